"""One depth sample: what every data set returns, and the error that names a file that cannot become one."""

from typing import TypedDict

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import interpolate

from marigold_uq.depth.data.specs import CROPS, MASKS, lookup

KINDS = ("depth_m", "disparity_px")


class DepthSample(TypedDict):
    """An image with its depth; `torch.utils.data.default_collate` batches it."""

    image: Tensor  # (3, H, W) float32 in [0, 1]
    depth: Tensor  # (1, H, W) float32, metres (1 / px if the file holds disparity); 0 where invalid
    valid: Tensor  # (1, H, W) bool
    name: str


class DepthDataError(ValueError):
    """A file or a sample is unusable; `reason` says why and `file` which one.

    The message is the first argument, so that `DataLoader` can raise the same class again in the main process.
    """

    def __init__(self, reason: str, file: str | None = None) -> None:
        super().__init__(f"{file}: {reason}" if file else reason)
        self.reason = reason
        self.file = file


def to_depth(values: NDArray[np.generic], depth_scale: float | None, kind: str, file: str) -> NDArray[np.float32]:
    """Stored numbers to depth: values / depth_scale, and its inverse for `kind="disparity_px"`.

    Integers have no unit of their own, so they need a `depth_scale` (1000 for millimetres); floats default to 1.
    """
    if kind not in KINDS:
        raise DepthDataError(f"unknown kind {kind!r}; known: {', '.join(KINDS)}", file)
    if depth_scale is None:
        if np.issubdtype(values.dtype, np.integer):
            raise DepthDataError(
                f"{values.dtype} values need depth_scale (depth = value / depth_scale; 1000 if they are millimetres)",
                file,
            )
        depth_scale = 1.0
    if not depth_scale > 0:
        raise DepthDataError(f"depth_scale must be positive, got {depth_scale}", file)
    scaled = values.astype(np.float32) / np.float32(depth_scale)
    if kind == "depth_m":
        return scaled
    positive = scaled > 0  # False for NaN too
    return np.divide(np.float32(1), scaled, out=np.zeros_like(scaled), where=positive)


def resize_sample(sample: DepthSample, size: tuple[int, int]) -> DepthSample:
    """Resize to (H, W): depth and mask by nearest-exact, so that no depth is invented; the image antialiased."""
    if tuple(sample["image"].shape[-2:]) == tuple(size):
        return sample
    image = interpolate(sample["image"][None], size=size, mode="bilinear", antialias=True)[0].clamp(0, 1)
    both = torch.cat([sample["depth"], sample["valid"].to(sample["depth"].dtype)])  # (2, H, W)
    depth, valid = interpolate(both[None], size=size, mode="nearest-exact")[0].split(1)
    return DepthSample(image=image, depth=depth, valid=valid > 0.5, name=sample["name"])


def assemble_sample(
    name: str,
    image: Tensor,
    depth: NDArray[np.float32],
    *,
    measured: NDArray[np.bool_] | None = None,
    min_depth: float = 0.0,
    max_depth: float = float("inf"),
    crop: str | None = None,
    mask: str | None = None,
    resize: tuple[int, int] | None = None,
) -> DepthSample:
    """Image and depth to a sample: check the sizes, find the valid pixels, crop, mask, resize.

    Args:
        name: the sample's name.
        image: (3, H, W) in [0, 1].
        depth: (H, W), metres.
        measured: (H, W), False where the data set itself declares the depth invalid.
        min_depth: a pixel is valid if its depth is finite and min_depth < depth < max_depth.
        max_depth: see min_depth.
        crop: a name in `CROPS`.
        mask: a name in `MASKS`; it is laid over the cropped picture.
        resize: the final (H, W).
    """
    _check_same_size(tuple(image.shape[-2:]), depth.shape, "depth", name)
    valid = np.isfinite(depth) & (depth > min_depth) & (depth < max_depth)
    if measured is not None:
        _check_same_size(tuple(image.shape[-2:]), measured.shape, "validity mask", name)
        valid &= measured
    maps = torch.from_numpy(np.stack([np.where(valid, depth, np.float32(0)), valid.astype(np.float32)]))  # (2, H, W)
    if crop is not None:
        rows, columns = _region(CROPS, crop, image, name)
        image, maps = image[:, rows, columns].contiguous(), maps[:, rows, columns]
    if mask is not None:
        rows, columns = _region(MASKS, mask, image, name)
        kept = torch.zeros_like(maps)
        kept[:, rows, columns] = maps[:, rows, columns]
        maps = kept
    sample = DepthSample(image=image, depth=maps[:1].clone(), valid=maps[1:] > 0.5, name=name)
    if resize is not None:
        sample = resize_sample(sample, resize)
    if not bool(sample["valid"].any()):
        raise DepthDataError(f"no valid depth pixel with {min_depth:g} < depth < {max_depth:g} (mask: {mask})", name)
    return sample


def _region(regions: dict, key: str, image: Tensor, name: str) -> tuple[slice, slice]:
    height, width = image.shape[-2:]
    try:
        return lookup(regions, key)(height, width)
    except ValueError as error:
        raise DepthDataError(str(error), name) from error


def _check_same_size(image: tuple[int, ...], other: tuple[int, ...], what: str, name: str) -> None:
    if image != tuple(other):
        raise DepthDataError(
            f"wrong size: the image is {image[0]} x {image[1]} (H x W) and its {what} {' x '.join(map(str, other))}; "
            "both must be registered to the same pixels",
            name,
        )
