"""Conformal intervals of fields: points weigh by area, and the unit is the trajectory or ten days of a record."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from fractions import Fraction

from torch import Tensor

from marigold_uq.calibration import COVERAGES, IntervalGrid

__all__ = ["weighted_interval_grid"]


def weighted_interval_grid(
    ratios: Tensor, weights: Tensor, groups: Sequence[Hashable], coverages: Sequence[float] = COVERAGES
) -> IntervalGrid | None:
    """`interval_grid_images` with weights: the loss of a window is the weighted share of its points outside.

    Conformal risk control: the smallest q with (sum of the units' mean losses + 1) / (n + 1) <= 1 - coverage.

    Args:
        ratios: |y - mean| / std, (B, *space).
        weights: Of the points, the same shape; windows without any are left out.
        groups: The unit of each window.
        coverages: Those that n units can promise are kept.
    """
    shares, kept = weights.double().flatten(1), weights.flatten(1).sum(1) > 0
    units = [unit for unit, keep in zip(groups, kept.tolist(), strict=True) if keep]
    sizes = Counter(units)
    if not sizes:
        return None
    shares = shares[kept] / shares[kept].sum(1, keepdim=True)
    shares = shares / shares.new_tensor([sizes[unit] for unit in units])[:, None]
    ordered, order = ratios.flatten(1)[kept].flatten().sort()
    outside = shares.flatten()[order].flip(0).cumsum(0).flip(0)[1:]  # what lies above each but the last ratio
    found = {}
    for coverage in sorted(coverages):
        allowed = (len(sizes) + 1) * (1 - Fraction(str(round(coverage, 12)))) - 1
        if allowed >= 0:
            place = int((outside > float(allowed) * (1 + 1e-12) + 1e-12).sum())
            found[coverage] = float(ordered[place])
    usable = {coverage: scale for coverage, scale in found.items() if math.isfinite(scale)}
    return IntervalGrid(tuple(usable), tuple((scale,) for scale in usable.values())) if usable else None
