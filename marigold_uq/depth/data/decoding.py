"""Bytes to numbers: images to (3, H, W) in [0, 1], depth files to the (H, W) values they store."""

import importlib.util
import io
import os
import tempfile
from collections.abc import Callable
from pathlib import Path, PurePosixPath

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from marigold_uq.array_files import npz_names, read_npy, read_npz
from marigold_uq.depth.data.sample import DepthDataError
from marigold_uq.picture_files import MAX_PIXELS, open_picture

Values = NDArray[np.generic]
Size = tuple[int, int]  # (H, W)

_EXR_MAGIC = b"\x76\x2f\x31\x01"
_EXR_DEPTH_CHANNELS = ("Z", "Y", "V", "depth")  # in order of preference

_MAX_DEPTH_BYTES = 8 * MAX_PIXELS


def decode_image(data: bytes, file: str) -> Tensor:
    """An image file to (3, H, W) float32 in [0, 1]; see `image_to_tensor`."""
    try:
        return image_to_tensor(_open_picture(data))
    except Exception as error:  # damage takes decoders anywhere: struct.error, KeyError, NotImplementedError, ...
        raise DepthDataError(f"cannot be decoded as an image ({len(data)} bytes): {error}", file) from error


def image_to_tensor(picture: Image.Image) -> Tensor:
    """A PIL image to (3, H, W) float32 in [0, 1]: grey is repeated, alpha dropped, 16 bit divided by 65535.

    An EXIF orientation is not applied: depth is registered to the stored pixels.
    """
    if picture.mode.startswith("I"):
        grey = np.asarray(picture).astype(np.float32) / np.float32(65535)
        return torch.from_numpy(grey).clamp(0, 1).expand(3, -1, -1).contiguous()
    pixels = np.asarray(picture.convert("RGB"))  # (H, W, 3)
    return torch.from_numpy(pixels.transpose(2, 0, 1).copy()).to(torch.float32) / 255


def decode_depth(data: bytes, depth_format: str, file: str, size: Size) -> Values:
    """A depth file to the (H, W) numbers it stores.

    Args:
        data: the file's contents.
        depth_format: a name in `DEPTH_FORMATS`.
        file: its name, for messages.
        size: (H, W) of the image, which is all that tells the shape of a raw file.
    """
    if depth_format not in DEPTH_FORMATS:
        raise DepthDataError(f"unknown depth format {depth_format!r}; known: {', '.join(DEPTH_FORMATS)}", file)
    try:
        values = DEPTH_FORMATS[depth_format](data, file, size)
    except DepthDataError:
        raise
    except Exception as error:
        raise DepthDataError(f"cannot be decoded as {depth_format} ({len(data)} bytes): {error}", file) from error
    return as_map(values, file)


def as_map(values: Values, file: str) -> Values:
    """(H, W), (H, W, 1) or (1, H, W) numbers to (H, W)."""
    if not (np.issubdtype(values.dtype, np.integer) or np.issubdtype(values.dtype, np.floating)):
        raise DepthDataError(f"depth must be integers or floats, got {values.dtype}", file)
    if values.ndim == 3 and 1 in (values.shape[0], values.shape[-1]):
        values = values[..., 0] if values.shape[-1] == 1 else values[0]
    if values.ndim != 2:
        raise DepthDataError(f"depth must be one (H, W) map, got shape {values.shape}; is it a colour picture?", file)
    return values


def format_of(file: str) -> str:
    """The depth format that belongs to a file's ending."""
    suffix = PurePosixPath(file).suffix.lower()
    if suffix not in FORMAT_OF_SUFFIX:
        raise DepthDataError(f"no depth format for {suffix!r}; known: {', '.join(FORMAT_OF_SUFFIX)}", file)
    return FORMAT_OF_SUFFIX[suffix]


def _picture(data: bytes, file: str, size: Size) -> Values:
    """PNG or TIFF, integers or floats."""
    return np.asarray(_open_picture(data))


def _open_picture(data: bytes) -> Image.Image:
    """Decode completely, so that damage shows here."""
    try:
        picture = open_picture(io.BytesIO(data), "the picture")
    except UnidentifiedImageError:  # its own message is the address of the buffer
        raise ValueError("not a picture, or cut off within its header") from None
    picture.load()
    return picture


def _raw_float32(data: bytes, file: str, size: Size) -> Values:
    """Row-major little-endian float32 without a header (ETH3D)."""
    height, width = size
    if len(data) != 4 * height * width:
        raise DepthDataError(
            f"{len(data)} bytes; raw float32 of the image's {height} x {width} pixels has {4 * height * width}", file
        )
    return np.frombuffer(data, dtype="<f4").reshape(height, width)


