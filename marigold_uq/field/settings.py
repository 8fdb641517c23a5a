"""The choice of steps, noise and tau: rollouts of settings, compared by the CRPS after the best factors.

Each variable and lead time counts in units of the first setting's CRPS there: late errors are larger, and units differ.
Points weigh by their area. Steps and noise are one choice for all variables; tau is one for each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from marigold_uq.calibration import Calibration
from marigold_uq.field.calibration_windows import LARGEST, Rollouts, Sampling, draw_samples, has_diverged
from marigold_uq.field.forecasters import Precision
from marigold_uq.field.variable_factors import best_stretched
from marigold_uq.metrics import crps
from marigold_uq.models.noise_color import NoiseColor
from marigold_uq.pipelines.field import FieldForecastPipeline

__all__ = ["CalibrationOptions", "Candidate", "Comparison", "TauSearch", "choose_settings", "keep_taus", "mean_scores"]


TAU_BOUNDS = (0.02, 4.0)
FIRST_STEP, STRETCH, CLOSE = 1.0, 1.6, 0.1
"""Of the search in log tau: the first step down, how much further to go beyond the best end, what is no news."""


@dataclass(frozen=True)
class CalibrationOptions:
    """How much is spent on the choice.

    Args:
        steps: Numbers of denoising steps to compare, beside those that the model takes by default.
        tau_evaluations: Rollouts that the search for tau may take, that of tau = 1 among them, at least 4; 0 leaves tau
            at 1. With several variables one more may follow, of the best tau of each.
        color: Also try coloured noise, for family "gaussian" with a DDIM scheduler.
        num_windows: Validation windows behind the choice of steps, colour and tau.
        fit_windows: Validation windows behind the stored kappas and dampings, which need more: with too few their noise
            is larger than what they correct.
        interval_windows: Validation windows behind the intervals, which no choice has seen; 0 leaves intervals out. The
            unit is the trajectory, of a single record ten days: fewer than 19 units promise no 95 %.
        ensemble_size: Samples behind the kappas and intervals, which hold for as many.
        choice_size: Samples behind the choice of steps and tau; the fair CRPS needs few.
        num_leads: Lead times of the rollouts; one for a model that cannot be rolled out.
        seed: Of the samples.
        batch_size: Chains per network call.
        mixed_precision: "no", "bf16" or "fp16", of the network.
    """

    steps: list[int] = field(default_factory=lambda: [1, 2, 5])
    tau_evaluations: int = 6
    color: bool = True
    num_windows: int = 24
    fit_windows: int = 64
    interval_windows: int = 128
    ensemble_size: int = 40
    choice_size: int = 16
    num_leads: int = 10
    seed: int = 1
    batch_size: int = 128
    mixed_precision: Precision = "no"

    def __post_init__(self) -> None:
        least = {"num_windows": 1, "fit_windows": 1, "num_leads": 1, "batch_size": 1, "interval_windows": 0}
        least |= {"ensemble_size": 3, "choice_size": 3}
        wrong = {name: getattr(self, name) for name, bound in least.items() if getattr(self, name) < bound}
        if wrong:
            bounds = ", ".join(f"{name} at least {least[name]}" for name in wrong)
            raise ValueError(f"must be: {bounds}; got {wrong}")
        if self.tau_evaluations != 0 and self.tau_evaluations < 4:
            raise ValueError(f"tau_evaluations must be 0 or at least 4; got {self.tau_evaluations}")


@dataclass(frozen=True)
class Candidate:
    """A setting and its scores: means over variables and lead times of the CRPS in units of the first candidate's.

    Args:
        steps: Denoising steps.
        tau: Of the scheduler; with several variables the geometric mean of theirs.
        colored: Whether the noise has the spectrum of the residual.
        score_alone: Without kappas; infinite where the rollout diverged.
        score: With the best kappa (and damping) of each variable and lead time.
        taus: Of each variable.
        variable_scores: Of each variable, with kappas.
    """

    steps: int
    tau: float
    colored: bool = False
    score_alone: float = math.inf
    score: float = math.inf
    taus: tuple[float, ...] = ()
    variable_scores: tuple[float, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it, which knows no infinity."""
        return {name: None if value == math.inf else value for name, value in asdict(self).items()}


