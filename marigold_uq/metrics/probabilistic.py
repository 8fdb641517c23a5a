"""Statistics of ensembles: how far, how sharp, how calibrated.

Everywhere `samples` is (M, ...) with the M members first and `target` is (...). A statistic is per coordinate, or per
sample where an event is scored as a whole, and is never averaged here: masks, weights and means are the reducer's
(`marigold_uq.metrics.reduce`). Half precision is raised to float32, float64 is kept. Quantiles and intervals are
written in `intervals` and listed here too, so that this module is the complete list.
"""

import math
from typing import Literal

import torch
from torch import Tensor

from marigold_uq.metrics.checks import as_ensemble, as_mask, as_members
from marigold_uq.metrics.intervals import (
    IntervalMethod,
    central_interval,
    coverage,
    expected_coverage,
    interval_score,
    interval_width,
    quantiles,
    reliability,
    student_t_interval,
    weighted_interval_score,
)
from marigold_uq.precision import at_least_float32, full_precision
from marigold_uq.scores.ensemble import CHUNK_ELEMENTS, ensemble_crps, ensemble_energy_score

__all__ = [
    "absolute_error",
    "central_interval",
    "coverage",
    "crps",
    "energy_score",
    "ensemble_statistics",
    "ensemble_variance",
    "expected_coverage",
    "gaussian_nll",
    "interval_score",
    "interval_width",
    "normal_nll",
    "pit",
    "quantiles",
    "rank_histogram",
    "ranks",
    "reliability",
    "spread_skill",
    "squared_error",
    "student_t_interval",
    "weighted_interval_score",
]


def squared_error(samples: Tensor, target: Tensor) -> Tensor:
    """(ybar - y)^2 of the ensemble mean, (...); RMSE is the root of its overall mean."""
    samples, target = as_ensemble(samples, target)
    return (samples.mean(dim=0) - target).square()


def absolute_error(samples: Tensor, target: Tensor, center: Literal["median", "mean"] = "median") -> Tensor:
    """|median - y|, (...): the median, because it is what minimises the absolute error; `center="mean"` on request."""
    samples, target = as_ensemble(samples, target)
    if center not in ("median", "mean"):
        raise ValueError(f"center is {center!r}; expected 'median' or 'mean'.")
    point = samples.mean(dim=0) if center == "mean" else quantiles(samples, 0.5)
    return (point - target).abs()


def ensemble_variance(samples: Tensor) -> Tensor:
    """Unbiased variance of the members (divisor M - 1), (...)."""
    samples = as_members(samples)
    if samples.shape[0] < 2:
        raise ValueError("one member has no variance; use at least 2 members.")
    return samples.var(dim=0, correction=1)


def crps(samples: Tensor, target: Tensor, *, fair: bool = True) -> Tensor:
    """Continuous ranked probability score E|X - y| - 1/2 E|X - X'| of the members, (...), in O(M log M).

    With the members in ascending order, sum_{i<j} |x_i - x_j| = sum_i (2 i - M - 1) x_(i): no M x M table. `fair`
    divides the pairs by M (M - 1), which is unbiased for the distribution behind the members; otherwise by M^2, the
    score of the empirical distribution itself. One member has no pairs (the fair form is undefined): both are |x - y|.
    """
    samples, target = as_ensemble(samples, target)
    return ensemble_crps(samples, target, fair=fair)


