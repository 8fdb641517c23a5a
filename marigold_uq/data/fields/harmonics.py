"""The mean state as a function of the hour and the season: a few waves per grid point, fitted to the training part."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from marigold_uq.data.fields.equation import FieldDataError, Floats
from marigold_uq.data.fields.sequences import FieldSequences

DAY, YEAR = 86_400.0, 365.2425 * 86_400.0
NUM_WAVES = 9
"""1, sine and cosine of the year and of the day, and their four products: days are longer in summer."""
DAILY_WAVES = (0, 3, 4)
"""The mean, and sine and cosine of the day."""
WHOLE_YEAR = 365 * DAY
BLOCK = 256


def harmonic_basis(seconds: Floats | Tensor) -> Tensor:
    """Waves (n, NUM_WAVES), float64, at times (n,) in seconds since 1970."""
    time = torch.as_tensor(seconds, dtype=torch.float64).reshape(-1)
    year, day = 2 * torch.pi * (time / YEAR % 1), 2 * torch.pi * (time / DAY % 1)
    annual, daily = [year.sin(), year.cos()], [day.sin(), day.cos()]
    products = [a * d for a in annual for d in daily]
    return torch.stack([torch.ones_like(time), *annual, *daily, *products], 1)


def fit_harmonics(train: FieldSequences, of: Callable[[Tensor, Tensor], Tensor] | None = None) -> Tensor:
    """Coefficients (C, NUM_WAVES, *space), float64, by least squares over all training states; one pass.

    `of` makes something else of the states (n, C, *space) at times (n,), and the waves are fitted to that. Less than a
    year of data does not know the other seasons: the waves of the year then get the coefficient 0.
    """
    if not train.calendar:
        raise FieldDataError(f"{train.source}: a seasonal mean needs times that are dates")
    ends = [train.times(sequence)[[0, -1]] for sequence in range(train.num_sequences)]
    whole_year = max(last for _, last in ends) - min(first for first, _ in ends) + train.time_step >= WHOLE_YEAR
    known = torch.ones(NUM_WAVES, dtype=torch.float64)
    if not whole_year:
        known[[wave for wave in range(NUM_WAVES) if wave not in DAILY_WAVES]] = 0
    gram = torch.zeros(NUM_WAVES, NUM_WAVES, dtype=torch.float64)
    moment: Tensor | None = None
    for sequence in range(train.num_sequences):
        times = train.times(sequence)
        for start in range(0, len(times), BLOCK):
            stop = min(len(times), start + BLOCK)
            states = train.read(sequence, start, stop).double()  # (n, C, *space)
            if of is not None:
                states = of(states, torch.as_tensor(np.asarray(times[start:stop])))
            waves = known * harmonic_basis(np.asarray(times[start:stop]))
            gram += waves.T @ waves
            part = waves.T @ states.flatten(1)  # (waves, C space)
            moment = part if moment is None else moment + part
            shape = states.shape[1:]
    assert moment is not None  # sequences have at least two states
    # Waves that are left out, or that few states do not tell apart: the smallest solution is taken.
    solution = torch.linalg.pinv(gram, hermitian=True, rtol=1e-8) @ moment
    return solution.reshape(NUM_WAVES, *shape).movedim(0, 1)
