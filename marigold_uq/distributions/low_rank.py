"""One Gaussian on all coordinates of a sample, covariance diagonal plus low rank (Sigma^mv in the paper)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from marigold_uq.distributions.base import (
    MIN_VARIANCE,
    ONE_OF_EACH,
    HeadOptions,
    InitialBlock,
    NoiseDistribution,
    check_tau,
    inverse_positive,
    per_component,
    positive,
    register,
)
from marigold_uq.distributions.gaussian import GaussianDistribution
from marigold_uq.distributions.linear_algebra import low_rank_log_density
from marigold_uq.distributions.low_rank_mixture import LowRankMixtureDistribution
from marigold_uq.randomness import Generators, randn


@register("low_rank")
@dataclass(frozen=True, eq=False)
class LowRankDistribution(NoiseDistribution):
    """N(loc, diag(cov_diag) + U U^T) with U = cov_factor, D x r. No D x D matrix is ever built."""

    layout = "[loc, rho, factor_1..factor_r]"
    joint = True
    smallest_head = HeadOptions(rank=1)
    default_score = "kernel"

    loc: Tensor  # (B, *event)
    cov_diag: Tensor  # (B, *event), a variance
    cov_factor: Tensor  # (B, R, *event)

    def _expected_shapes(self) -> dict[str, Sequence[int]]:
        batch, *event = self.loc.shape
        return {"cov_diag": self.loc.shape, "cov_factor": (batch, *self.cov_factor.shape[1:2], *event)}

    @classmethod
    def num_blocks(cls, head: HeadOptions = ONE_OF_EACH) -> int:
        return 2 + head.rank

    @classmethod
    def initial_blocks(cls, head: HeadOptions, scale: float) -> list[InitialBlock]:
        variance = InitialBlock(bias=inverse_positive(scale**2, MIN_VARIANCE))
        return [InitialBlock(copies_mean=True), variance, *[InitialBlock(is_factor=True)] * head.rank]

    @classmethod
    def from_raw(
        cls, raw: Tensor, head: HeadOptions = ONE_OF_EACH, *, event_shape: Sequence[int] | None = None
    ) -> Self:
        blocks = cls._split_blocks(raw, head, event_shape)
        return cls(blocks[:, 0], positive(blocks[:, 1], MIN_VARIANCE), blocks[:, 2:])

    @property
    def rank(self) -> int:
        """r."""
        return self.cov_factor.shape[1]

    @property
    def mean(self) -> Tensor:
        return self.loc

    @property
    def variance(self) -> Tensor:
        return self.cov_diag + self.cov_factor.square().sum(1)

    def covariance(self) -> Tensor:
        factor = self.cov_factor.flatten(2)  # (B, R, D)
        return torch.diag_embed(self.cov_diag.flatten(1)) + factor.mT @ factor

    def rsample(self, sample_shape: Sequence[int] = (), generator: Generators = None) -> Tensor:
        """Loc + U z_r + sqrt(d) z, from r + D normal numbers."""
        batch = self.loc.shape[0]
        z_rank = randn(sample_shape, (batch, self.rank), like=self.loc, generator=generator)
        z_rank = z_rank.reshape(*z_rank.shape, *[1] * (self.loc.ndim - 1))  # (*sample, B, R, 1, ...)
        z = randn(sample_shape, self.loc.shape, like=self.loc, generator=generator)
        shared = (self.cov_factor * z_rank).sum(-self.loc.ndim)
        return self.loc + shared + self.cov_diag.sqrt() * z

    def _log_density(self, value: Tensor, mask: Tensor | None) -> Tensor:
        return low_rank_log_density(value - self.loc, self.cov_diag, self.cov_factor, mask)

    def affine(self, scale: float | Tensor, shift: float | Tensor) -> Self:
        factor = per_component(scale, self.loc.ndim - 1) * self.cov_factor
        return type(self)(scale * self.loc + shift, scale * scale * self.cov_diag, factor)

    def scaled(self, tau: float) -> Self:
        return type(self)(self.loc, check_tau(tau) * self.cov_diag, math.sqrt(tau) * self.cov_factor)

    def _convolved(self, variance: float) -> Self:
        return type(self)(self.loc, self.cov_diag + variance, self.cov_factor)

    def marginal(self) -> GaussianDistribution:
        return GaussianDistribution(self.loc, self.stddev)

    def components(self) -> LowRankMixtureDistribution:
        """The mixture of this one component."""
        return LowRankMixtureDistribution.single(self.loc, self.cov_diag, self.cov_factor)
