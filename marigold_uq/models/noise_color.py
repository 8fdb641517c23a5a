"""Noise coloured by the spectrum of the residual; the module's path is written into checkpoints.

A Gaussian head with independent coordinates draws white noise. Where the residual of its mean is smooth in space, noise
of the same marginal variance but with the residual's spectrum is nearer to the truth (METHOD: calibration).
"""

from collections.abc import Sequence
from typing import Any, Self, TypeVar

import torch
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.models.modeling_utils import ModelMixin
from torch import Tensor, nn

__all__ = ["ModelMixin", "NoiseColor"]

ModuleT = TypeVar("ModuleT", bound=nn.Module)


class NoiseColor(ModelMixin, ConfigMixin):
    """Amplitude of each wave per row, (T, C, *space as rfftn has it), such that coloured noise has variance 1.

    Rows are those of `DistributionalScheduler.noise_index`; for DDIM its timesteps. Correlations wrap around at the
    edges of the grid, also of one that is not periodic.
    """

    amplitude: Tensor

    @register_to_config
    def __init__(self, num_train_timesteps: int = 50, event_shape: Sequence[int] = (1, 8)) -> None:
        super().__init__()
        channels, *space = event_shape
        waves = (*space[:-1], space[-1] // 2 + 1)
        self.register_buffer("amplitude", torch.ones(num_train_timesteps, channels, *waves))

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Move to a device; amplitudes keep their dtype."""
        return move_only(self, *args, **kwargs)

    def forward(self, white: Tensor, row: int) -> Tensor:
        """White noise (B, C, *space) with the spectrum of this row and its variance."""
        axes = tuple(range(2, white.ndim))
        waves = torch.fft.rfftn(white, dim=axes) * self.amplitude[row].to(white)
        return torch.fft.irfftn(waves, s=white.shape[2:], dim=axes)


def move_only(module: ModuleT, *args: Any, **kwargs: Any) -> ModuleT:
    """`module.to(...)` without its dtype; torch's own, diffusers' (0.42) warns of a dtype even where none is given."""
    kwargs.pop("dtype", None)
    places: list[Any] = [
        one.device if isinstance(one, Tensor) else one for one in args if not isinstance(one, torch.dtype)
    ]
    nn.Module.to(module, *places, **kwargs)
    return module
