"""The one seam between networks and everything else: noisy sample in, distribution of the model output out."""

from collections.abc import Callable
from typing import TypeAlias, cast

import torch
from torch import Tensor

from marigold_uq.distributions import NoiseDistribution, SampleDistribution
from marigold_uq.randomness import Generators, randn
from marigold_uq.schedulers.distributional import DistributionalScheduler

Denoiser: TypeAlias = Callable[[Tensor, Tensor | int], Tensor]
"""Raw output (B, channels, ...) for x_t (B, C [+ noise channels], ...) at timestep t; the condition is bound inside."""


def predict_noise(
    denoiser: Denoiser,
    scheduler: DistributionalScheduler,
    x_t: Tensor,
    timestep: Tensor | int,
    *,
    num_draws: int = 1,
    generator: Generators = None,
) -> NoiseDistribution:
    """The distribution of the model *output* (eps, v, x_0, ..., as the scheduler says) given x_t.

    The network sees x_t as the scheduler scales it. Families that learn an implicit distribution see channels of fresh
    noise after those of x_t and are called `num_draws` times; the others are called once. `affine` turns the result
    into a distribution of eps or x_0.
    """
    if num_draws < 1:
        raise ValueError(f"num_draws must be at least 1; got {num_draws}")
    event_shape = x_t.shape[1:]
    x_t = scheduler.scale_model_input(x_t, timestep)
    if not scheduler.family.noise_channels:
        return scheduler.noise_distribution(denoiser(x_t, timestep), event_shape)
    shape = (x_t.shape[0], scheduler.family.noise_channels, *x_t.shape[2:])
    draws = []
    for _ in range(num_draws):
        noise = randn((), shape, like=x_t, generator=generator)
        draw = scheduler.noise_distribution(denoiser(torch.cat([x_t, noise], 1), timestep), event_shape)
        draws.append(cast(SampleDistribution, draw))  # the family with noise channels
    return SampleDistribution.stack(draws)
