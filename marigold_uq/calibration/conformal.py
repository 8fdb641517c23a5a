"""Split-conformal intervals: finite-sample coverage from calibration units that are exchangeable with the test unit.

The unit is what was drawn independently: a row of a table, an image, or a scene that gave several images. Pixels of one
image are not independent and are never pooled as if they were.
"""

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, Self, TypeAlias

import torch
from torch import Tensor

from marigold_uq.calibration.intervals import COVERAGES, IntervalGrid, check_coverage
from marigold_uq.distributions.base import at_least_float32

TooFew: TypeAlias = Literal["raise", "inf"]
"""Too few calibration units: an error, or the infinite scale that the guarantee then asks for."""


def residual_ratio(mean: Tensor, std: Tensor, target: Tensor, mask: Tensor | None = None) -> Tensor:
    """|y - mean| / std: how many standard deviations the interval must reach. With a mask, the valid entries, flat.

    0/0 is 0 (an exact prediction needs no width); an error where std is 0 is infinite: no scale can cover it.
    """
    if not mean.shape == std.shape == target.shape:
        raise ValueError(
            f"mean {tuple(mean.shape)}, std {tuple(std.shape)} and target {tuple(target.shape)} must have one shape"
        )
    mean, std, target = at_least_float32(mean), at_least_float32(std), at_least_float32(target)
    if mask is not None:
        keep = mask.expand(mean.shape)
        mean, std, target = mean[keep], std[keep], target[keep]
    if bool((std < 0).any()):
        raise ValueError("std holds negative numbers; pass a standard deviation")
    error = (target - mean).abs()
    return torch.where(error == 0, error, error / std)


def conformal_rows(scores: Tensor, coverage: float, *, too_few: TooFew = "raise") -> Tensor:
    """The ceil((n + 1) coverage)-th smallest of n exchangeable scores (n, ...): (...), one per further coordinate.

    With scores r = |y - ybar|/s (`residual_ratio`) the interval ybar +- q s covers a new row with at least this
    probability, and at most 1/(n + 1) more if scores do not tie. For intervals that cover all outputs of a row at once,
    pass the largest score of each row.
    """
    _check_rows(scores)
    scores = at_least_float32(scores)
    _check_nan(scores, "scores")
    num_rows = scores.shape[0]
    rank = math.ceil((num_rows + 1) * _exact(coverage))
    if rank > num_rows:
        return scores.new_full(scores.shape[1:], _not_enough(num_rows, coverage, "rows", too_few))
    return scores.kthvalue(rank, dim=0).values


def conformal_images(
    ratios: Iterable[Tensor],
    coverage: float,
    *,
    groups: Sequence[Hashable] | None = None,
    too_few: TooFew = "raise",
) -> float:
    """Smallest q with (sum_i L_i(q) + 1) / (n + 1) <= 1 - coverage, L_i the share of image i outside ybar +- q s.

    Conformal risk control: on a new image the *expected share* of valid pixels inside is at least `coverage`.

    Args:
        ratios: one tensor of |y - ybar|/s at the valid pixels per image (`residual_ratio` with a mask), any shape.
        coverage: the promised share; needs n >= 1/(1 - coverage) - 1 units (19 for 95 %).
        groups: the scene of each image. The unit is then the scene, its loss the mean over its images.
        too_few: with fewer units, raise or return infinity.
    """
    return _ImageLosses.of(ratios, groups).smallest_scale(coverage, too_few)


def interval_grid_rows(scores: Tensor, coverages: Sequence[float] = COVERAGES) -> IntervalGrid | None:
    """`conformal_rows` of scores (n, outputs) at every coverage that n rows can promise; None if they promise none."""
    _check_rows(scores)
    rows = scores.unsqueeze(1) if scores.ndim == 1 else scores.flatten(1)
    return _grid(coverages, lambda c: conformal_rows(rows, c, too_few="inf").tolist())


def interval_grid_images(
    ratios: Iterable[Tensor], coverages: Sequence[float] = COVERAGES, *, groups: Sequence[Hashable] | None = None
) -> IntervalGrid | None:
    """`conformal_images` at every coverage that the images can promise; None if they promise none."""
    losses = _ImageLosses.of(ratios, groups)
    return _grid(coverages, lambda c: [losses.smallest_scale(c, "inf")])


def stack_grids(grids: Sequence[IntervalGrid | None]) -> IntervalGrid | None:
    """Grids of one output each as one grid of all outputs, at the coverages that they have in common."""
    if not grids or any(grid is None for grid in grids):
        return None
    known = [dict(zip(grid.coverages, grid.scales, strict=True)) for grid in grids if grid is not None]
    shared = sorted(set.intersection(*(set(rows) for rows in known)))
    if not shared:
        return None
    return IntervalGrid(tuple(shared), tuple(tuple(s for rows in known for s in rows[c]) for c in shared))


