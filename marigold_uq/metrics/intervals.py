"""Quantiles and central intervals of an ensemble, their statistics, and what a finite ensemble can reach.

Samples are (M, ...) with the M members first, targets (...); every statistic is unreduced.
"""

from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np
import torch
from scipy import special
from torch import Tensor

from marigold_uq.distributions.order_statistics import QuantileMethod, member_quantiles, quantile_position
from marigold_uq.metrics.checks import as_ensemble, as_members
from marigold_uq.precision import at_least_float32

IntervalMethod = Literal["weibull", "linear", "minmax", "gaussian", "student_t"]
Levels = float | Sequence[float]

_QUADRATURE_NODES = 256


def quantiles(samples: Tensor, q: Levels, method: QuantileMethod = "weibull") -> Tensor:
    """Quantiles of the members, linear between order statistics.

    `weibull` puts level q at order statistic (M + 1) q (counted from 1, clamped to the extremes): the level is exact
    for exchangeable members wherever that is a whole number within 1..M. `linear`, at 1 + (M - 1) q, is the default of
    numpy and torch and too narrow for small M.

    Args:
        samples: (M, ...).
        q: one level or Q of them, within [0, 1].
        method: `weibull` or `linear`, numpy's names.

    Returns:
        (...) for one level, (Q, ...) for several.
    """
    samples = as_members(samples)
    values = member_quantiles(samples, _levels(q, closed=True), method)  # (Q, ...)
    return values[0] if isinstance(q, float | int) else values


def central_interval(samples: Tensor, coverage: Levels, method: IntervalMethod = "weibull") -> tuple[Tensor, Tensor]:
    """Lower and upper end of the central interval with nominal `coverage` c.

    `weibull` and `linear`: quantiles (1 - c)/2 and (1 + c)/2; `minmax`: smallest and largest member, whatever c is;
    `gaussian`: ybar +- z s; `student_t`: ybar +- t_{M-1} s sqrt(1 + 1/M), exact for Gaussian members of any number.
    What each of them can cover with M perfect members is `expected_coverage`.

    Returns:
        Two tensors (...), or (L, ...) for L coverages.
    """
    samples = as_members(samples)
    levels = _levels(coverage, closed=False)
    if method in get_args(QuantileMethod):
        tails = [(1 - c) / 2 for c in levels] + [(1 + c) / 2 for c in levels]
        lower, upper = quantiles(samples, tails, "weibull" if method == "weibull" else "linear").chunk(2)
    elif method == "minmax":
        lower = samples.amin(dim=0).expand(len(levels), *samples.shape[1:])
        upper = samples.amax(dim=0).expand(len(levels), *samples.shape[1:])
    else:
        mean, spread = samples.mean(dim=0), _unbiased_spread(samples)
        factors = [_spread_factor(samples.shape[0], c, method) for c in levels]
        width = torch.stack([factor * spread for factor in factors])  # (L, ...)
        lower, upper = mean - width, mean + width
    return (lower[0], upper[0]) if isinstance(coverage, float | int) else (lower, upper)


def nested_interval(samples: Tensor, coverage: float) -> tuple[Tensor, Tensor]:
    """Central interval of few members at any coverage, each within those of higher coverage.

    Quantiles at Weibull's positions as far as M members reach, (M - 1)/(M + 1). Beyond, the outermost members move away
    from the mean as Student's t does, so that Gaussian members cover about what is asked for.

    Returns:
        Two tensors (...).
    """
    samples = as_members(samples)
    num_members = samples.shape[0]
    reach = (num_members - 1) / (num_members + 1)
    if coverage <= reach:
        return central_interval(samples, coverage, "weibull")
    mean, factor = samples.mean(0), _spread_factor(num_members, coverage, "student_t")
    factor /= _spread_factor(num_members, reach, "student_t")
    return torch.lerp(mean, samples.amin(0), factor), torch.lerp(mean, samples.amax(0), factor)


def student_t_interval(samples: Tensor, coverage: Levels) -> tuple[Tensor, Tensor]:
    """The interval ybar +- t_{M-1} s sqrt(1 + 1/M): covers one more Gaussian draw with probability c for any M >= 2."""
    return central_interval(samples, coverage, "student_t")


def coverage(lower: Tensor, upper: Tensor, target: Tensor) -> Tensor:
    """1 where lower <= target <= upper, else 0, for a target (...) and ends (...), or (L, ...) for L levels at once."""
    _check_ends(lower, upper, target)
    covered = (lower <= target) & (target <= upper)
    return covered.to(at_least_float32(target).dtype)


def interval_width(lower: Tensor, upper: Tensor) -> Tensor:
    """Width upper - lower."""
    return at_least_float32(upper) - at_least_float32(lower)


def interval_score(lower: Tensor, upper: Tensor, target: Tensor, coverage: float) -> Tensor:
    """Winkler's score (u - l) + 2/alpha (l - y)_+ + 2/alpha (y - u)_+, alpha = 1 - coverage; lower is better."""
    (level,) = _levels(coverage, closed=False)
    _check_ends(lower, upper, target)
    lower, upper, target = at_least_float32(lower), at_least_float32(upper), at_least_float32(target)
    outside = (lower - target).clamp(min=0) + (target - upper).clamp(min=0)
    return (upper - lower) + 2 / (1 - level) * outside


