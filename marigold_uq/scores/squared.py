"""Squared error of the mean, the classical diffusion loss."""

from torch import Tensor

from marigold_uq.distributions import NoiseDistribution
from marigold_uq.distributions.base import check_value


def squared_error(dist: NoiseDistribution, value: Tensor) -> Tensor:
    """(E X - y)^2 of every coordinate, (B, *event)."""
    return (dist.mean - check_value(dist, value)).square()
