"""Choose the number of steps, the colour of the noise, tau and kappa on validation windows never seen in training.

All candidates roll out from the same windows with the same random numbers and are compared by the fair CRPS after the
best kappa of each lead time, averaged over lead times. One step ahead would not do: the CRPS sees each point by itself,
and whether members are as smooth as the truth shows only once they are fed back. tau is searched for the winner alone.
The winner and its kappas, smoothed over lead times, are stored in the pipeline. Where the model knows the season, the
mean forecast of each lead time is first damped towards the season's mean, by least squares; there every candidate with
kappas has its dampings too, and with the training part at hand the stored spread also gets a share of the season's own.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import minimize
from torch import Tensor
from torch.utils.data import default_collate

from marigold_uq.calibration import Calibration, choose_kappa, choose_tau
from marigold_uq.data.fields import FieldSequences, Transitions
from marigold_uq.denoising import predict_noise
from marigold_uq.distributions import GaussianDistribution
from marigold_uq.evaluation.fields.forecasters import PipelineForecaster, Precision
from marigold_uq.evaluation.fields.scores import spread_windows
from marigold_uq.metrics import crps
from marigold_uq.models.noise_color import NoiseColor
from marigold_uq.models.season import Season
from marigold_uq.pipelines.field import FieldForecastPipeline
from marigold_uq.pipelines.field_output import blend, damp, stretch

COLOR_WINDOWS = 4
"""Windows behind the colour for each that scores it."""
SMOOTHED = 2
"""Lead times on each side that a kappa or a damping is averaged with."""
LEAST_DAMPING = 0.02
"""Smallest share of the forecast that is kept."""
LEAST_KAPPA = 1e-3
"""Smallest kappa beside a share of the season's spread."""


