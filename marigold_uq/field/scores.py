"""Scores of ensemble forecasts per lead time: unreduced statistics of a batch, and their means over windows."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from marigold_uq.field.data import Transitions, latitude_weights
from marigold_uq.field.forecasters import Forecaster
from marigold_uq.metrics import (
    Estimate,
    MeanAccumulator,
    absolute_error,
    crps,
    energy_score,
    ensemble_statistics,
    rank_histogram,
    squared_error,
)
from marigold_uq.models.field_grid import DAY
from marigold_uq.pipelines.field.output import scaled_interval

__all__ = ["accumulate_scores", "independent_groups", "power_spectrum", "score_forecasts", "spread_windows"]


Select = Callable[[Tensor], Tensor]
GROUP_DAYS = 10
"""Windows of a weather record that start in different stretches of this length count as independent; a rough rule."""


def score_forecasts(
    forecaster: Forecaster,
    windows: Transitions,
    indices: Sequence[int],
    *,
    select_targets: Select = lambda state: state,
    min_scale: float,
    coverage: float = 0.95,
    batch_size: int = 8,
    seed: int = 0,
) -> dict[str, Estimate]:
    """Means over windows, every statistic with the lead times first: rmse (L,), crps (L,), rank_histogram (L, M + 1).

    The arguments are those of `accumulate_scores`.
    """
    return accumulate_scores(
        forecaster,
        windows,
        indices,
        select_targets=select_targets,
        min_scale=min_scale,
        coverage=coverage,
        batch_size=batch_size,
        seed=seed,
    ).compute()


def accumulate_scores(
    forecaster: Forecaster,
    windows: Transitions,
    indices: Sequence[int],
    *,
    select_targets: Select = lambda state: state,
    select_samples: Select = lambda state: state,
    min_scale: float,
    coverage: float = 0.95,
    batch_size: int = 8,
    seed: int = 0,
) -> MeanAccumulator:
    """The statistics of every window, with the lead times first; `compute` averages them.

    Args:
        forecaster: Makes the samples.
        windows: History and future states; the number of lead times is theirs.
        indices: Windows to score.
        select_targets: The predicted channels of states (..., C, *space).
        select_samples: The same of the samples, for a forecaster that forecasts all variables.
        min_scale: Floor of the standard deviation in the Gaussian NLL, in the field's units.
        coverage: Of the intervals whose actual coverage is counted.
        batch_size: Windows at once.
        seed: Of the ties in the rank histogram.
    """
    weight = latitude_weights(windows.sequences.coordinates)
    accumulator = MeanAccumulator()
    generator = torch.Generator().manual_seed(seed)
    calibrated = getattr(forecaster, "interval_scales", None)
    scales = calibrated(coverage) if calibrated is not None else None
    for first in range(0, len(indices), batch_size):
        some = list(indices[first : first + batch_size])
        batch = default_collate([windows[index] for index in some])
        target = select_targets(batch["future"])  # (B, L, C, *space)
        samples = select_samples(forecaster.forecast(batch, some, windows.num_leads))
        _require_finite(forecaster, samples, some)
        add_statistics(accumulator, samples, target, some, weight, min_scale, coverage, generator)
        if scales is not None and len(samples) > 1:
            accumulator.update(interval_statistics(samples, target, scales), some, weight=weight, keep=1)
    return accumulator


def interval_statistics(samples: Tensor, target: Tensor, scales: Sequence[float]) -> dict[str, Tensor]:
    """Whether the model's calibrated interval holds the truth, and its width, each (B, L, C, *space)."""
    lower, upper = scaled_interval(samples, scales).unbind()
    inside = (lower <= target) & (target <= upper)
    return {"conformal_coverage": inside.to(target.dtype), "conformal_width": upper - lower}


def add_statistics(
    accumulator: MeanAccumulator,
    samples: Tensor,
    target: Tensor,
    ids: Sequence[int],
    weight: Tensor | None,
    min_scale: float,
    coverage: float,
    generator: torch.Generator,
) -> None:
    """Members (M, B, L, C, *space) against target (B, L, C, *space); geographic grids weigh by cos(latitude)."""
    if len(samples) > 1:
        panel = ensemble_statistics(samples, target, min_scale=min_scale, level=coverage)
        counts = rank_histogram(samples, target, generator=generator, sample_dims=2)
        shares = counts / counts.sum(-1, keepdim=True)
        accumulator.update({"rank_histogram": shares}, ids, keep=2)
    else:
        panel = {
            "squared_error": squared_error(samples, target),
            "absolute_error": absolute_error(samples, target),
            "crps": crps(samples, target),
        }
    accumulator.update(panel, ids, weight=weight, keep=1)
    scale = 1.0 if weight is None else weight.sqrt().to(target)  # the distance weighs coordinates alike
    energy = energy_score(samples * scale, target * scale, target.ndim - 2)
    accumulator.update({"energy_score": energy}, ids, keep=1)
    num_axes = target.ndim - 3
    spectra = {
        "spectrum_members": power_spectrum(samples, num_axes).mean(0),
        "spectrum_mean": power_spectrum(samples.mean(0), num_axes),
        "spectrum_target": power_spectrum(target, num_axes),
    }
    accumulator.update(spectra, ids, keep=2)


def power_spectrum(states: Tensor, num_axes: int) -> Tensor:
    """Power per wave number along the last of `num_axes` spatial axes, (..., C, *space) -> (..., waves).

    Means are taken off. On a map, where the last axis (longitude) of a region does not close, a Hann window damps its
    ends. Power is averaged over channels and the other spatial axis.
    """
    values = states - states.mean(-1, keepdim=True)
    if num_axes > 1:
        values = values * torch.hann_window(values.shape[-1], periodic=False).to(values)
    power = torch.fft.rfft(values, norm="forward").abs().square()
    return power.flatten(-1 - num_axes, -2).mean(-2)


def _require_finite(forecaster: Forecaster, samples: Tensor, ids: Sequence[int]) -> None:
    bad = [i for i, fine in zip(ids, samples.isfinite().transpose(0, 1).flatten(1).all(1), strict=True) if not fine]
    if bad:
        raise FloatingPointError(f"{forecaster.name}: the forecast of windows {bad[:5]} left the finite numbers")


def independent_groups(windows: Transitions, indices: Sequence[int]) -> list[int]:
    """A number for each window, the same for windows that are not independent of each other.

    Windows of one trajectory belong together; of a single dated record, those that start within the same GROUP_DAYS.
    """
    sequences = windows.sequences
    if sequences.num_sequences > 1 or not sequences.calendar:
        return [windows.sequence_of(index) for index in indices]
    times = sequences.times(0)
    return [int(times[windows.steps[index] - 1] // (GROUP_DAYS * DAY)) for index in indices]


def spread_windows(count: int, available: int, seed: int = 0) -> list[int]:
    """`count` windows, one at a random place of each of `count` equal stretches of those available.

    Evenly spaced ones would fall on the same time of every trajectory, or on the same hour of every day.
    """
    count = min(count, available)
    offsets = np.random.default_rng(seed).random(count)
    ends = [place * available // count for place in range(count + 1)]  # stretches share no window
    return [low + int(offset * (high - low)) for low, high, offset in zip(ends, ends[1:], offsets, strict=False)]
