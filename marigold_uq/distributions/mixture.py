"""Independent Gaussian mixtures, one per coordinate (Sigma^mix in the paper)."""

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
    per_component,
    positive,
    register,
    spread_components,
)
from marigold_uq.distributions.gaussian import GaussianDistribution, gaussian_log_density
from marigold_uq.randomness import Generators, rand, randn

MAX_BISECTIONS = 2200
"""Halvings that bring any bracket of float64 numbers down to its smallest; about 55 suffice where scales are alike."""


@register("mixture")
@dataclass(frozen=True, eq=False)
class MixtureDistribution(NoiseDistribution):
    """Per coordinate sum_k softmax(logits)_k N(loc_k, scale_k^2); components on axis 1.

    `rsample` draws the component by inverting the cumulative weights, so gradients reach loc and scale but not logits.
    """

    layout = "[loc_1..loc_K, rho_1..rho_K, logit_1..logit_K]"
    smallest_head = HeadOptions(num_components=2)

    loc: Tensor  # (B, K, *event)
    scale: Tensor  # (B, K, *event)
    logits: Tensor  # (B, K, *event)

    def _expected_shapes(self) -> dict[str, Sequence[int]]:
        return {"scale": self.loc.shape, "logits": self.loc.shape}

    @classmethod
    def num_blocks(cls, head: HeadOptions = ONE_OF_EACH) -> int:
        return 3 * head.num_components

    @classmethod
    def initial_blocks(cls, head: HeadOptions, scale: float) -> list[InitialBlock]:
        count = head.num_components
        scales = [InitialBlock(bias=inverse_positive(scale))] * count
        return [*spread_components(count, scale), *scales, *[InitialBlock(is_logit=True)] * count]

    @classmethod
    def from_raw(
        cls, raw: Tensor, head: HeadOptions = ONE_OF_EACH, *, event_shape: Sequence[int] | None = None
    ) -> Self:
        """With `head.pooled_weights` one weight vector per sample and channel, from the logits averaged over space."""
        loc, rho, logits = cls._split_blocks(raw, head, event_shape).chunk(3, dim=1)
        if head.pooled_weights and logits.ndim > 3:
            space = tuple(range(3, logits.ndim))
            logits = logits.mean(space, keepdim=True).expand_as(loc)
        return cls(loc, positive(rho), logits)

    @classmethod
    def pool(cls, parts: Sequence[NoiseDistribution]) -> Self:
        """The mixture of Gaussians, or mixtures, of one shape, each with the same weight."""
        mixtures = [_as_mixture(part) for part in parts]
        return cls(
            loc=torch.cat([one.loc for one in mixtures], 1),
            scale=torch.cat([one.scale for one in mixtures], 1),
            logits=torch.cat([one.logits.log_softmax(1) for one in mixtures], 1),
        )

    @property
    def num_components(self) -> int:
        """K."""
        return self.loc.shape[1]

    @property
    def weights(self) -> Tensor:
        """Mixture weights, (B, K, *event)."""
        return self.logits.softmax(1)

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.loc.shape[0], *self.loc.shape[2:]))

    @property
    def mean(self) -> Tensor:
        return (self.weights * self.loc).sum(1)

    @property
    def variance(self) -> Tensor:
        spread = (self.loc - self.mean.unsqueeze(1)).square()
        return (self.weights * (self.scale.square() + spread)).sum(1)

    def rsample(self, sample_shape: Sequence[int] = (), generator: Generators = None) -> Tensor:
        shape = (self.loc.shape[0], *self.loc.shape[2:])  # (B, *event)
        uniform = rand(sample_shape, shape, like=self.loc, generator=generator)
        noise = randn(sample_shape, shape, like=self.loc, generator=generator)
        loc, scale = pick_component(self.weights, uniform, self.loc, self.scale)
        return loc + scale * noise

    def _log_density(self, value: Tensor, mask: Tensor | None) -> Tensor:
        axis = 1 - self.loc.ndim  # where K stands in (..., B, K, *event)
        components = gaussian_log_density(value.unsqueeze(axis) - self.loc, self.scale)
        return (self.logits.log_softmax(1) + components).logsumexp(axis)

    def _marginal_cdf(self, value: Tensor) -> Tensor:
        axis = 1 - self.loc.ndim
        z = (value.unsqueeze(axis) - self.loc) / self.scale  # (..., B, K, *event)
        return (self.weights * torch.special.ndtr(z)).sum(axis)

    def affine(self, scale: float | Tensor, shift: float | Tensor) -> Self:
        event = self.loc.ndim - 2
        scale, shift = per_component(scale, event), per_component(shift, event)
        return type(self)(scale * self.loc + shift, (scale * self.scale).abs(), self.logits)

    def scaled(self, tau: float) -> Self:
        return type(self)(self.loc, math.sqrt(check_tau(tau)) * self.scale, self.logits)

    def _convolved(self, variance: float) -> Self:
        return type(self)(self.loc, (self.scale.square() + variance).sqrt(), self.logits)

    def marginal(self) -> Self:
        return self

    def _marginal_quantile(self, levels: Tensor) -> Tensor:
        """Bisection between the smallest and the largest component quantile, where the mixture's own must lie.

        A Newton step from the solution moves it by nothing and carries the gradient, -dF / density.
        """
        levels = levels.reshape(-1, *[1] * (self.loc.ndim - 1))  # (Q, 1, ...)
        with torch.no_grad():
            components = self.loc + self.scale * torch.special.ndtri(levels).unsqueeze(1)  # (Q, B, K, *event)
            low, high = components.amin(2), components.amax(2)  # (Q, B, *event)
            eps, narrowest = torch.finfo(low.dtype).eps, self.scale.amin(1)
            for _ in range(MAX_BISECTIONS):  # a far component of little weight makes the bracket wide, not the answer
                middle = 0.5 * (low + high)
                wide = high - low > eps * (middle.abs() + narrowest)
                if not bool(wide.any()):
                    break
                below = self.cdf(middle) < levels
                low, high = torch.where(wide & below, middle, low), torch.where(wide & ~below, middle, high)
            solution = 0.5 * (low + high)
            density = self.log_prob(solution).exp().clamp(min=torch.finfo(low.dtype).tiny)
        level = self.cdf(solution)
        return solution - (level - level.detach()) / density


def _as_mixture(part: NoiseDistribution) -> MixtureDistribution:
    """A Gaussian has one component."""
    if isinstance(part, MixtureDistribution):
        return part
    if not isinstance(part, GaussianDistribution):
        raise TypeError(f"families 'gaussian' and 'mixture' can be pooled; got {part.name!r}")
    loc = part.loc.unsqueeze(1)
    return MixtureDistribution(loc, part.scale.unsqueeze(1), torch.zeros_like(loc))


def pick_component(weights: Tensor, uniform: Tensor, *parameters: Tensor) -> list[Tensor]:
    """Component parameters (B, K, *event) at the index that `uniform` (*sample, B, *event) picks from the weights."""
    axis = -(weights.ndim - 1)  # where K stands in (*sample, B, K, *event)
    index = (uniform.unsqueeze(axis) >= weights.cumsum(1)).sum(axis, keepdim=True)
    index = index.clamp(max=weights.shape[1] - 1)  # the cumulative sum may end at 1 - 1e-7
    lead = uniform.shape[: uniform.ndim - (weights.ndim - 1)]
    return [p.expand(*lead, *p.shape).gather(p.ndim + len(lead) + axis, index).squeeze(axis) for p in parameters]
