"""Picture files to arrays, whatever is in them: sizes by the header, EXIF orientation, bit depths, palettes, damage.

No torch here: `marigold_uq.depth.onnx_model` reads pictures too. Every way in which a file can be broken is an
`ImageError` that names it.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import IO

import numpy as np
from PIL import ExifTags, Image, UnidentifiedImageError

__all__ = [
    "IMAGE_SUFFIXES",
    "MAX_PIXELS",
    "ImageError",
    "array_of_picture",
    "check_size",
    "files_in",
    "list_images",
    "open_picture",
    "read_array",
]

logger = logging.getLogger(__name__)

IMAGE_SUFFIXES = (
    ".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".gif", ".ppm", ".pgm", ".jp2", ".avif",
)  # fmt: skip
MAX_PIXELS = 2**26
"""What a picture may have by default, 67 million: a file of two kilobytes can claim more than fits into memory."""
_FORMATS = ("AVIF", "BMP", "DIB", "GIF", "JPEG", "JPEG2000", "MPO", "PNG", "PPM", "TIFF", "WEBP")
"""Of Pillow's formats those of :data:`IMAGE_SUFFIXES`; others hand a file to programs (EPS), or are no photographs."""
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""EXIF orientation -> what makes the picture upright."""


class ImageError(ValueError):
    """An image that cannot be used: unreadable file, wrong shape, wrong values. The message says which and why."""


def read_array(source: str | Path, max_pixels: int | None = MAX_PIXELS) -> np.ndarray:
    """Decode one image file, (H, W) or (H, W, 3 or 4).

    Every way in which a file can be broken becomes an ImageError that names it.
    """
    if str(source).startswith(("http://", "https://")):
        raise ImageError(f"{source} is a web address; download it first: diffusers.utils.load_image(url)")
    path = Path(source).expanduser()
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder; list its images with list_images")
    if not path.exists():
        raise FileNotFoundError(f"no such image file: {path}")
    if path.stat().st_size == 0:
        raise ImageError(f"{path} is empty (0 bytes)")
    with _decoding(str(path)), open_picture(path, str(path), max_pixels) as image:
        return _pil_to_array(image, str(path))


def array_of_picture(image: Image.Image, name: str, max_pixels: int | None = MAX_PIXELS) -> np.ndarray:
    """The same of a PIL image of any mode; one that was opened from a file is decoded only now."""
    check_size(image, name, max_pixels)
    with _decoding(name):
        return _pil_to_array(image, name)


def open_picture(source: Path | IO[bytes], name: str, max_pixels: int | None = MAX_PIXELS) -> Image.Image:
    """A picture whose header is read: of a known format, and not larger than allowed."""
    picture = Image.open(source, formats=_readable_formats())
    check_size(picture, name, max_pixels)
    return picture


@cache
def _readable_formats() -> list[str]:
    """Those that this build of Pillow has."""
    Image.init()
    return [name for name in _FORMATS if name in Image.OPEN]


def check_size(picture: Image.Image, name: str, max_pixels: int | None = MAX_PIXELS) -> None:
    """Refuse a picture of more than `max_pixels` by the size in its header."""
    width, height = picture.size
    if max_pixels is not None and width * height > max_pixels:
        raise ImageError(
            f"{name} has {width} x {height} = {width * height:,} pixels, more than the {max_pixels:,} allowed; make it "
            "smaller, or raise max_pixels"
        )


@contextmanager
def _decoding(name: str) -> Iterator[None]:
    """Translate what Pillow raises while it decodes into an ImageError with the image's name."""
    try:
        yield
    except ImageError:
        raise
    except UnidentifiedImageError as error:
        raise ImageError(f"{name} is not an image, or of a kind Pillow cannot read") from error
    except Image.DecompressionBombError as error:
        raise ImageError(f"{name} is larger than Pillow allows (PIL.Image.MAX_IMAGE_PIXELS): {error}") from error
    except PermissionError as error:
        raise PermissionError(f"no permission to read {name}") from error
    except MemoryError:
        raise
    except Exception as error:  # damaged data takes Pillow's decoders anywhere: struct.error, KeyError, TypeError, ...
        raise ImageError(f"{name} is damaged or truncated: {error or type(error).__name__}") from error


