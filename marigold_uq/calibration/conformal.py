"""Split-conformal intervals: finite-sample coverage from calibration units that are exchangeable with the test unit.

The unit is what was drawn independently: a row of a table, an image, or a scene that gave several images. Pixels of one
image are not independent and are never pooled as if they were.
"""

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from fractions import Fraction
from typing import Literal, TypeAlias

import torch
from torch import Tensor

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


def cqr_score(lower: Tensor, upper: Tensor, target: Tensor) -> Tensor:
    """Conformalised quantile regression: max(lower - y, y - upper), by how much the interval misses (or clears) y.

    `conformal_rows` of it is a margin: the calibrated interval is [lower - margin, upper + margin].
    """
    if not lower.shape == upper.shape == target.shape:
        raise ValueError(
            f"lower {tuple(lower.shape)}, upper {tuple(upper.shape)} and target {tuple(target.shape)} differ in shape"
        )
    return torch.maximum(lower - target, target - upper)


def conformal_rows(scores: Tensor, alpha: float, *, too_few: TooFew = "raise") -> Tensor:
    """The ceil((n + 1)(1 - alpha))-th smallest of n exchangeable scores (n, ...): (...), one per further coordinate.

    With scores r = |y - ybar|/s (`residual_ratio`) the interval ybar +- q s covers a new row with probability at least
    1 - alpha, and at most 1 - alpha + 1/(n + 1) if scores do not tie. For intervals that cover all outputs of a row
    at once, pass the largest score of each row.
    """
    if scores.ndim == 0:
        raise ValueError("expected scores (n, ...) with the calibration rows first; got a single number")
    scores = at_least_float32(scores)
    _check_nan(scores, "scores")
    num_rows = scores.shape[0]
    rank = math.ceil((num_rows + 1) * (1 - _exact(alpha)))
    if rank > num_rows:
        return scores.new_full(scores.shape[1:], _not_enough(num_rows, alpha, "rows", too_few))
    return scores.kthvalue(rank, dim=0).values


def conformal_images(
    ratios: Iterable[Tensor],
    alpha: float,
    *,
    groups: Sequence[Hashable] | None = None,
    too_few: TooFew = "raise",
) -> float:
    """Smallest lam with (sum_i L_i(lam) + 1) / (n + 1) <= alpha, L_i the share of image i outside ybar +- lam s.

    Conformal risk control: on a new image the *expected share* of valid pixels outside is at most alpha. Exact, no
    grid: L_i only jumps at the ratios of image i, each by one over its number of valid pixels.

    Args:
        ratios: one tensor of |y - ybar|/s at the valid pixels per image (`residual_ratio` with a mask), any shape.
        alpha: the tolerated share, 0.05 for 95 %; needs n >= 1/alpha - 1 units (19 for 5 %).
        groups: the scene of each image. The unit is then the scene, its loss the mean over its images.
        too_few: with fewer units, raise or return infinity.
    """
    images = [at_least_float32(ratio).flatten() for ratio in ratios]
    for index, image in enumerate(images):
        _check_nan(image, f"the ratios of image {index}")
        if not image.numel():
            raise ValueError(f"image {index} has no valid pixel: leave it out of the calibration set")
    units = list(range(len(images))) if groups is None else list(groups)
    if len(units) != len(images):
        raise ValueError(f"groups names one scene per image: got {len(units)} for {len(images)} images")
    sizes = Counter(units)
    allowed = (len(sizes) + 1) * _exact(alpha) - 1  # sum of losses that may remain
    if allowed < 0:
        return _not_enough(len(sizes), alpha, "images" if groups is None else "scenes", too_few)
    weights = [1.0 / (sizes[unit] * image.numel()) for unit, image in zip(units, images, strict=True)]
    return _smallest_scale(images, weights, float(allowed))


def _smallest_scale(images: Sequence[Tensor], weights: Sequence[float], allowed: float) -> float:
    """Largest ratio at which the total weight of ratios from the top down exceeds what may stay outside."""
    ordered, order = torch.cat(list(images)).sort(descending=True)
    each = torch.tensor(weights, dtype=torch.float64).repeat_interleave(torch.tensor([len(i) for i in images]))
    outside = each[order.cpu()].cumsum(0)  # loss if lam falls just below each ratio
    first = int(torch.searchsorted(outside, allowed, right=True))
    return float(ordered[first]) if first < len(ordered) else 0.0


def _exact(alpha: float) -> Fraction:
    """The decimal number that was typed: 0.1 means 1/10, so that ceil and <= do not depend on rounding."""
    if not 0 < alpha < 1:
        raise ValueError(f"alpha is the tolerated miss rate within (0, 1), 0.05 for 95 % coverage; got {alpha}")
    return Fraction(str(float(alpha)))


def _not_enough(num_units: int, alpha: float, name: str, too_few: TooFew) -> float:
    if too_few == "inf":
        return math.inf
    need = math.ceil(1 / _exact(alpha)) - 1
    raise ValueError(
        f"{num_units} calibration {name} cannot promise a miss rate of {alpha}: at least {need} are needed. Collect "
        "more, raise alpha, or pass too_few='inf'"
    )


def _check_nan(values: Tensor, name: str) -> None:
    """NaN would be sorted somewhere, silently; infinity is a legitimate miss."""
    if bool(values.isnan().any()):
        raise ValueError(f"{name} contain NaN: mask invalid entries before calibrating")
