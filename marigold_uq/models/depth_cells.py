"""Depth maps as a few numbers per cell, and back along the edges of the picture; in place of a variational autoencoder.

A latent is the mean of a monotone function of depth over a part of a cell. A pixel is a convex combination of the nine
parts around it, with weights that a network reads off the picture (as Teed and Deng, RAFT, ECCV 2020, upsample flow).
So the decoder is monotone: where neighbouring parts go wrong together, quantiles of the latents decode to the quantiles
of the pixels, and a distribution pushed through it needs no draws.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.models.modeling_utils import ModelMixin
from torch import Tensor, nn

from marigold_uq.models.tiny_vit import LayerNorm2d

__all__ = ["DepthCells", "ModelMixin"]  # diffusers looks for ModelMixin in the module of a component

LATENT_RANGE = 2.0
"""Normalised depth from -1 to 1 becomes a latent from -LATENT_RANGE to LATENT_RANGE."""
MAX_LOGIT = 6.0
"""Weights of parts differ by a factor of at most exp(2 MAX_LOGIT)."""


class DepthCells(ModelMixin, ConfigMixin):
    """Encodes and decodes depth maps; with the interface that a depth pipeline expects of its `vae`.

    Args:
        cell: Pixels of the picture along the edge of a latent cell.
        latent_channels: Numbers per cell, a square: a cell has that many parts, one number each.
        upsampling: Decoded values along the edge of a part; what is finer is interpolated.
        guide_channels: Channels of what the picture's encoder gives to the decoder, at the resolution of the parts.
        offset: Depth from 0 to 1 is taken as log(depth + offset): how much more the near counts than the far.
        scaling_factor: As in diffusers; latents have about unit variance as they are.
    """

    is_monotone = True

    @register_to_config
    def __init__(
        self,
        cell: int = 16,
        latent_channels: int = 4,
        upsampling: int = 4,
        guide_channels: int = 64,
        offset: float = 0.15,
        scaling_factor: float = 1.0,
    ) -> None:
        super().__init__()
        self.parts = math.isqrt(latent_channels)
        if self.parts**2 != latent_channels or cell % (self.parts * upsampling):
            raise ValueError(
                f"latent_channels must be a square, and cell a multiple of its root times upsampling; got cell={cell}, "
                f"latent_channels={latent_channels}, upsampling={upsampling}"
            )
        if not offset > 0:
            raise ValueError(f"offset must be positive; got {offset}")
        last = nn.Conv2d(guide_channels, 9 * upsampling**2, 1)
        nn.init.zeros_(last.weight)
        last.bias = nn.Parameter(_linear_logits(upsampling))
        self.weights = nn.Sequential(
            LayerNorm2d(guide_channels), nn.Conv2d(guide_channels, guide_channels, 3, padding=1), nn.GELU(), last
        )

    def to_latent(self, depth: Tensor) -> Tensor:
        """Normalised depth in [-1, 1] to the scale of the latents, element by element."""
        low, high = self._log_range
        logarithm = torch.log((depth + 1) / 2 + self.config.offset)
        return LATENT_RANGE * (2 * (logarithm - low) / (high - low) - 1)

    def to_depth(self, latent: Tensor) -> Tensor:
        """The inverse of `to_latent`."""
        low, high = self._log_range
        logarithm = low + (latent / LATENT_RANGE + 1) / 2 * (high - low)
        return 2 * (torch.exp(logarithm) - self.config.offset) - 1

    @property
    def _log_range(self) -> tuple[float, float]:
        offset = self.config.offset
        return math.log(offset), math.log(1 + offset)

    @property
    def pixels_per_value(self) -> int:
        """How many pixels of the picture's edge there are for a value that is decoded."""
        return int(self.config.cell) // (self.parts * int(self.config.upsampling))

    def encode(self, depth: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
        """Maps (B, 1, H, W), of `parts x upsampling` pixels per cell, to latents and their validity (B, C, h, w).

        A part is valid where at least half of its pixels are; its number is their mean.
        """
        values, count = self.to_latent(depth) * valid, valid.to(depth.dtype)
        size = self.config.upsampling
        total, share = F.avg_pool2d(values, size), F.avg_pool2d(count, size)
        latents = torch.where(share > 0, total / share.clamp(min=1e-6), LATENT_RANGE)
        return F.pixel_unshuffle(latents, self.parts), F.pixel_unshuffle(share, self.parts) >= 0.5

    def decode(self, latents: Tensor, return_dict: bool = True, *, guide: Tensor) -> Any:
        """Latents (E, C, h, w) of one picture, or of E, and its guide (1 or E, G, h parts, w parts): maps in a tuple.

        The maps (E, 1, H, W) have the picture's resolution.
        """
        if return_dict:
            raise ValueError("DepthCells.decode returns a tuple: pass return_dict=False")
        coarse = self.upsample(latents, guide)
        factor = self.pixels_per_value
        fine = F.interpolate(coarse, scale_factor=float(factor), mode="bilinear") if factor > 1 else coarse
        return (self.to_depth(fine),)

    def upsample(self, latents: Tensor, guide: Tensor) -> Tensor:
        """(E, 1, H, W) on the scale of the latents, `upsampling` values along the edge of a part."""
        return self.combine(latents, self.convex_weights(guide))

    def convex_weights(self, guide: Tensor) -> Tensor:
        """How much each of the nine parts around counts for each value, (1 or E, 9, upsampling^2, H', W').

        Before anything is learnt this is linear interpolation. Logits are bounded, else all weight soon lies on one
        part of the nine, and a softmax has no gradient left to change that.
        """
        logits = MAX_LOGIT * torch.tanh(self.weights(guide) / MAX_LOGIT)
        return logits.unflatten(1, (9, -1)).softmax(1)

    def combine(self, latents: Tensor, weights: Tensor) -> Tensor:
        """Values (E, 1, H, W) from latents and the weights of their parts."""
        values = F.pixel_shuffle(latents, self.parts)  # (E, 1, H', W')
        around = F.unfold(F.pad(values, (1, 1, 1, 1), mode="replicate"), 3)
        around = around.view(len(values), 9, 1, *values.shape[-2:])
        return F.pixel_shuffle((weights * around).sum(1), self.config.upsampling)


def _linear_logits(upsampling: int) -> Tensor:
    """(9 upsampling^2,): logits of the weights of linear interpolation, for each of nine parts and each value."""
    place = (torch.arange(upsampling) + 0.5) / upsampling - 0.5  # of a value, from the centre of its part
    tent = (1 - (place - torch.arange(-1, 2)[:, None]).abs()).clamp(min=0)  # (3, upsampling)
    weights = torch.einsum("ai,bj->abij", tent, tent).flatten(2).flatten(0, 1)  # (9, upsampling^2)
    logits = weights.clamp(min=math.exp(-MAX_LOGIT)).log()
    return MAX_LOGIT * torch.atanh((logits / MAX_LOGIT).clamp(min=-0.99)).flatten()