@full_precision
def energy_score(
    samples: Tensor,
    target: Tensor,
    event_dims: int,
    *,
    fair: bool = True,
    exponent: float = 1.0,
    mask: Tensor | None = None,
    chunk_elements: int = CHUNK_ELEMENTS,
) -> Tensor:
    """Energy score E||X - y||^b - 1/2 E||X - X'||^b of the members, one value per event.

    Squared distances are summed over blocks of coordinates, so memory beyond the inputs is a few `chunk_elements`
    numbers at most and an M x M x D tensor never exists. Differences are taken directly, not through a Gram matrix, so
    close members far from the origin keep their digits.

    Args:
        samples: (M, *batch, *event).
        target: (*batch, *event).
        event_dims: how many trailing axes of `target` form the event (3 for latents (B, C, H, W)); at least 1.
        fair: divide the pairs by M (M - 1) instead of M^2; one member gives ||x - y||^b.
        exponent: b within (0, 2).
        mask: broadcastable to `target`, True where valid; other coordinates leave the event, whatever they hold.
        chunk_elements: the size of one block, in numbers.

    Returns:
        (*batch).
    """
    samples, target = as_ensemble(samples, target)
    if not 1 <= event_dims <= target.ndim:
        raise ValueError(f"event_dims is {event_dims}; target {tuple(target.shape)} allows 1 to {target.ndim}.")
    if not 0 < exponent < 2:
        raise ValueError(f"exponent is {exponent}; the energy score is strictly proper within (0, 2).")
    mask = as_mask(mask, target.shape)
    first = target.ndim - event_dims
    flat = (target.shape[:first].numel(), target.shape[first:].numel())
    members, observed = samples.reshape(samples.shape[0], *flat), target.reshape(flat)  # (M, B, D) and (B, D)
    valid = None if mask is None else mask.reshape(flat)
    num_rows = max(1, chunk_elements // (samples.shape[0] + 1) ** 2)  # so many tables of distances at once
    scores = [
        ensemble_energy_score(
            members[:, start : start + num_rows],
            observed[start : start + num_rows],
            exponent=exponent,
            lam=1.0 if samples.shape[0] > 1 else 0.0,
            mask=None if valid is None else valid[start : start + num_rows],
            fair=fair,
            chunk_elements=chunk_elements,
        )
        for start in range(0, flat[0], num_rows)
    ]
    return torch.cat([target.new_empty(0), *scores]).reshape(target.shape[:first])


def gaussian_nll(
    samples: Tensor, target: Tensor, *, min_scale: float | None = None, mask: Tensor | None = None
) -> Tensor:
    """Negative log density of y under N(ybar, s^2) with the members' mean and unbiased standard deviation, (...).

    Args:
        samples: (M, ...), M >= 2.
        target: (...).
        min_scale: smallest s. Without it a coordinate whose members all agree is an error: its score would be infinite.
        mask: broadcastable to `target`; coordinates with False are not checked.
    """
    samples, target = as_ensemble(samples, target)
    return normal_nll(samples.mean(dim=0), ensemble_variance(samples).sqrt(), target, min_scale=min_scale, mask=mask)


def normal_nll(
    loc: Tensor, scale: Tensor, target: Tensor, *, min_scale: float | None = None, mask: Tensor | None = None
) -> Tensor:
    """1/2 log(2 pi s^2) + (mu - y)^2 / (2 s^2), for predictions given as mean and standard deviation.

    Shapes broadcast; `min_scale` and `mask` as in `gaussian_nll`.
    """
    loc, scale, target = at_least_float32(loc), at_least_float32(scale), at_least_float32(target)
    if min_scale is not None:
        scale = scale.clamp(min=min_scale)
    mask = as_mask(mask, scale.shape)
    collapsed = scale <= 0 if mask is None else (scale <= 0) & mask
    if collapsed.any():
        raise ValueError(
            f"{int(collapsed.sum())} of {scale.numel()} coordinates have no spread, so their Gaussian NLL is infinite."
            " Pass min_scale (a floor in the target's units) or a mask, and report which."
        )
    return 0.5 * math.log(2 * math.pi) + scale.log() + ((loc - target) / scale).square() / 2


def spread_skill(samples: Tensor, target: Tensor) -> dict[str, Tensor]:
    """The two statistics, each (...), behind spread/skill = sqrt((M + 1)/M) sqrt(mean variance) / RMSE.

    `predicted_squared_error` = (M + 1)/M s^2 is what (ybar - y)^2 would be on average if members and target had one
    distribution, `squared_error` is what it was. The reducer's `spread_skill_ratio` is the root of the ratio of their
    means: 1 is calibrated, below 1 over-confident. Averages come before the ratio, never a mean of ratios.
    """
    num_members = samples.shape[0]
    return {
        "predicted_squared_error": (num_members + 1) / num_members * ensemble_variance(samples),
        "squared_error": squared_error(samples, target),
    }


def ranks(samples: Tensor, target: Tensor, *, generator: torch.Generator) -> Tensor:
    """How many members lie below the target, 0..M as int64 (...); ties are broken uniformly at random.

    Uniform on {0, ..., M} if target and members are exchangeable, also where they are discrete.
    """
    samples, target = as_ensemble(samples, target)
    below = (samples < target).sum(dim=0)
    ties = (samples == target).sum(dim=0)
    return below + (_uniform(target, generator) * (ties + 1)).long().clamp(max=ties)


def pit(samples: Tensor, target: Tensor, *, generator: torch.Generator) -> Tensor:
    """Randomised probability integral transform (rank + U) / (M + 1), (...): exactly uniform on [0, 1) for exchangeable
    members, for any M.
    """
    rank = ranks(samples, target, generator=generator)
    uniform = _uniform(at_least_float32(target), generator)
    return (rank + uniform) / (samples.shape[0] + 1)


def rank_histogram(
    samples: Tensor, target: Tensor, *, generator: torch.Generator, mask: Tensor | None = None, sample_dims: int = 0
) -> Tensor:
    """Counts of `ranks` in M + 1 bins: flat if calibrated, U-shaped if over-confident, sloped if biased.

    Args:
        samples: (M, ...).
        target: (...).
        generator: breaks ties.
        mask: broadcastable to `target`; False is not counted.
        sample_dims: leading axes of `target` that keep their own histogram; 0 counts everything together.

    Returns:
        int64 (*target.shape[:sample_dims], M + 1). To reduce per-sample counts, hand
        `counts / counts.sum(-1, keepdim=True)` to the reducer with `keep=1`.
    """
    num_bins, kept = samples.shape[0] + 1, target.shape[:sample_dims]
    rank = ranks(samples, target, generator=generator).reshape(kept.numel(), -1)  # (N, coordinates)
    bins = rank + num_bins * torch.arange(kept.numel(), device=rank.device)[:, None]
    valid = as_mask(mask, target.shape)
    chosen = bins.flatten() if valid is None else bins[valid.reshape(bins.shape)]
    return torch.bincount(chosen, minlength=kept.numel() * num_bins).reshape(*kept, num_bins)


def ensemble_statistics(
    samples: Tensor,
    target: Tensor,
    *,
    min_scale: float,
    level: float = 0.95,
    method: IntervalMethod = "weibull",
    mask: Tensor | None = None,
) -> dict[str, Tensor]:
    """The usual panel of per-coordinate statistics, each (...), under the names the derived quantities expect.

    Energy score (its event is a choice), ranks and reliability are separate calls. `min_scale` floors the standard
    deviation of the Gaussian NLL; `level` and `method` define the interval behind `coverage` and `interval_width`.
    """
    lower, upper = central_interval(samples, level, method)
    return {
        **spread_skill(samples, target),
        "variance": ensemble_variance(samples),
        "absolute_error": absolute_error(samples, target),
        "crps": crps(samples, target),
        "gaussian_nll": gaussian_nll(samples, target, min_scale=min_scale, mask=mask),
        "coverage": coverage(lower, upper, target),
        "interval_width": interval_width(lower, upper),
        "interval_score": interval_score(lower, upper, target, level),
    }


def _uniform(like: Tensor, generator: torch.Generator) -> Tensor:
    """U[0, 1) of the shape and precision of `like`, drawn on the generator's device."""
    drawn = torch.rand(like.shape, generator=generator, dtype=like.dtype, device=generator.device)
    return drawn.to(like.device)
