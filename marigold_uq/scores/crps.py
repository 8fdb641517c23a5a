"""Continuous ranked probability score of every coordinate."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from marigold_uq.distributions import (
    GaussianDistribution,
    MixtureDistribution,
    NoiseDistribution,
    PointDistribution,
    SampleDistribution,
)
from marigold_uq.scores.ensemble import check_draws, ensemble_crps
from marigold_uq.scores.masking import formula_for, masked_target, zero_masked

INV_SQRT_PI = 1 / math.sqrt(math.pi)


def crps(dist: NoiseDistribution, value: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """CRPS(F, y) = E|X - y| - 1/2 E|X - X'| of each marginal, (B, *event); closed form where there is one.

    Joint families are scored through their marginals: the CRPS sees no correlation. Masked coordinates score 0.
    """
    value, keep = masked_target(dist, value, mask)
    marginal = dist.marginal()
    return zero_masked(formula_for(FORMULAS, marginal)(marginal, value), keep)


def _point(dist: PointDistribution, value: Tensor) -> Tensor:
    return (value - dist.loc).abs()


def _gaussian(dist: GaussianDistribution, value: Tensor) -> Tensor:
    # s [z (2 Phi(z) - 1) + 2 phi(z) - 1/sqrt(pi)], written so that no product overflows for tiny s
    return absolute_moment(value - dist.loc, dist.scale) - INV_SQRT_PI * dist.scale


def _mixture(dist: MixtureDistribution, value: Tensor) -> Tensor:
    return mixture_crps(dist.loc, dist.scale, dist.weights, value)


def _sample(dist: SampleDistribution, value: Tensor) -> Tensor:
    check_draws(dist.draws)
    return ensemble_crps(dist.draws, value)


FORMULAS: dict[type[NoiseDistribution], Callable[..., Tensor]] = {
    PointDistribution: _point,
    GaussianDistribution: _gaussian,
    MixtureDistribution: _mixture,
    SampleDistribution: _sample,
}
"""Families that `marginal` returns."""


def mixture_crps(loc: Tensor, scale: Tensor, weights: Tensor, value: Tensor) -> Tensor:
    """sum_i w_i A(y - mu_i, s_i^2) - 1/2 sum_ij w_i w_j A(mu_i - mu_j, s_i^2 + s_j^2), components on axis 1.

    Pairs are taken row by row, so that memory stays K times the event and not K^2.
    """
    to_value = (weights * absolute_moment(value.unsqueeze(1) - loc, scale)).sum(1)
    between = INV_SQRT_PI * (weights.square() * scale).sum(1)  # i = j: A(0, 2 s^2) / 2 = s / sqrt(pi)
    for i in range(loc.shape[1] - 1):
        pair_scale = torch.hypot(scale[:, i : i + 1], scale[:, i + 1 :])
        moment = absolute_moment(loc[:, i : i + 1] - loc[:, i + 1 :], pair_scale)
        between = between + weights[:, i] * (weights[:, i + 1 :] * moment).sum(1)
    return to_value - between


def absolute_moment(mean: Tensor, scale: Tensor) -> Tensor:
    """A(m, s^2) = E|N(m, s^2)| = m (2 Phi(m/s) - 1) + 2 s phi(m/s)."""
    z = mean / scale
    density = torch.exp(-0.5 * z.square()) / math.sqrt(2 * math.pi)
    return mean * torch.erf(z / math.sqrt(2)) + 2 * scale * density
