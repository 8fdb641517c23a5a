"""An implicit distribution known through draws only (eps^ES in the paper)."""

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
    register,
)
from marigold_uq.distributions.low_rank_mixture import LowRankMixtureDistribution
from marigold_uq.distributions.order_statistics import member_quantiles
from marigold_uq.precision import at_least_float32
from marigold_uq.randomness import Generators, rand


@register("sample")
@dataclass(frozen=True, eq=False)
class SampleDistribution(NoiseDistribution):
    """M equally likely draws of whole events, from a network that sees a fresh noise channel at its input.

    There is no density; scores are the fair sample estimators. `tau` has nothing to shrink here but the noise of the
    reverse step, which `convolved` adds.
    """

    layout = "[draw]"
    joint = True
    has_spread = False
    has_density = False
    batch_axis = 1
    noise_channels = 1
    default_score = "energy"

    draws: Tensor  # (M, B, *event)

    @classmethod
    def num_blocks(cls, head: HeadOptions = ONE_OF_EACH) -> int:
        return 1

    @classmethod
    def initial_blocks(cls, head: HeadOptions, scale: float) -> list[InitialBlock]:
        return [InitialBlock(copies_mean=True)]

    @classmethod
    def from_raw(
        cls, raw: Tensor, head: HeadOptions = ONE_OF_EACH, *, event_shape: Sequence[int] | None = None
    ) -> Self:
        """One network call is one draw; `stack` joins several."""
        return cls(cls._split_blocks(raw, head, event_shape)[:, 0].unsqueeze(0))

    @classmethod
    def stack(cls, parts: Sequence["SampleDistribution"]) -> Self:
        """The distribution of all the draws of `parts`."""
        return cls(torch.cat([at_least_float32(part.draws) for part in parts]))

    @property
    def shape(self) -> torch.Size:
        return self.draws.shape[1:]

    @property
    def mean(self) -> Tensor:
        return self.draws.mean(0)

    @property
    def variance(self) -> Tensor:
        return self.draws.var(0, correction=0)

    def covariance(self) -> Tensor:
        """Of the M draws, divisor M."""
        spread = (self.draws - self.mean).flatten(2).transpose(0, 1)  # (B, M, D)
        return spread.mT @ spread / self.draws.shape[0]

    def rsample(self, sample_shape: Sequence[int] = (), generator: Generators = None) -> Tensor:
        num_draws, batch = self.draws.shape[:2]
        uniform = rand(sample_shape, (batch,), like=self.draws, generator=generator)  # (*sample, B)
        index = (uniform * num_draws).long().clamp(max=num_draws - 1)
        return self.draws[index, torch.arange(batch, device=index.device)]

    def affine(self, scale: float | Tensor, shift: float | Tensor) -> Self:
        return type(self)(scale * self.draws + shift)

    def scaled(self, tau: float) -> Self:
        check_tau(tau)
        return self

    def _convolved(self, variance: float) -> NoiseDistribution:
        """Around each draw a Gaussian: a mixture of M joint components."""
        loc = self.draws.transpose(0, 1)  # (B, M, *event)
        return LowRankMixtureDistribution(
            loc=loc,
            cov_diag=torch.full_like(loc, variance),
            cov_factor=loc.new_zeros(*loc.shape[:2], 0, *loc.shape[2:]),
            logits=loc.new_zeros(loc.shape[:2]),
        )

    def marginal(self) -> Self:
        return self

    def _marginal_quantile(self, levels: Tensor) -> Tensor:
        """Plotting positions m/(M+1) (`weibull`), constant beyond the outermost draws."""
        return member_quantiles(self.draws, levels.tolist())

    def _marginal_cdf(self, value: Tensor) -> Tensor:
        share = torch.zeros_like(value)
        for draw in self.draws:  # one by one: no (M, ..., B, *event)
            share = share + (draw <= value).to(share.dtype)
        return share / self.draws.shape[0]
