"""A mixture of joint Gaussians with low-rank covariances: multimodal and correlated at once."""

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
    spread_components,
)
from marigold_uq.distributions.linear_algebra import low_rank_log_density
from marigold_uq.distributions.mixture import MixtureDistribution, pick_component
from marigold_uq.randomness import Generators, rand, randn


@register("low_rank_mixture")
@dataclass(frozen=True, eq=False)
class LowRankMixtureDistribution(NoiseDistribution):
    """sum_k softmax(logits)_k N(loc_k, diag(d_k) + U_k U_k^T); one component is drawn for the whole event."""

    layout = "[loc_1..loc_K, rho_1..rho_K, logit_1..logit_K, factor_11..factor_1r, .., factor_K1..factor_Kr]"
    joint = True
    default_score = "kernel"
    smallest_head = HeadOptions(num_components=2)

    loc: Tensor  # (B, K, *event)
    cov_diag: Tensor  # (B, K, *event), variances
    cov_factor: Tensor  # (B, K, R, *event)
    logits: Tensor  # (B, K)

    def _expected_shapes(self) -> dict[str, Sequence[int]]:
        batch, count, *event = self.loc.shape
        factor = (batch, count, *self.cov_factor.shape[2:3], *event)
        return {"cov_diag": self.loc.shape, "cov_factor": factor, "logits": (batch, count)}

    @classmethod
    def single(cls, loc: Tensor, cov_diag: Tensor, cov_factor: Tensor) -> Self:
        """One component, from the parameters of a low-rank Gaussian."""
        weightless = loc.new_zeros(loc.shape[0], 1)
        return cls(loc.unsqueeze(1), cov_diag.unsqueeze(1), cov_factor.unsqueeze(1), weightless)

    def components(self) -> Self:
        """The distribution itself."""
        return self

    @classmethod
    def num_blocks(cls, head: HeadOptions = ONE_OF_EACH) -> int:
        return head.num_components * (3 + head.rank)

    @classmethod
    def initial_blocks(cls, head: HeadOptions, scale: float) -> list[InitialBlock]:
        count = head.num_components
        variances = [InitialBlock(bias=inverse_positive(scale**2, MIN_VARIANCE))] * count
        weights = [InitialBlock(is_logit=True)] * count
        factors = [InitialBlock(is_factor=True)] * (count * head.rank)
        return [*spread_components(count, scale), *variances, *weights, *factors]

    @classmethod
    def from_raw(
        cls, raw: Tensor, head: HeadOptions = ONE_OF_EACH, *, event_shape: Sequence[int] | None = None
    ) -> Self:
        """Weights belong to whole samples: the logits are averaged over all coordinates."""
        blocks = cls._split_blocks(raw, head, event_shape)
        count = head.num_components
        loc, rho, logits = blocks[:, : 3 * count].chunk(3, dim=1)
        if head.rank:
            factor = blocks[:, 3 * count :].unflatten(1, (count, head.rank))
        else:
            factor = loc.new_zeros(loc.shape[0], count, 0, *loc.shape[2:])
        return cls(loc, positive(rho, MIN_VARIANCE), factor, logits.flatten(2).mean(2))

    @property
    def num_components(self) -> int:
        """K."""
        return self.loc.shape[1]

    @property
    def weights(self) -> Tensor:
        """Mixture weights of whole samples, (B, K)."""
        return self.logits.softmax(1)

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.loc.shape[0], *self.loc.shape[2:]))

    @property
    def mean(self) -> Tensor:
        return self.marginal().mean

    @property
    def variance(self) -> Tensor:
        return self.marginal().variance

    def rsample(self, sample_shape: Sequence[int] = (), generator: Generators = None) -> Tensor:
        batch, _, rank = self.cov_factor.shape[:3]
        event = self.loc.shape[2:]
        uniform = rand(sample_shape, (batch,), like=self.loc, generator=generator)
        z_rank = randn(sample_shape, (batch, rank), like=self.loc, generator=generator)
        z = randn(sample_shape, (batch, *event), like=self.loc, generator=generator)
        (choice,) = pick_component(self.weights, uniform, self._component_index())  # (*sample, B)
        rows = torch.arange(batch, device=choice.device)
        factor = self.cov_factor[rows, choice]  # (*sample, B, R, *event)
        shared = (factor * z_rank.reshape(*z_rank.shape, *[1] * len(event))).sum(-len(event) - 1)
        return self.loc[rows, choice] + shared + self.cov_diag[rows, choice].sqrt() * z

    def _component_index(self) -> Tensor:
        return torch.arange(self.num_components, device=self.loc.device).expand(self.logits.shape)

    def covariance(self) -> Tensor:
        """Within the components plus between them."""
        factor = self.cov_factor.flatten(3)  # (B, K, R, D)
        spread = (self.loc - self.mean.unsqueeze(1)).flatten(2)  # (B, K, D)
        inner = torch.diag_embed(self.cov_diag.flatten(2)) + factor.mT @ factor
        return (self.weights[..., None, None] * (inner + spread.unsqueeze(-1) * spread.unsqueeze(-2))).sum(1)

    def _log_density(self, value: Tensor, mask: Tensor | None) -> Tensor:
        components = [
            low_rank_log_density(value - self.loc[:, k], self.cov_diag[:, k], self.cov_factor[:, k], mask)
            for k in range(self.num_components)
        ]
        return (self.logits.log_softmax(1) + torch.stack(components, -1)).logsumexp(-1)

    def affine(self, scale: float | Tensor, shift: float | Tensor) -> Self:
        event = self.loc.ndim - 2
        wide = per_component(scale, event)
        return type(self)(
            loc=wide * self.loc + per_component(shift, event),
            cov_diag=wide * wide * self.cov_diag,
            cov_factor=per_component(scale, event, axes=2) * self.cov_factor,
            logits=self.logits,
        )

    def scaled(self, tau: float) -> Self:
        return type(self)(self.loc, check_tau(tau) * self.cov_diag, math.sqrt(tau) * self.cov_factor, self.logits)

    def _convolved(self, variance: float) -> Self:
        return type(self)(self.loc, self.cov_diag + variance, self.cov_factor, self.logits)

    def marginal(self) -> MixtureDistribution:
        scale = (self.cov_diag + self.cov_factor.square().sum(2)).sqrt()
        logits = self.logits.reshape(*self.logits.shape, *[1] * (self.loc.ndim - 2)).expand_as(self.loc)
        return MixtureDistribution(self.loc, scale, logits)
