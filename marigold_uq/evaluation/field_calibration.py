"""Choose tau, kappa, the number of steps and the colour of the noise on validation windows never seen in training.

All candidates are compared by the fair CRPS one step ahead, with the same random numbers. The winner is stored in the
pipeline; then one kappa per lead time is chosen on rollouts, because errors that grow with the lead time are not the
one-step model's to know.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import default_collate

from marigold_uq.calibration import Calibration, choose_kappa, choose_tau
from marigold_uq.data.fields import FieldSequences, Transitions
from marigold_uq.denoising import predict_noise
from marigold_uq.distributions import GaussianDistribution
from marigold_uq.evaluation.field_forecasters import PipelineForecaster
from marigold_uq.evaluation.field_scores import spread_windows
from marigold_uq.models.noise_color import NoiseColor
from marigold_uq.pipelines.field import FieldForecastPipeline


@dataclass(frozen=True)
class CalibrationOptions:
    """How much is spent on the choice.

    Args:
        steps: Numbers of denoising steps to compare.
        num_windows: Validation windows for the one-step choice.
        num_members: Members; kappa holds for as many.
        max_evaluations: How often tau is tried for each number of steps.
        tau_bounds: Of the search.
        color: Also try coloured noise, for family "gaussian".
        num_rollouts: Validation windows for the kappa of each lead time.
        num_leads: Lead times that get a kappa.
        seed: Of the members.
        max_batch_size: Chains per network call.
    """

    steps: list[int] = field(default_factory=lambda: [5, 20])
    num_windows: int = 24
    num_members: int = 20
    max_evaluations: int = 7
    tau_bounds: tuple[float, float] = (0.01, 4.0)
    color: bool = True
    num_rollouts: int = 8
    num_leads: int = 10
    seed: int = 1
    max_batch_size: int = 128


@dataclass(frozen=True)
class Candidate:
    """One setting and its score."""

    name: str
    steps: int
    tau: float
    kappa: float
    colored: bool
    crps: float
    curve: tuple[tuple[float, float], ...] = ()


def calibrate_field(
    pipeline: FieldForecastPipeline,
    validation: FieldSequences,
    options: CalibrationOptions,
    *,
    target_hours: Sequence[int] | None = None,
) -> dict[str, Any]:
    """Compare the candidates, store the best in the pipeline, and return all of them as plain numbers."""
    pipeline.set_calibration(Calibration())
    pipeline.register_modules(noise_color=None)
    history = pipeline.encoder.config.num_history
    windows = Transitions(validation, num_history=history, target_hours=target_hours)
    batch, ids = _batch(windows, options.num_windows)
    color = fit_color(pipeline, windows, options) if options.color and _is_gaussian(pipeline) else None
    candidates = _candidates(pipeline, batch, ids, options, color)
    best = min(candidates, key=lambda one: one.crps)
    pipeline.register_modules(noise_color=color if best.colored else None)
    chosen = Calibration(
        tau=best.tau, num_steps=best.steps, num_members=options.num_members, note=f"{best.name} on {validation.source}"
    )
    pipeline.set_calibration(chosen)
    kappas = lead_kappas(pipeline, validation, options, target_hours)
    pipeline.set_calibration(chosen, kappas)
    return {
        "candidates": [vars(one) for one in candidates],
        "best": vars(best),
        "lead_kappas": kappas,
    }


def _batch(windows: Transitions, count: int) -> tuple[dict[str, Any], list[int]]:
    ids = spread_windows(count, len(windows))
    return default_collate([windows[index] for index in ids]), ids


def _is_gaussian(pipeline: FieldForecastPipeline) -> bool:
    return pipeline.scheduler.family is GaussianDistribution


def _candidates(
    pipeline: FieldForecastPipeline,
    batch: dict[str, Any],
    ids: list[int],
    options: CalibrationOptions,
    color: NoiseColor | None,
) -> list[Candidate]:
    """As it is, tau, kappa, and coloured noise with tau, for each number of steps that the schedule has."""
    target = pipeline.encoder.select_targets(batch["future"][:, 0])
    last = pipeline.scheduler.config.num_train_timesteps
    found = []
    for steps in sorted({min(steps, last) for steps in options.steps}):
        for colored in [False] if color is None else [False, True]:
            pipeline.register_modules(noise_color=color if colored else None)
            label = "coloured" if colored else "white"

            def draw(tau: float, steps: int = steps) -> Tensor:
                with _tau(pipeline, tau):
                    return _members(pipeline, batch, ids, options, steps, 1)[:, :, 0]

            with warnings.catch_warnings():  # a family that tau does not change, or a best tau at a bound: both show
                warnings.simplefilter("ignore", UserWarning)
                choice = choose_tau(
                    draw, target, bounds=options.tau_bounds, max_evaluations=options.max_evaluations, tolerance=0.1
                )
            plain = draw(1.0)
            kappa = choose_kappa(plain, target)
            found += [
                Candidate(f"{label}, as it is", steps, 1.0, 1.0, colored, kappa.score_before),
                Candidate(f"{label}, kappa", steps, 1.0, kappa.kappa, colored, kappa.score),
                Candidate(f"{label}, tau", steps, choice.tau, 1.0, colored, choice.score, choice.curve),
            ]
    return found


@contextmanager
def _tau(pipeline: FieldForecastPipeline, tau: float) -> Any:
    """Within the block the pipeline samples with this tau."""
    before = Calibration.from_dict(pipeline.config.calibration or {})
    pipeline.set_calibration(Calibration(tau=tau))
    try:
        yield
    finally:
        pipeline.set_calibration(before)


def _members(
    pipeline: FieldForecastPipeline,
    batch: dict[str, Any],
    ids: list[int],
    options: CalibrationOptions,
    steps: int | None,
    num_leads: int,
) -> Tensor:
    """(M, B, L, C, *space), from the same random numbers every time."""
    forecaster = PipelineForecaster(
        pipeline,
        num_members=options.num_members,
        num_steps=steps,
        seed=options.seed,
        max_batch_size=options.max_batch_size,
    )
    return forecaster.forecast(batch, ids, num_leads)


def lead_kappas(
    pipeline: FieldForecastPipeline,
    validation: FieldSequences,
    options: CalibrationOptions,
    target_hours: Sequence[int] | None = None,
) -> list[float]:
    """The kappa with the best CRPS at each lead time of validation rollouts; the first from more windows."""
    history = pipeline.encoder.config.num_history
    single = Transitions(validation, num_history=history, target_hours=target_hours)
    batch, ids = _batch(single, options.num_windows)
    found = [_kappa(pipeline, _members(pipeline, batch, ids, options, None, 1), batch["future"], 0)]
    if options.num_rollouts == 0 or options.num_leads == 1:
        return found
    windows = Transitions(validation, num_history=history, num_leads=options.num_leads, target_hours=target_hours)
    batch, ids = _batch(windows, options.num_rollouts)
    members = _members(pipeline, batch, ids, options, None, options.num_leads)
    return found + [_kappa(pipeline, members, batch["future"], lead) for lead in range(1, options.num_leads)]


def _kappa(pipeline: FieldForecastPipeline, members: Tensor, future: Tensor, lead: int) -> float:
    target = pipeline.encoder.select_targets(future[:, lead])
    return choose_kappa(members[:, :, lead], target).kappa


@torch.no_grad()
def fit_color(pipeline: FieldForecastPipeline, windows: Transitions, options: CalibrationOptions) -> NoiseColor:
    """The spectrum of the standardised residual (o - mean) / std at every timestep, on held-out windows."""
    encoder, scheduler = pipeline.encoder, pipeline.scheduler
    batch, _ = _batch(windows, 4 * options.num_windows)
    history, future = (batch[name].to(pipeline.device) for name in ("history", "future"))
    x_0 = encoder.encode_target(history[:, -1], future[:, 0])
    denoiser = pipeline.denoiser(encoder.condition(history, batch["time"]))
    color = NoiseColor(scheduler.config.num_train_timesteps, list(encoder.event_shape))
    generator = torch.Generator().manual_seed(options.seed)
    for timestep in range(scheduler.config.num_train_timesteps):
        noise = torch.randn(x_0.shape, generator=generator).to(x_0)
        timesteps = torch.full((len(x_0),), timestep, device=x_0.device)
        x_t = scheduler.add_noise(x_0, noise, timesteps)
        law = predict_noise(denoiser, scheduler, x_t, timesteps)
        residual = (scheduler.training_target(x_0, noise, timesteps) - law.mean) / law.stddev
        color.set_power(timestep, residual.cpu())
    return color.to(pipeline.device)
