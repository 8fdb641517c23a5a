"""Sampling with a tau for each predicted variable."""

from collections.abc import Sequence

import torch
from torch import Tensor

from marigold_uq.sampling import ReverseStep
from marigold_uq.schedulers.distributional import DistributionalScheduler

__all__ = ["VariableTaus"]


class VariableTaus:
    """Observer and callback of `reverse_diffusion` that stretches each step's draw around its mean by sqrt(tau_v).

    x_prev = m + sqrt(tau_v) (x - m), with the mean m = A x_t + B mu of Theorem 1 and x drawn at tau = 1. For a single
    component that is the scheduler's tau, one for each variable v; a mixture is stretched as a whole.
    """

    def __init__(self, taus: Sequence[float]) -> None:
        self.taus = torch.tensor(list(taus), dtype=torch.float64)
        self._mean: Tensor | None = None

    def observe(self, scheduler: DistributionalScheduler, step: ReverseStep) -> None:
        """Note the mean of the step."""
        c, mean = scheduler.step_coefficients(step.timestep), step.law.mean
        self._mean = c.sample * step.x_t.to(mean.dtype) + c.output * mean

    def redraw(self, index: int, timestep: int | float, x_prev: Tensor) -> Tensor:
        """The draw with the spread of each variable, (B, C, *space)."""
        assert self._mean is not None
        roots = self.taus.sqrt().reshape(-1, *[1] * (x_prev.ndim - 2)).to(x_prev)
        mean = self._mean.to(x_prev)
        return mean + roots * (x_prev - mean)
