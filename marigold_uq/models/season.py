"""What states are usual at an hour and a time of the year; the module's path is written into checkpoints."""

from collections.abc import Sequence
from typing import Any, Self

import torch
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.models.modeling_utils import ModelMixin
from torch import Tensor

from marigold_uq.models.field_grid import harmonic_basis, num_waves
from marigold_uq.models.noise_color import move_only

__all__ = ["ModelMixin", "Season"]

LEAST_SHARE = 0.05
"""Of a point's mean variance: waves fitted to squares could fall below zero."""


class Season(ModelMixin, ConfigMixin):
    """Mean and variance of the targets as functions of the hour and the time of the year, waves (C, waves, *space).

    It is what is left of a forecast when its skill has gone. The encoder's seasonal mean, which the network sees, has
    the waves of one year alone; this one has as many harmonics of the year as the training part supports.
    """

    mean_waves: Tensor
    variance_waves: Tensor

    @register_to_config
    def __init__(self, event_shape: Sequence[int] = (1, 8), num_annual: int = 1) -> None:
        super().__init__()
        channels, *space = event_shape
        self.register_buffer("mean_waves", torch.zeros(channels, num_waves(num_annual), *space))
        self.register_buffer("variance_waves", torch.zeros(channels, num_waves(1), *space))

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Move to a device; waves keep their dtype."""
        return move_only(self, *args, **kwargs)

    def mean(self, time: Tensor) -> Tensor:
        """Means (n, C, *space) at times (n,) in seconds since 1970."""
        basis = harmonic_basis(time, self.config.num_annual).to(self.mean_waves)
        return torch.einsum("bw,cw...->bc...", basis, self.mean_waves)

    def deviation(self, time: Tensor) -> Tensor:
        """Standard deviations around the means, (n, C, *space), at times (n,)."""
        variance = torch.einsum("bw,cw...->bc...", harmonic_basis(time).to(self.variance_waves), self.variance_waves)
        return variance.maximum(LEAST_SHARE * self.variance_waves[:, 0].clamp(min=0)).sqrt()
