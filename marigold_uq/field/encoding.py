"""What the encoder and the season of a field model learn from the training part: statistics, static fields, waves."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from marigold_uq.denoising import predict_output
from marigold_uq.field.data import FieldSequences, Transitions, statistics_of
from marigold_uq.field.data.sequences import block_size, masked_of, target_hours_of, units_of
from marigold_uq.field.data.statistics import observed_share
from marigold_uq.models.field_encoder import FieldEncoder
from marigold_uq.models.field_grid import DAY, NUM_WAVES, FieldDataError, harmonic_basis, require_grid
from marigold_uq.models.noise_color import NoiseColor
from marigold_uq.models.season import Season
from marigold_uq.pipelines.field import FieldForecastPipeline

__all__ = ["amplitudes", "fit_color", "fit_encoder", "fit_harmonics", "fit_season", "require_data"]

DAILY_WAVES = (0, 3, 4)
"""The mean, and sine and cosine of the day."""
WHOLE_YEAR = 365 * DAY
BLOCK = 256
_COLORS = 50
"""Noise levels at which noise has a colour of its own, where the schedule has so many."""

Quantity = Callable[[Tensor, Tensor], Tensor]
"""Something made of states (n, C, *space) at times (n,), of the same form."""


def fit_encoder(
    train: FieldSequences,
    *,
    targets: Sequence[str] | None = None,
    num_history: int = 2,
    grid_channels: bool = False,
    time_features: Sequence[str] = (),
    mean_field: bool = False,
    seasonal: bool = False,
) -> FieldEncoder:
    """The encoder of a training set: its statistics, its grid, its static fields (scaled to mean 0, variance 1).

    With `mean_field` the time means of the training states are static fields too, named mean_<variable>. Of variables
    that may be missing, the share of times with a value is one, named observed_<variable>.
    """
    masked, hours = masked_of(train), target_hours_of(train)
    observed = observed_share(train) if masked else torch.zeros(0)
    statics = {**train.static_fields(), **(_time_means(train) if mean_field else {})}
    statics |= {
        f"observed_{name}": share for name, share in zip(train.variables, observed, strict=False) if name in masked
    }
    encoder = FieldEncoder(
        variables=list(train.variables),
        targets=list(targets or train.variables),
        statistics={name: one.to_dict() for name, one in statistics_of(train).items()},
        coordinates={name: values.tolist() for name, values in train.coordinates.items()},
        num_history=num_history,
        static_names=list(statics),
        grid_channels=grid_channels,
        time_features=list(time_features),
        seasonal=seasonal,
        calendar=train.calendar,
        time_step=train.time_step,
        units=units_of(train),
        target_hours=None if hours is None else list(hours),
        masked=list(masked),
    )
    if masked:
        encoder.observed.copy_(observed)
    for channel, values in enumerate(statics.values()):
        centred = values.double() - values.double().mean()
        encoder.static[channel] = centred / centred.std().clamp(min=1e-12)
    if seasonal:
        encoder.harmonics.copy_(fit_harmonics(train))
    return encoder


def _time_means(train: FieldSequences) -> dict[str, Tensor]:
    """Mean over all states of each variable, (*space); where a value is always missing, that of the other points."""
    total, count = torch.zeros(()), torch.zeros(())
    for states, _ in _blocks(train):
        total, count = total + states.nansum(0), count + states.isfinite().sum(0)
    means = total / count  # 0 / 0 where nothing was ever seen
    usual = means.flatten(1).nanmean(1).reshape(-1, *[1] * (means.ndim - 1))
    return dict(zip((f"mean_{name}" for name in train.variables), means.where(count > 0, usual), strict=True))


def fit_season(encoder: FieldEncoder, train: FieldSequences) -> Season:
    """Mean and variance of the encoder's targets at each hour and time of the year, in the units of the data."""
    found = Season(list(encoder.event_shape))
    found.mean_waves.copy_(fit_harmonics(train, lambda states, _: encoder.select_targets(states)))

    def squares(states: Tensor, times: Tensor) -> Tensor:
        return (encoder.select_targets(states) - found.mean(times)).square()

    found.variance_waves.copy_(fit_harmonics(train, squares))
    return found


def fit_harmonics(train: FieldSequences, of: Quantity | None = None) -> Tensor:
    """Coefficients (C, NUM_WAVES, *space), float64, by least squares over all training states; one pass.

    Points that are always missing get NaN; points that are missing at some times are refused.

    The waves are fitted to the states, or to what `of` makes of them. Less than a year of data does not know the other
    seasons: the waves of the year then get the coefficient 0.
    """
    known = _known_waves(train)
    gram, moment = torch.zeros(()), torch.zeros(())
    for values, times in _blocks(train, of):
        waves = known * harmonic_basis(times)
        gram, moment = gram + waves.T @ waves, moment + waves.T @ values.flatten(1)
    # of waves that are left out, or that few states do not tell apart, the smallest solution is taken
    solution = torch.linalg.pinv(gram, hermitian=True, rtol=1e-8) @ moment
    _require_constant_mask(train)
    return solution.reshape(-1, *values.shape[1:]).movedim(0, 1)


