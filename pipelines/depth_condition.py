"""What is known of the pictures before the first denoising step: by the VAE, or by an image encoder in its place."""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from torch import Tensor

from marigold_uq.pipelines.depth_codec import encode_images

PictureCondition: TypeAlias = tuple[Tensor, Tensor | None]
"""Condition channels (C, h, w) of the U-Net, and the guide (G, h', w') of a decoder that takes one."""


def encode_conditions(image_encoder: Any, vae: Any, images: list[Tensor], batch_size: int) -> list[PictureCondition]:
    """Conditions of images (1, 3, H, W), in batches of one size."""
    found: dict[int, PictureCondition] = {}
    for shape in dict.fromkeys(tuple(image.shape) for image in images):
        places = [i for i, image in enumerate(images) if tuple(image.shape) == shape]
        own = [images[i] for i in places]
        found.update(zip(places, _of_one_size(image_encoder, vae, own, batch_size), strict=True))
    return [found[i] for i in range(len(images))]


def _of_one_size(image_encoder: Any, vae: Any, images: list[Tensor], batch_size: int) -> list[PictureCondition]:
    if image_encoder is None:
        return [(latent, None) for latent in encode_images(vae, images, batch_size)]
    conditions: list[PictureCondition] = []
    for first in range(0, len(images), batch_size):
        pixels = torch.cat(images[first : first + batch_size]).to(image_encoder.dtype)
        condition = image_encoder(pixels)
        conditions += list(zip(condition.channels, condition.guide, strict=True))
    return conditions