def _grid(coverages: Sequence[float], scales: Callable[[float], list[float]]) -> IntervalGrid | None:
    rows = {c: scales(c) for c in sorted(coverages)}
    usable = {c: row for c, row in rows.items() if all(math.isfinite(s) for s in row)}
    return IntervalGrid(tuple(usable), tuple(tuple(row) for row in usable.values())) if usable else None


@dataclass(frozen=True)
class _ImageLosses:
    """What lies outside at every scale. Each image is sorted by itself, so memory is that of the ratios."""

    images: list[Tensor]  # ascending ratios of the valid pixels
    weights: list[float]  # of a pixel: 1 / (images of its unit x valid pixels of the image)
    num_units: int
    unit_name: str

    @classmethod
    def of(cls, ratios: Iterable[Tensor], groups: Sequence[Hashable] | None) -> Self:
        images = [at_least_float32(ratio).flatten() for ratio in ratios]
        for index, image in enumerate(images):
            _check_nan(image, f"the ratios of image {index}")
            if not image.numel():
                raise ValueError(f"image {index} has no valid pixel: leave it out of the calibration set")
        units = list(range(len(images))) if groups is None else list(groups)
        if len(units) != len(images):
            raise ValueError(f"groups names one scene per image: got {len(units)} for {len(images)} images")
        sizes = Counter(units)
        weights = [1.0 / (sizes[unit] * image.numel()) for unit, image in zip(units, images, strict=True)]
        return cls([i.sort().values for i in images], weights, len(sizes), "images" if groups is None else "scenes")

    def outside(self, scale: float) -> float:
        """Sum over units of the share of pixels whose ratio exceeds the scale."""
        shares = [
            weight * (image.numel() - int(torch.searchsorted(image, image.new_tensor(scale), right=True)))
            for image, weight in zip(self.images, self.weights, strict=True)
        ]
        return math.fsum(shares)

    def smallest_scale(self, coverage: float, too_few: TooFew) -> float:
        """Bisection over the ratios themselves: the loss only jumps there."""
        allowed = (self.num_units + 1) * (1 - _exact(coverage)) - 1  # sum of losses that may remain
        if allowed < 0:
            return _not_enough(self.num_units, coverage, self.unit_name, too_few)
        limit = float(allowed) * (1 + 1e-12)  # the sum of weights is rounded, the promise is not
        if self.outside(0.0) <= limit:
            return 0.0
        low, high = 0.0, max(float(image[-1]) for image in self.images)
        while True:  # the answer is a ratio within (low, high]
            inside = [self._between(image, low, high) for image in self.images]
            middle = _median_of_medians(inside)
            if middle >= high:
                return high
            low, high = (middle, high) if self.outside(middle) > limit else (low, middle)

    @staticmethod
    def _between(image: Tensor, low: float, high: float) -> Tensor:
        """The ratios within (low, high)."""
        first = int(torch.searchsorted(image, image.new_tensor(low), right=True))
        last = int(torch.searchsorted(image, image.new_tensor(high), right=False))
        return image[first:last]


def _median_of_medians(images: list[Tensor]) -> float:
    """A ratio that splits what is left well; infinity where nothing is left."""
    candidates = sorted((float(image[len(image) // 2]), len(image)) for image in images if len(image))
    if not candidates:
        return math.inf
    half, seen = sum(count for _, count in candidates) / 2, 0
    for value, count in candidates:
        seen += count
        if seen >= half:
            return value
    return candidates[-1][0]


def _exact(coverage: float) -> Fraction:
    """The decimal number that was typed, 9/10 for 0.9 and for 1 - 0.1, so that ranks do not depend on rounding."""
    return Fraction(str(round(check_coverage(coverage), 12)))


def _not_enough(num_units: int, coverage: float, name: str, too_few: TooFew) -> float:
    if too_few == "inf":
        return math.inf
    need = math.ceil(1 / (1 - _exact(coverage))) - 1
    raise ValueError(
        f"{num_units} calibration {name} cannot promise a coverage of {coverage:g}: at least {need} are needed. "
        "Collect more, lower the coverage, or pass too_few='inf'"
    )


def _check_rows(scores: Tensor) -> None:
    if scores.ndim == 0:
        raise ValueError("expected scores (n, ...) with the calibration rows first; got a single number")


def _check_nan(values: Tensor, name: str) -> None:
    """NaN would be sorted somewhere, silently; infinity is a legitimate miss."""
    if bool(values.isnan().any()):
        raise ValueError(f"{name} contain NaN: mask invalid entries before calibrating")
