"""Depth in [-1, 1] as the network sees it, and which latent cells have full ground truth."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

_DepthRange = tuple[float, float]


def normalize_depth(depth: Tensor, valid: Tensor, low: float = 0.02, high: float = 0.98) -> tuple[Tensor, _DepthRange]:
    """x = 2 (d - d_low) / (d_high - d_low) - 1, clipped to [-1, 1]; d_low and d_high are quantiles of the valid depth.

    Invalid pixels go to the far plane, +1; mask them out of the loss (`latent_mask`). A constant map has no range and
    becomes 0, which `denormalize_depth` takes back to the constant.

    Args:
        depth: any shape, e.g. (1, H, W).
        valid: bool, the same shape.
        low: the quantile that becomes -1; linear interpolation between order statistics.
        high: the quantile that becomes +1.

    Returns:
        The normalised map and (d_low, d_high).
    """
    if depth.shape != valid.shape or valid.dtype != torch.bool:
        raise ValueError(
            f"valid must be bool with depth's shape {tuple(depth.shape)}, got {valid.dtype} {tuple(valid.shape)}"
        )
    if not 0 <= low < high <= 1:
        raise ValueError(f"quantiles need 0 <= low < high <= 1, got low={low}, high={high}")
    if not bool(valid.any()):
        raise ValueError("no valid pixel: a depth map without ground truth has no range")
    d_low, d_high = _quantiles(depth[valid], (low, high))
    if d_high - d_low <= 1e-6 * max(abs(d_low), abs(d_high)):
        normalized = torch.zeros_like(depth)
    else:
        normalized = ((depth - d_low) / (d_high - d_low) * 2 - 1).clamp(-1, 1)
    return torch.where(valid, normalized, torch.ones_like(normalized)), (d_low, d_high)


def denormalize_depth(normalized: Tensor, depth_range: _DepthRange) -> Tensor:
    """d = d_low + (x + 1) / 2 (d_high - d_low), the inverse of `normalize_depth` between the two quantiles."""
    d_low, d_high = depth_range
    return (normalized + 1) / 2 * (d_high - d_low) + d_low


def network_pixels(images: Sequence[Tensor], maps: Sequence[Tensor], valid: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Pictures and depth maps as an autoencoder takes them, both (B, 3, H, W) in [-1, 1]."""
    normalized = [normalize_depth(one, where)[0] for one, where in zip(maps, valid, strict=True)]
    return 2 * torch.stack(list(images)) - 1, torch.stack(normalized).expand(-1, 3, -1, -1)


def latent_mask(valid: Tensor, factor: int = 8) -> Tensor:
    """(..., H, W) bool to (..., H / factor, W / factor): a latent cell is valid iff all its pixels are."""
    height, width = valid.shape[-2:]
    if height % factor or width % factor:
        raise ValueError(
            f"{height} x {width} pixels do not divide into cells of {factor} x {factor}; "
            f"crop or resize to a multiple of {factor}, e.g. DepthTransform(size=...)"
        )
    cells = valid.reshape(*valid.shape[:-2], height // factor, factor, width // factor, factor)
    return cells.all(dim=-1).all(dim=-2)


def _quantiles(values: Tensor, quantiles: tuple[float, float]) -> _DepthRange:
    """Linear interpolation between order statistics, numpy's and torch's default.

    A partition finds four order statistics in linear time; torch.quantile sorts, and refuses more than 2**24 pixels.
    """
    last = values.numel() - 1
    below = [int(q * last) for q in quantiles]
    above = [min(k + 1, last) for k in below]
    ordered = np.partition(values.detach().cpu().numpy(), [*below, *above])
    low, high = (
        float(ordered[i]) + (float(ordered[j]) - float(ordered[i])) * (q * last - i)
        for q, i, j in zip(quantiles, below, above, strict=True)
    )
    return low, high
