"""What is chosen on held-out data with a proper score: tau inside the sampler, kappa after it, the number of steps."""

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from scipy.optimize import minimize_scalar
from torch import Tensor

from marigold_uq.calibration.comparison import Comparison
from marigold_uq.distributions import GaussianDistribution
from marigold_uq.distributions.base import at_least_float32
from marigold_uq.metrics.probabilistic import crps
from marigold_uq.scores import crps as distribution_crps

Score: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""Samples (M, ...) and target (...) -> unreduced score, lower is better."""

Curve: TypeAlias = tuple[tuple[float, float], ...]
"""(parameter, mean score) at every point that was evaluated, in rising order of the parameter."""


@dataclass(frozen=True)
class TauChoice:
    """The tau with the best mean score among those evaluated."""

    tau: float
    score: float
    curve: Curve

    @property
    def num_evaluations(self) -> int:
        """How often the sampler ran."""
        return len(self.curve)


@dataclass(frozen=True)
class KappaChoice:
    """The kappa with the best mean score, and the score at kappa = 1 for comparison."""

    kappa: float
    score: float
    score_before: float


@dataclass(frozen=True)
class StepsChoice:
    """The number of steps that was chosen, and the comparison behind it, in rising order of the steps."""

    num_inference_steps: int
    steps: tuple[int, ...]
    comparison: Comparison


def choose_steps(steps: Sequence[int], unit_scores: Callable[[int], Tensor]) -> StepsChoice:
    """The fewest denoising steps within one standard error of the best, by paired scores of held-out units.

    Args:
        steps: Numbers of steps to compare, each at least 1.
        unit_scores: Scores (U,) of the same held-out units for a number of steps; lower is better. Draw from the same
            random numbers each time.
    """
    numbers = tuple(sorted(set(steps)))
    if not numbers or numbers[0] < 1:
        raise ValueError(f"steps must name at least one number of denoising steps, each at least 1; got {list(steps)}")
    comparison = Comparison.of(torch.stack([unit_scores(number) for number in numbers]))
    return StepsChoice(numbers[comparison.chosen], numbers, comparison)


def choose_tau(
    draw: Callable[[float], Tensor],
    target: Tensor,
    *,
    score: Score = crps,
    mask: Tensor | None = None,
    bounds: tuple[float, float] = (0.01, 10.0),
    max_evaluations: int = 12,
    tolerance: float = 0.05,
) -> TauChoice:
    """Minimise the mean score of `draw(tau)` over tau: Brent's bounded search in log tau.

    tau = 1 is evaluated wherever the bounds allow it, so the choice is never worse than no calibration on these data.
    A minimum at a bound warns.

    Args:
        draw: predictive samples (M, ...) for a tau, from the *same random numbers* every time (reseed inside). Common
            random numbers make the curve smooth, so that a dozen evaluations are enough.
        target: (...), held-out truth that was not trained on.
        score: a proper score; the fair CRPS by default.
        mask: True where the score counts, broadcast against the score.
        bounds: of tau.
        max_evaluations: how often `draw` may run, tau = 1 included; at least 4.
        tolerance: of log tau; 0.05 is 5 % of tau.
    """

    def objective(tau: float) -> float:
        return _mean_score(score, draw(tau), target, mask, f"tau = {tau:g}")

    curve = _search_log(objective, bounds, max_evaluations, tolerance, "tau")
    scores = [value for _, value in curve]
    if max(scores) == min(scores):
        warnings.warn("tau changes nothing here: eta = 0 with a family without spread? It stays 1", stacklevel=2)
    tau, best = min(curve, key=lambda point: (point[1], abs(math.log(point[0]))))  # ties go to the tau nearest to 1
    return TauChoice(tau, best, curve)


def choose_kappa(
    samples: Tensor,
    target: Tensor,
    *,
    score: Score | None = None,
    mask: Tensor | None = None,
    weights: Tensor | None = None,
    bounds: tuple[float, float] = (0.01, 100.0),
) -> KappaChoice:
    """The kappa for which ybar + kappa (x - ybar) scores best; no resampling, the mean and so the RMSE stay.

    The fair CRPS (`score=None`) is convex and piecewise linear in kappa; its slope is bisected to float precision.
    Another proper score is searched in log kappa within `bounds`. Choose with as many members as will be used: with M
    perfect Gaussian members kappa^2 = (1 + 1/M) / ((1 - 1/M)(1 - 2/M)), above 1 because it also has to cover the error
    of a mean of M draws.

    Args:
        samples: (M, ...) with M >= 3 (with two members the fair CRPS does not fall off and has no minimum).
        target: (...), held out.
        score: another proper score than the fair CRPS.
        mask: True where a coordinate counts, broadcast to the target.
        weights: how much a coordinate (with another score: an event) counts, broadcast like the mask; alike if None.
        bounds: of kappa.
    """
    _check_samples(samples, target, min_members=3)
    if weights is not None and not bool(((weights >= 0) & torch.isfinite(weights)).all()):
        raise ValueError("weights are finite and not negative")
    if not bool(torch.isfinite(samples).all()):
        raise ValueError("samples contain NaN or infinity; calibrate on finite predictions")
    samples, target = at_least_float32(samples), at_least_float32(target)

    def objective(kappa: float) -> float:
        return _mean_score(score or crps, apply_kappa(samples, kappa), target, mask, f"kappa = {kappa:g}", weights)

    before = objective(1.0)
    if score is None:
        kappa = _crps_kappa(samples, target, mask, weights, bounds)
    else:
        curve = _search_log(objective, bounds, 60, 1e-4, "kappa")
        kappa = min(curve, key=lambda point: point[1])[0]
    return KappaChoice(kappa, objective(kappa), before)


def choose_gaussian_kappa(
    mean: Tensor, std: Tensor, target: Tensor, *, bounds: tuple[float, float] = (1e-3, 1e3)
) -> KappaChoice:
    """The kappa for which N(mean, (kappa std)^2) has the best mean CRPS, for predictions without members.

    Args:
        mean: (...).
        std: (...), not negative.
        target: (...), held out.
        bounds: Of kappa, in units of the mean absolute error over the mean deviation.
    """
    if not mean.shape == std.shape == target.shape:
        raise ValueError(
            f"mean {tuple(mean.shape)}, std {tuple(std.shape)} and target {tuple(target.shape)} must have one shape"
        )
    mean, std, target = (at_least_float32(values) for values in (mean, std, target))
    if not bool((std > 0).any()):
        raise ValueError("the standard deviation is 0 everywhere, so no kappa can change it")
    floor = torch.finfo(std.dtype).tiny

    def objective(kappa: float) -> float:
        law = GaussianDistribution(mean, (kappa * std).clamp(min=floor))
        return float(distribution_crps(law, target).double().mean())

    middle = float((target - mean).abs().mean() / std.mean()) or 1.0
    curve = _search_log(objective, (middle * bounds[0], middle * bounds[1]), 60, 1e-4, "kappa")
    kappa, best = min(curve, key=lambda point: point[1])
    return KappaChoice(kappa, best, objective(1.0))


def apply_kappa(samples: Tensor, kappa: float) -> Tensor:
    """Ybar + kappa (x - ybar), members on the first axis."""
    if not (kappa > 0 and math.isfinite(kappa)):
        raise ValueError(f"kappa stretches the spread and must be positive and finite; got {kappa}")
    mean = samples.mean(0)
    return mean + kappa * (samples - mean)


def _crps_kappa(
    samples: Tensor, target: Tensor, mask: Tensor | None, weights: Tensor | None, bounds: tuple[float, float]
) -> float:
    """Root of the slope of the mean fair CRPS: mean_m d_m sign(kappa d_m - r) - g, d = x - ybar, r = y - ybar."""
    mean = samples.mean(0)
    deviation, residual = samples - mean, target - mean
    pair_spread = deviation.abs().mean(0) - crps(deviation, torch.zeros_like(target))  # 1/2 mean |x - x'|
    keep = torch.ones_like(target, dtype=torch.bool) if mask is None else mask.expand(target.shape)
    if not bool((deviation.abs().amax(0)[keep] > 0).any()):
        raise ValueError("all members agree everywhere, so no kappa can change them: there is no spread to scale")

    def slope(kappa: float) -> float:
        change = (deviation * torch.sign(kappa * deviation - residual)).mean(0) - pair_spread
        return _weighted_mean(change, keep, weights)

    low, high = _checked_bounds(bounds, "kappa")
    while high / low > 1 + 1e-7:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if slope(middle) < 0 else (low, middle)
    _warn_at_bound(high, bounds, 1e-6, "kappa")
    return high


def _search_log(
    objective: Callable[[float], float],
    bounds: tuple[float, float],
    max_evaluations: int,
    tolerance: float,
    name: str,
) -> Curve:
    """Evaluate 1 and then what Brent's bounded method asks for in the logarithm; the curve in rising order."""
    low, high = _checked_bounds(bounds, name)
    if max_evaluations < 4:
        raise ValueError(f"a search needs at least 4 evaluations; got max_evaluations = {max_evaluations}")
    seen: dict[float, float] = {}

    def evaluate(log_value: float) -> float:
        value = math.exp(log_value)
        seen[value] = objective(value)
        return seen[value]

    if low <= 1 <= high:
        evaluate(0.0)
    options = {"maxiter": max_evaluations - len(seen), "xatol": tolerance}
    minimize_scalar(evaluate, bounds=(math.log(low), math.log(high)), method="bounded", options=options)
    _warn_at_bound(min(seen, key=lambda value: seen[value]), bounds, 2 * tolerance, name)
    return tuple(sorted(seen.items()))