def keep_taus(
    pipeline: FieldForecastPipeline, taus: Sequence[float], calibration: Calibration | None = None
) -> tuple[Calibration, list[float] | None]:
    """The record with one tau in the scheduler, or with the taus of several variables beside it; both are stored."""
    several = list(taus) if len(set(taus)) > 1 else None
    found = replace(calibration or Calibration(), tau=1.0 if several else float(taus[0]))
    pipeline.calibrate(found, target_taus=several)
    return found, several


def mean_scores(scores: Tensor, weight: Tensor) -> Tensor:
    """Weighted means (L, C), float64, of scores (B, L, C, *space)."""
    weights = weight.double().expand(scores.shape).transpose(0, 1).transpose(1, 2).flatten(2)
    values = scores.double().transpose(0, 1).transpose(1, 2).flatten(2)
    return (values * weights).sum(2) / weights.sum(2)


@dataclass
class Comparison:
    """Rollouts of settings, scored without and with kappas; each setting is rolled out once.

    `unit` (L, C) is the CRPS of the first candidate that stays finite.
    """

    pipeline: FieldForecastPipeline
    rollouts: Rollouts
    options: CalibrationOptions
    color: NoiseColor | None = None
    bar: Any = None
    candidates: list[Candidate] = field(default_factory=list)
    unit: Tensor | None = None

    def __post_init__(self) -> None:
        self.samples = lru_cache(maxsize=4)(self._samples)  # the search for tau asks for tau = 1 again

    @property
    def num_variables(self) -> int:
        """Targets of the model."""
        return self.rollouts.target.shape[2]

    def __call__(self, steps: int, taus: tuple[float, ...], colored: bool = False) -> Candidate:
        """The setting as a candidate."""
        self.candidates.append(self._score(steps, taus, colored))
        return self.candidates[-1]

    def _score(self, steps: int, taus: tuple[float, ...], colored: bool) -> Candidate:
        tau = math.exp(math.fsum(map(math.log, taus)) / len(taus))
        tau = taus[0] if len(set(taus)) == 1 else tau
        samples, rollouts = self.samples(steps, taus, colored), self.rollouts
        if has_diverged(samples):
            return Candidate(steps, tau, colored, taus=taus)
        alone = mean_scores(crps(samples, rollouts.target), rollouts.weight)
        if self.unit is None:
            self.unit = alone
        after = mean_scores(crps(best_stretched(samples, rollouts), rollouts.target), rollouts.weight) / self.unit
        own = tuple(after.mean(0).tolist())
        return Candidate(steps, tau, colored, float((alone / self.unit).mean()), float(after.mean()), taus, own)

    def ignores_tau(self, best: Candidate) -> bool:
        """Whether there is nothing for tau to multiply: one step of a family without a spread."""
        small = (TAU_BOUNDS[0],) * self.num_variables
        return torch.equal(*(self.samples(best.steps, taus, best.colored) for taus in (best.taus, small)))

    def search_taus(self, best: Candidate) -> None:
        """Search for each variable at once: every rollout asks for a tau of each; what comes next is its own affair."""
        searches = [TauSearch() for _ in range(self.num_variables)]
        candidate = best  # tau = 1
        for _ in range(self.options.tau_evaluations - 1):
            for number, search in enumerate(searches):
                search.note(candidate.taus[number], _score_of(candidate, number))
            candidate = self(best.steps, tuple(search.propose() for search in searches), best.colored)
        for number, search in enumerate(searches):
            search.note(candidate.taus[number], _score_of(candidate, number))
        together = tuple(search.best for search in searches)
        if together not in {one.taus for one in self.candidates}:
            self(best.steps, together, best.colored)

    def _samples(self, steps: int, taus: tuple[float, ...], colored: bool) -> Tensor:
        self.pipeline.register_modules(noise_color=self.color if colored else None)
        keep_taus(self.pipeline, taus)
        if self.bar is not None:
            self.bar.update()
        options = self.options
        how = Sampling(steps, options.choice_size, options.seed, options.batch_size, options.mixed_precision)
        return draw_samples(self.pipeline, self.rollouts, how)


