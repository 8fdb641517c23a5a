"""What EDM and flow matching share: noise levels that are numbers, of which a chain visits some."""

from abc import abstractmethod
from itertools import pairwise

import torch
from torch import Tensor

from marigold_uq.randomness import Generators, randn
from marigold_uq.schedulers.distributional import DistributionalScheduler

__all__ = ["ContinuousScheduler"]

_LEAST_RANK = 1e-6


class ContinuousScheduler(DistributionalScheduler):
    """Timesteps are continuous; in training a function of theirs, ln(sigma) or logit(t), is Gaussian.

    `normal_score` is that function in standard deviations from its mean, so a share Phi(score) of the timesteps of
    training has less noise.
    """

    sigmas: Tensor  # (S + 1,), of the chain, with its end
    _chain: dict[float, tuple[float, float]]
    """Each timestep of the chain -> its noise level and the next one."""

    @abstractmethod
    def normal_score(self, timesteps: Tensor) -> Tensor:
        """Standard normal numbers (B,) that `timesteps_of_score` makes these timesteps from."""

    @abstractmethod
    def timesteps_of_score(self, score: Tensor) -> Tensor:
        """Timesteps (B,) of normal scores."""

    def sample_timesteps(self, batch: int, generator: Generators = None) -> Tensor:
        """Those of standard normal scores."""
        return self.timesteps_of_score(randn((), (batch,), like=torch.empty(()), generator=generator))

    def timesteps_at(self, ranks: Tensor) -> Tensor:
        """As in `DistributionalScheduler`; from 1e-6 to 1 - 1e-6, because the ends lie at infinity."""
        return self.timesteps_of_score(torch.special.ndtri(ranks.clamp(_LEAST_RANK, 1 - _LEAST_RANK)))

    def table_position(self, timesteps: Tensor) -> Tensor:
        """T Phi(normal score)."""
        return self.config.num_train_timesteps * torch.special.ndtr(self.normal_score(timesteps))

    def _note_chain(self) -> None:
        """Remember the noise levels of the timesteps that were just set."""
        self._chain = dict(zip(self.timesteps.tolist(), pairwise(self.sigmas.tolist()), strict=True))

    def _next_noise(self, timestep: int | float) -> float:
        """The next lower noise level of the chain."""
        self._check_steps()
        if timestep not in self._chain:
            raise ValueError(f"a step starts at one of the scheduler's timesteps; got {timestep}")
        return self._chain[timestep][1]
