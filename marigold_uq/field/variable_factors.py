"""Dampings, kappas and shares of the season's spread, fitted variable by variable, with points weighed by area.

The CRPS of scaled samples is the scaled CRPS, so a weighted fit is a fit to weighted values; a squared error asks for
the root of the weight. Missing points have the weight 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from marigold_uq.calibration import Calibration
from marigold_uq.field.calibration_windows import Rollouts
from marigold_uq.field.lead_factors import Factors, best_blends, best_dampings, best_kappas, smooth
from marigold_uq.pipelines.field.output import damp, stretch

__all__ = ["best_stretched", "fit_variable_factors", "of_variables"]


def of_variables(samples: Tensor, rollouts: Rollouts) -> Iterator[tuple[Tensor, Tensor, Tensor | None, Tensor]]:
    """Samples (M, B, L, 1, *space), target, expected and weight (B, L, 1, *space) of one variable after the other."""
    weights = rollouts.weight.to(rollouts.target).expand(rollouts.target.shape)
    for number in range(rollouts.target.shape[2]):
        one = slice(number, number + 1)
        expected = None if rollouts.expected is None else rollouts.expected[:, :, one]
        yield samples[:, :, :, one], rollouts.target[:, :, one], expected, weights[:, :, one]


def best_stretched(samples: Tensor, rollouts: Rollouts) -> Tensor:
    """Samples (M, B, L, C, *space) with the best damping and kappa of each variable and lead time."""
    found = []
    for values, target, expected, weight in of_variables(samples, rollouts):
        damped = _damped(values, target, expected, weight, lambda factors: factors)[0]
        found.append(stretch(damped, best_kappas(weight * damped, weight * target)))
    return torch.cat(found, 3)


def fit_variable_factors(
    samples: Tensor, rollouts: Rollouts, chosen: Calibration, season_deviations: Tensor | None
) -> Factors:
    """Dampings where the season is known, then kappas, with shares of the season's spread where that is known.

    Each list holds all lead times of the first variable first.
    """
    dampings: list[float] = []
    kappas: list[float] = []
    shares: list[float] = []
    for number, (values, target, expected, weight) in enumerate(of_variables(samples, rollouts)):
        damped, own = _damped(values, target, expected, weight, smooth)
        dampings += own
        if season_deviations is None:
            kappas += smooth(best_kappas(weight * damped, weight * target))
        else:
            usual = season_deviations[:, :, number : number + 1].nan_to_num(nan=0.0)
            blended = best_blends(weight * damped, weight * target, weight * usual)
            kappas, shares = kappas + blended[0], shares + blended[1]
    return Factors(replace(chosen, kappa=tuple(kappas)), dampings or None, shares or None)


def _damped(
    samples: Tensor,
    target: Tensor,
    expected: Tensor | None,
    weight: Tensor,
    smoothed: Callable[[list[float]], list[float]],
) -> tuple[Tensor, list[float]]:
    """Samples moved towards what the season expects, and the dampings; without a season as they are."""
    if expected is None:
        return samples, []
    root = weight.sqrt()
    dampings = smoothed(list(best_dampings(root * samples, root * target, root * expected)))
    return damp(samples, dampings, expected), dampings
