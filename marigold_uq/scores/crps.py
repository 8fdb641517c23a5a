"""Continuous ranked probability score of every coordinate."""

import math
from functools import singledispatch

import torch
from torch import Tensor

from marigold_uq.distributions import (
    GaussianDistribution,
    MixtureDistribution,
    NoiseDistribution,
    PointDistribution,
    SampleDistribution,
)
from marigold_uq.distributions.base import check_value
from marigold_uq.metrics.probabilistic import crps as ensemble_crps

INV_SQRT_PI = 1 / math.sqrt(math.pi)


def crps(dist: NoiseDistribution, value: Tensor) -> Tensor:
    """CRPS(F, y) = E|X - y| - 1/2 E|X - X'| of each marginal, (B, *event); closed form where there is one.

    Joint families are scored through their marginals: the CRPS sees no correlation.
    """
    return _crps(dist, check_value(dist, value))


@singledispatch
def _crps(dist: NoiseDistribution, value: Tensor) -> Tensor:
    return _crps(dist.marginal(), value)


@_crps.register
def _(dist: PointDistribution, value: Tensor) -> Tensor:
    return (value - dist.loc).abs()


@_crps.register
def _(dist: GaussianDistribution, value: Tensor) -> Tensor:
    # s [z (2 Phi(z) - 1) + 2 phi(z) - 1/sqrt(pi)], written so that no product overflows for tiny s
    return absolute_moment(value - dist.loc, dist.scale) - INV_SQRT_PI * dist.scale


@_crps.register
def _(dist: MixtureDistribution, value: Tensor) -> Tensor:
    return mixture_crps(dist.loc, dist.scale, dist.weights, value)


@_crps.register
def _(dist: SampleDistribution, value: Tensor) -> Tensor:
    return ensemble_crps(dist.draws, value)


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