@dataclass(frozen=True)
class CalibrationOptions:
    """How much is spent on the choice.

    Args:
        steps: Numbers of denoising steps to compare.
        num_windows: Validation windows behind the choice of steps, colour and tau.
        fit_windows: Validation windows behind the stored kappas and dampings, which need more: with too few their noise
            is larger than what they correct.
        num_members: Members behind the kappas, which hold for as many.
        choice_members: Members behind the choice of steps, colour and tau; the fair CRPS needs few.
        max_evaluations: How often tau is tried, at least 4; 0 leaves it at 1.
        tau_bounds: Of the search.
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
    max_evaluations: int = 6
    tau_bounds: tuple[float, float] = (0.05, 4.0)
    color: bool = True
    num_leads: int = 10
    seed: int = 1
    max_batch_size: int = 128
    mixed_precision: Precision = "no"


@dataclass(frozen=True)
class Candidate:
    """One setting and its CRPS, averaged over lead times; `kappas` and `dampings` have one per lead time."""

    name: str
    steps: int
    tau: float
    kappas: tuple[float, ...]
    dampings: tuple[float, ...] | None
    colored: bool
    crps: float
    curve: tuple[tuple[float, float], ...] = ()


class Rollouts(NamedTuple):
    """Validation windows, their numbers, what happened after them and what the season expects, (B, L, C, *space)."""

    batch: dict[str, Any]
    ids: list[int]
    target: Tensor
    expected: Tensor | None


class Fit(NamedTuple):
    """The best dampings and kappas of each lead time, and the CRPS with and without them, averaged over lead times."""

    dampings: tuple[float, ...] | None
    kappas: tuple[float, ...]
    after: float
    before: float

    def apply(self, members: Tensor, rollouts: Rollouts) -> Tensor:
        """Members as the calibrated pipeline would give them."""
        return stretch(_damped(members, self.dampings, rollouts), self.kappas)


def calibrate_field(
    pipeline: FieldForecastPipeline,
    validation: FieldSequences,
    options: CalibrationOptions,
    *,
    train: FieldSequences | None = None,
    target_hours: Sequence[int] | None = None,
) -> dict[str, Any]:
    """Compare the candidates, store the best in the pipeline, and return all of them as plain numbers.

    `train` is what the model was trained with; a model that knows the season learns from it what else is usual then.
    """
    pipeline.set_calibration(Calibration())
    config = pipeline.encoder.config
    season = None if train is None or not config.seasonal else Season.fit(pipeline.encoder, train).to(pipeline.device)
    pipeline.register_modules(noise_color=None, season=season)
    leads = options.num_leads if list(config.targets) == list(config.variables) else 1
    windows = Transitions(validation, num_history=config.num_history, num_leads=leads, target_hours=target_hours)
    scored, fitted, others = alternate_windows(options.num_windows, options.fit_windows, len(windows))
    rollouts = _rollouts(pipeline, windows, scored)
    color = fit_color(pipeline, windows, others, options.seed) if options.color and _is_gaussian(pipeline) else None
    candidates = _candidates(pipeline, rollouts, options, color)
    best = min((one for one in candidates if one.name.endswith("kappa")), key=lambda one: one.crps)
    pipeline.register_modules(noise_color=color if best.colored else None)
    if options.max_evaluations:
        candidates.append(_with_tau(pipeline, rollouts, options, best))
        best = min(best, candidates[-1], key=lambda one: one.crps)
    chosen = Calibration(
        tau=best.tau, num_steps=best.steps, num_members=options.num_members, note=f"{best.name} on {validation.source}"
    )
    pipeline.set_calibration(chosen)
    rollouts = _rollouts(pipeline, windows, fitted)
    members = _members(pipeline, rollouts, options, best.steps, options.num_members)
    expected = rollouts.expected
    dampings = None if expected is None else smooth(best_dampings(members, rollouts.target, expected))
    members = _damped(members, dampings, rollouts)
    shares = None
    if season is None:
        kappas = smooth(_best_kappas(members, rollouts.target)[0])
    else:
        usual = pipeline.season_deviations(np.asarray(rollouts.batch["time"]), leads)
        kappas, shares = best_blends(members, rollouts.target, usual)
    pipeline.set_calibration(chosen, kappas, dampings, shares)
    return {
        "candidates": [vars(one) for one in candidates],
        "best": vars(best),
        "lead_kappas": kappas,
        "lead_dampings": dampings,
        "lead_season_shares": shares,
    }


def alternate_windows(count: int, fitted: int, available: int) -> tuple[list[int], list[int], list[int]]:
    """`count` windows that score, about `fitted` for the kappas, and others for the colour.

    The first two come from every other stretch of the data, the third from the stretches between.
    """
    stretches = 2 * max(1, min(count, available // 2))
    scored = spread_windows(stretches, available)[::2]
    near = spread_windows(2 * max(fitted, count), available)
    places = spread_windows(2 * COLOR_WINDOWS * count, available)
    others = [i for i in places if i * stretches // available % 2 == 1 and i not in scored]
    return scored, [i for i in near if i * stretches // available % 2 == 0 and i not in others], others


def _rollouts(pipeline: FieldForecastPipeline, windows: Transitions, ids: list[int]) -> Rollouts:
    batch = default_collate([windows[index] for index in ids])
    times = np.asarray(batch["time"])
    expected = pipeline.expected_states(times, windows.num_leads) if pipeline.encoder.config.seasonal else None
    return Rollouts(batch, ids, pipeline.encoder.select_targets(batch["future"]), expected)


def smooth(factors: Sequence[float]) -> list[float]:
    """Geometric means with neighbouring lead times; as many before as after, so the first and last keep their own."""
    return [math.exp(value) for value in _near_means([math.log(factor) for factor in factors])]


def _near_means(values: Sequence[float]) -> list[float]:
    found = []
    for lead in range(len(values)):
        reach = min(SMOOTHED, lead, len(values) - 1 - lead)
        near = values[lead - reach : lead + reach + 1]
        found.append(math.fsum(near) / len(near))
    return found


def _is_gaussian(pipeline: FieldForecastPipeline) -> bool:
    return pipeline.scheduler.family is GaussianDistribution


def _candidates(
    pipeline: FieldForecastPipeline, rollouts: Rollouts, options: CalibrationOptions, color: NoiseColor | None
) -> list[Candidate]:
    """As it is and with kappa, white and coloured, for each number of steps that the schedule has."""
    last = pipeline.scheduler.config.num_train_timesteps
    found = []
    for steps in sorted({min(steps, last) for steps in options.steps}):
        for colored in [False] if color is None else [False, True]:
            pipeline.register_modules(noise_color=color if colored else None)
            members = _members(pipeline, rollouts, options, steps, options.choice_members)
            fit = _fit(members, rollouts)
            label = "coloured" if colored else "white"
            ones = (1.0,) * len(fit.kappas)
            found += [
                Candidate(f"{label}, as it is", steps, 1.0, ones, None, colored, fit.before),
                Candidate(f"{label}, kappa", steps, 1.0, fit.kappas, fit.dampings, colored, fit.after),
            ]
    return found


def _with_tau(
    pipeline: FieldForecastPipeline, rollouts: Rollouts, options: CalibrationOptions, best: Candidate
) -> Candidate:
    """The best candidate with the tau that is best for it, each tau with its own kappas and dampings."""
    fits: dict[float, Fit] = {}

    def draw(tau: float) -> Tensor:
        with _tau(pipeline, tau):
            members = _members(pipeline, rollouts, options, best.steps, options.choice_members)
        fits[tau] = _fit(members, rollouts)
        return fits[tau].apply(members, rollouts)

    with warnings.catch_warnings():  # a family that tau does not change, or a best tau at a bound: both show
        warnings.simplefilter("ignore", UserWarning)
        choice = choose_tau(
            draw,
            rollouts.target,
            bounds=options.tau_bounds,
            max_evaluations=options.max_evaluations,
            tolerance=0.1,
        )
    name = best.name.replace("kappa", "tau and kappa")
    fit = fits[choice.tau]
    return replace(
        best,
        name=name,
        tau=choice.tau,
        kappas=fit.kappas,
        dampings=fit.dampings,
        crps=choice.score,
        curve=choice.curve,
    )


def _fit(members: Tensor, rollouts: Rollouts) -> Fit:
    """Dampings by least squares where the season is known, then kappas by the CRPS."""
    kappas, after, before = _best_kappas(members, rollouts.target)
    if rollouts.expected is None:
        return Fit(None, kappas, after, before)
    dampings = best_dampings(members, rollouts.target, rollouts.expected)
    kappas, after, _ = _best_kappas(_damped(members, dampings, rollouts), rollouts.target)
    return Fit(dampings, kappas, after, before)


def best_dampings(members: Tensor, target: Tensor, expected: Tensor) -> tuple[float, ...]:
    """For each lead time the d that makes e + d (ybar - e) closest to the truth, LEAST_DAMPING to 1.

    Each variable counts in units of its own distance from the season's mean, so that units do not matter.
    """
    forecast, truth = members.mean(0) - expected, target - expected  # (B, L, C, *space)
    unit = truth.square().transpose(0, 2).flatten(1).mean(1).sqrt().clamp(min=1e-12)  # (C,)
    unit = unit.reshape(-1, *[1] * (truth.ndim - 3))
    forecast, truth = forecast / unit, truth / unit
    others = [axis for axis in range(forecast.ndim) if axis != 1]
    share = (forecast * truth).sum(others) / forecast.square().sum(others).clamp(min=1e-12)
    return tuple(share.clamp(LEAST_DAMPING, 1.0).tolist())


def _damped(members: Tensor, dampings: Sequence[float] | None, rollouts: Rollouts) -> Tensor:
    if dampings is None or rollouts.expected is None:
        return members
    return damp(members, dampings, rollouts.expected)


def _best_kappas(members: Tensor, target: Tensor) -> tuple[tuple[float, ...], float, float]:
    """The best kappa of each lead time, and the CRPS with and without them, averaged over lead times."""
    with warnings.catch_warnings():  # a kappa at a bound shows
        warnings.simplefilter("ignore", UserWarning)
        choices = [choose_kappa(members[:, :, lead], target[:, lead]) for lead in range(target.shape[1])]
    count = len(choices)
    return (
        tuple(one.kappa for one in choices),
        math.fsum(one.score for one in choices) / count,
        math.fsum(one.score_before for one in choices) / count,
    )


def best_blends(members: Tensor, target: Tensor, season: Tensor) -> tuple[list[float], list[float]]:
    """Kappas and shares of the season's deviation (B, L, C, *space) with the best CRPS of each lead time.

    Their squares, which add up to a variance, are averaged with neighbouring lead times.
    """
    found = []
    for lead in range(target.shape[1]):
        here = members[:, :, lead : lead + 1], target[:, lead], season[:, lead : lead + 1]
        found.append(_best_blend(*here))
    columns = zip(*found, strict=True)
    kappas, shares = ([math.sqrt(v) for v in _near_means([one**2 for one in column])] for column in columns)
    return [max(kappa, LEAST_KAPPA) for kappa in kappas], shares


def _best_blend(members: Tensor, target: Tensor, season: Tensor) -> tuple[float, float]:
    """One lead time: members (M, B, 1, C, *space), target (B, C, *space), season (B, 1, C, *space)."""

    def score(point: NDArray[np.float64]) -> float:
        kappa, share = np.abs(point).tolist()
        return float(crps(blend(members, [kappa], [share], season)[:, :, 0], target).mean())

    with warnings.catch_warnings():  # a kappa at a bound shows
        warnings.simplefilter("ignore", UserWarning)
        alone = choose_kappa(members[:, :, 0], target).kappa
    without = score(np.array([alone, 0.0]))
    result = minimize(
        score,
        [0.8 * alone, 0.4],
        method="Nelder-Mead",
        options={"xatol": 0.01, "fatol": 1e-4 * without, "maxfev": 60},
    )
    if result.fun >= without:
        return alone, 0.0
    kappa, share = np.abs(result.x).tolist()
    return kappa, share


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
        law = predict_noise(denoiser, scheduler, x_t, timesteps)
        residual = (scheduler.training_target(x_0, noise, timesteps) - law.mean) / law.stddev
        color.set_power(timestep, residual.cpu())
    return color.to(pipeline.device)
