"""Between pixels and latents: images in, depth maps out, and a latent spread through the decoder."""

from __future__ import annotations

from typing import Any

import torch
from diffusers.models.autoencoders.autoencoder_tiny import AutoencoderTiny
from torch import Tensor

from marigold_uq.randomness import member_seed, randn

SPREAD_DRAWS = 8


def encode_images(vae: Any, images: list[Tensor], batch_size: int) -> list[Tensor]:
    """Latents (C, h, w) of images (1, 3, H, W) of one size: the mode of the posterior, scaled."""
    latents: list[Tensor] = []
    for first in range(0, len(images), batch_size):
        output = vae.encode(_laid_out(vae, torch.cat(images[first : first + batch_size])))
        mode = output.latent_dist.mode() if hasattr(output, "latent_dist") else output.latents
        latents.extend(mode * vae.config.scaling_factor)
    return latents


def decode_maps(vae: Any, latents: Tensor, batch_size: int, guide: Tensor | None = None) -> Tensor:
    """Latents (E, C, h, w) -> maps (E, H, W) in [0, 1], in at least float32."""
    maps = []
    guided = {} if guide is None else {"guide": guide[None].to(vae.dtype)}
    for part in latents.to(vae.dtype).split(batch_size):
        decoded = vae.decode(_laid_out(vae, part / vae.config.scaling_factor), return_dict=False, **guided)[0]
        maps.append((decoded.mean(1).clip(-1.0, 1.0) + 1.0) / 2.0)
    return torch.cat(maps).float()


def _laid_out(vae: Any, pictures: Tensor) -> Tensor:
    """The same numbers, channels last for a tiny autoencoder, which then decodes ten members in half the time.

    Others keep the order that diffusers has, whose results are matched to the bit.
    """
    return pictures.contiguous(memory_format=torch.channels_last) if isinstance(vae, AutoencoderTiny) else pictures


def decode_spread(vae: Any, centre: Tensor, std: Tensor, batch_size: int, guide: Tensor | None = None) -> Tensor:
    """Standard deviation (H, W) of the decoded map where the latent is N(centre, diag(std^2)), both (C, h, w).

    From SPREAD_DRAWS independent draws, so the relative error is about 1 / sqrt(2 (SPREAD_DRAWS - 1)) per pixel. A
    decoder is not linear, so half differences of antithetic pairs or its Jacobian at the centre would give another
    number. The numbers drawn are the same for every image, so that maps compare.
    """
    generator = torch.Generator().manual_seed(member_seed(0))
    draws = centre + std * randn((), (SPREAD_DRAWS, *std.shape), like=std, generator=generator)
    return decode_maps(vae, draws, batch_size, guide).std(0)
