"""Calibrate a forecast model on validation windows never seen in training, in four stages.

1. `choose_settings`: rollouts from the same windows with the same random numbers. They compare numbers of steps, white
   and (family `gaussian`) coloured noise, and then several tau for the best of them, by the fair CRPS after the best
   kappa of each lead time.
   Each lead time counts in units of the first setting's CRPS, so that late ones, whose errors are larger, do not decide
   alone. One step ahead would not do: the CRPS sees each point by itself. Whether samples are as smooth as the truth
   shows only once they are fed back.
2. `fit_factors`: kappas, smoothed over lead times. Where the model knows the season, the mean forecast is first damped
   towards the season's mean, and with the training part at hand the spread also gets a share of the season's own.
3. `fit_intervals`: half widths by conformal risk control, on trajectories that took part in none of this.
4. `pipeline.calibrate` keeps the result.
"""

from __future__ import annotations

import math
import sys
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate
from tqdm.auto import tqdm

from marigold_uq.calibration import (
    Calibration,
    IntervalGrid,
    choose_tau,
    interval_grid_images,
    residual_ratio,
    stack_grids,
)
from marigold_uq.commands.runner import Invocation
from marigold_uq.distributions import GaussianDistribution
from marigold_uq.field.config import read_config
from marigold_uq.field.data import FieldSequences, Transitions
from marigold_uq.field.encoding import fit_color, fit_season, require_data
from marigold_uq.field.forecasters import PipelineForecaster, Precision, load_quietly
from marigold_uq.field.lead_factors import Factors, best_blends, best_dampings, best_kappas, smooth
from marigold_uq.field.scores import independent_groups, spread_windows
from marigold_uq.field.splits import open_split, target_hours
from marigold_uq.files import atomic_folder, fingerprint
from marigold_uq.metrics import crps
from marigold_uq.models.noise_color import NoiseColor
from marigold_uq.pipelines.field import FieldForecastPipeline
from marigold_uq.pipelines.field.output import damp, stretch
from marigold_uq.results import write_json

__all__ = [
    "CalibrationOptions",
    "Candidate",
    "FieldCalibration",
    "calibrate_field",
    "calibrate_run",
    "calibration_settings",
    "run_calibration",
]

LARGEST = 1e18
"""Samples beyond it, whose squares single precision does not hold, have diverged."""
TAU_BOUNDS = (0.02, 4.0)
COLOR_WINDOWS = 4
"""Windows behind the colour for each that scores it."""


@dataclass(frozen=True)
class CalibrationOptions:
    """How much is spent on the choice.

    Args:
        steps: Numbers of denoising steps to compare, beside those that the model takes by default.
        tau_evaluations: Rollouts that the search for tau may take, at least 4; 0 leaves tau at 1.
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
class FieldCalibration(CalibrationOptions):
    """Calibrate a trained forecast model.

    Args:
        run: Folder that train_field.py wrote.
        device: Where the network runs.
    """

    run: Path = Path("runs/field")
    device: str = "cpu"


@dataclass(frozen=True)
class Candidate:
    """A setting and its scores: means over lead times of the CRPS in units of the first candidate's.

    Args:
        steps: Denoising steps.
        tau: Of the scheduler.
        colored: Whether the noise has the spectrum of the residual.
        score_alone: Without kappas; infinite where the rollout diverged.
        score: With the best kappa (and damping) of each lead time.
    """

    steps: int
    tau: float
    colored: bool = False
    score_alone: float = math.inf
    score: float = math.inf

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it, which knows no infinity."""
        return {name: value if math.isfinite(value) else None for name, value in asdict(self).items()}


class Rollouts(NamedTuple):
    """Validation windows, their numbers, what happened after them and what the season expects, (B, L, C, *space)."""

    batch: dict[str, Any]
    ids: list[int]
    target: Tensor
    expected: Tensor | None


def run_calibration(options: FieldCalibration, invocation: Invocation) -> int:
    """The command `eval/calibrate_field.py`: calibrate, save, and say what was chosen."""
    try:
        found = calibrate_run(options.run, options, device=options.device, verbose=True)
    except FloatingPointError as error:
        raise ValueError(str(error)) from error
    best = found["best"]
    print(f"{best['steps']} steps, tau {best['tau']:.3g}; written: {options.run / 'calibrated'}")
    grid, units = found["calibration"]["interval"], found["num_interval_units"]
    if grid is None:
        print(f"no intervals: {units} independent units are too few, or samples do not differ", file=sys.stderr)
    else:
        print(f"intervals for coverages up to {grid['coverages'][-1]:g}, from {units} independent units")
    return 0