def _npy(data: bytes, file: str, size: Size) -> Values:
    return read_npy(data, "the array", max_bytes=_MAX_DEPTH_BYTES)


def _npz(data: bytes, file: str, size: Size) -> Values:
    """The array called `depth`, or the only one."""
    keys = npz_names(data, "the archive")
    if "depth" not in keys and len(keys) != 1:
        raise DepthDataError(f"needs an array called 'depth' or exactly one array, has {keys}", file)
    key = "depth" if "depth" in keys else keys[0]
    return read_npz(data, "the archive", [key], max_bytes=_MAX_DEPTH_BYTES)[key]


def _exr(data: bytes, file: str, size: Size) -> Values:
    """OpenEXR: a channel called Z, Y, V or depth, a single channel, or equal colour channels."""
    if importlib.util.find_spec("OpenEXR") is not None:
        return _depth_channel(_exr_with_openexr(data, file), file)
    return _depth_channel(_exr_with_opencv(data, file), file)


def _depth_channel(channels: dict[str, Values], file: str) -> Values:
    named = [name for name in _EXR_DEPTH_CHANNELS if name in channels]
    if named or len(channels) == 1:
        return channels[named[0] if named else next(iter(channels))]
    if not {"R", "G", "B"} <= set(channels):
        raise DepthDataError(
            f"EXR channels {sorted(channels)}: expected one of {', '.join(_EXR_DEPTH_CHANNELS)}, or RGB", file
        )
    if not all(np.array_equal(channels["R"], channels[name], equal_nan=True) for name in "GB"):
        raise DepthDataError("EXR with differing colour channels is a picture, not a depth map", file)
    return channels["R"]


def _exr_with_openexr(data: bytes, file: str) -> dict[str, Values]:
    import OpenEXR

    with tempfile.TemporaryDirectory() as folder:  # its reader takes a file name only
        copy = Path(folder) / "depth.exr"
        copy.write_bytes(data)
        try:
            with OpenEXR.File(str(copy), separate_channels=True) as opened:
                return {name: np.array(channel.pixels) for name, channel in opened.channels().items()}
        except RuntimeError as error:
            raise DepthDataError(f"cannot be decoded as EXR ({len(data)} bytes): {error}", file) from error


def _exr_with_opencv(data: bytes, file: str) -> dict[str, Values]:
    """Colour and luminance only: OpenCV silently returns zeros for every other channel, so ask the header first."""
    names = exr_channel_names(data, file)
    if not set(names) <= set("RGBAY"):
        raise DepthDataError(f"EXR channels {names}: OpenCV reads only R, G, B, A, Y; `pip install OpenEXR`", file)
    os.environ.setdefault("OPENCV_IO_ENABLE_OPENEXR", "1")  # OpenCV looks at it with its first EXR file
    import cv2

    try:
        values = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_UNCHANGED)
    except cv2.error:  # an earlier EXR call of this process, without the switch, has turned it off for good
        values = None
    if values is None:
        raise DepthDataError(
            "a damaged EXR file, or an OpenCV without EXR (its wheels from version 5 on, or OPENCV_IO_ENABLE_OPENEXR "
            "was off at its first EXR file): `pip install OpenEXR`",
            file,
        )
    planes = values[..., None] if values.ndim == 2 else values
    return dict(zip("BGRA" if planes.shape[-1] >= 3 else "Y", np.moveaxis(planes, -1, 0), strict=False))


def exr_channel_names(data: bytes, file: str) -> list[str]:
    """The channels in an EXR header: attribute `channels` of type chlist, entries of a name and 16 bytes."""
    marker = b"channels\0chlist\0"
    start = data.find(marker)
    if not data.startswith(_EXR_MAGIC) or start < 0:
        raise DepthDataError(f"is not an EXR file, or cut off within its header ({len(data)} bytes)", file)
    position = start + len(marker) + 4  # the attribute's size
    names = []
    while (end := data.find(b"\0", position)) > position:  # an empty name ends the list
        names.append(data[position:end].decode("latin-1"))
        position = end + 1 + 16
    return names


DEPTH_FORMATS: dict[str, Callable[[bytes, str, Size], Values]] = {
    "png": _picture,
    "tiff": _picture,
    "npy": _npy,
    "npz": _npz,
    "exr": _exr,
    "raw_float32": _raw_float32,
}
FORMAT_OF_SUFFIX = {".png": "png", ".tif": "tiff", ".tiff": "tiff", ".npy": "npy", ".npz": "npz", ".exr": "exr"}
