"""The ordinary diffusion model: all mass on the network's output."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from torch import Tensor

from marigold_uq.distributions.base import (
    ONE_OF_EACH,
    HeadOptions,
    InitialBlock,
    NoiseDistribution,
    check_tau,
    register,
)
from marigold_uq.distributions.gaussian import GaussianDistribution
from marigold_uq.randomness import Generators


@register("point")
@dataclass(frozen=True, eq=False)
class PointDistribution(NoiseDistribution):
    """Dirac distribution at `loc`; trained with squared error it is the classical baseline."""

    layout = "[loc]"
    joint = True
    has_spread = False
    has_density = False
    default_score = "squared_error"

    loc: Tensor  # (B, *event)

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
        return cls(cls._split_blocks(raw, head, event_shape)[:, 0])

    @property
    def mean(self) -> Tensor:
        return self.loc

    @property
    def variance(self) -> Tensor:
        return self.loc.new_zeros(self.loc.shape)

    def rsample(self, sample_shape: Sequence[int] = (), generator: Generators = None) -> Tensor:
        """Copies of `loc`: who changes a draw must not change the distribution."""
        return self.loc.expand(*sample_shape, *self.loc.shape).clone()

    def affine(self, scale: float | Tensor, shift: float | Tensor) -> Self:
        return type(self)(scale * self.loc + shift)

    def scaled(self, tau: float) -> Self:
        check_tau(tau)
        return self

    def _convolved(self, variance: float) -> NoiseDistribution:
        return GaussianDistribution(self.loc, self.loc.new_full((), variance).sqrt().expand_as(self.loc))

    def marginal(self) -> NoiseDistribution:
        return self

    def _marginal_quantile(self, levels: Tensor) -> Tensor:
        return self.loc.expand(len(levels), *self.loc.shape)

    def _marginal_cdf(self, value: Tensor) -> Tensor:
        return (value >= self.loc).to(self.dtype)