def _score_of(candidate: Candidate, variable: int) -> float:
    return candidate.variable_scores[variable] if candidate.variable_scores else math.sqrt(LARGEST)


class TauSearch:
    """The minimum of a score over log tau for one variable, by parabolas through the best point and its neighbours."""

    def __init__(self, bounds: tuple[float, float] = TAU_BOUNDS) -> None:
        self.low, self.high = math.log(bounds[0]), math.log(bounds[1])
        self.curve: dict[float, float] = {}
        self._taus: dict[float, float] = {}

    def note(self, tau: float, score: float) -> None:
        """Learn the score of a tau."""
        self.curve[math.log(tau)], self._taus[math.log(tau)] = score, tau

    @property
    def best(self) -> float:
        """The best tau so far; of ties the one nearest to 1."""
        return self._taus[min(self.curve, key=lambda x: (self.curve[x], abs(x)))]

    def propose(self) -> float:
        """The next tau to try."""
        points = sorted(self.curve)
        here = points.index(math.log(self.best))
        if len(points) == 1:
            return math.exp(max(self.low, points[0] - FIRST_STEP))
        if here == 0 or here == len(points) - 1:
            return math.exp(self._beyond(points, here))
        return math.exp(self._between(points[here - 1 : here + 2]))

    def _beyond(self, points: list[float], here: int) -> float:
        """Further out than the best end; at a bound, between it and its neighbour."""
        end, neighbour = points[here], points[1] if here == 0 else points[-2]
        out = min(max(end + STRETCH * (end - neighbour), self.low), self.high)
        return out if abs(out - end) > CLOSE else (end + neighbour) / 2

    def _between(self, points: list[float]) -> float:
        """The lowest point of the parabola through three, or the middle of the wider gap where that is no news."""
        left, middle, right = points
        a, b = middle - left, middle - right
        rise_left, rise_right = (self.curve[middle] - self.curve[x] for x in (left, right))
        below = a * rise_right - b * rise_left
        found = middle - 0.5 * (a * a * rise_right - b * b * rise_left) / below if below else middle
        if left + CLOSE < found < right - CLOSE and abs(found - middle) > CLOSE:
            return found
        return (left + middle) / 2 if a > -b else (middle + right) / 2


def choose_settings(
    pipeline: FieldForecastPipeline,
    rollouts: Rollouts,
    options: CalibrationOptions,
    color: NoiseColor | None = None,
    verbose: bool = False,
) -> tuple[Candidate, list[Candidate]]:
    """The best number of steps and noise at tau = 1, then the best taus for them; and everything that was compared."""
    own = pipeline.config.default_denoising_steps
    last = pipeline.scheduler.config.num_train_timesteps
    steps = sorted({min(number, last) for number in (*options.steps, own or last)})
    noises = [False] if color is None else [False, True]
    with tqdm(total=len(steps) * len(noises) + options.tau_evaluations, desc="settings", disable=not verbose) as bar:
        compare = Comparison(pipeline, rollouts, options, color, bar)
        for number in steps:
            for colored in noises:
                compare(number, (1.0,) * compare.num_variables, colored)
        best = min(compare.candidates, key=lambda one: one.score)
        if math.isinf(best.score):
            raise FloatingPointError(
                f"none of {len(compare.candidates)} settings rolls out to finite states: train more"
            )
        if options.tau_evaluations and not compare.ignores_tau(best):
            compare.search_taus(best)
    return min(compare.candidates, key=lambda one: one.score), compare.candidates
