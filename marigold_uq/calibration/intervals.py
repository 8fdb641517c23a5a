"""Calibrated intervals on a grid of coverages: nested for every coverage, because half widths rise with it."""

from __future__ import annotations

import math
import warnings
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from scipy.special import erfinv

COVERAGES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.925, 0.95, 0.96, 0.97, 0.98, 0.99, 0.995)
"""Where intervals are calibrated by default, as far as the number of calibration units allows."""


@dataclass(frozen=True)
class IntervalGrid:
    """Half widths of central intervals, in predicted standard deviations, at rising coverages.

    Between two coverages the half width is linear in the Gaussian quantile z((1 + c) / 2), so a perfect Gaussian is
    met exactly. Outside the grid it is proportional to z, with a warning: nothing was calibrated there.

    Args:
        coverages: Rising, each within (0, 1).
        scales: For each coverage the half width of each output (targets of a table, lead times of a forecast; one for
            a depth map). They never fall from one coverage to the next.
    """

    coverages: tuple[float, ...]
    scales: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "coverages", tuple(float(c) for c in self.coverages))
        object.__setattr__(self, "scales", tuple(tuple(float(s) for s in row) for row in self.scales))
        if not self.coverages or len(self.coverages) != len(self.scales):
            raise ValueError(
                f"expected one row of half widths per coverage; got {len(self.coverages)} coverages and "
                f"{len(self.scales)} rows"
            )
        if not all(0 < c < 1 for c in self.coverages) or list(self.coverages) != sorted(set(self.coverages)):
            raise ValueError(f"coverages must rise within (0, 1), 0.95 for 95 %; got {list(self.coverages)}")
        if len({len(row) for row in self.scales}) != 1 or not self.scales[0]:
            raise ValueError(f"every coverage needs one half width per output; got {[len(row) for row in self.scales]}")
        if not all(math.isfinite(s) and s >= 0 for row in self.scales for s in row):
            raise ValueError("half widths must be finite and not negative (too few calibration units?)")
        for narrow, wide in zip(self.scales, self.scales[1:], strict=False):
            if any(b < a for a, b in zip(narrow, wide, strict=True)):
                raise ValueError("half widths must not fall as coverage rises: intervals would not be nested")

    @property
    def num_outputs(self) -> int:
        """Half widths per coverage."""
        return len(self.scales[0])

    def scale(self, coverage: float) -> tuple[float, ...]:
        """The half width of each output at any coverage within (0, 1); a warning outside the grid."""
        check_coverage(coverage)
        first, last = self.coverages[0], self.coverages[-1]
        if not first - 1e-9 <= coverage <= last + 1e-9:
            warnings.warn(
                f"intervals were calibrated for coverages from {first:g} to {last:g}; the one for {coverage:g} is "
                "extrapolated and promises nothing",
                stacklevel=2,
            )
        upper = bisect_left(self.coverages, coverage)
        if coverage in self.coverages:
            return self.scales[upper]
        if upper in (0, len(self.coverages)):
            nearest = min(upper, len(self.coverages) - 1)
            factor = _z(coverage) / _z(self.coverages[nearest])
            return tuple(factor * s for s in self.scales[nearest])
        low, high = self.coverages[upper - 1], self.coverages[upper]
        share = (_z(coverage) - _z(low)) / (_z(high) - _z(low))
        rows = zip(self.scales[upper - 1], self.scales[upper], strict=True)
        return tuple(min(a + share * (b - a), b) for a, b in rows)

    def to_dict(self) -> dict[str, Any]:
        """Plain lists, as JSON has them."""
        return {"coverages": list(self.coverages), "scales": [list(row) for row in self.scales]}

    @classmethod
    def from_dict(cls, values: Mapping[str, Sequence[Any]]) -> Self:
        """Undo `to_dict`."""
        return cls(tuple(values["coverages"]), tuple(tuple(row) for row in values["scales"]))


def check_coverage(coverage: float) -> float:
    """A share within (0, 1)."""
    if not 0 < coverage < 1:
        raise ValueError(f"coverage must lie strictly between 0 and 1, 0.95 for 95 %; got {coverage!r}")
    return float(coverage)


def _z(coverage: float) -> float:
    """How many standard deviations a central Gaussian interval reaches to each side; finite for every float below 1."""
    return math.sqrt(2) * float(erfinv(coverage))