def _checked_bounds(bounds: tuple[float, float], name: str) -> tuple[float, float]:
    if not 0 < bounds[0] < bounds[1] < math.inf:
        raise ValueError(f"bounds of {name} are 0 < low < high; got {bounds}")
    return bounds


def _warn_at_bound(value: float, bounds: tuple[float, float], tolerance: float, name: str) -> None:
    if min(math.log(value / bounds[0]), math.log(bounds[1] / value)) < tolerance:
        warnings.warn(f"the best {name} = {value:g} lies at a bound of {bounds}: widen the bounds", stacklevel=3)


def _mean_score(
    score: Score, samples: Tensor, target: Tensor, mask: Tensor | None, where: str, weights: Tensor | None = None
) -> float:
    _check_samples(samples, target, min_members=1)
    values = score(at_least_float32(samples), at_least_float32(target))
    if mask is not None and mask.dtype != torch.bool:
        raise TypeError(f"a mask is boolean, True where the score counts; got dtype {mask.dtype}")
    keep = torch.ones_like(values, dtype=torch.bool) if mask is None else mask.expand(values.shape)
    counts = keep if weights is None else keep & (weights.expand(values.shape) > 0)
    if not bool(counts.any()):
        raise ValueError(
            "no coordinate counts: the mask is False everywhere, all weights are 0, or the target is empty"
        )
    mean = _weighted_mean(values, keep, weights)
    if not math.isfinite(mean):
        raise ValueError(
            f"the mean score at {where} is {mean}: samples or target are not finite where the mask is True"
        )
    return mean


def _weighted_mean(values: Tensor, keep: Tensor, weights: Tensor | None) -> float:
    kept = values[keep].double()
    if weights is None:
        return float(kept.mean())
    kept_weights = weights.expand(values.shape)[keep].to(kept)
    return float((kept_weights * kept).sum() / kept_weights.sum())


def _check_samples(samples: Tensor, target: Tensor, min_members: int) -> None:
    if samples.shape[1:] != target.shape or samples.ndim == 0 or samples.shape[0] < min_members:
        raise ValueError(
            f"expected samples (M, *target.shape) = (M, {', '.join(map(str, target.shape))}) with M >= {min_members}; "
            f"got samples {tuple(samples.shape)} for target {tuple(target.shape)}"
        )