def weighted_interval_score(
    samples: Tensor, target: Tensor, coverages: Sequence[float], method: IntervalMethod = "weibull"
) -> Tensor:
    """( 1/2 |y - median| + sum_k alpha_k/2 S_k ) / (K + 1/2), (...), S_k Winkler's score at coverage 1 - alpha_k.

    The score of forecasts that are given as K central intervals and a median (Bracher et al., 2021); for many levels it
    tends to the CRPS.
    """
    samples, target = as_ensemble(samples, target)
    lower, upper = central_interval(samples, list(coverages), method)  # (K, ...)
    total = 0.5 * (quantiles(samples, 0.5) - target).abs()
    for low, high, level in zip(lower, upper, coverages, strict=True):
        total = total + 0.5 * (1 - level) * interval_score(low, high, target, level)
    return total / (len(lower) + 0.5)


def reliability(samples: Tensor, target: Tensor, levels: Sequence[float], method: IntervalMethod = "weibull") -> Tensor:
    """Is the target inside the central interval of each nominal level? 0 or 1, unreduced.

    Its mean per level is the observed coverage. Compare it with `expected_coverage(M, level, method)`, not with the
    level itself. Intervals that come from elsewhere, (L, ...), go to `coverage` directly.

    Args:
        samples: (M, ...).
        target: (...).
        levels: L nominal coverages within (0, 1).
        method: how intervals are made, as in `central_interval`.

    Returns:
        (L, ...); move the first axis behind the sample axis to hand it to the reducer with `keep=1`.
    """
    samples, target = as_ensemble(samples, target)
    lower, upper = central_interval(samples, list(levels), method)
    return coverage(lower, upper, target)


def expected_coverage(num_members: int, coverage: float, method: IntervalMethod = "weibull") -> float:
    """Coverage that M perfect members reach: the number an observed coverage is to be compared with.

    Members and target are independent draws of one Gaussian. Where the ends are order statistics themselves (`minmax`,
    and `weibull` when (M + 1)(1 - c)/2 is whole or at most 1) the result holds for every continuous law.

    Args:
        num_members: M.
        coverage: the nominal c within (0, 1).
        method: as in `central_interval`.
    """
    if num_members < 1:
        raise ValueError(f"num_members is {num_members}; an ensemble has at least one member.")
    (level,) = _levels(coverage, closed=False)
    if method == "minmax":
        return (num_members - 1) / (num_members + 1)
    if method == "student_t" or method == "gaussian":
        # (y - ybar) / (s sqrt(1 + 1/M)) is Student t with M - 1 degrees of freedom.
        quantile = _spread_factor(num_members, level, method) / (1 + 1 / num_members) ** 0.5
        return float(2 * special.stdtr(num_members - 1, quantile) - 1)
    # Symmetry: both tails lose the same.
    return 1 - 2 * _expected_level(num_members, quantile_position(num_members, (1 - level) / 2, method))


def _expected_level(num_members: int, position: float) -> float:
    """E Phi(Q) for Q interpolated at `position` (from 0) between order statistics of M Gaussian draws.

    In levels, U_(k) is Beta(k, M - k + 1) and U_(k+1) = U_(k) + (1 - U_(k)) V with V ~ Beta(1, M - k), so two nested
    Gauss-Legendre rules over uniform variables give the expectation.
    """
    rank, fraction = int(position) + 1, position - int(position)
    if fraction == 0:
        return rank / (num_members + 1)
    nodes, weights = np.polynomial.legendre.leggauss(_QUADRATURE_NODES)
    uniform, weights = (nodes + 1) / 2, weights / 2
    first = special.betaincinv(rank, num_members - rank + 1, uniform)[:, None]
    second = first + (1 - first) * -np.expm1(np.log1p(-uniform) / (num_members - rank))
    value = (1 - fraction) * special.ndtri(first) + fraction * special.ndtri(second)
    return float(weights @ special.ndtr(value) @ weights)


def _spread_factor(num_members: int, level: float, method: str) -> float:
    """How many ensemble standard deviations the interval reaches on each side."""
    if num_members < 2:
        raise ValueError(f"method {method!r} needs a standard deviation, so at least 2 members; got {num_members}.")
    if method == "gaussian":
        return float(special.ndtri((1 + level) / 2))
    if method == "student_t":
        return float(special.stdtrit(num_members - 1, (1 + level) / 2)) * (1 + 1 / num_members) ** 0.5
    raise ValueError(f"method is {method!r}; intervals know {get_args(IntervalMethod)}.")


def _unbiased_spread(samples: Tensor) -> Tensor:
    """Ensemble standard deviation with M - 1; refused for one member, where it does not exist."""
    if samples.shape[0] < 2:
        raise ValueError("one member has no standard deviation; use at least 2 members.")
    return samples.std(dim=0, correction=1)


def _check_ends(lower: Tensor, upper: Tensor, target: Tensor) -> None:
    """Ends have the target's shape, or one axis of levels before it; anything else would broadcast by accident."""
    if lower.shape != upper.shape or target.shape not in (lower.shape, lower.shape[1:]):
        raise ValueError(
            f"interval ends {tuple(lower.shape)} and {tuple(upper.shape)} do not fit target {tuple(target.shape)}:"
            " expected the target's shape, or (L, *target.shape) for L levels."
        )


def _levels(levels: Levels, *, closed: bool) -> list[float]:
    """One or several levels as a list, each within (0, 1), or within [0, 1] if `closed`."""
    values = [float(levels)] if isinstance(levels, float | int) else [float(level) for level in levels]
    inside = [(0 <= v <= 1) if closed else (0 < v < 1) for v in values]
    if not values or not all(inside):
        bounds = "[0, 1]" if closed else "(0, 1)"
        raise ValueError(f"levels are {values}; expected at least one, each a fraction within {bounds} (0.95, not 95).")
    return values
