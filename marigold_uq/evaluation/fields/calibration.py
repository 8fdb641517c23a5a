"""Choose the number of steps, the colour of the noise, tau and kappa on validation windows never seen in training.

All candidates roll out from the same windows with the same random numbers and are compared by the fair CRPS after the
best kappa of each lead time, averaged over lead times in units of the first candidate's, so that late leads, whose
errors are larger, do not decide alone. One step ahead would not do: the CRPS sees each point by itself, and whether
members are as smooth as the truth shows only once they are fed back. Several tau are tried for the winner alone.
The winner and its kappas, smoothed over lead times, are stored in the pipeline. Where the model knows the season, the
mean forecast of each lead time is first damped towards the season's mean, by least squares; there every candidate with
kappas has its dampings too, and with the training part at hand the stored spread also gets a share of the season's own.
Last, on trajectories that took part in none of this, intervals get the half width that conformal risk control asks for.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate
from tqdm.auto import tqdm

from marigold_uq.calibration import Calibration, conformal_images, residual_ratio
from marigold_uq.data.fields import FieldSequences, Transitions
from marigold_uq.denoising import predict_output
from marigold_uq.distributions import GaussianDistribution
from marigold_uq.evaluation.fields.calibration_windows import allot_windows, untouched_windows
from marigold_uq.evaluation.fields.forecasters import PipelineForecaster, Precision, load_quietly
from marigold_uq.evaluation.fields.lead_factors import best_blends, best_dampings, best_kappas, smooth
from marigold_uq.evaluation.fields.scores import independent_groups
from marigold_uq.models.noise_color import NoiseColor
from marigold_uq.models.season import Season
from marigold_uq.pipelines.field import FieldForecastPipeline
from marigold_uq.pipelines.field_output import damp
from marigold_uq.training.field_config import FieldData
from marigold_uq.training.field_data import open_split, target_hours

LARGEST = 1e18
"""Members beyond it, whose squares single precision does not hold, have diverged."""


@dataclass(frozen=True)
class CalibrationOptions:
    """How much is spent on the choice.

    Args:
        steps: Numbers of denoising steps to compare, beside those that the model takes by default.
        num_windows: Validation windows behind the choice of steps, colour and tau.
        fit_windows: Validation windows behind the stored kappas and dampings, which need more: with too few their noise
            is larger than what they correct.
        num_members: Members behind the kappas, which hold for as many.
        choice_members: Members behind the choice of steps, colour and tau; the fair CRPS needs few.
        taus: Tried beside 1.
        interval_windows: Validation windows behind the intervals, which no choice has seen; 0 leaves intervals out. The
            unit is the trajectory, of a single record ten days: fewer than 19 units promise no 95 %.
        coverage: What the intervals promise: the expected share of points inside.
        color: Also try coloured noise, for family "gaussian".
        num_leads: Lead times of the rollouts; one for a model that cannot be rolled out.
        seed: Of the members.
        max_batch_size: Chains per network call.
        mixed_precision: "no", "bf16" or "fp16", of the network.
    """

    steps: list[int] = field(default_factory=lambda: [1, 2, 5])
    num_windows: int = 24
    fit_windows: int = 64
    num_members: int = 40
    choice_members: int = 16
    taus: list[float] = field(default_factory=lambda: [0.03, 0.1, 0.3, 0.6, 2.0])
    interval_windows: int = 128
    coverage: float = 0.95
    color: bool = True
    num_leads: int = 10
    seed: int = 1
    max_batch_size: int = 128
    mixed_precision: Precision = "no"

    def __post_init__(self) -> None:
        if not 0 < self.coverage < 1:
            raise ValueError(f"coverage is a share within (0, 1), 0.95 for 95 %; got {self.coverage}")
        counts = {name: getattr(self, name) for name in ("num_windows", "fit_windows", "num_leads", "max_batch_size")}
        wrong = {name: count for name, count in counts.items() if count < 1}
        members = {name: getattr(self, name) for name in ("num_members", "choice_members")}
        wrong |= {name: count for name, count in members.items() if count < 3}
        if wrong or self.interval_windows < 0:
            raise ValueError(
                f"{', '.join(counts)} are at least 1, {', '.join(members)} at least 3, interval_windows not negative; "
                f"got {wrong or self.interval_windows}"
            )


@dataclass(frozen=True)
class Candidate:
    """One setting, with its kappas and dampings, and its CRPS, each per lead time.

    `score` is the mean over lead times of the CRPS in units of the first candidate's; where a rollout has left the
    numbers, it is infinite and there is nothing per lead time.
    """

    name: str
    steps: int
    tau: float
    colored: bool
    kappas: tuple[float, ...] = ()
    dampings: tuple[float, ...] | None = None
    lead_crps: tuple[float, ...] = ()
    score: float = math.inf

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it, which knows no infinity."""
        return {**vars(self), "score": self.score if math.isfinite(self.score) else None}