def _require_constant_mask(train: FieldSequences) -> None:
    """Refuse variables that are missing at some times only: their waves would be fitted to other times elsewhere."""
    if not masked_of(train):
        return
    share = observed_share(train)
    changing = [name for name, one in zip(train.variables, share, strict=True) if bool(((one > 0) & (one < 1)).any())]
    if changing:
        raise FieldDataError(
            f"{train.source}: a seasonal mean needs points that are missing always or never; those of {changing} "
            "change: fill them, or set model.seasonal to false"
        )


def _has_whole_year(train: FieldSequences) -> bool:
    if not train.calendar:
        raise FieldDataError(f"{train.source}: a seasonal mean needs times that are dates")
    ends = [train.times(sequence)[[0, -1]] for sequence in range(train.num_sequences)]  # weather has no gaps
    return max(last for _, last in ends) - min(first for first, _ in ends) + train.time_step >= WHOLE_YEAR


def _known_waves(train: FieldSequences) -> Tensor:
    """1 for the waves that the record is long enough to know, 0 for the others."""
    known = torch.ones(NUM_WAVES, dtype=torch.float64)
    if not _has_whole_year(train):
        known[[wave for wave in range(NUM_WAVES) if wave not in DAILY_WAVES]] = 0
    return known


def _blocks(train: FieldSequences, of: Quantity | None = None) -> Iterator[tuple[Tensor, Tensor]]:
    """The states, or what `of` makes of them, and their times, a block after the other."""
    for sequence in range(train.num_sequences):
        times = torch.as_tensor(np.asarray(train.times(sequence)))
        size = block_size(train, BLOCK)
        for start in range(0, len(times), size):
            stop = min(len(times), start + size)
            states = train.read(sequence, start, stop).double()  # (n, C, *space)
            yield (states if of is None else of(states, times[start:stop])), times[start:stop]


@torch.no_grad()
def fit_color(
    pipeline: FieldForecastPipeline, windows: Transitions, indices: Sequence[int], seed: int = 1
) -> NoiseColor:
    """The spectrum of the standardised residual (o - mean) / std at up to 50 noise levels, on held-out windows."""
    encoder, scheduler = pipeline.encoder, pipeline.scheduler
    batch = default_collate([windows[index] for index in indices])
    history, future = (batch[name].to(pipeline.device) for name in ("history", "future"))
    x_0 = encoder.encode_target(history[:, -1], future[:, 0])
    denoiser = pipeline.denoiser(encoder.condition(history, batch["time"]))
    num_rows = min(_COLORS, scheduler.config.num_train_timesteps)
    color = NoiseColor(num_rows, list(encoder.event_shape))
    generator = torch.Generator().manual_seed(seed)
    for row, timestep in enumerate(scheduler.table_timesteps(num_rows).to(x_0.device)):
        noise = torch.randn(x_0.shape, generator=generator).to(x_0)
        timesteps = timestep.expand(len(x_0))
        law = predict_output(denoiser, scheduler, scheduler.add_noise(x_0, noise, timesteps), timesteps)
        residual = (scheduler.training_target(x_0, noise, timesteps) - law.mean) / law.stddev
        color.amplitude[row] = amplitudes(residual.cpu())
    return color.to(pipeline.device)


def amplitudes(residual: Tensor) -> Tensor:
    """Amplitude of each wave (C, *waves) of residuals (N, C, *space), such that noise of this colour has variance 1."""
    axes = tuple(range(2, residual.ndim))
    power = torch.fft.rfftn(residual, dim=axes).abs().square().mean(0)
    twins = torch.full(power.shape[-1:], 2.0)  # rfftn keeps half of the waves: the others count through their twins
    twins[0] = 1.0
    if residual.shape[-1] % 2 == 0:
        twins[-1] = 1.0
    mean = (power * twins).sum(tuple(range(1, power.ndim)), keepdim=True) / math.prod(residual.shape[2:])
    return (power / mean.clamp(min=torch.finfo(power.dtype).tiny)).sqrt()


def require_data(encoder: FieldEncoder, data: FieldSequences) -> None:
    """Refuse data of other variables, another grid or another time step than the encoder's."""
    config = encoder.config
    if tuple(data.variables) != tuple(config.variables):
        raise FieldDataError(
            f"{data.source}: mismatched statistics: the model was trained on {list(config.variables)}, in this order, "
            f"the data hold {list(data.variables)}"
        )
    require_grid(data.source, data.coordinates, encoder.coordinates)
    _require_units(encoder, data)
    if abs(data.time_step / config.time_step - 1) > 1e-4:
        raise FieldDataError(
            f"{data.source}: states are {data.time_step:g} apart, the model steps by {config.time_step:g}"
        )


def _require_units(encoder: FieldEncoder, data: FieldSequences) -> None:
    """Refuse another unit than that of the training data, where both are known."""
    given = units_of(data)
    for name, unit in encoder.units.items():
        if given.get(name, unit) != unit:
            raise FieldDataError(
                f"{data.source}: {name} is in {given[name]}, the model was trained with {unit}: convert it"
            )