def calibrate_run(
    run: Path, options: CalibrationOptions, *, device: str = "cpu", verbose: bool = False
) -> dict[str, Any]:
    """Calibrate RUN/model on the validation part of its data: RUN/calibrated and, last, RUN/calibration.json."""
    config_file, model = run / "config.yaml", run / "model"
    if not config_file.exists() or not model.exists():
        raise FileNotFoundError(f"{run} is not a finished training: it has no config.yaml or no model folder")
    if (run / "calibration.json").exists():
        raise FileExistsError(f"{run / 'calibration.json'} exists: remove it to calibrate again")
    config, _ = read_config(["--config", str(config_file)])
    split, pipeline = open_split(config.data), load_quietly(model).to(device)
    require_data(pipeline.encoder, split.validation)
    hours = target_hours(config.data)
    found = calibrate_field(pipeline, split.validation, options, train=split.train, target_hours=hours, verbose=verbose)
    found |= {"seed": config.training.seed, "settings": calibration_settings(run, options)}
    with atomic_folder(run / "calibrated", overwrite=True) as temporary:  # one may be there of a killed calibration
        pipeline.save_pretrained(temporary)
    write_json(run / "calibration.json", found)
    return found


def calibration_settings(run: Path, options: CalibrationOptions) -> dict[str, Any]:
    """What a calibration of RUN/model depends on, as JSON has it."""
    return {
        **{one.name: getattr(options, one.name) for one in fields(CalibrationOptions)},
        "model": fingerprint(run / "model"),
    }


def calibrate_field(
    pipeline: FieldForecastPipeline,
    validation: FieldSequences,
    options: CalibrationOptions,
    *,
    train: FieldSequences | None = None,
    target_hours: Sequence[int] | None = None,
    verbose: bool = False,
) -> dict[str, Any]:
    """Calibrate the pipeline in place, and return what was compared and chosen as plain numbers.

    `train` is what the model was trained with; a model that knows the season learns from it what else is usual then.
    `verbose` shows a progress bar.
    """
    config = pipeline.encoder.config
    season = fit_season(pipeline.encoder, train).to(pipeline.device) if train is not None and config.seasonal else None
    pipeline.register_modules(noise_color=None, season=season)
    leads = options.num_leads if list(config.targets) == list(config.variables) else 1
    windows = Transitions(validation, num_history=config.num_history, num_leads=leads, target_hours=target_hours)
    allotted = allot_windows(options.num_windows, options.fit_windows, options.interval_windows, len(windows))
    can_color = pipeline.scheduler.family is GaussianDistribution
    color = fit_color(pipeline, windows, allotted.color, options.seed) if options.color and can_color else None
    scored = open_rollouts(pipeline, windows, allotted.scored)
    best, candidates = choose_settings(pipeline, scored, options, color, verbose)
    pipeline.register_modules(noise_color=color if best.colored else None)
    chosen = Calibration(
        tau=best.tau,
        num_inference_steps=best.steps,
        ensemble_size=options.ensemble_size,
        note=f"validation part of {validation.source}",
    )
    factors = fit_factors(pipeline, open_rollouts(pipeline, windows, allotted.fitted), chosen, options)
    grid, num_units = fit_intervals(pipeline, windows, untouched_windows(windows, allotted), factors, options)
    final = replace(factors.calibration, interval=grid, num_calibration=num_units if grid else 0)
    _keep(pipeline, replace(factors, calibration=final))
    return {
        "candidates": [one.to_dict() for one in candidates],
        "best": best.to_dict(),
        "calibration": final.to_dict(),
        "lead_dampings": factors.dampings,
        "lead_season_shares": factors.shares,
        "num_interval_units": num_units,
    }


def choose_settings(
    pipeline: FieldForecastPipeline,
    rollouts: Rollouts,
    options: CalibrationOptions,
    color: NoiseColor | None = None,
    verbose: bool = False,
) -> tuple[Candidate, list[Candidate]]:
    """The best number of steps and noise at tau = 1, then the best tau for them; and everything that was compared."""
    own = pipeline.config.default_denoising_steps
    last = pipeline.scheduler.config.num_train_timesteps
    steps = sorted({min(number, last) for number in (*options.steps, own or last)})
    candidates: list[Candidate] = []
    noises = [False] if color is None else [False, True]
    with tqdm(total=len(steps) * len(noises) + options.tau_evaluations, desc="settings", disable=not verbose) as bar:
        compare = _Comparison(pipeline, rollouts, options, candidates, color, bar)
        for number in steps:
            for colored in noises:
                compare(number, 1.0, colored)
        best = min(candidates, key=lambda one: one.score)
        if math.isinf(best.score):
            raise FloatingPointError(f"none of {len(candidates)} settings rolls out to finite states: train more")
        if options.tau_evaluations and not compare.ignores_tau(best):
            compare.search_tau(best)
    return min(candidates, key=lambda one: one.score), candidates


