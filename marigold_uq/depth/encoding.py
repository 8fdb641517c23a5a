"""What a training sample becomes on the latent grid: the same for training as it reads and for a cache on disk."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor

from marigold_uq.depth.data.normalization import latent_mask, network_pixels
from marigold_uq.models.depth_baseline import weights_hash
from marigold_uq.pipelines.depth import MarigoldUQDepthPipeline
from marigold_uq.pipelines.depth.baseline import Frame, encode_map
from marigold_uq.pipelines.depth.latents import encode_conditions, encode_pixels

__all__ = ["Encoded", "LatentEncoder"]

SMALLEST_CORRELATION = 0.5
"""A map that tells less of the truth is fitted as if it told so much: its residual would grow without bound."""


class Encoded(NamedTuple):
    """A batch as the objective takes it."""

    condition: Tensor  # (B, C', h, w)
    target: Tensor  # (B, C, h, w), depth, or what the baseline leaves over divided by its scale
    mask: Tensor  # (B, 1, h, w)


class LatentEncoder:
    """Encodes batches of pictures and depth with the frozen parts of a pipeline.

    Args:
        pipeline: Its autoencoder, image encoder and baseline are used.
        device: Where they run.
        dtype: Another precision for an `AutoencoderKL`, as a copy: the pipeline's own stays what it is. bfloat16
            halves the cost, which is half of all arithmetic in training from Stable Diffusion.
    """

    def __init__(
        self, pipeline: MarigoldUQDepthPipeline, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
    ) -> None:
        if pipeline.image_encoder is not None and pipeline.baseline is None:
            raise ValueError(
                "a model with an image encoder learns its encoder's fusion too, from kept features and not from "
                "latents: see python -m scripts.studies.embedded.cache_features"
            )
        self.pipeline, self.device = pipeline, torch.device(device)
        self.vae = pipeline.vae if dtype is None else copy.deepcopy(pipeline.vae).to(dtype)
        if pipeline.image_encoder is None:
            self.vae.to(memory_format=torch.channels_last)
        self.vae.requires_grad_(False).eval()

    def identity(self) -> dict[str, str | None]:
        """Hashes of everything that decides what `arrays` gives."""
        parts = {name: getattr(self.pipeline, name) for name in ("vae", "image_encoder", "baseline")}
        hashes = {name: None if part is None else weights_hash(part) for name, part in parts.items()}
        return {**hashes, "prediction_type": self.pipeline.config.prediction_type}

    @torch.no_grad()
    def arrays(self, batch: dict[str, Any]) -> dict[str, Tensor]:
        """Latents of samples of one size, (B, ., h, w): image_latent, depth_latent, latent_valid, baseline_latent."""
        depth, valid, pictures = (batch[key].to(self.device, non_blocking=True) for key in ("depth", "valid", "image"))
        if self.pipeline.config.prediction_type == "disparity":
            depth = torch.where(valid, depth, 1.0).reciprocal()
        mask = latent_mask(valid, self.pipeline.vae_scale_factor)
        pixels = 2 * pictures - 1
        if self.pipeline.baseline is None:
            _, maps = network_pixels(pictures, depth, valid)
            image = encode_pixels(self.vae, pixels)
            return {"image_latent": image, "depth_latent": encode_pixels(self.vae, maps), "latent_valid": mask}
        conditions = encode_conditions(self.vae, self.pipeline.image_encoder, pixels, len(pixels))
        own, places = self._truth_in_frame(pixels, depth, valid)
        return {
            "image_latent": torch.stack([one.channels for one in conditions]),
            "baseline_latent": encode_map(self.vae, own),
            "depth_latent": encode_map(self.vae, places),
            "latent_valid": mask,
        }

    def _truth_in_frame(self, pixels: Tensor, depth: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
        """The baseline's maps and the truth in their frames (B, 1, H, W); where there is no truth, nothing is left."""
        maps = self.pipeline.baseline(pixels)
        frame = Frame.around(maps, bool(self.pipeline.baseline.config.metric))
        truth = depth if frame.metric else fitted_truth(maps, depth, valid)
        own = frame.place(maps)
        return own, torch.where(valid, frame.place(truth), own)

    def encode(self, batch: dict[str, Any]) -> Encoded:
        """Condition, target and mask; a batch may bring the latents ready made."""
        arrays = batch if "image_latent" in batch else self.arrays(batch)
        found = {key: value.to(self.device) for key, value in arrays.items() if isinstance(value, Tensor)}
        image, target, mask = found["image_latent"].float(), found["depth_latent"].float(), found["latent_valid"]
        baseline = self.pipeline.baseline
        if ("baseline_latent" in found) != (baseline is not None):
            raise ValueError(
                f"the latents were made {'with' if baseline is None else 'without'} a baseline, and the model has "
                f"{'none' if baseline is None else 'one'}: make them again with `marigold-uq cache`"
            )
        if baseline is None:
            return Encoded(image, target, mask)
        own = found["baseline_latent"].float()
        return Encoded(torch.cat([image, own], 1), (target - own) / float(baseline.config.residual_scale), mask)


def fitted_truth(maps: Tensor, truth: Tensor, valid: Tensor) -> Tensor:
    """The truth (B, 1, H, W) in the units of maps whose scale and shift mean nothing.

    A map is fitted to its truth by least squares, as it will be judged, and the line is undone: what is left over is
    then what no scale and shift would mend.
    """
    weight = valid.to(maps)
    total = weight.sum((1, 2, 3), keepdim=True).clamp(min=1.0)

    def mean(values: Tensor) -> Tensor:
        return (weight * values).sum((1, 2, 3), keepdim=True) / total

    centre, level = mean(maps), mean(truth)
    spread, own = mean((maps - centre).square()).sqrt(), mean((truth - level).square()).sqrt()
    covariance = mean((maps - centre) * (truth - level))
    smallest = SMALLEST_CORRELATION * spread * own
    slope = torch.maximum(covariance, smallest) / spread.square().clamp(min=1e-12)
    return centre + (truth - level) / slope.clamp(min=1e-12)
