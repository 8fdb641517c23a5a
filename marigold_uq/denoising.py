"""The one seam between networks and everything else: noisy sample in, law of the model output out."""

from collections.abc import Callable
from typing import TypeAlias, cast

import torch
from torch import Tensor

from marigold_uq.distributions import NoiseDistribution, SampleDistribution
from marigold_uq.randomness import Generators, randn
from marigold_uq.schedulers.scheduling_distributional_ddim import DistributionalDDIMScheduler

Denoiser: TypeAlias = Callable[[Tensor, Tensor | int], Tensor]
"""Raw output (B, channels, ...) for x_t (B, C [+ noise channels], ...) at timestep t; the condition is bound inside."""


def predict_noise(
    denoiser: Denoiser,
    scheduler: DistributionalDDIMScheduler,
    x_t: Tensor,
    timestep: Tensor | int,
    *,
    num_draws: int = 1,
    generator: Generators = None,
) -> NoiseDistribution:
    """The law of the model *output* (eps, v or x_0, as the scheduler's prediction_type says) given x_t.

    Families that learn an implicit law see channels of fresh noise after those of x_t and are called `num_draws` times;
    the others are called once. `affine` turns the law into one of eps or x_0.
    """
    if num_draws < 1:
        raise ValueError(f"num_draws is at least 1; got {num_draws}")
    event_shape = x_t.shape[1:]
    if not scheduler.family.noise_channels:
        return scheduler.noise_distribution(denoiser(x_t, timestep), event_shape)
    shape = (x_t.shape[0], scheduler.family.noise_channels, *x_t.shape[2:])
    laws = []
    for _ in range(num_draws):
        noise = randn((), shape, like=x_t, generator=generator)
        law = scheduler.noise_distribution(denoiser(torch.cat([x_t, noise], 1), timestep), event_shape)
        laws.append(cast(SampleDistribution, law))  # the family with noise channels
    return SampleDistribution.stack(laws)
