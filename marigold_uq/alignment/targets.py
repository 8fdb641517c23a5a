"""Predictions to ground truth, by least squares."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from marigold_uq.alignment.precision import like
from marigold_uq.precision import at_least_float32

Space = Literal["depth", "disparity"]

MIN_DISPARITY = 1e-3  # Marigold's evaluation clips aligned disparity here before inverting it


def least_squares_alignment(
    prediction: Tensor,
    target: Tensor,
    mask: Tensor | None = None,
    *,
    weights: Tensor | None = None,
    max_resolution: int | None = None,
    space: Space = "depth",
) -> tuple[Tensor, Tensor]:
    """Scale and shift (...), float64 on the CPU, that minimise sum w (scale * prediction + shift - target)^2 per map.

    Maps are (..., H, W), target and mask as the prediction. `space="disparity"`: the prediction is a disparity and is
    fitted to 1 / target, the target being depth. `max_resolution` fits on every k-th pixel of maps with a longer edge,
    nearest neighbour. A constant prediction gives scale 0 and the target's mean. Use `apply_alignment` for the result.
    """
    if prediction.ndim < 2 or prediction.shape != target.shape:
        raise ValueError(f"expected equal shapes (..., H, W), got {tuple(prediction.shape)} and {tuple(target.shape)}")
    _check_space(space)
    ones = torch.ones(prediction.shape[-2:])
    maps = (prediction, target, ones if mask is None else mask, ones if weights is None else weights)
    x, y, valid, w = (_thin(m.detach().cpu().double().expand(prediction.shape), max_resolution) for m in maps)
    used = (valid != 0) & (w != 0)
    if int(used.sum(dim=(-2, -1)).min()) < 2:
        raise ValueError("alignment needs at least 2 valid pixels per map; check mask and weights")
    x, y, w = x.where(used, 1.0), y.where(used, 1.0), w.where(used, 0.0)
    if not (x.isfinite().all() and y.isfinite().all() and w.isfinite().all() and (w >= 0).all()):
        raise ValueError("NaN, infinity or a negative weight among the valid pixels; exclude them with `mask`")
    if space == "disparity" and (y <= 0).any():
        raise ValueError("depth must be > 0 at valid pixels to be aligned as disparity; exclude the others with `mask`")
    return _weighted_line(x, y if space == "depth" else 1 / y, w)


def apply_alignment(prediction: Tensor, scale: Tensor, shift: Tensor, *, space: Space = "depth") -> Tensor:
    """scale * prediction + shift, as depth: in disparity space clipped to at least 1e-3, then inverted.

    Scale and shift (...) broadcast over prediction (..., H, W), so one fit serves all members of an ensemble.
    """
    _check_space(space)
    prediction = at_least_float32(prediction)
    aligned = like(scale, prediction)[..., None, None] * prediction + like(shift, prediction)[..., None, None]
    return aligned if space == "depth" else aligned.clamp(min=MIN_DISPARITY).reciprocal()


def _check_space(space: str) -> None:
    if space not in ("depth", "disparity"):
        raise ValueError(f"unknown space {space!r}; choose 'depth' or 'disparity'")


def _thin(maps: Tensor, max_resolution: int | None) -> Tensor:
    """Nearest-neighbour copy of maps (..., H, W) whose longer edge is at most max_resolution."""
    factor = max(maps.shape[-2:]) / (max_resolution or max(maps.shape[-2:]))
    if factor <= 1:
        return maps
    rows, columns = (torch.arange(max(1, int(n / factor))).mul(factor).long() for n in maps.shape[-2:])
    return maps[..., rows[:, None], columns]


def _weighted_line(x: Tensor, y: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """Closed form: scale = cov_w(x, y) / var_w(x), shift = mean_w(y) - scale mean_w(x), over the last two axes."""
    total = w.sum(dim=(-2, -1), keepdim=True)
    mean_x, mean_y = ((w * m).sum(dim=(-2, -1), keepdim=True) / total for m in (x, y))
    variance, covariance = ((w * (x - mean_x) * d).sum(dim=(-2, -1)) for d in (x - mean_x, y - mean_y))
    constant = variance <= total[..., 0, 0] * (1e-7 * mean_x[..., 0, 0]).square()  # up to float32 rounding
    scale = torch.where(constant, 0.0, covariance / variance)
    return scale, mean_y[..., 0, 0] - scale * mean_x[..., 0, 0]