class _Comparison:
    """Rollouts of settings, scored without and with kappas; each setting is rolled out once."""

    def __init__(
        self,
        pipeline: FieldForecastPipeline,
        rollouts: Rollouts,
        options: CalibrationOptions,
        candidates: list[Candidate],
        color: NoiseColor | None,
        bar: Any,
    ) -> None:
        self.color = color
        self.pipeline, self.rollouts, self.options, self.candidates, self.bar = (
            pipeline, rollouts, options, candidates, bar,
        )  # fmt: skip
        self.unit: Tensor | None = None  # (L,): the CRPS of the first candidate that stays finite
        self.samples = lru_cache(maxsize=4)(self._samples)  # the search for tau asks for tau = 1 again

    def __call__(self, steps: int, tau: float, colored: bool = False) -> Tensor:
        """Samples with the best kappas, (M, B, L, C, *space); the setting becomes a candidate."""
        samples, target = self.samples(steps, tau, colored), self.rollouts.target
        if _has_diverged(samples):
            self.candidates.append(Candidate(steps, tau, colored))
            return torch.full_like(samples, math.sqrt(LARGEST))
        alone = _lead_means(crps(samples, target))
        if self.unit is None:
            self.unit = alone
        if self.rollouts.expected is not None:
            dampings = best_dampings(samples, target, self.rollouts.expected)
            samples = damp(samples, dampings, self.rollouts.expected)
        samples = stretch(samples, best_kappas(samples, target))
        after = _lead_means(crps(samples, target))
        scores = [float((lead_scores / self.unit).mean()) for lead_scores in (alone, after)]
        self.candidates.append(Candidate(steps, tau, colored, *scores))
        return samples

    def ignores_tau(self, best: Candidate) -> bool:
        """Whether there is nothing for tau to multiply: one step of a family without a spread."""
        one, other = (self.samples(best.steps, tau, best.colored) for tau in (1.0, TAU_BOUNDS[0]))
        return torch.equal(one, other)

    def search_tau(self, best: Candidate) -> None:
        """Brent's search; every tau it asks for becomes a candidate."""
        assert self.unit is not None
        unit = self.unit.reshape(-1, *[1] * (self.rollouts.target.ndim - 2)).to(self.rollouts.target)
        choose_tau(
            lambda tau: self(best.steps, tau, best.colored),
            self.rollouts.target,
            score=lambda samples, target: crps(samples, target) / unit,
            bounds=TAU_BOUNDS,
            max_evaluations=self.options.tau_evaluations,
            tolerance=0.1,
        )

    def _samples(self, steps: int, tau: float, colored: bool) -> Tensor:
        self.pipeline.register_modules(noise_color=self.color if colored else None)
        _keep(self.pipeline, Factors(Calibration(tau=tau)))
        self.bar.update()
        return draw_samples(self.pipeline, self.rollouts, self.options, steps, self.options.choice_size)


def fit_factors(
    pipeline: FieldForecastPipeline, rollouts: Rollouts, chosen: Calibration, options: CalibrationOptions
) -> Factors:
    """Dampings where the season is known, then kappas, with shares of the season's spread where it was fitted."""
    _keep(pipeline, Factors(chosen))
    samples = _finite_samples(pipeline, rollouts, options)
    expected, target = rollouts.expected, rollouts.target
    dampings = None
    if expected is not None:
        dampings = smooth(best_dampings(samples, target, expected))
        samples = damp(samples, dampings, expected)
    if pipeline.season is None:
        return Factors(replace(chosen, kappa=tuple(smooth(best_kappas(samples, target)))), dampings)
    usual = pipeline.season_deviations(np.asarray(rollouts.batch["time"]), target.shape[1])
    kappas, shares = best_blends(samples, target, usual)
    return Factors(replace(chosen, kappa=tuple(kappas)), dampings, shares)


