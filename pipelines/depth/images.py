"""From whatever a user has (file, PIL, numpy, torch, lists of those) to tensors, and to the size a network wants.

Resizing and padding are those of diffusers' ``MarigoldImageProcessor``, called, not copied: :func:`to_model_input`
equals its ``preprocess`` bit for bit for every input both accept. On top of it come mixed sizes, alpha, palettes, EXIF
orientation, 16-bit files, extreme aspect ratios, and errors that say what to do.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from diffusers.pipelines.marigold.marigold_image_processing import MarigoldImageProcessor
from PIL import Image

from marigold_uq.picture_files import MAX_PIXELS, ImageError, array_of_picture, read_array

ImageInput: TypeAlias = str | Path | Image.Image | np.ndarray | torch.Tensor | Iterable[Any]

RESAMPLE_METHODS = ("nearest", "nearest-exact", "bilinear", "bicubic", "area")
CHANNELS = (1, 3, 4)  # grey, RGB, RGBA
_LARGE_PIXELS, _BAND_PIXELS = 2**22, 2**20
"""A picture of more than the first is resized in bands of about the second."""


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
        yield from _from_array(array_of_picture(image, name, max_pixels), name, background)
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
