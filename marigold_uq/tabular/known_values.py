"""Targets that take few values: marks, counts, settings of a machine."""

import numpy as np
from numpy.typing import NDArray

ROWS_PER_VALUE = 20
"""A target takes few values if each is seen so often on average: new rows then hold no new value, as a rule."""


def known_values(targets: NDArray[np.float64]) -> list[list[float] | None] | None:
    """For each column of (n, C) its values, rising, if they are few, else None; None if no column has few."""
    values = [np.unique(column) for column in targets.T]
    few = [v.tolist() if len(v) * ROWS_PER_VALUE <= len(targets) else None for v in values]
    return few if any(v is not None for v in few) else None
