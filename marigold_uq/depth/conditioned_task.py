"""Training a depth pipeline with an image encoder: its head, U-Net and decoder together, and at last its backbone."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn

from marigold_uq.depth.data.normalization import normalize_depth
from marigold_uq.depth.task import PictureTask, Validation
from marigold_uq.models.condition_encoder import ConditionEncoder
from marigold_uq.models.depth_cells import DepthCells
from marigold_uq.pipelines.depth import MarigoldUQDepthPipeline
from marigold_uq.training.objective import Objective, ObjectiveConfig, Prediction, residual_rows
from marigold_uq.training.order import Ordered

Seen: TypeAlias = Tensor | tuple[list[Tensor], Tensor]
"""Pictures (B, 3, H, W) in [-1, 1], or what the backbone made of them: features and thumbnails."""


@dataclass(frozen=True)
class ConditionedObjective:
    """What is minimised: the score of the distribution of the latents, and the error of the decoded mean.

    Args:
        score: As in `ObjectiveConfig`; None takes the family's own.
        score_options: Its arguments.
        decoded_weight: Weight of the absolute error of decoded values, which also teaches the decoder.
        edge_weight: Weight of the absolute error of their differences between neighbours, relative to that.
        invalid_weight: How much places without depth count, such as the sky; they are taught to be far away.
    """

    score: str | None = None
    score_options: dict[str, Any] = field(default_factory=dict)
    decoded_weight: float = 1.0
    edge_weight: float = 1.0
    invalid_weight: float = 0.1


class ConditionedNetwork(nn.Module):
    """All that learns, as one module."""

    def __init__(self, pipeline: MarigoldUQDepthPipeline) -> None:
        super().__init__()
        self.encoder: ConditionEncoder = pipeline.image_encoder
        self.unet: nn.Module = pipeline.unet
        self.decoder: DepthCells = pipeline.vae
        self._denoiser = pipeline.denoiser

    def forward(self, seen: Seen, x_t: Tensor, t: Tensor | int) -> tuple[Tensor, Tensor]:
        """Raw output of the U-Net, and the weights of the decoder."""
        condition = self.encoder(seen) if isinstance(seen, Tensor) else self.encoder.fuse(*seen)
        return self._denoiser(condition.channels, self.unet)(x_t, t), self.decoder.convex_weights(condition.guide)


class ConditionedTask(PictureTask):
    """Samples have depth, valid, and either image, or features_0, features_1, ... and thumbnail.

    Only the last timestep is trained, where a model of one step is used: at zero terminal SNR its distribution of x_0
    is the predictive distribution of the depth map.
    """

    def __init__(
        self,
        pipeline: MarigoldUQDepthPipeline,
        dataset: Ordered,
        objective: ConditionedObjective,
        *,
        train_backbone: bool = False,
        validation: Validation | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.pipeline, self.dataset, self.weights, self.validation = pipeline, dataset, objective, validation
        self.device = torch.device(device)
        pipeline.to(self.device)
        self.decoder = cast(DepthCells, pipeline.vae)
        self.network: nn.Module = ConditionedNetwork(pipeline)
        self.network.requires_grad_(True)
        pipeline.image_encoder.network.requires_grad_(train_backbone)
        config = ObjectiveConfig(score=objective.score, score_options=objective.score_options)
        self.objective = Objective(config, pipeline.scheduler)
        self.objective.scale.to(self.device)

    def _part(
        self, network: nn.Module, batch: dict[str, Any], generators: list[torch.Generator]
    ) -> tuple[Tensor, Tensor]:
        """Losses (B,) of samples of one shape and their residual rows (B, 3)."""
        depth, valid = self._targets(batch)
        x_0, known = self.decoder.encode(depth, valid)
        seen = self._seen(batch)
        weights: list[Tensor] = []

        def denoiser(x: Tensor, t: Tensor | int) -> Tensor:
            raw, own = network(seen, x, t)
            weights.append(own)
            return raw

        last = self.pipeline.scheduler.noisiest_timestep
        timesteps = torch.full((len(x_0),), last)
        prediction = self.objective.predict(denoiser, x_0, generators, timesteps=timesteps)
        score = self._score(prediction, known, generators)
        mean = self.pipeline.scheduler.original_distribution(prediction.law, last, prediction.x_t).mean
        error = self._decoded_error(mean, weights[0], depth, valid)
        return score + self.weights.decoded_weight * error, residual_rows(prediction, known)

    def _targets(self, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Depth normalised as the pipeline predicts it, and where it is known."""
        step = self._pixels_per_value if "image" in batch else 1  # kept depth has one value for each that is decoded
        depth, valid = batch["depth"][..., ::step, ::step].float(), batch["valid"][..., ::step, ::step]
        maps = [normalize_depth(own, there)[0] for own, there in zip(depth, valid, strict=True)]
        return torch.stack(maps).to(self.device), valid.to(self.device)

    @property
    def _pixels_per_value(self) -> int:
        """How many pixels of the picture's edge there are for a value that is decoded."""
        config = self.decoder.config
        return int(config.cell) // (self.decoder.parts * int(config.upsampling))

    def _seen(self, batch: dict[str, Any]) -> Seen:
        if "image" in batch:
            return 2 * batch["image"].to(self.device) - 1
        names = sorted(name for name in batch if name.startswith("features_"))
        features = [batch[name].to(self.device).float() for name in names]
        return features, batch["thumbnail"].to(self.device).float() / 127.5 - 1

    def _score(self, prediction: Prediction, known: Tensor, generators: list[torch.Generator]) -> Tensor:
        """Score of the distribution (B,), of known places and a little of the others."""
        score = self.objective.scores(prediction, generators, known)
        if prediction.law.joint:
            return score
        return score + self.weights.invalid_weight * self.objective.scores(prediction, generators, ~known)

    def _decoded_error(self, latents: Tensor, weights: Tensor, depth: Tensor, valid: Tensor) -> Tensor:
        """Absolute error (B,) of the decoded latents and of their edges, on the scale of the latents."""
        importance = valid + self.weights.invalid_weight * ~valid
        error = self.decoder.combine(latents, weights) - self.decoder.to_latent(depth)
        total = _weighted_mean(error.abs(), importance)
        for dim in (-1, -2):
            size = importance.shape[dim] - 1
            both = importance.narrow(dim, 1, size) * importance.narrow(dim, 0, size)
            total = total + self.weights.edge_weight * _weighted_mean(error.diff(dim=dim).abs(), both)
        return total

    def save(self, network: nn.Module, folder: Path) -> None:
        """A pipeline folder that `from_pretrained` loads."""
        self.pipeline.save_pretrained(folder)


def _weighted_mean(values: Tensor, weight: Tensor) -> Tensor:
    """(B,)"""
    return (values * weight).flatten(1).sum(1) / weight.flatten(1).sum(1).clamp(min=1.0)
