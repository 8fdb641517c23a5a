"""Factors of each lead time, fitted to validation rollouts: dampings, kappas, and shares of the season's spread."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize
from torch import Tensor

from marigold_uq.calibration import Calibration, choose_kappa
from marigold_uq.metrics import crps
from marigold_uq.pipelines.field.output import blend

__all__ = ["LEAST_DAMPING", "Factors", "best_blends", "best_dampings", "best_kappas", "smooth"]


SMOOTHED = 2
"""Lead times on each side that a kappa or a damping is averaged with."""
LEAST_DAMPING = 0.02
"""Smallest share of the forecast that is kept."""
LEAST_KAPPA = 1e-3
"""Smallest kappa beside a share of the season's spread."""


@dataclass(frozen=True)
class Factors:
    """What the pipeline applies at each lead time; kappas are part of the calibration."""

    calibration: Calibration
    dampings: list[float] | None = None
    shares: list[float] | None = None


def smooth(factors: Sequence[float]) -> list[float]:
    """Geometric means with neighbouring lead times; as many before as after, so the first and last keep their own."""
    return [math.exp(value) for value in _near_means([math.log(factor) for factor in factors])]


def _near_means(values: Sequence[float]) -> list[float]:
    found = []
    for lead in range(len(values)):
        reach = min(SMOOTHED, lead, len(values) - 1 - lead)
        near = values[lead - reach : lead + reach + 1]
        found.append(math.fsum(near) / len(near))
    return found


def best_dampings(samples: Tensor, target: Tensor, expected: Tensor) -> tuple[float, ...]:
    """For each lead time the d that makes e + d (ybar - e) closest to the truth, LEAST_DAMPING to 1.

    Each variable counts in units of its own distance from the season's mean, so that units do not matter.
    """
    forecast, truth = samples.mean(0) - expected, target - expected  # (B, L, C, *space)
    unit = truth.square().transpose(0, 2).flatten(1).mean(1).sqrt().clamp(min=1e-12)  # (C,)
    unit = unit.reshape(-1, *[1] * (truth.ndim - 3))
    forecast, truth = forecast / unit, truth / unit
    others = [axis for axis in range(forecast.ndim) if axis != 1]
    share = (forecast * truth).sum(others) / forecast.square().sum(others).clamp(min=1e-12)
    return tuple(share.clamp(LEAST_DAMPING, 1.0).tolist())


def best_kappas(samples: Tensor, target: Tensor) -> tuple[float, ...]:
    """The kappa of each lead time with the best CRPS."""
    return tuple(_best_kappa(samples[:, :, lead], target[:, lead]) for lead in range(target.shape[1]))


def _best_kappa(samples: Tensor, target: Tensor) -> float:
    with warnings.catch_warnings():  # a kappa at a bound shows in what is stored
        warnings.simplefilter("ignore", UserWarning)
        return choose_kappa(samples, target).kappa


def best_blends(samples: Tensor, target: Tensor, season: Tensor) -> tuple[list[float], list[float]]:
    """Kappas and shares of the season's deviation (B, L, C, *space) with the best CRPS of each lead time.

    Their squares, which add up to a variance, are averaged with neighbouring lead times.
    """
    found = []
    for lead in range(target.shape[1]):
        here = samples[:, :, lead : lead + 1], target[:, lead], season[:, lead : lead + 1]
        found.append(_best_blend(*here))
    columns = zip(*found, strict=True)
    kappas, shares = ([math.sqrt(v) for v in _near_means([one**2 for one in column])] for column in columns)
    return [max(kappa, LEAST_KAPPA) for kappa in kappas], shares


def _best_blend(samples: Tensor, target: Tensor, season: Tensor) -> tuple[float, float]:
    """One lead time: samples (M, B, 1, C, *space), target (B, C, *space), season (B, 1, C, *space)."""

    def score(point: NDArray[np.float64]) -> float:
        kappa, share = np.abs(point).tolist()
        return float(crps(blend(samples, [kappa], [share], season)[:, :, 0], target).mean())

    alone = _best_kappa(samples[:, :, 0], target)
    without = score(np.array([alone, 0.0]))
    result = minimize(
        score,
        [0.8 * alone, 0.4],
        method="Nelder-Mead",
        options={"xatol": 0.01, "fatol": 1e-4 * without, "maxfev": 60},
    )
    if result.fun >= without:
        return alone, 0.0
    kappa, share = np.abs(result.x).tolist()
    return kappa, share
