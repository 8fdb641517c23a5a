"""What a training sample draws: its timestep, and its noise, plain or Marigold's annealed multi-resolution noise."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import interpolate

__all__ = ["multiresolution_noise", "training_noise", "training_timesteps"]

_MAX_LEVELS = 10


def training_timesteps(num_train_timesteps: int, generators: list[torch.Generator], *, uniform: bool) -> Tensor:
    """Timesteps (B,), each from its own generator; unless uniform, half of them are the last one."""
    last = num_train_timesteps - 1
    drawn = []
    for generator in generators:
        t = torch.randint(num_train_timesteps, (1,), generator=generator)
        is_last = torch.rand(1, generator=generator) < 0.5
        drawn.append(t if uniform else torch.where(is_last, last, t))
    return torch.cat(drawn)


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
    timesteps: Tensor,
    num_train_timesteps: int,
    strength: float,
    generators: list[torch.Generator],
) -> Tensor:
    """Noise of a batch (B, C, H, W), each sample from its own generator.

    strength > 0: multi-resolution noise annealed with the timestep, strength * t / T, so that little noise is white and
    much noise is coarse. strength 0: white.
    """
    if strength == 0:
        return torch.stack([torch.randn(tuple(shape), generator=generator) for generator in generators])
    return torch.stack(
        [
            multiresolution_noise(shape, strength * int(t) / num_train_timesteps, generator)
            for t, generator in zip(timesteps, generators, strict=True)
        ]
    )
