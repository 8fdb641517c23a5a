"""Members to each other.

Marigold aligns members d_i by scales s_i > 0 and shifts t_i that minimise the spread

    P(s, t) = sum_{i<j} RMSE(s_i d_i + t_i, s_j d_j + t_j),

which the collapse s = 0 makes zero: what is meant is the smallest P *relative to the depth range of the reduced map*.
P depends on the maps only through their means and their E x E covariance (`pairwise_rmse`), one pass over the pixels:
1. t_i = -s_i mean_i is optimal for every pair at once; the s_i minimise P / std(mean map), smooth in E numbers.
2. Scales and shifts move by at most a tenth of the ensemble's own spread to minimise P / range(reduced map), where the
   range is taken over the extreme pixels of step 1's mean map. The bound keeps it from fitting noise at those few.
3. The reduced map is mapped onto [0, 1], the members with it.
Scale-invariant maps: the same with uncentred moments, no shifts, and the maximum in place of the range.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import minimize
from torch import Tensor

from marigold_uq.alignment.precision import like
from marigold_uq.precision import at_least_float32

Array = NDArray[np.float64]
Reduction = Literal["median", "mean"]

MAX_WEIGHT = 2.0  # step 1 lets standard deviations of two members differ by at most 2 ** 2: none collapses
REFINEMENT = 0.1  # bound of step 2 in units of the mean pairwise RMSE
NUM_EXTREMES = 64  # pixels at either end of the mean map that step 2 watches
SMOOTHING = 1e-7  # smooths |.| at identical members, whose RMSE is 0, in units of a member's standard deviation
FLAT = 1e-2  # a reduced map whose range is below this many standard deviations of a member carries no depth
BLOCK = 1 << 13  # pixels per partial sum: stays in cache, and float32 devices lose nothing in long sums
MEDIAN_BLOCK = 1 << 16  # pixels per pass of the median network


@dataclass(frozen=True)
class AlignedMembers:
    """Members in common units: maps = scale * input + shift, with scale > 0 (float64, on the CPU)."""

    maps: Tensor  # (E, H, W)
    scale: Tensor  # (E,)
    shift: Tensor  # (E,)


@dataclass(frozen=True)
class EnsembledDepth:
    """Reduced map and its spread, all in the units of `prediction`; `uncertainty` is None for a single member.

    `uncertainty` is the standard deviation over members (divisor E - 1). `members` may leave [0, 1] a little.
    """

    prediction: Tensor  # (H, W)
    uncertainty: Tensor | None  # (H, W)
    members: Tensor  # (E, H, W)
    scale: Tensor  # (E,)
    shift: Tensor  # (E,)


def align_members(
    maps: Tensor,
    *,
    scale_invariant: bool = True,
    shift_invariant: bool = True,
    reduction: Reduction = "median",
    mask: Tensor | None = None,
) -> AlignedMembers:
    """Align maps (E, H, W) to each other so that their reduction spans [0, 1] (scale-only: has maximum 1).

    Pixels where `mask` (H, W) is False may hold anything and do not count. A single member and metric maps (neither
    invariance) come back unchanged. A constant member is moved to the common mean; constant maps only give zeros.
    Float16 and bfloat16 maps come back as float32. Shift without scale invariance has no model and is refused.
    """
    return _align_and_reduce(maps, scale_invariant, shift_invariant, reduction, mask)[0]


def ensemble_members(
    maps: Tensor,
    *,
    scale_invariant: bool = True,
    shift_invariant: bool = True,
    reduction: Reduction = "median",
    mask: Tensor | None = None,
) -> EnsembledDepth:
    """`align_members`, then the pixelwise median (the proper one, also for even E) or mean, and the spread."""
    aligned, prediction = _align_and_reduce(maps, scale_invariant, shift_invariant, reduction, mask)
    uncertainty = _standard_deviation(aligned.maps) if len(maps) > 1 else None
    return EnsembledDepth(prediction, uncertainty, aligned.maps, aligned.scale, aligned.shift)


def in_units_of(ensemble: EnsembledDepth, reference: Tensor, *, shift_invariant: bool = True) -> EnsembledDepth:
    """The ensemble scaled and shifted as a whole, so that its prediction has mean and spread of `reference` (H, W).

    Scale-invariant maps are scaled to the same root mean square. Moments are matched rather than fitted: both maps have
    errors, and a regression would shrink. A flat map has no scale, and 1 is taken.
    """
    own, other = ensemble.prediction.double(), reference.double()
    start, end = (own.mean(), other.mean()) if shift_invariant else (own.new_zeros(()), other.new_zeros(()))
    ratio = float((other - end).square().mean().sqrt() / (own - start).square().mean().sqrt())
    scale = ratio if np.isfinite(ratio) and ratio > 0 else 1.0
    shift = float(end - scale * start)
    return EnsembledDepth(
        prediction=scale * ensemble.prediction + shift,
        uncertainty=None if ensemble.uncertainty is None else scale * ensemble.uncertainty,
        members=scale * ensemble.members + shift,
        scale=scale * ensemble.scale,
        shift=scale * ensemble.shift + shift,
    )


def pairwise_rmse(covariance: Array, mean: Array, scale: Array, shift: Array) -> Array:
    """RMSE between s_i d_i + t_i and s_j d_j + t_j for all pairs, (E, E), from the moments of the d_i.

    RMSE_ij^2 = s_i^2 C_ii + s_j^2 C_jj - 2 s_i s_j C_ij + (s_i m_i + t_i - s_j m_j - t_j)^2.
    """
    scaled = scale[:, None] * covariance * scale  # (E, E)
    variance = np.diag(scaled)
    location = scale * mean + shift
    squared = variance[:, None] + variance - 2 * scaled + (location[:, None] - location) ** 2
    return np.sqrt(np.maximum(squared, 0.0))


def member_moments(values: Tensor, dtype: torch.dtype | None = None) -> tuple[Array, Array]:
    """Covariance (E, E) and mean (E,) of values (E, N), accumulated in float64; `dtype` is that of the products.

    By default float64, or float32 on devices without it: centred first and summed by blocks, float32 is enough.
    """
    dtype = dtype or (torch.float64 if values.device.type in ("cpu", "cuda") else torch.float32)
    reference = values.mean(dim=1, keepdim=True).to(dtype)  # near enough to the mean for exact products
    products, sums = np.zeros((len(values), len(values))), np.zeros(len(values))
    for block in values.split(BLOCK, dim=1):
        deviation = block.to(dtype) - reference
        products += _host(deviation @ deviation.T)
        sums += _host(deviation.sum(dim=1))
    residual = sums / values.shape[1]
    return products / values.shape[1] - np.outer(residual, residual), _host(reference[:, 0]) + residual


def _align_and_reduce(
    maps: Tensor, scale_invariant: bool, shift_invariant: bool, reduction: Reduction, mask: Tensor | None
) -> tuple[AlignedMembers, Tensor]:
    """Aligned members, and their reduction (H, W) in the same units."""
    _check_members(maps, mask, scale_invariant, shift_invariant, reduction)
    maps = at_least_float32(maps)
    values = maps.flatten(1) if mask is None else maps[:, mask.to(maps.device)]  # (E, N)
    _require_finite(values)
    num_members = len(maps)
    if num_members == 1 or not scale_invariant:
        identity = AlignedMembers(maps, torch.ones(num_members).double(), torch.zeros(num_members).double())
        return identity, _reduce(maps, reduction)
    centre, scale, offset = _solve_alignment(values, shift_invariant, reduction)
    aligned = _affine(maps, centre, scale, offset)
    reduced = _reduce(aligned, reduction)
    low, span = _unit_interval(reduced, aligned, mask, shift_invariant)
    scale, shift = scale / span, (offset - scale * centre - low) / span
    members = AlignedMembers(aligned.sub_(low).mul_(1 / span), torch.from_numpy(scale), torch.from_numpy(shift))
    return members, (reduced - low) / span


def _check_members(
    maps: Tensor, mask: Tensor | None, scale_invariant: bool, shift_invariant: bool, reduction: str
) -> None:
    if maps.ndim != 3 or maps.numel() == 0 or not maps.is_floating_point():
        raise ValueError(f"expected floating-point maps (E, H, W), got {tuple(maps.shape)} of {maps.dtype}")
    if reduction not in ("median", "mean"):
        raise ValueError(f"unknown reduction {reduction!r}; choose 'median' or 'mean'")
    if shift_invariant and not scale_invariant:
        raise ValueError(
            "no depth model is shift-invariant but not scale-invariant; set scale_invariant=True (affine-invariant) "
            "or shift_invariant=False (metric)"
        )
    if mask is not None and (mask.shape != maps.shape[1:] or mask.dtype != torch.bool or not mask.any()):
        raise ValueError(
            f"expected a boolean mask {tuple(maps.shape[1:])} with at least one True (= valid) pixel, "
            f"got {tuple(mask.shape)} of {mask.dtype} with {int(mask.count_nonzero())} set"
        )


def _require_finite(values: Tensor) -> None:
    """A NaN or infinity always reaches the sum, so the slow look at every value is only needed to name the member."""
    if values.float().sum(dim=1).isfinite().all():
        return
    bad = (~values.isfinite()).sum(dim=1).tolist()
    found = ", ".join(f"member {i} ({count} pixels)" for i, count in enumerate(bad) if count)
    if found:
        raise ValueError(f"NaN or infinite values in {found}; drop the member or exclude the pixels with `mask`")


def _solve_alignment(values: Tensor, shift_invariant: bool, reduction: Reduction) -> tuple[Array, Array, Array]:
    """Centre, scale and offset (E,) of the aligned members scale * (d - centre) + offset, up to a common affine map."""
    moments, centre = member_moments(values)
    magnitude = np.abs(centre)
    if not shift_invariant:
        moments, centre = moments + np.outer(centre, centre), np.zeros_like(centre)
    size = np.sqrt(np.diag(moments))  # standard deviation, or root mean square
    active = size > torch.finfo(values.dtype).eps * magnitude  # the others are constant up to rounding
    weight, offset = np.ones(int(active.sum())), np.zeros_like(size)
    if len(weight) > 1:
        similarity = moments[np.ix_(active, active)] / np.outer(size[active], size[active])
        weight = _balance(similarity)
        chosen = values if active.all() else values[torch.from_numpy(active)]
        pixels = _extreme_values(chosen, weight / size[active])
        pixels = (pixels - centre[active, None]) / size[active, None]
        weight, offset[active] = _refine(similarity, weight, pixels, reduction, shift_invariant)
    scale = np.full_like(size, (weight / size[active]).mean() if len(weight) else 1.0)  # a constant map has no scale
    scale[active] = weight / size[active]
    return centre, scale, offset


def _balance(similarity: Array) -> Array:
    """Step 1: weights (E,) of members of unit size that minimise P / std(mean map)."""

    def objective(log_weight: Array) -> tuple[float, Array]:
        weight = np.exp(log_weight)
        spread, gradient, _ = _log_spread(similarity, weight, np.zeros_like(weight))
        gauge = weight @ similarity @ weight + SMOOTHING
        return spread - 0.5 * float(np.log(gauge)), weight * (gradient - similarity @ weight / gauge)

    start = np.zeros(len(similarity))
    return np.exp(_minimise(objective, start, start + np.log(MAX_WEIGHT), max_iterations=100))


def _refine(
    similarity: Array, weight: Array, pixels: Array, reduction: Reduction, shift_invariant: bool
) -> tuple[Array, Array]:
    """Step 2: weights and offsets (E,) near `weight` and 0 that minimise P / range over the given pixels (E, K).

    The range over all pixels is at least that, so the true ratio can only be smaller than the one reached here.
    """
    size, start = len(weight), np.concatenate([np.log(weight), np.zeros_like(weight)])

    def objective(parameters: Array) -> tuple[float, Array]:
        weight, offset = np.exp(parameters[:size]), parameters[size:]
        spread, spread_weight, spread_offset = _log_spread(similarity, weight, offset)
        span, span_weight, span_offset = _log_span(pixels, weight, offset, reduction, shift_invariant)
        gradient = [weight * (spread_weight - span_weight), spread_offset - span_offset]
        return spread - span, np.concatenate(gradient)

    rmse = pairwise_rmse(similarity, start[size:], weight, start[size:]).sum() / (size * (size - 1))
    radius = REFINEMENT * rmse / weight.mean()
    if _log_span(pixels, weight, start[size:], reduction, shift_invariant)[0] < np.log(FLAT):
        return weight, start[size:]  # the members cancel each other
    best = _minimise(objective, start, radius * np.repeat([1.0, float(shift_invariant)], size), max_iterations=5)
    return np.exp(best[:size]), best[size:]


def _log_spread(similarity: Array, weight: Array, offset: Array) -> tuple[float, Array, Array]:
    """log P of members of unit size, and its gradients in weight and offset (E,)."""
    rmse = np.hypot(pairwise_rmse(similarity, np.zeros_like(weight), weight, offset), SMOOTHING)
    total = np.triu(rmse, 1).sum()
    np.fill_diagonal(rmse, np.inf)
    inverse = 1.0 / rmse
    pairs = inverse.sum(axis=1)
    by_weight, by_offset = weight * pairs - (inverse * similarity) @ weight, offset * pairs - inverse @ offset
    return float(np.log(total)), by_weight / total, by_offset / total


def _log_span(
    pixels: Array, weight: Array, offset: Array, reduction: Reduction, shift_invariant: bool
) -> tuple[float, Array, Array]:
    """Log of the reduced map's range (or maximum) over pixels (E, K), and its gradients in weight and offset (E,)."""
    size = len(weight)
    aligned = pixels * weight[:, None] + offset[:, None]
    middle = [(size - 1) // 2, size // 2]
    reduced = aligned.mean(axis=0) if reduction == "mean" else np.sort(aligned, axis=0)[middle].mean(axis=0)
    top, bottom = reduced.argmax(), reduced.argmin()
    span = max(reduced[top] - shift_invariant * reduced[bottom], SMOOTHING)
    by_weight, by_offset = np.zeros(size), np.zeros(size)
    for pixel, sign in ((top, 1.0), (bottom, -float(shift_invariant))):
        members = np.arange(size) if reduction == "mean" else aligned[:, pixel].argsort()[middle]
        share = sign / (span * len(members))
        np.add.at(by_offset, members, share)
        np.add.at(by_weight, members, share * pixels[members, pixel])
    return float(np.log(span)), by_weight, by_offset


def _minimise(
    objective: Callable[[Array], tuple[float, Array]], start: Array, radius: Array, max_iterations: int
) -> Array:
    """Best point seen by L-BFGS-B in the box start +- radius; never worse than the start, also where kinks stop it."""
    best = (objective(start)[0], start)

    def watched(parameters: Array) -> tuple[float, Array]:
        nonlocal best
        value, gradient = objective(parameters)
        if value < best[0]:
            best = (value, parameters.copy())
        return value, gradient

    bounds = list(zip(start - radius, start + radius, strict=True))
    minimize(watched, start, jac=True, method="L-BFGS-B", bounds=bounds, options={"maxiter": max_iterations})
    return best[1]


def _extreme_values(values: Tensor, scale: Array) -> Array:
    """Values (E, K) of all members where the mean aligned map, a stand-in for any reduction, is lowest or highest."""
    mean_map = like(torch.from_numpy(scale), values) @ values
    count = min(NUM_EXTREMES, len(mean_map))
    lowest, highest = (mean_map.topk(count, largest=largest).indices for largest in (False, True))
    return _host(values[:, torch.cat([lowest, highest])])


def _affine(maps: Tensor, centre: Array, scale: Array, offset: Array) -> Tensor:
    """scale * (maps - centre) + offset per member; subtracting first keeps float32 exact for far-off maps."""
    shape = (-1,) + (1,) * (maps.ndim - 1)
    centre_, scale_, offset_ = (like(torch.from_numpy(x), maps).view(shape) for x in (centre, scale, offset))
    return (maps - centre_).mul_(scale_).add_(offset_)


def _reduce(maps: Tensor, reduction: Reduction) -> Tensor:
    """Mean or median over the first axis; the median by elementwise minima and maxima of whole planes.

    That is an order of magnitude quicker than sorting E numbers at every pixel; blocks stay in cache.
    """
    if reduction == "mean":
        return maps.mean(dim=0)
    blocks = [_median(list(block.unbind(0))) for block in maps.flatten(1).split(MEDIAN_BLOCK, dim=1)]
    return torch.cat(blocks).view(maps.shape[1:])


def _median(planes: list[Tensor]) -> Tensor:
    for i, j, use_low, use_high in _median_network(len(planes)):
        low, high = planes[i], planes[j]
        if use_low:
            planes[i] = torch.minimum(low, high)
        if use_high:
            planes[j] = torch.maximum(low, high)
    return (planes[(len(planes) - 1) // 2] + planes[len(planes) // 2]) / 2


@cache
def _median_network(size: int) -> list[tuple[int, int, bool, bool]]:
    """Comparators (i, j) of Batcher's merge exchange (Knuth, TAOCP 3, 5.2.2, algorithm M) that reach the middle.

    The flags say whether the smaller value (into i) and the larger one (into j) are used later.
    """
    top = 1 << max(size - 1, 1).bit_length() - 1
    comparators, p = [], top
    while p > 0:
        q, r, d = top, 0, p
        while d > 0:
            comparators += [(i, i + d) for i in range(size - d) if i & p == r]
            q, r, d = q >> 1, p, q - p
        p >>= 1
    used, network = {(size - 1) // 2, size // 2}, []
    for i, j in reversed(comparators):
        if i in used or j in used:
            network.append((i, j, i in used, j in used))
            used |= {i, j}
    return network[::-1]


def _standard_deviation(maps: Tensor) -> Tensor:
    """Over the first axis, divisor E - 1."""
    mean, total = maps.mean(dim=0), torch.zeros_like(maps[0])
    for member in maps:  # plane by plane: three times quicker than torch.std over the outermost axis
        deviation = member - mean
        total.addcmul_(deviation, deviation)
    return total.div_(len(maps) - 1).sqrt_()


def _unit_interval(reduced: Tensor, aligned: Tensor, mask: Tensor | None, shift_invariant: bool) -> tuple[float, float]:
    """Lowest value and range (scale-only: 0 and maximum) of the reduced map over valid pixels.

    Where members cancel and the reduced map is flat, the mean range of the members is the unit; where all are
    constant, 1.
    """
    valid = (lambda x: x) if mask is None else (lambda x: x[..., mask.to(x.device)])

    def limits(x: Tensor) -> tuple[float, float]:
        low, high = (float(v) for v in valid(x).aminmax())
        return (low, high - low) if shift_invariant else (0.0, high)

    low, span = limits(reduced)
    if span < 0:
        raise ValueError("scale-invariant maps must be positive somewhere; for maps below 0 use shift_invariant=True")
    if span > FLAT:  # members have unit size
        return low, span
    member_span = sum(limits(member)[1] for member in aligned) / len(aligned)
    return low, member_span or 1.0


def _host(x: Tensor) -> Array:
    return x.detach().cpu().double().numpy()
