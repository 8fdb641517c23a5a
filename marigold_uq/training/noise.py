"""What a training sample draws: its timestep, and its noise, plain or Marigold's annealed multi-resolution noise."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from marigold_uq.schedulers.distributional import DistributionalScheduler

__all__ = ["multiresolution_noise", "training_noise", "training_timesteps"]

_MAX_LEVELS = 10


def training_timesteps(
    scheduler: DistributionalScheduler, generators: list[torch.Generator], *, uniform: bool
) -> Tensor:
    """Timesteps (B,), each from its own generator, drawn as the framework does; unless uniform, half are the last."""
    timesteps = scheduler.sample_timesteps(len(generators), generators)
    coins = torch.cat([torch.rand(1, generator=generator) for generator in generators])
    return timesteps if uniform else torch.where(coins < 0.5, scheduler.noisiest_timestep, timesteps)


def multiresolution_noise(shape: Sequence[int], strength: float, generator: torch.Generator) -> Tensor:
    """Noise (C, H, W) of unit variance that is correlated in space: draws on ever coarser grids, added up.

    At level i the grid shrinks by r^i, r ~ U(2, 4) drawn anew, and its bilinear enlargement counts strength^i; the sum
    is divided by its standard deviation. Level 0 adds a second draw at full resolution. With strength 0 it is white.
    """
    channels, height, width = shape
    noise = torch.randn(1, channels, height, width, generator=generator)
    grid_height, grid_width = height, width
    for level in range(_MAX_LEVELS):
        ratio = 2 + 2 * float(torch.rand(1, generator=generator))
        grid_height = max(1, int(grid_height / ratio**level))
        grid_width = max(1, int(grid_width / ratio**level))
        coarse = torch.randn(1, channels, grid_height, grid_width, generator=generator)
        noise += strength**level * interpolate(coarse, size=(height, width), mode="bilinear", align_corners=False)
        if grid_height == 1 or grid_width == 1:
            break
    return (noise / noise.std())[0]


def training_noise(
    shape: Sequence[int],
    index: Tensor,
    num_train_timesteps: int,
    strength: float,
    generators: list[torch.Generator],
) -> Tensor:
    """Noise of a batch (B, C, H, W), each sample from its own generator.

    strength > 0: multi-resolution noise annealed with `DistributionalScheduler.noise_index` (B,), strength * index / T,
    so that little noise is white and much noise is coarse. strength 0: white.
    """
    if strength == 0:
        return torch.stack([torch.randn(tuple(shape), generator=generator) for generator in generators])
    return torch.stack(
        [
            multiresolution_noise(shape, strength * int(i) / num_train_timesteps, generator)
            for i, generator in zip(index, generators, strict=True)
        ]
    )
