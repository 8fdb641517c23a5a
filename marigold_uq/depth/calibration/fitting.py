"""Kappa and conformal intervals from pixels, and what they cover on units that were left out."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from marigold_uq.calibration import (
    COVERAGES,
    IntervalGrid,
    choose_gaussian_kappa,
    choose_kappa,
    interval_grid_images,
    residual_ratio,
    unit_means,
)
from marigold_uq.depth.calibration.options import DepthCalibration
from marigold_uq.depth.calibration.pixels import Pixels, split_units
from marigold_uq.depth.calibration.spread import Base, SpreadRule, candidate_rules
from marigold_uq.metrics import coverage, interval_width

Ends = tuple[Tensor, Tensor]
Before = Callable[[Pixels, float], Ends | None]
"""The interval that was there before, (N,) each; None where there was none."""
FEW_UNITS = 20
_MAX_FOLDS = 20


@dataclass(frozen=True)
class Fit:
    """What was chosen on one part of the images and promised by the other.

    Args:
        rule: From what the model states to a standard deviation.
        kappa: Its factor.
        interval: Half widths in stretched standard deviations, at the coverages that can be promised.
        num_units: Units behind the intervals.
    """

    rule: SpreadRule
    kappa: float
    interval: IntervalGrid
    num_units: int

    def promises(self, level: float) -> bool:
        """Whether there were enough units for an interval of this coverage."""
        return self.interval.coverages[0] <= level <= self.interval.coverages[-1]

    def std(self, pixels: Pixels) -> Tensor:
        """The calibrated standard deviation, (N,)."""
        return self.kappa * abs(pixels.scale) * self.rule.spread(pixels.stated)

    def ends(self, pixels: Pixels, level: float) -> Ends | None:
        """The interval, (N,) each; None where it cannot be promised."""
        if not self.promises(level):
            return None
        half_width = self.interval.scale(level)[0] * self.std(pixels)
        return pixels.point - half_width, pixels.point + half_width


def fit(
    first: Sequence[Pixels],
    second: Sequence[Pixels],
    *,
    metric: bool = False,
    levels: Sequence[float] = COVERAGES,
) -> Fit:
    """Rule and kappa from the first images, intervals at the `levels` from the second."""
    rule, kappa = choose_rule(first, metric=metric)
    unscaled = Fit(rule, kappa, IntervalGrid((0.5,), ((0.0,),)), 0)
    ratios = [residual_ratio(one.point, unscaled.std(one), one.truth) for one in second]
    units = [one.unit for one in second]
    grid = interval_grid_images(ratios, levels, groups=units)
    if grid is None:
        raise ValueError("no interval can be promised: at some pixels the spread is 0 and the prediction wrong")
    return Fit(rule, kappa, grid, len(set(units)))


def choose_rule(pixels: Sequence[Pixels], *, metric: bool) -> tuple[SpreadRule, float]:
    """The rule with the best CRPS after its best kappa, and that kappa."""
    kinds = sorted({one.stated.kind for one in pixels})
    if len(kinds) > 1:
        raise ValueError(
            f"the maps state different things beside the mean: {', '.join(kinds)}; calibrate each by itself"
        )
    rules = candidate_rules(kinds[0], metric=metric, learn=partial(_learn, pixels))
    choices = [_best_kappa(rule, pixels) for rule in rules]
    _, place = min((score, place) for place, (_, score) in enumerate(choices))
    return rules[place], choices[place][0]


def _learn(pixels: Sequence[Pixels], base: Base) -> SpreadRule:
    """How the error, in units of the base, falls with the confidence."""
    plain = SpreadRule(base)
    errors, confidences = [], []
    for one in pixels:
        assert one.stated.confidence is not None
        unit = abs(one.scale) * plain.of_base(one.stated)
        errors.append((one.truth - one.point).abs() / unit)
        confidences.append(one.stated.confidence)
    error, confidence = torch.cat(errors), torch.cat(confidences)
    usable = error.isfinite()
    if not bool(usable.any()):
        raise ValueError("all maps are constant, so their errors have no unit: nothing can be learnt")
    return SpreadRule.learnt(base, confidence[usable], error[usable])


def _best_kappa(rule: SpreadRule, pixels: Sequence[Pixels]) -> tuple[float, float]:
    """Kappa and the CRPS with it: of members where there are any, else of a Gaussian."""
    truth = torch.cat([one.truth for one in pixels])
    draws = [one.draws for one in pixels]
    if all(one is not None for one in draws):
        choice = choose_kappa(torch.cat([one for one in draws if one is not None], -1), truth)
    else:
        std = torch.cat([abs(one.scale) * rule.spread(one.stated) for one in pixels])
        choice = choose_gaussian_kappa(torch.cat([one.point for one in pixels]), std, truth)
    return choice.kappa, choice.score


@dataclass(frozen=True)
class Coverage:
    """What intervals cover: a mean over units of the mean over their images, at several levels.

    Args:
        levels: Nominal.
        share: Covered, NaN where no interval was promised.
        standard_error: Over units.
        width: Mean width, in standard deviations of the image's truth.
    """

    levels: tuple[float, ...]
    share: tuple[float, ...]
    standard_error: tuple[float, ...]
    width: tuple[float, ...]

    @classmethod
    def of(cls, levels: Sequence[float], covered: Tensor, width: Tensor, units: Sequence[str]) -> Coverage:
        """From shares and widths (images, L); a level that is missing for some image is missing."""
        means = torch.stack([unit_means(column, units) for column in covered.T], 1)  # (U, L)
        widths = torch.stack([unit_means(column, units) for column in width.T], 1)
        error = means.std(0) / math.sqrt(len(means)) if len(means) > 1 else torch.full_like(means[0], math.nan)
        numbers = (means.mean(0), error, widths.mean(0))
        return cls(tuple(levels), *(tuple(values.tolist()) for values in numbers))


@dataclass(frozen=True)
class LeftOut:
    """Every image judged by a fit that has not seen its unit.

    Args:
        images: In the order of the tensors below.
        fits: That of each image.
        covered: (images, L) at the levels of the summary, NaN where not promised.
        width: The same.
        summary: Over units.
    """

    images: tuple[Pixels, ...]
    fits: tuple[Fit, ...]
    covered: Tensor
    width: Tensor
    summary: Coverage


def leave_out(
    pixels: Sequence[Pixels],
    options: DepthCalibration,
    *,
    metric: bool = False,
    folds: Sequence[str] | None = None,
    levels: Sequence[float] = COVERAGES,
) -> LeftOut:
    """Calibrate anew without each fold, and see what the intervals cover on it.

    Args:
        pixels: All images.
        options: How the rest is split.
        metric: Whether maps are in metres.
        folds: What is left out together, one name per image; default: the units, in at most 20 folds.
        levels: Of the intervals; few of them are quicker.
    """
    names = _folds([one.unit for one in pixels], options.seed) if folds is None else list(folds)
    found: dict[int, tuple[Fit, Tensor, Tensor]] = {}
    for name in dict.fromkeys(names):
        rest = [one for one, own in zip(pixels, names, strict=True) if own != name]
        first, second = split_units([one.unit for one in rest], options)
        own_fit = fit([rest[i] for i in first], [rest[i] for i in second], metric=metric, levels=levels)
        for one, own in zip(pixels, names, strict=True):
            if own == name:
                found[one.index] = (own_fit, *outcome(one, own_fit.ends, levels))
    fits, covered, width = zip(*(found[one.index] for one in pixels), strict=True)
    stacked = torch.stack(covered), torch.stack(width)
    by_unit = [one.unit for one in pixels] if folds is None else names
    return LeftOut(tuple(pixels), fits, *stacked, Coverage.of(levels, *stacked, by_unit))


def covered_before(
    pixels: Sequence[Pixels],
    before: Before,
    units: Sequence[str] | None = None,
    levels: Sequence[float] = COVERAGES,
) -> Coverage:
    """What the intervals cover that were there before."""
    covered, width = zip(*(outcome(one, before, levels) for one in pixels), strict=True)
    names = [one.unit for one in pixels] if units is None else units
    return Coverage.of(levels, torch.stack(covered), torch.stack(width), names)


def outcome(pixels: Pixels, ends: Before, levels: Sequence[float]) -> tuple[Tensor, Tensor]:
    """Covered share and mean width of one image at the levels, (L,) each; NaN without an interval."""
    rows = []
    for level in levels:
        found = ends(pixels, level)
        if found is None:
            rows.append((math.nan, math.nan))
        else:
            lower, upper = found
            rows.append(
                (float(coverage(lower, upper, pixels.truth).mean()), float(interval_width(lower, upper).mean()))
            )
    covered, width = torch.tensor(rows, dtype=torch.float64).T
    return covered, width


def missing_units(fit: Fit, levels: Sequence[float]) -> list[tuple[float, int]]:
    """Levels that cannot be promised, with the units that they need."""
    return [(level, math.ceil(round(1 / (1 - level), 6)) - 1) for level in levels if not fit.promises(level)]


def _folds(units: Sequence[str], seed: int) -> list[str]:
    """The units themselves, or dealt to twenty folds where there are more."""
    names = list(dict.fromkeys(units))
    random.Random(seed).shuffle(names)
    places = {name: str(place % _MAX_FOLDS) for place, name in enumerate(names)}
    return [places[unit] for unit in units]