def fit_intervals(
    pipeline: FieldForecastPipeline,
    windows: Transitions,
    ids: list[int],
    factors: Factors,
    options: CalibrationOptions,
) -> tuple[IntervalGrid | None, int]:
    """Half widths in standard deviations, one per lead time, and the number of independent units behind them.

    The share of a window's points outside is its loss, and the unit is what is independent: the trajectory, or ten days
    of a record. None where there are too few units for any promise, or no spread to scale.
    """
    groups = independent_groups(windows, ids)
    if not groups:
        return None, 0
    _keep(pipeline, factors)
    rollouts = open_rollouts(pipeline, windows, ids)
    samples = _finite_samples(pipeline, rollouts, options)
    ratios = residual_ratio(samples.mean(0), samples.std(0), rollouts.target)  # (B, L, C, *space)
    grids = [interval_grid_images(ratios[:, lead], groups=groups) for lead in range(ratios.shape[1])]
    return stack_grids(grids), len(set(groups))


def _keep(pipeline: FieldForecastPipeline, factors: Factors) -> None:
    pipeline.calibrate(factors.calibration, lead_dampings=factors.dampings, lead_season_shares=factors.shares)


def open_rollouts(pipeline: FieldForecastPipeline, windows: Transitions, ids: list[int]) -> Rollouts:
    """The windows of these numbers."""
    batch = default_collate([windows[index] for index in ids])
    times = np.asarray(batch["time"])
    expected = pipeline.expected_states(times, windows.num_leads) if pipeline.encoder.config.seasonal else None
    return Rollouts(batch, ids, pipeline.encoder.select_targets(batch["future"]), expected)


def draw_samples(
    pipeline: FieldForecastPipeline, rollouts: Rollouts, options: CalibrationOptions, steps: int, ensemble_size: int
) -> Tensor:
    """(M, B, L, C, *space), from the same random numbers every time."""
    forecaster = PipelineForecaster(
        pipeline,
        ensemble_size=ensemble_size,
        num_inference_steps=steps,
        seed=options.seed,
        batch_size=options.batch_size,
        mixed_precision=options.mixed_precision,
    )
    return forecaster.forecast(rollouts.batch, rollouts.ids, rollouts.target.shape[1])


def _finite_samples(pipeline: FieldForecastPipeline, rollouts: Rollouts, options: CalibrationOptions) -> Tensor:
    """As many samples as the calibration is for, with its number of steps."""
    steps = pipeline.calibration_for().num_inference_steps
    assert steps is not None
    samples = draw_samples(pipeline, rollouts, options, steps, options.ensemble_size)
    if _has_diverged(samples):
        raise FloatingPointError(f"{steps} steps: rollouts of {len(rollouts.ids)} windows diverge: train more")
    return samples


def _has_diverged(samples: Tensor) -> bool:
    return not bool((samples.abs() < LARGEST).all())  # NaN is not below anything


def _lead_means(scores: Tensor) -> Tensor:
    """(L,) of scores (B, L, C, *space)."""
    return scores.double().transpose(0, 1).flatten(1).mean(1)


class Windows(NamedTuple):
    """Numbers of the windows that score settings, fit kappas, give the colour, and calibrate intervals."""

    scored: list[int]
    fitted: list[int]
    color: list[int]
    intervals: list[int]


def allot_windows(num_scored: int, num_fitted: int, num_intervals: int, available: int) -> Windows:
    """The data in 2 `num_scored` stretches: every other one scores and fits.

    Of those between, every fourth gives the colour and the others calibrate intervals, so each part has its own.
    """
    stretches = 2 * max(1, min(num_scored, available // 2))
    starts = [place * available // stretches for place in range(stretches)]  # those of `spread_windows`

    def among(wanted: int, kinds: set[int]) -> list[int]:
        """About `wanted` windows, evenly, of the stretches whose number modulo 8 is one of `kinds`."""
        places = spread_windows(round(8 / len(kinds) * wanted), available)
        return [i for i in places if (bisect_right(starts, i) - 1) % 8 in kinds]

    scored = spread_windows(stretches, available)[::2]
    fitted = among(max(num_fitted, num_scored), {0, 2, 4, 6})
    color = among(COLOR_WINDOWS * num_scored, {7} if stretches >= 8 else {1, 3, 5})
    return Windows(scored, fitted, color, among(num_intervals, {1, 3, 5}) if stretches >= 8 and num_intervals else [])


def untouched_windows(windows: Transitions, allotted: Windows) -> list[int]:
    """The windows for intervals without those of a trajectory (or ten days of a record) that took part in a choice."""
    touched = set(independent_groups(windows, [*allotted.scored, *allotted.fitted, *allotted.color]))
    own = independent_groups(windows, allotted.intervals)
    return [i for i, group in zip(allotted.intervals, own, strict=True) if group not in touched]
