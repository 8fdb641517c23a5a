"""How far states usually are from the mean of their hour and season; the module's path is written into checkpoints."""

from collections.abc import Sequence
from typing import Any, Self

import torch
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.models.modeling_utils import ModelMixin
from torch import Tensor

from marigold_uq.data.fields.harmonics import NUM_WAVES, fit_harmonics, harmonic_basis
from marigold_uq.data.fields.sequences import FieldSequences
from marigold_uq.models.field_encoder import FieldEncoder
from marigold_uq.models.noise_color import move_only

__all__ = ["ModelMixin", "SeasonSpread"]

LEAST_SHARE = 0.05
"""Of a point's mean variance: waves fitted to squares could fall below zero."""


class SeasonSpread(ModelMixin, ConfigMixin):
    """The variance of the targets around their seasonal mean, as waves (C, NUM_WAVES, *space).

    It is what is left of a forecast's uncertainty when its skill has gone.
    """

    waves: Tensor

    @register_to_config
    def __init__(self, event_shape: Sequence[int] = (1, 8)) -> None:
        super().__init__()
        channels, *space = event_shape
        self.register_buffer("waves", torch.zeros(channels, NUM_WAVES, *space))

    @classmethod
    def fit(cls, encoder: FieldEncoder, train: FieldSequences) -> Self:
        """From all training states, in the units of the data."""

        def squares(states: Tensor, times: Tensor) -> Tensor:
            return encoder.select_targets(states - encoder.seasonal_mean(times).to(states)).square()

        found = cls(list(encoder.event_shape))
        found.waves.copy_(fit_harmonics(train, squares))
        return found

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Move to a device; waves keep their dtype."""
        return move_only(self, *args, **kwargs)

    def forward(self, time: Tensor) -> Tensor:
        """Standard deviations (n, C, *space) at times (n,) in seconds since 1970."""
        basis = harmonic_basis(time).to(self.waves)
        variance = torch.einsum("bw,cw...->bc...", basis, self.waves)
        return variance.maximum(LEAST_SHARE * self.waves[:, 0].clamp(min=0)).sqrt()
