"""Independent Gaussians, one per coordinate (Sigma^diag in the paper)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from marigold_uq.distributions.base import (
    ONE_OF_EACH,
    HeadOptions,
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

    loc: Tensor  # (B, *event)
    scale: Tensor  # (B, *event)

    def _expected_shapes(self) -> dict[str, Sequence[int]]:
        return {"scale": self.loc.shape}

    @classmethod
    def num_blocks(cls, head: HeadOptions = ONE_OF_EACH) -> int:
        return 2

    @classmethod
    def initial_blocks(cls, head: HeadOptions, scale: float) -> list[InitialBlock]:
        return [InitialBlock(copies_mean=True), InitialBlock(bias=inverse_positive(scale))]

    @classmethod
    def from_raw(
        cls, raw: Tensor, head: HeadOptions = ONE_OF_EACH, *, event_shape: Sequence[int] | None = None
    ) -> Self:
        loc, rho = cls._split_blocks(raw, head, event_shape).unbind(1)
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

    def _log_density(self, value: Tensor, mask: Tensor | None) -> Tensor:
        return gaussian_log_density(value - self.loc, self.scale)

    def affine(self, scale: float | Tensor, shift: float | Tensor) -> Self:
        return type(self)(scale * self.loc + shift, (scale * self.scale).abs())

    def scaled(self, tau: float) -> Self:
        return type(self)(self.loc, math.sqrt(check_tau(tau)) * self.scale)

    def _convolved(self, variance: float) -> Self:
        return type(self)(self.loc, (self.scale.square() + variance).sqrt())

    def marginal(self) -> Self:
        return self

    def _marginal_quantile(self, levels: Tensor) -> Tensor:
        z = torch.special.ndtri(levels).reshape(-1, *[1] * self.loc.ndim)  # (Q, 1, ...)
        return self.loc + self.scale * z

    def _marginal_cdf(self, value: Tensor) -> Tensor:
        return torch.special.ndtr((value - self.loc) / self.scale)


def gaussian_log_density(residual: Tensor, scale: Tensor) -> Tensor:
    """log N(residual; 0, scale^2), coordinate by coordinate."""
    return -0.5 * (residual / scale).square() - scale.log() - 0.5 * math.log(2 * math.pi)
