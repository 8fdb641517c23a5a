"""Squared error of the mean, the classical diffusion loss."""

from torch import Tensor

from marigold_uq.distributions import NoiseDistribution
from marigold_uq.scores.masking import masked_target, zero_masked


def squared_error(dist: NoiseDistribution, value: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """(E X - y)^2 of every coordinate, (B, *event); 0 where it is masked."""
    value, keep = masked_target(dist, value, mask)
    return zero_masked((dist.mean - value).square(), keep)
