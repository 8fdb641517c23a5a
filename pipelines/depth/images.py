"""From whatever a user has (file, PIL, numpy, torch, lists of those) to tensors, and to the size a network wants.

Resizing and padding are those of diffusers' ``MarigoldImageProcessor``, called, not copied: :func:`to_model_input`
equals its ``preprocess`` bit for bit for every input both accept. On top of it come mixed sizes, alpha, palettes, EXIF
orientation, 16-bit files, extreme aspect ratios, and errors that say what to do.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO, Any, TypeAlias

import numpy as np
import torch
from diffusers.pipelines.marigold.marigold_image_processing import MarigoldImageProcessor
from PIL import ExifTags, Image, UnidentifiedImageError

logger = logging.getLogger(__name__)

ImageInput: TypeAlias = str | Path | Image.Image | np.ndarray | torch.Tensor | Iterable[Any]

IMAGE_SUFFIXES = (
    ".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".gif", ".ppm", ".pgm", ".jp2", ".avif",
)  # fmt: skip
RESAMPLE_METHODS = ("nearest", "nearest-exact", "bilinear", "bicubic", "area")
CHANNELS = (1, 3, 4)  # grey, RGB, RGBA
_LARGE_PIXELS, _BAND_PIXELS = 2**22, 2**20
"""A picture of more than the first is resized in bands of about the second."""
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


def load_images(
    image: ImageInput, *, background: float = 1.0, max_pixels: int | None = MAX_PIXELS
) -> list[torch.Tensor]:
    """Every image in `image`, as a list of (3, H, W) float32 tensors in [0, 1]; sizes may differ.

    Args:
        image: one of the following, or a list (or any iterable) of them.

            - path: a file in one of the formats of :data:`IMAGE_SUFFIXES`; :func:`list_images` expands folders;
            - PIL: any mode. EXIF orientation is applied where it can be read. 16-bit grey is divided by 65535, as is
              mode "I", which is what Pillow makes of some 16-bit files; mode "F" must already be in [0, 1];
            - numpy: (H, W), (H, W, C) or (N, H, W, C) with C in 1, 3, 4;
            - torch: (H, W), (C, H, W) or (N, C, H, W) with C in 1, 3, 4; it stays on its device.

            Floats must lie in [0, 1]; unsigned integers are divided by the largest value of their type.
        background: grey level in [0, 1] that shows through transparent pixels; white as in most viewers.
        max_pixels: larger files and PIL images are refused before they are decoded; None takes all of them.

    Raises:
        ImageError: too large; unreadable, empty or truncated file; NaN; values out of range; wrong shape or dtype.
        FileNotFoundError, IsADirectoryError: the path is not a file.
        TypeError: not an image at all.
    """
    if not 0.0 <= background <= 1.0:
        raise ValueError(f"background is a grey level in [0, 1], but got {background}")
    if max_pixels is not None and max_pixels < 1:
        raise ValueError(f"max_pixels must be at least 1, or None for any size; got {max_pixels}")
    images = list(_load_any(image, "image", background, max_pixels))
    if not images:
        raise ImageError("no image given: the list (or batch) is empty")
    return images


def _load_any(image: Any, name: str, background: float, max_pixels: int | None) -> Iterator[torch.Tensor]:
    if isinstance(image, str | Path):
        yield from _from_array(read_array(image, max_pixels), str(image), background)
    elif isinstance(image, Image.Image):
        check_size(image, name, max_pixels)
        with _decoding(name):  # an opened file is decoded only now
            array = _pil_to_array(image, name)
        yield from _from_array(array, name, background)
    elif isinstance(image, np.ndarray):
        yield from _from_array(image, name, background)
    elif isinstance(image, torch.Tensor):
        yield from _from_tensor(image, name, background)
    elif isinstance(image, Iterable) and not isinstance(image, bytes | dict):
        for index, item in enumerate(image):
            yield from _load_any(item, f"{name}[{index}]", background, max_pixels)
    else:
        raise TypeError(
            f"{name} is a {type(image).__name__}; give a path, a PIL image, a numpy array (H, W, C), "
            "a torch tensor (C, H, W), or a list of these"
        )


# ------------------------------------------------------------------------------------------------------------- files


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


# ----------------------------------------------------------------------------------------------- arrays and tensors


def _from_array(array: np.ndarray, name: str, background: float) -> Iterator[torch.Tensor]:
    if array.dtype.kind not in "uf":
        raise ImageError(f"{name} is a numpy array of {array.dtype}; {_EXPECTED_DTYPE}")
    if array.ndim == 2:
        array = array[..., None]
    if array.ndim not in (3, 4):
        raise ImageError(f"{name} has shape {array.shape}; a numpy image is (H, W), (H, W, C) or (N, H, W, C)")
    _check_numpy_channels(array.shape, name)
    scale = float(np.iinfo(array.dtype).max) if array.dtype.kind == "u" else None
    batch = array[None] if array.ndim == 3 else array
    # A copy in float32: the caller's array is never shared. The memory stays channels-last, as in diffusers: the VAE's
    # convolutions round differently for the two layouts.
    tensor = torch.from_numpy(batch.astype(np.float32)).permute(0, 3, 1, 2)  # (N, C, H, W)
    yield from _finish(tensor, scale, name, background)


def _from_tensor(tensor: torch.Tensor, name: str, background: float) -> Iterator[torch.Tensor]:
    dtype = tensor.dtype
    unsigned = dtype in (torch.uint8, torch.uint16, torch.uint32, torch.uint64)
    if not (dtype.is_floating_point or unsigned):
        raise ImageError(f"{name} is a torch tensor of {dtype}; {_EXPECTED_DTYPE}")
    if tensor.ndim == 2:
        tensor = tensor[None]
    if tensor.ndim not in (3, 4):
        raise ImageError(f"{name} has shape {tuple(tensor.shape)}; a torch image is (H, W), (C, H, W) or (N, C, H, W)")
    _check_torch_channels(tuple(tensor.shape), name)
    scale = float(torch.iinfo(dtype).max) if unsigned else None
    batch = tensor[None] if tensor.ndim == 3 else tensor
    copied = batch.detach().to(dtype=torch.float32, copy=True)  # (N, C, H, W)
    yield from _finish(copied, scale, name, background)


_EXPECTED_DTYPE = "expected floats in [0, 1] or unsigned integers (8-bit: 0 to 255, 16-bit: 0 to 65535)"


def _check_numpy_channels(shape: tuple[int, ...], name: str) -> None:
    if shape[-1] in CHANNELS:
        return
    if shape[-3] in CHANNELS:
        order = "(1, 2, 0)" if len(shape) == 3 else "(0, 2, 3, 1)"
        raise ImageError(
            f"{name} has shape {shape}, which looks like channels first; numpy images are channels last: "
            f"pass array.transpose{order}, or torch.from_numpy(array)"
        )
    raise ImageError(
        f"{name} has shape {shape}, that is {shape[-1]} channels; expected 1, 3 or 4 in the last place. "
        "For a stack of grey images pass array[..., None]"
    )


def _check_torch_channels(shape: tuple[int, ...], name: str) -> None:
    if shape[-3] in CHANNELS:
        return
    if shape[-1] in CHANNELS:
        order = "(2, 0, 1)" if len(shape) == 3 else "(0, 3, 1, 2)"
        raise ImageError(
            f"{name} has shape {shape}, which looks like channels last; torch images are channels first: "
            f"pass tensor.permute{order}, or tensor.numpy()"
        )
    raise ImageError(
        f"{name} has shape {shape}, that is {shape[-3]} channels; expected 1, 3 or 4 before height and width. "
        "For a stack of grey images pass tensor[:, None]"
    )


def _finish(batch: torch.Tensor, scale: float | None, name: str, background: float) -> Iterator[torch.Tensor]:
    """Scale integers, check floats, turn 1 or 4 channels into 3. batch: (N, C, H, W) float32."""
    if 0 in batch.shape[-2:]:
        raise ImageError(f"{name} has no pixels: height x width is {batch.shape[-2]} x {batch.shape[-1]}")
    if scale is not None:
        batch = batch / scale
    elif batch.numel():
        _check_values(batch, name)
    if batch.shape[1] == 1:
        batch = batch.repeat(1, 3, 1, 1)
    elif batch.shape[1] == 4:
        colour, alpha = batch[:, :3], batch[:, 3:]
        batch = colour * alpha + background * (1.0 - alpha)
    yield from batch  # each (3, H, W)


def _check_values(batch: torch.Tensor, name: str) -> None:
    bad = int((~torch.isfinite(batch)).sum())
    if bad:
        raise ImageError(f"{name} has {bad} values that are NaN or infinite, of {batch.numel()}; expected [0, 1]")
    low, high = batch.min().item(), batch.max().item()
    if low >= 0.0 and high <= 1.0:
        return
    hint = "clip it"
    if low >= 0.0 and high > 2.0:
        hint = "divide by 255 (or by 65535), or pass unsigned integers"
    elif -1.0 <= low < 0.0 and high <= 1.0:
        hint = "if it was normalised to [-1, 1], pass (image + 1) / 2; otherwise clip it"
    raise ImageError(f"{name} has values from {low:.6g} to {high:.6g}; floats must be in [0, 1]: {hint}")


def to_uint8(image: torch.Tensor) -> np.ndarray:
    """(3, H, W) in [0, 1] -> (H, W, 3) uint8, rounded: the picture to show beside a prediction."""
    return image.detach().mul(255.0).round().clamp(0, 255).to("cpu", torch.uint8).permute(1, 2, 0).contiguous().numpy()


# --------------------------------------------------------------------------------------------------- size and shape


def to_model_input(
    image: torch.Tensor, *, resolution: int | None, multiple: int, method: str = "bilinear"
) -> tuple[torch.Tensor, tuple[int, int]]:
    """(3, H, W) in [0, 1] -> (1, 3, h, w) in [-1, 1] with h, w multiples of `multiple`, and the padding to undo.

    Normalised first, resized second, padded last: the order decides the last bit. The way back for a prediction is
    ``resize(unpad(prediction, padding), (H, W), method)``.
    """
    # Channels-last memory stays so, as in diffusers.
    batch = image[None] if image.is_contiguous() else image.permute(1, 2, 0)[None].permute(0, 3, 1, 2)
    normalized = batch * 2.0 - 1.0  # (1, 3, H, W)
    return pad_to_multiple(resize_to_max_edge(normalized, resolution, method), multiple)


@dataclass(frozen=True)
class ModelInput:
    """A picture as the network sees it, and the way back."""

    pixels: torch.Tensor  # (1, 3, h, w) in [-1, 1]
    padding: tuple[int, int]
    size: tuple[int, int]  # (H, W) of the picture


def picture_for_model(
    array: np.ndarray, name: str, *, resolution: int, multiple: int, method: str = "bilinear"
) -> tuple[np.ndarray, ModelInput]:
    """A picture as `read_array` gives it to be shown, (H, W, 3) uint8, and as the network sees it.

    A large one of 8 bits is resized band by band: every method resizes rows and columns one after the other, so a float
    copy of the whole picture need not exist. Up to rounding that changes nothing.
    """
    size = array.shape[0], array.shape[1]
    plain = array.dtype == np.uint8 and array.shape[2:] == (3,)
    if plain and size[0] * size[1] > _LARGE_PIXELS and 0 < resolution < max(size):
        return array, ModelInput(*pad_to_multiple(_resized_in_bands(array, resolution, method), multiple), size)
    (tensor,) = _from_array(array, name, 1.0)
    pixels, padding = to_model_input(tensor, resolution=resolution, multiple=multiple, method=method)
    return array if plain else to_uint8(tensor), ModelInput(pixels, padding, size)


def _resized_in_bands(picture: np.ndarray, resolution: int, method: str) -> torch.Tensor:
    """(H, W, 3) uint8 -> (1, 3, h, w) in [-1, 1]."""
    height, width = picture.shape[:2]
    longer = max(height, width)
    size = max(1, height * resolution // longer), max(1, width * resolution // longer)
    rows = max(1, _BAND_PIXELS // width)
    bands = (picture[first : first + rows] for first in range(0, height, rows))
    narrow = [resize(_normalized(band), (len(band), size[1]), method, antialias=True) for band in bands]
    return resize(torch.cat(narrow, 2), size, method, antialias=True)


def _normalized(rows: np.ndarray) -> torch.Tensor:
    """(h, W, 3) uint8 -> (1, 3, h, W) in [-1, 1]."""
    pixels = torch.from_numpy(rows.astype(np.float32)).permute(2, 0, 1)[None]
    return pixels.contiguous() / 255.0 * 2.0 - 1.0  # torch (2.13) shrinks channels-last ones to a width of 1 wrongly


def resize(
    image: torch.Tensor, size: tuple[int, int], method: str = "bilinear", *, antialias: bool = False
) -> torch.Tensor:
    """(..., H, W) -> (..., *size). `antialias` acts on bilinear and bicubic, and matters when the image shrinks."""
    if method not in RESAMPLE_METHODS:
        raise ValueError(f"unknown resampling method {method!r}; choose one of {', '.join(RESAMPLE_METHODS)}")
    if min(size) < 1:
        raise ValueError(f"size is (height, width), each at least 1, but got {tuple(size)}")
    resized = MarigoldImageProcessor.resize_antialias(_as_batch(image), tuple(size), method, is_aa=antialias)
    return resized.reshape(*image.shape[:-2], *size) if image.dim() != 4 else resized


def resize_to_max_edge(image: torch.Tensor, resolution: int | None, method: str = "bilinear") -> torch.Tensor:
    """(..., H, W) -> the same picture with a longer edge of `resolution` pixels, antialiased; None or 0 keeps it.

    The shorter edge is rounded down, but never below one pixel, so a 20000 x 10 strip still passes.
    """
    if resolution is None or resolution == 0:
        return image
    if resolution < 0:
        raise ValueError(f"resolution is the longer edge in pixels, or 0 for the image's own, but got {resolution}")
    height, width = image.shape[-2:]
    longer = max(height, width)
    size = max(1, height * resolution // longer), max(1, width * resolution // longer)
    return resize(image, size, method, antialias=True)


def pad_to_multiple(image: torch.Tensor, multiple: int) -> tuple[torch.Tensor, tuple[int, int]]:
    """Repeat the last row and column until height and width divide by `multiple`; returns (padded, (pad_h, pad_w))."""
    if multiple < 1:
        raise ValueError(f"multiple must be at least 1, but got {multiple}")
    padded, padding = MarigoldImageProcessor.pad_image(_as_batch(image), multiple)
    return (padded if image.dim() == 4 else padded.reshape(*image.shape[:-2], *padded.shape[-2:])), padding


def unpad(image: torch.Tensor, padding: tuple[int, int]) -> torch.Tensor:
    """Remove what :func:`pad_to_multiple` added at the bottom and on the right; (..., H, W)."""
    height, width = image.shape[-2] - padding[0], image.shape[-1] - padding[1]
    if min(padding) < 0 or min(height, width) < 1:
        raise ValueError(f"cannot remove padding {tuple(padding)} from an image of {tuple(image.shape[-2:])} pixels")
    return image[..., :height, :width]


def _as_batch(image: torch.Tensor) -> torch.Tensor:
    """(..., H, W) -> (N, C, H, W), which is all that torch's interpolate and diffusers' helpers take."""
    if image.dim() == 4:
        return image
    if image.dim() < 2:
        raise ValueError(f"expected an image (..., H, W), but got shape {tuple(image.shape)}")
    return image.reshape(1, -1, *image.shape[-2:]) if image.dim() < 4 else image.reshape(-1, *image.shape[-3:])