class Rollouts(NamedTuple):
    """Validation windows, their numbers, what happened after them and what the season expects, (B, L, C, *space)."""

    batch: dict[str, Any]
    ids: list[int]
    target: Tensor
    expected: Tensor | None


class Fit(NamedTuple):
    """The best dampings and kappas of each lead time, and its CRPS with and without them."""

    dampings: tuple[float, ...] | None
    kappas: tuple[float, ...]
    after: tuple[float, ...]
    before: tuple[float, ...]


def calibrate_model(
    folder: Path, data: FieldData, options: CalibrationOptions, *, device: str = "cpu", verbose: bool = False
) -> tuple[FieldForecastPipeline, dict[str, Any]]:
    """The pipeline in a folder, calibrated on the validation part of the data that it was trained with."""
    split, pipeline = open_split(data), load_quietly(folder).to(device)
    pipeline.encoder.require_data(split.validation)
    hours = target_hours(data)
    found = calibrate_field(pipeline, split.validation, options, train=split.train, target_hours=hours, verbose=verbose)
    return pipeline, found


def calibrate_field(
    pipeline: FieldForecastPipeline,
    validation: FieldSequences,
    options: CalibrationOptions,
    *,
    train: FieldSequences | None = None,
    target_hours: Sequence[int] | None = None,
    verbose: bool = False,
) -> dict[str, Any]:
    """Compare the candidates, store the best in the pipeline, and return all of them as plain numbers.

    `train` is what the model was trained with; a model that knows the season learns from it what else is usual then.
    `verbose` shows a progress bar.
    """
    pipeline.set_calibration(Calibration())
    config = pipeline.encoder.config
    season = None if train is None or not config.seasonal else Season.fit(pipeline.encoder, train).to(pipeline.device)
    pipeline.register_modules(noise_color=None, season=season)
    leads = options.num_leads if list(config.targets) == list(config.variables) else 1
    windows = Transitions(validation, num_history=config.num_history, num_leads=leads, target_hours=target_hours)
    allotted = allot_windows(options.num_windows, options.fit_windows, options.interval_windows, len(windows))
    rollouts = _rollouts(pipeline, windows, allotted.scored)
    coloured = options.color and _is_gaussian(pipeline)
    color = fit_color(pipeline, windows, allotted.color, options.seed) if coloured else None
    comparison = _Comparison(pipeline, rollouts, options, color)
    with tqdm(total=comparison.num_settings, desc="settings", disable=not verbose) as comparison.bar:
        best = comparison.run()
    pipeline.register_modules(noise_color=color if best.colored else None)
    chosen = Calibration(
        tau=best.tau, num_steps=best.steps, num_members=options.num_members, note=f"{best.name} on {validation.source}"
    )
    pipeline.set_calibration(chosen)
    rollouts = _rollouts(pipeline, windows, allotted.fitted)
    members = _members(pipeline, rollouts, options, best.steps, options.num_members)
    if _has_diverged(members):
        raise FloatingPointError(
            f"{best.name}, {best.steps} steps: rollouts of {len(rollouts.ids)} windows diverge: train more"
        )
    factors = _fit_factors(pipeline, members, rollouts)
    pipeline.set_calibration(chosen, *factors)
    scales, num_units = _interval_scales(pipeline, windows, untouched_windows(windows, allotted), options, best.steps)
    if scales is not None:
        chosen = replace(chosen, conformal_scale=tuple(scales), coverage=options.coverage, num_calibration=num_units)
        pipeline.set_calibration(chosen, *factors)
    return {
        "candidates": [one.to_dict() for one in comparison.candidates],
        "best": best.to_dict(),
        "lead_kappas": factors.kappas,
        "lead_dampings": factors.dampings,
        "lead_season_shares": factors.shares,
        "lead_interval_scales": scales,
        "num_interval_units": num_units,
    }


