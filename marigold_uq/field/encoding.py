"""What the encoder and the season of a field model learn from the training part: statistics, static fields, waves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from marigold_uq.field.data import FieldSequences, statistics_of
from marigold_uq.models.field_encoder import FieldEncoder
from marigold_uq.models.field_grid import DAY, NUM_WAVES, FieldDataError, harmonic_basis, num_waves, require_grid
from marigold_uq.models.season import Season

__all__ = ["choose_num_annual", "fit_encoder", "fit_harmonics", "fit_season", "require_data"]

DAILY_WAVES = (0, 3, 4)
"""The mean, and sine and cosine of the day."""
WHOLE_YEAR = 365 * DAY
BLOCK = 256
LEFT_OUT, GAP = 12 * DAY, 3 * DAY
"""Stretches that are predicted from the rest of the record, and what is also left out on each side of them."""

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

    With `mean_field` the time means of the training states are static fields too, named mean_<variable>.
    """
    statics = {**train.static_fields(), **(_time_means(train) if mean_field else {})}
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
    )
    for channel, values in enumerate(statics.values()):
        centred = values.double() - values.double().mean()
        encoder.static[channel] = centred / centred.std().clamp(min=1e-12)
    if seasonal:
        encoder.harmonics.copy_(fit_harmonics(train))
    return encoder


def _time_means(train: FieldSequences) -> dict[str, Tensor]:
    """Mean over all states of each variable, (*space)."""
    total, count = torch.zeros(()), 0
    for states, _ in _blocks(train, None, BLOCK):
        total, count = total + states.sum(0), count + len(states)
    return {f"mean_{name}": field for name, field in zip(train.variables, total / count, strict=True)}


def fit_season(encoder: FieldEncoder, train: FieldSequences) -> Season:
    """Mean and variance of the encoder's targets at each hour and time of the year, in the units of the data."""
    num_annual = choose_num_annual(train, lambda states, _: encoder.select_targets(states))
    found = Season(list(encoder.event_shape), num_annual)
    found.mean_waves.copy_(fit_harmonics(train, lambda states, _: encoder.select_targets(states), num_annual))

    def squares(states: Tensor, times: Tensor) -> Tensor:
        return (encoder.select_targets(states) - found.mean(times)).square()

    found.variance_waves.copy_(fit_harmonics(train, squares))
    return found


def fit_harmonics(train: FieldSequences, of: Quantity | None = None, num_annual: int = 1) -> Tensor:
    """Coefficients (C, num_waves, *space), float64, by least squares over all training states; one pass.

    The waves are fitted to the states, or to what `of` makes of them. Less than a year of data does not know the other
    seasons: the waves of the year then get the coefficient 0.
    """
    gram, moment, shape = _totals(train, of, _known_waves(train, num_annual))
    return _solve(gram, moment).reshape(-1, *shape).movedim(0, 1)


def choose_num_annual(train: FieldSequences, of: Quantity | None = None, candidates: Sequence[int] = (1, 2, 3)) -> int:
    """How many harmonics of the year predict stretches of the training part from the rest of it best.

    Each variable counts in units of its own error with one harmonic. Where the record is shorter than a year: 1.
    """
    if not _has_whole_year(train):
        return 1
    length, gap = (max(1, round(span / train.time_step)) for span in (LEFT_OUT, GAP))
    errors = []
    for num_annual in candidates:
        known = _known_waves(train, num_annual)
        gram, moment, _ = _totals(train, of, known)
        error = torch.zeros(())
        for sequence in range(train.num_sequences):
            times = torch.as_tensor(np.asarray(train.times(sequence)))
            for start in range(0, len(times), length):
                low, stop = max(0, start - gap), min(len(times), start + length)
                high = min(len(times), stop + gap)
                near = _quantity(train, sequence, low, high, of)
                own_gram, own_moment, _ = _sums(near, times[low:high], known)
                waves = known * harmonic_basis(times[start:stop], num_annual)
                truth = near[start - low : stop - low]
                fitted = (waves @ _solve(gram - own_gram, moment - own_moment)).reshape(truth.shape)
                error = error + (truth - fitted).square().transpose(0, 1).flatten(1).sum(1)  # (C,)
        errors.append(error)
    scores = [float((error / errors[0].clamp(min=1e-300)).mean()) for error in errors]
    return candidates[int(np.argmin(scores))]


def _has_whole_year(train: FieldSequences) -> bool:
    if not train.calendar:
        raise FieldDataError(f"{train.source}: a seasonal mean needs times that are dates")
    ends = [train.times(sequence)[[0, -1]] for sequence in range(train.num_sequences)]  # weather has no gaps
    return max(last for _, last in ends) - min(first for first, _ in ends) + train.time_step >= WHOLE_YEAR


def _known_waves(train: FieldSequences, num_annual: int) -> Tensor:
    """1 for the waves that the record is long enough to know, 0 for the others."""
    if _has_whole_year(train):
        return torch.ones(num_waves(num_annual), dtype=torch.float64)
    known = torch.zeros(num_waves(num_annual), dtype=torch.float64)
    known[list(DAILY_WAVES)] = 1
    return known


def _quantity(train: FieldSequences, sequence: int, start: int, stop: int, of: Quantity | None) -> Tensor:
    states = train.read(sequence, start, stop).double()  # (n, C, *space)
    return states if of is None else of(states, torch.as_tensor(np.asarray(train.times(sequence)[start:stop])))


def _blocks(train: FieldSequences, of: Quantity | None, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The quantity and its times, a block after the other."""
    for sequence in range(train.num_sequences):
        times = torch.as_tensor(np.asarray(train.times(sequence)))
        for start in range(0, len(times), size):
            stop = min(len(times), start + size)
            yield _quantity(train, sequence, start, stop, of), times[start:stop]


def _totals(train: FieldSequences, of: Quantity | None, known: Tensor) -> tuple[Tensor, Tensor, torch.Size]:
    """`_sums` of the whole record."""
    parts = (_sums(values, times, known) for values, times in _blocks(train, of, BLOCK))
    gram, moment, shape = next(parts)
    for more in parts:
        gram, moment = gram + more[0], moment + more[1]
    return gram, moment, shape


def _sums(values: Tensor, times: Tensor, known: Tensor) -> tuple[Tensor, Tensor, torch.Size]:
    """Gram matrix of the waves, their products with the values (waves, C space), and the shape of a value."""
    waves = known * harmonic_basis(times, 1 + (len(known) - NUM_WAVES) // 2)
    return waves.T @ waves, waves.T @ values.flatten(1), values.shape[1:]


def _solve(gram: Tensor, moment: Tensor) -> Tensor:
    """Of waves that are left out, or that few states do not tell apart, the smallest solution is taken."""
    return torch.linalg.pinv(gram, hermitian=True, rtol=1e-8) @ moment


def require_data(encoder: FieldEncoder, data: FieldSequences) -> None:
    """Refuse data of other variables, another grid or another time step than the encoder's."""
    config = encoder.config
    if tuple(data.variables) != tuple(config.variables):
        raise FieldDataError(
            f"{data.source}: mismatched statistics: the model was trained on {list(config.variables)}, in this order, "
            f"the data hold {list(data.variables)}"
        )
    require_grid(data.source, data.coordinates, encoder.coordinates)
    if abs(data.time_step / config.time_step - 1) > 1e-4:
        raise FieldDataError(
            f"{data.source}: states are {data.time_step:g} apart, the model steps by {config.time_step:g}"
        )
