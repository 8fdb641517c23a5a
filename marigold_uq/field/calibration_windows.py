"""Validation windows for calibration: which part each stage sees, their rollouts, and how points weigh."""

from __future__ import annotations

from bisect import bisect_right
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from marigold_uq.field.data import Transitions, latitude_weights
from marigold_uq.field.forecasters import PipelineForecaster, Precision
from marigold_uq.field.scores import independent_groups, spread_windows
from marigold_uq.pipelines.field import FieldForecastPipeline

__all__ = [
    "LARGEST",
    "Rollouts",
    "Sampling",
    "Windows",
    "allot_windows",
    "draw_samples",
    "has_diverged",
    "open_rollouts",
    "untouched_windows",
]


LARGEST = 1e18
"""Samples beyond it, whose squares single precision does not hold, have diverged."""
COLOR_WINDOWS = 4
"""Windows behind the colour for each that scores it."""


class Windows(NamedTuple):
    """Numbers of the windows that score settings, fit kappas, give the colour, and calibrate intervals."""

    scored: list[int]
    fitted: list[int]
    color: list[int]
    intervals: list[int]


class Rollouts(NamedTuple):
    """Validation windows, their numbers, what happened after them and what the season expects, (B, L, C, *space).

    `weight` (broadcast to the target) is the area of a point, 0 where it is missing; there all values are 0.
    """

    batch: dict[str, Any]
    ids: list[int]
    target: Tensor
    expected: Tensor | None
    weight: Tensor


class Sampling(NamedTuple):
    """How samples are drawn: denoising steps, ensemble size, seed, chains per network call, precision."""

    steps: int
    ensemble_size: int
    seed: int
    batch_size: int
    mixed_precision: Precision


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


def open_rollouts(pipeline: FieldForecastPipeline, windows: Transitions, ids: list[int]) -> Rollouts:
    """The windows of these numbers."""
    batch, encoder = default_collate([windows[index] for index in ids]), pipeline.encoder
    times = np.asarray(batch["time"])
    expected = pipeline.expected_states(times, windows.num_leads) if encoder.config.seasonal else None
    target = encoder.select_targets(batch["future"])
    weight = point_weights(windows, target, encoder.select_targets(batch["history"][:, -1]))
    found = Rollouts(batch, ids, target, expected, weight)
    return found._replace(
        target=_present(target, weight), expected=None if expected is None else _present(expected, weight)
    )


def point_weights(windows: Transitions, target: Tensor, last: Tensor) -> Tensor:
    """Areas, and 0 where the target (B, L, C, *space) or the last state (B, C, *space) is missing."""
    area = latitude_weights(windows.sequences.coordinates)
    weight = torch.ones(()) if area is None else area.to(target.dtype)
    valid = target.isfinite() & last.isfinite().unsqueeze(1)
    return weight if bool(valid.all()) else weight * valid


def _present(values: Tensor, weight: Tensor) -> Tensor:
    """Values with 0 where nothing counts; a row of poles may count nothing and keeps its values."""
    return torch.where(values.isfinite() | (weight > 0), values, 0)


def draw_samples(pipeline: FieldForecastPipeline, rollouts: Rollouts, how: Sampling) -> Tensor:
    """(M, B, L, C, *space), from the same random numbers every time."""
    forecaster = PipelineForecaster(
        pipeline,
        ensemble_size=how.ensemble_size,
        num_inference_steps=how.steps,
        seed=how.seed,
        batch_size=how.batch_size,
        mixed_precision=how.mixed_precision,
    )
    samples = forecaster.forecast(rollouts.batch, rollouts.ids, rollouts.target.shape[1])
    return _present(samples, rollouts.weight) if pipeline.encoder.config.get("masked") else samples


def has_diverged(samples: Tensor) -> bool:
    """Whether anything is NaN or out of range."""
    return not bool((samples.abs() < LARGEST).all())  # NaN is not below anything