class Factors(NamedTuple):
    """What the pipeline applies at each lead time."""

    kappas: list[float]
    dampings: list[float] | None
    shares: list[float] | None


def _fit_factors(pipeline: FieldForecastPipeline, members: Tensor, rollouts: Rollouts) -> Factors:
    """Dampings where the season is known, then kappas, with shares of the season's spread where it was fitted."""
    expected, target = rollouts.expected, rollouts.target
    dampings = None if expected is None else smooth(best_dampings(members, target, expected))
    members = _damped(members, dampings, rollouts)
    if pipeline.season is None:
        return Factors(smooth(best_kappas(members, target)[0]), dampings, None)
    usual = pipeline.season_deviations(np.asarray(rollouts.batch["time"]), target.shape[1])
    kappas, shares = best_blends(members, target, usual)
    return Factors(kappas, dampings, shares)


def _interval_scales(
    pipeline: FieldForecastPipeline,
    windows: Transitions,
    ids: list[int],
    options: CalibrationOptions,
    steps: int,
) -> tuple[list[float] | None, int]:
    """Half widths in spreads, one per lead time, and the number of independent units behind them.

    The share of a window's points outside is its loss, and the unit is what is independent: the trajectory, or ten days
    of a record. None where there are too few units for the promise, or no spread to scale.
    """
    groups = independent_groups(windows, ids)
    num_units, alpha = len(set(groups)), round(1 - options.coverage, 12)
    if math.isinf(conformal_images([torch.zeros(1)] * len(ids), alpha, groups=groups, too_few="inf")):
        return None, num_units
    rollouts = _rollouts(pipeline, windows, ids)
    members = _members(pipeline, rollouts, options, steps, options.num_members)
    if _has_diverged(members):
        raise FloatingPointError(f"{steps} steps: rollouts of {len(ids)} windows for intervals diverge: train more")
    ratios = residual_ratio(members.mean(0), members.std(0), rollouts.target)  # (B, L, C, *space)
    scales = [conformal_images(ratios[:, lead], alpha, groups=groups) for lead in range(ratios.shape[1])]
    return (scales if all(math.isfinite(scale) for scale in scales) else None), num_units


def _rollouts(pipeline: FieldForecastPipeline, windows: Transitions, ids: list[int]) -> Rollouts:
    batch = default_collate([windows[index] for index in ids])
    times = np.asarray(batch["time"])
    expected = pipeline.expected_states(times, windows.num_leads) if pipeline.encoder.config.seasonal else None
    return Rollouts(batch, ids, pipeline.encoder.select_targets(batch["future"]), expected)


def _is_gaussian(pipeline: FieldForecastPipeline) -> bool:
    return pipeline.scheduler.family is GaussianDistribution


class _Comparison:
    """The candidates of a model: numbers of steps and colours, then several tau for the best of them."""

    def __init__(
        self,
        pipeline: FieldForecastPipeline,
        rollouts: Rollouts,
        options: CalibrationOptions,
        color: NoiseColor | None,
    ) -> None:
        self.pipeline, self.rollouts, self.options, self.color = pipeline, rollouts, options, color
        self.candidates: list[Candidate] = []
        self._unit: tuple[float, ...] = ()
        last, own = pipeline.scheduler.config.num_train_timesteps, pipeline.config.default_num_inference_steps
        self.steps = sorted({min(steps, last) for steps in (*options.steps, own or last)})
        self.bar = tqdm(disable=True)

    @property
    def num_settings(self) -> int:
        """Rollouts that are made at most."""
        return len(self.steps) * (1 if self.color is None else 2) + len(self.options.taus)

    def run(self) -> Candidate:
        """The best candidate of those that have kappas."""
        for steps in self.steps:
            for colored in [False] if self.color is None else [False, True]:
                self._try(steps, 1.0, colored, ("as it is", "kappa"))
        best = self._best()
        plain = next(one for one in self.candidates if (one.steps, one.colored) == (best.steps, best.colored))
        for tau in self.options.taus:
            if self._try(best.steps, tau, best.colored, ("tau", "tau and kappa")).lead_crps == plain.lead_crps:
                break  # a law without spread, in one step: there is nothing for tau to multiply
        return self._best()

    def _best(self) -> Candidate:
        best = min((one for one in self.candidates if one.name.endswith("kappa")), key=lambda one: one.score)
        if math.isinf(best.score):
            raise FloatingPointError(f"none of {len(self.candidates)} settings rolls out to finite states: train more")
        return best

    def _try(self, steps: int, tau: float, colored: bool, names: tuple[str, str]) -> Candidate:
        """A setting without and with kappas (and dampings) of its own; the one without is returned."""
        self.pipeline.register_modules(noise_color=self.color if colored else None)
        with _tau(self.pipeline, tau):
            members = _members(self.pipeline, self.rollouts, self.options, steps, self.options.choice_members)
        label = "coloured" if colored else "white"
        plain, fitted = (Candidate(f"{label}, {name}", steps, tau, colored) for name in names)
        if not _has_diverged(members):
            fit = _fit(members, self.rollouts)
            self._unit = self._unit or fit.before
            ones = (1.0,) * len(fit.kappas)
            plain = replace(plain, kappas=ones, lead_crps=fit.before, score=self._score(fit.before))
            fitted = replace(
                fitted, kappas=fit.kappas, dampings=fit.dampings, lead_crps=fit.after, score=self._score(fit.after)
            )
        self.candidates += [plain, fitted]
        self.bar.update()
        return plain

    def _score(self, lead_crps: tuple[float, ...]) -> float:
        return math.fsum(own / unit for own, unit in zip(lead_crps, self._unit, strict=True)) / len(self._unit)


