"""Independent Gaussians, one per coordinate (Sigma^diag in the paper)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from marigold_uq.distributions.base import (
    InitialBlock,
    NoiseDistribution,
    check_tau,
    inverse_positive,
    positive,
    register,
)
from marigold_uq.randomness import Generators, randn


@register("gaussian")
@dataclass(frozen=True, eq=False)
class GaussianDistribution(NoiseDistribution):
    """N(loc, diag(scale^2)); `scale` is a standard deviation."""

    layout = "[loc, rho]"
    symmetric = True

    loc: Tensor  # (B, *event)
    scale: Tensor  # (B, *event)

    @classmethod
    def num_blocks(cls, num_components: int = 1, rank: int = 0) -> int:
        return 2

    @classmethod
    def initial_blocks(cls, num_components: int, rank: int, scale: float) -> list[InitialBlock]:
        return [InitialBlock(copies_mean=True), InitialBlock(bias=inverse_positive(scale))]

    @classmethod
    def from_raw(
        cls,
        raw: Tensor,
        *,
        num_components: int = 1,
        rank: int = 0,
        event_shape: Sequence[int] | None = None,
        pooled_weights: bool = False,
    ) -> Self:
        loc, rho = cls._split_blocks(raw, num_components, rank, event_shape).unbind(1)
        return cls(loc, positive(rho))

    @property
    def mean(self) -> Tensor:
        return self.loc

    @property
    def variance(self) -> Tensor:
        return self.scale.square()

    @property
    def stddev(self) -> Tensor:
        return self.scale

    def rsample(self, sample_shape: Sequence[int] = (), generator: Generators = None) -> Tensor:
        return self.loc + self.scale * randn(sample_shape, self.loc.shape, like=self.loc, generator=generator)

    def log_prob(self, value: Tensor) -> Tensor:
        """Log density of each coordinate, (B, *event)."""
        return gaussian_log_density(value - self.loc, self.scale)

    def affine(self, scale: float | Tensor, shift: float | Tensor) -> Self:
        return type(self)(scale * self.loc + shift, (scale * self.scale).abs())

    def scaled(self, tau: float) -> Self:
        return type(self)(self.loc, math.sqrt(check_tau(tau)) * self.scale)

    def convolved(self, variance: float) -> Self:
        return type(self)(self.loc, (self.scale.square() + variance).sqrt()) if variance else self

    def marginal(self) -> Self:
        return self

    def _marginal_quantile(self, levels: Tensor) -> Tensor:
        z = torch.special.ndtri(levels).reshape(-1, *[1] * self.loc.ndim)  # (Q, 1, ...)
        return self.loc + self.scale * z


def gaussian_log_density(residual: Tensor, scale: Tensor) -> Tensor:
    """log N(residual; 0, scale^2), coordinate by coordinate."""
    return -0.5 * (residual / scale).square() - scale.log() - 0.5 * math.log(2 * math.pi)