def _pil_to_array(image: Image.Image, name: str) -> np.ndarray:
    """(H, W) or (H, W, 3 or 4) array that keeps the bit depth; upright; palettes and exotic colour spaces resolved."""
    if 0 in image.size:
        raise ImageError(f"{name} has no pixels: width x height is {image.width} x {image.height}")
    image = _upright(image, name)
    if image.mode.startswith("I;16"):
        return np.asarray(image).astype(np.uint16)  # astype also undoes the big-endian variant
    if image.mode == "I":
        return _int32_to_uint16(np.asarray(image), name)
    if image.mode == "F":
        return np.asarray(image)
    if image.mode == "La":  # premultiplied; Pillow converts it to LA only
        image = image.convert("LA")
    if image.has_transparency_data:
        return np.asarray(image.convert("RGBA"))
    return np.asarray(image.convert("L" if image.mode in ("1", "L") else "RGB"))


def _upright(image: Image.Image, name: str) -> Image.Image:
    """Turned as its EXIF says; where that is damaged, as it is stored.

    Pillow's `exif_transpose` writes all of the EXIF anew, and damage to any entry stops it.
    """
    try:
        orientation = image.getexif().get(ExifTags.Base.Orientation, 1)
    except Exception as error:  # its parser meets damage with anything
        logger.warning("%s: its EXIF cannot be read (%s), the picture is taken as it is stored", name, error)
        return image
    turn = _TURNS.get(orientation) if isinstance(orientation, int) else None
    return image if turn is None else image.transpose(turn)


def _int32_to_uint16(array: np.ndarray, name: str) -> np.ndarray:
    low, high = int(array.min()), int(array.max())
    if low < 0 or high > 65535:
        raise ImageError(
            f"{name} has PIL mode 'I' with values from {low} to {high}; expected 16-bit data, 0 to 65535. "
            "Scale it to [0, 1] yourself and pass a float array"
        )
    return array.astype(np.uint16)


def list_images(paths: str | Path | Sequence[str | Path], *, recursive: bool = False) -> list[Path]:
    """Image files named by `paths`: a file stands for itself, a folder for the images in it in natural order.

    A file is taken whatever its suffix; in folders only :data:`IMAGE_SUFFIXES` count and hidden files are left out.
    "frame2" comes before "frame10". A file named twice is listed once.

    Raises:
        FileNotFoundError: a path does not exist, or nothing was found.
    """
    given = [paths] if isinstance(paths, str | Path) else list(paths)
    found: dict[Path, None] = {}
    for path in (Path(item).expanduser() for item in given):
        if path.is_dir():
            found.update(dict.fromkeys(files_in(path, IMAGE_SUFFIXES, recursive=recursive)))
        elif path.exists():
            found[path] = None
        else:
            raise FileNotFoundError(f"no such file or folder: {path}")
    if not found:
        where = ", ".join(str(item) for item in given) or "an empty list of paths"
        raise FileNotFoundError(f"no image found in {where}; looked for files ending in {' '.join(IMAGE_SUFFIXES)}")
    return list(found)


def files_in(folder: Path, suffixes: Sequence[str], *, recursive: bool = False) -> list[Path]:
    """Files of these kinds in a folder, in natural order; hidden ones are left out."""
    entries = folder.rglob("*") if recursive else folder.iterdir()
    files = [
        entry
        for entry in entries
        if entry.suffix.lower() in suffixes and not entry.name.startswith(".") and entry.is_file()
    ]
    return sorted(files, key=lambda path: [_natural_key(part) for part in path.relative_to(folder).parts])


def _natural_key(text: str) -> tuple[list[tuple[int, int, str]], str]:
    """Sort key under which digits count as numbers: "frame2" < "frame10"."""
    pieces = re.split(r"([0-9]+)", text.lower())
    return [(0, int(piece), "") if piece.isdecimal() else (1, 0, piece) for piece in pieces if piece], text
