"""Sampling with noise that is correlated in space."""

import math

import torch
from torch import Tensor

from marigold_uq.distributions import GaussianDistribution
from marigold_uq.models.noise_color import NoiseColor
from marigold_uq.randomness import Generators, randn
from marigold_uq.sampling import ReverseStep
from marigold_uq.schedulers.distributional import DistributionalScheduler

__all__ = ["ColoredSteps"]


class ColoredSteps:
    """Observer and callback of `reverse_diffusion` that redraws each step with coloured noise.

    x_prev = A x_t + B mu + sqrt(tau) (B s c + sigma z), c coloured and z white: Theorem 1 with the head's share of the
    noise correlated in space.
    """

    def __init__(self, color: NoiseColor, generator: Generators) -> None:
        self.color, self.generator = color, generator
        self._next: Tensor | None = None

    def observe(self, scheduler: DistributionalScheduler, step: ReverseStep) -> None:
        """Note the step; its noise is drawn in `redraw`."""
        if not isinstance(step.law, GaussianDistribution):
            raise TypeError(f"coloured noise is for family 'gaussian'; got {step.law.name!r}")
        c = scheduler.step_coefficients(step.timestep)
        loc, x_t = step.law.loc, step.x_t.to(step.law.dtype)
        head, white = (randn((), loc.shape, like=loc, generator=self.generator) for _ in range(2))
        row = int(scheduler.noise_index(torch.as_tensor(step.timestep), len(self.color.amplitude)))
        noise = c.output * step.law.scale * self.color(head, row) + c.std_dev * white
        self._next = c.sample * x_t + c.output * loc + math.sqrt(scheduler.config.tau) * noise

    def redraw(self, index: int, timestep: int | float, x_prev: Tensor) -> Tensor:
        """The coloured draw instead of the white one."""
        assert self._next is not None
        return self._next.to(x_prev)
