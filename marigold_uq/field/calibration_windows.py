"""Which validation windows a calibration uses for what: no window serves two purposes that must not see each other."""

from __future__ import annotations

from bisect import bisect_right
from typing import NamedTuple

from marigold_uq.field.data import Transitions
from marigold_uq.field.scores import independent_groups, spread_windows

COLOR_WINDOWS = 4
"""Windows behind the colour for each that scores it."""


class Windows(NamedTuple):
    """Numbers of the windows that score candidates, fit kappas, give the colour, and calibrate intervals."""

    scored: list[int]
    fitted: list[int]
    color: list[int]
    intervals: list[int]


def allot_windows(num_scored: int, num_fitted: int, num_intervals: int, available: int) -> Windows:
    """The data in 2 `num_scored` stretches: every other one scores and fits.

    Of those between, every fourth gives the colour and the others calibrate intervals, so each part has its own.
    """
    stretches = 2 * max(1, min(num_scored, available // 2))
    starts = [place * available // stretches for place in range(stretches)]  # those of `spread_windows`

    def among(wanted: int, kinds: set[int], share: float) -> list[int]:
        """About `wanted` windows, evenly, of the stretches whose number modulo 8 is one of `kinds`."""
        places = spread_windows(round(wanted / share), available)
        return [i for i in places if (bisect_right(starts, i) - 1) % 8 in kinds]

    scored = spread_windows(stretches, available)[::2]
    fitted = among(max(num_fitted, num_scored), {0, 2, 4, 6}, 1 / 2)
    color = among(COLOR_WINDOWS * num_scored, {7} if stretches >= 8 else {1, 3, 5}, 1 / 8)
    intervals = among(num_intervals, {1, 3, 5}, 3 / 8) if stretches >= 8 and num_intervals else []
    return Windows(scored, fitted, color, intervals)


def untouched_windows(windows: Transitions, allotted: Windows) -> list[int]:
    """The windows for intervals without those of a trajectory (or ten days of a record) that took part in a choice."""
    others = [*allotted.scored, *allotted.fitted, *allotted.color]
    touched = set(independent_groups(windows, others))
    own = independent_groups(windows, allotted.intervals)
    return [i for i, group in zip(allotted.intervals, own, strict=True) if group not in touched]