def _has_diverged(members: Tensor) -> bool:
    return not bool((members.abs() < LARGEST).all())  # NaN is not below anything


def _fit(members: Tensor, rollouts: Rollouts) -> Fit:
    """Dampings by least squares where the season is known, then kappas by the CRPS."""
    kappas, after, before = best_kappas(members, rollouts.target)
    if rollouts.expected is None:
        return Fit(None, kappas, after, before)
    dampings = best_dampings(members, rollouts.target, rollouts.expected)
    kappas, after, _ = best_kappas(_damped(members, dampings, rollouts), rollouts.target)
    return Fit(dampings, kappas, after, before)


def _damped(members: Tensor, dampings: Sequence[float] | None, rollouts: Rollouts) -> Tensor:
    if dampings is None or rollouts.expected is None:
        return members
    return damp(members, dampings, rollouts.expected)


@contextmanager
def _tau(pipeline: FieldForecastPipeline, tau: float) -> Iterator[None]:
    """Within the block the pipeline samples with this tau."""
    before = Calibration.from_dict(pipeline.config.calibration or {})
    pipeline.set_calibration(Calibration(tau=tau))
    try:
        yield
    finally:
        pipeline.set_calibration(before)


def _members(
    pipeline: FieldForecastPipeline, rollouts: Rollouts, options: CalibrationOptions, steps: int, num_members: int
) -> Tensor:
    """(M, B, L, C, *space), from the same random numbers every time."""
    forecaster = PipelineForecaster(
        pipeline,
        num_members=num_members,
        num_steps=steps,
        seed=options.seed,
        max_batch_size=options.max_batch_size,
        mixed_precision=options.mixed_precision,
    )
    return forecaster.forecast(rollouts.batch, rollouts.ids, rollouts.target.shape[1])


@torch.no_grad()
def fit_color(
    pipeline: FieldForecastPipeline, windows: Transitions, indices: Sequence[int], seed: int = 1
) -> NoiseColor:
    """The spectrum of the standardised residual (o - mean) / std at every timestep, on held-out windows."""
    encoder, scheduler = pipeline.encoder, pipeline.scheduler
    batch = default_collate([windows[index] for index in indices])
    history, future = (batch[name].to(pipeline.device) for name in ("history", "future"))
    x_0 = encoder.encode_target(history[:, -1], future[:, 0])
    denoiser = pipeline.denoiser(encoder.condition(history, batch["time"]))
    color = NoiseColor(scheduler.config.num_train_timesteps, list(encoder.event_shape))
    generator = torch.Generator().manual_seed(seed)
    for timestep in range(scheduler.config.num_train_timesteps):
        noise = torch.randn(x_0.shape, generator=generator).to(x_0)
        timesteps = torch.full((len(x_0),), timestep, device=x_0.device)
        x_t = scheduler.add_noise(x_0, noise, timesteps)
        law = predict_output(denoiser, scheduler, x_t, timesteps)
        residual = (scheduler.training_target(x_0, noise, timesteps) - law.mean) / law.stddev
        color.set_power(timestep, residual.cpu())
    return color.to(pipeline.device)
