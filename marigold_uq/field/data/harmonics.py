"""The mean state as a function of the hour and the season: a few waves per grid point, fitted to the training part."""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from marigold_uq.field.data.equation import FieldDataError, Floats
from marigold_uq.field.data.sequences import FieldSequences

DAY, YEAR = 86_400.0, 365.2425 * 86_400.0
NUM_WAVES = 9
"""1, sine and cosine of the year and of the day, and their four products: days are longer in summer."""
DAILY_WAVES = (0, 3, 4)
"""The mean, and sine and cosine of the day."""
WHOLE_YEAR = 365 * DAY
BLOCK = 256
LEFT_OUT, GAP = 12 * DAY, 3 * DAY
"""Stretches that are predicted from the rest of the record, and what is also left out on each side of them."""

Quantity = Callable[[Tensor, Tensor], Tensor]
"""Something made of states (n, C, *space) at times (n,), of the same form."""


def num_waves(num_annual: int = 1) -> int:
    """Of a basis with so many harmonics of the year."""
    return NUM_WAVES + 2 * (num_annual - 1)


def harmonic_basis(seconds: Floats | Tensor, num_annual: int = 1) -> Tensor:
    """Waves (n, num_waves), float64, at times (n,) in seconds since 1970."""
    time = torch.as_tensor(seconds, dtype=torch.float64).reshape(-1)
    year, day = 2 * torch.pi * (time / YEAR % 1), 2 * torch.pi * (time / DAY % 1)
    annual, daily = [year.sin(), year.cos()], [day.sin(), day.cos()]
    products = [a * d for a in annual for d in daily]
    higher = [wave(k * year) for k in range(2, num_annual + 1) for wave in (torch.sin, torch.cos)]
    return torch.stack([torch.ones_like(time), *annual, *daily, *products, *higher], 1)


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
