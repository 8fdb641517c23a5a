"""Scores of ensemble forecasts per lead time: unreduced statistics of a batch, and their means over windows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from marigold_uq.field.data import Transitions, latitude_weights
from marigold_uq.field.data.sequences import masked_of
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

__all__ = [
    "Channels",
    "accumulate_channels",
    "accumulate_scores",
    "independent_groups",
    "power_spectrum",
    "score_forecasts",
    "spread_windows",
]


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


class Channels(NamedTuple):
    """Channels that are scored together: which, in what units (C,) (None: their own), and the floor of the NLL's
    deviation in these units.
    """

    places: slice
    units: Tensor | None
    min_scale: float


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

    All channels are averaged in their own unit: `accumulate_channels` keeps variables apart.

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
    everything = {"": Channels(slice(None), None, min_scale)}
    found = accumulate_channels(
        forecaster,
        windows,
        indices,
        everything,
        select_targets,
        select_samples,
        coverage=coverage,
        batch_size=batch_size,
        seed=seed,
    )
    return found[""]


def accumulate_channels(
    forecaster: Forecaster,
    windows: Transitions,
    indices: Sequence[int],
    groups: Mapping[str, Channels],
    select_targets: Select,
    select_samples: Select,
    *,
    coverage: float = 0.95,
    batch_size: int = 8,
    seed: int = 0,
) -> dict[str, MeanAccumulator]:
    """The statistics of each group of channels, from the same samples; the arguments are those of `accumulate_scores`.

    Points that are missing in the truth or in the last known state do not count.
    """
    weight = latitude_weights(windows.sequences.coordinates)
    accumulators = {name: MeanAccumulator() for name in groups}
    generators = {name: torch.Generator().manual_seed(seed) for name in groups}
    for first in range(0, len(indices), batch_size):
        some = list(indices[first : first + batch_size])
        forecast = _forecast(forecaster, windows, some, select_targets, select_samples)
        half_widths = _half_widths(forecaster, forecast.samples, coverage)
        for name, channels in groups.items():
            one = forecast.of(channels)
            add_statistics(
                accumulators[name], one.samples, one.target, some, weight, channels.min_scale, coverage,
                generators[name], mask=one.mask,
            )  # fmt: skip
            if half_widths is not None:
                inside = interval_statistics(one.samples, one.target, half_widths[channels.places])
                accumulators[name].update(inside, some, mask=one.mask, weight=weight, keep=1)
    return accumulators


class _Forecast(NamedTuple):
    """Samples (M, B, L, C, *space), target (B, L, C, *space), and where both count; elsewhere they are 0."""

    samples: Tensor
    target: Tensor
    mask: Tensor | None

    def of(self, channels: Channels) -> _Forecast:
        """Some channels in their units."""
        places, units = channels.places, channels.units
        samples, target = self.samples[:, :, :, places], self.target[:, :, places]
        if units is not None:
            scale = units[places].reshape(-1, *[1] * (target.ndim - 3)).to(target)
            samples, target = samples / scale, target / scale
        return _Forecast(samples, target, None if self.mask is None else self.mask[:, :, places])


def _forecast(
    forecaster: Forecaster, windows: Transitions, ids: list[int], select_targets: Select, select_samples: Select
) -> _Forecast:
    batch = default_collate([windows[index] for index in ids])
    target = select_targets(batch["future"])  # (B, L, C, *space)
    samples = select_samples(forecaster.forecast(batch, ids, windows.num_leads))
    mask = None
    if masked_of(windows.sequences):
        last = select_targets(batch["history"][:, -1]).unsqueeze(1)
        mask = target.isfinite() & last.isfinite()
        samples, target = torch.where(mask, samples, 0), torch.where(mask, target, 0)
    _require_finite(forecaster, samples, ids)
    return _Forecast(samples, target, mask)


def _half_widths(forecaster: Forecaster, samples: Tensor, coverage: float) -> list[list[float]] | None:
    """Of the forecaster's calibrated intervals, a row per channel; None where it has none for these samples."""
    calibrated, pipeline = getattr(forecaster, "interval_scales", None), getattr(forecaster, "pipeline", None)
    scales = calibrated(coverage) if calibrated is not None and len(samples) > 1 else None
    if scales is None:
        return None
    return [list(scales)] * samples.shape[3] if pipeline is None else pipeline.by_variable(scales)


def interval_statistics(samples: Tensor, target: Tensor, scales: Sequence[Sequence[float]]) -> dict[str, Tensor]:
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
    mask: Tensor | None = None,
) -> None:
    """Members (M, B, L, C, *space) against target (B, L, C, *space); geographic grids weigh by cos(latitude).

    Spectra are of whole fields alone: with a `mask` there are none.
    """
    if len(samples) > 1:
        panel = ensemble_statistics(samples, target, min_scale=min_scale, level=coverage, mask=mask)
        counts = rank_histogram(samples, target, generator=generator, sample_dims=2, mask=mask)
        shares = counts / counts.sum(-1, keepdim=True)
        accumulator.update({"rank_histogram": shares}, ids, keep=2)
    else:
        panel = {
            "squared_error": squared_error(samples, target),
            "absolute_error": absolute_error(samples, target),
            "crps": crps(samples, target),
        }
    accumulator.update(panel, ids, mask=mask, weight=weight, keep=1)
    scale = 1.0 if weight is None else weight.sqrt().to(target)  # the distance weighs coordinates alike
    energy = energy_score(samples * scale, target * scale, target.ndim - 2, mask=mask)
    accumulator.update({"energy_score": energy}, ids, keep=1)
    if mask is None:
        accumulator.update(_spectra(samples, target), ids, keep=2)


def _spectra(samples: Tensor, target: Tensor) -> dict[str, Tensor]:
    """Power per wave number, (B, L, waves)."""
    num_axes = target.ndim - 3
    return {
        "spectrum_members": power_spectrum(samples, num_axes).mean(0),
        "spectrum_mean": power_spectrum(samples.mean(0), num_axes),
        "spectrum_target": power_spectrum(target, num_axes),
    }


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
