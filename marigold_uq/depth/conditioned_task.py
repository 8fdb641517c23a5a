"""Training a depth pipeline with an image encoder: its head, U-Net and decoder together, and at last its backbone."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias, cast

import torch
from torch import Tensor, nn

from marigold_uq.depth.data.normalization import normalize_depth
from marigold_uq.depth.task import PictureTask, Validation
from marigold_uq.models.condition_encoder import Condition, ConditionEncoder
from marigold_uq.models.depth_cells import DepthCells
from marigold_uq.pipelines.depth import MarigoldUQDepthPipeline
from marigold_uq.training.noise import training_timesteps
from marigold_uq.training.objective import Objective, ObjectiveConfig, Prediction, residual_rows
from marigold_uq.training.order import Ordered

Seen: TypeAlias = Tensor | tuple[list[Tensor], Tensor]
"""Pictures (B, 3, H, W) in [-1, 1], or what the backbone made of them: features and thumbnails."""
Learning: TypeAlias = Literal["none", "later", "all"]
"""Which part of the backbone learns."""

MAX_SLOPE = 2.0
"""By how much the scale of a prediction may differ from that of its target."""


@dataclass(frozen=True)
class ConditionedObjective:
    """What is minimised: the score of the distribution of the latents, and the error of the decoded mean.

    Args:
        score: As in `ObjectiveConfig`; None takes the family's own.
        score_options: Its arguments.
        fitted: The distribution is scored against the depth map on the scale of the prediction, from a fit by least
            squares. So its spread is that of the errors which alignment leaves, and not of a scale nobody asked for.
        decoded_weight: Weight of the absolute error of decoded values, which also teaches the decoder.
        edge_weight: Weight of the absolute error of their differences between neighbours, relative to that.
        invalid_weight: How much places without depth count, such as the sky; they are taught to be far away.
        all_timesteps: Half of the samples are at random timesteps, for a model of several steps; else all are at the
            last one, where a model of one step is used.
    """

    score: str | None = None
    score_options: dict[str, Any] = field(default_factory=dict)
    fitted: bool = True
    decoded_weight: float = 1.0
    edge_weight: float = 1.0
    invalid_weight: float = 0.1
    all_timesteps: bool = False


class ConditionedNetwork(nn.Module):
    """All that learns, as one module; with `later` the backbone's later stages run on the first of kept features."""

    def __init__(self, pipeline: MarigoldUQDepthPipeline, later: bool = False) -> None:
        super().__init__()
        self.later = later
        self.encoder: ConditionEncoder = pipeline.image_encoder
        self.unet: nn.Module = pipeline.unet
        self.decoder: DepthCells = pipeline.vae
        self._denoiser = pipeline.denoiser

    def forward(self, seen: Seen, x_t: Tensor, t: Tensor | int) -> tuple[Tensor, Tensor]:
        """Raw output of the U-Net, and the weights of the decoder."""
        condition = self._condition(seen)
        return self._denoiser(condition.channels, self.unet)(x_t, t), self.decoder.convex_weights(condition.guide)

    def _condition(self, seen: Seen) -> Condition:
        if isinstance(seen, Tensor):
            return self.encoder(seen)
        features, thumbnail = seen
        return self.encoder.fuse(self.encoder.features_after(features[0]) if self.later else features, thumbnail)


class ConditionedTask(PictureTask):
    """Samples have depth, valid, and either image, or features_0, features_1, ... and thumbnail.

    By default only the last timestep is trained, where a model of one step is used: at zero terminal SNR its
    distribution of x_0 is the predictive distribution of the depth map.

    Args:
        pipeline: Learns in place.
        dataset: The samples.
        objective: What is minimised.
        backbone: Which part of it learns: none; its later stages, on the first level of kept features; or all.
        validation: What to measure on held-out samples.
        device: Where the networks run.
    """

    def __init__(
        self,
        pipeline: MarigoldUQDepthPipeline,
        dataset: Ordered,
        objective: ConditionedObjective,
        *,
        backbone: Learning = "none",
        validation: Validation | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.pipeline, self.dataset, self.weights, self.validation = pipeline, dataset, objective, validation
        self.device = torch.device(device)
        pipeline.to(self.device)
        self.decoder = cast(DepthCells, pipeline.vae)
        self.network: nn.Module = ConditionedNetwork(pipeline, later=backbone == "later")
        self.network.requires_grad_(True)
        pipeline.image_encoder.network.requires_grad_(backbone == "all")
        if backbone == "later":
            pipeline.image_encoder.network.learn_after(pipeline.image_encoder.config.levels[0])
        self._lay_out(torch.channels_last)  # a third faster on a CPU
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

        timesteps = self._timesteps(generators)
        prediction = self.objective.predict(denoiser, x_0, generators, timesteps=timesteps)
        original = self.pipeline.scheduler.original_distribution(prediction.law, prediction.timesteps, prediction.x_t)
        mean = original.mean
        if self.weights.fitted:
            target = torch.where(known, fitted_target(self.decoder, mean.detach(), x_0, known), x_0)
            prediction = replace(prediction, law=original, target=target)
        score = self._score(prediction, known, generators)
        error = self._decoded_error(mean, weights[0], depth, valid)
        return score + self.weights.decoded_weight * error, residual_rows(prediction, known)

    def _timesteps(self, generators: list[torch.Generator]) -> Tensor:
        scheduler = self.pipeline.scheduler
        if self.weights.all_timesteps:
            return training_timesteps(scheduler, generators, uniform=False)
        return torch.full((len(generators),), scheduler.noisiest_timestep)

    def _targets(self, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Depth normalised as the pipeline predicts it, and where it is known."""
        step = (
            self.decoder.pixels_per_value if "image" in batch else 1
        )  # kept depth has one value for each that is decoded
        depth, valid = batch["depth"][..., ::step, ::step].float(), batch["valid"][..., ::step, ::step]
        maps = [normalize_depth(own, there)[0] for own, there in zip(depth, valid, strict=True)]
        return torch.stack(maps).to(self.device), valid.to(self.device)

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

    def _lay_out(self, form: torch.memory_format) -> None:
        everything: Any = self.network
        everything.to(memory_format=form)

    def save(self, network: nn.Module, folder: Path) -> None:
        """A pipeline folder that `from_pretrained` loads."""
        self._lay_out(torch.contiguous_format)  # the only one that safetensors writes
        self.pipeline.save_pretrained(folder)


def fitted_target(decoder: DepthCells, latents: Tensor, target: Tensor, known: Tensor) -> Tensor:
    """The target (B, C, h, w) in the units of predicted latents: the line from their depth to its own, undone.

    A slope beyond MAX_SLOPE, either way, is not followed: a map without relief would look right on any scale.
    """
    depth, truth = decoder.to_depth(latents.float()).flatten(1), decoder.to_depth(target.float()).flatten(1)
    weight = known.flatten(1).to(depth)
    total = weight.sum(1, keepdim=True).clamp(min=1.0)
    centre, level = ((weight * values).sum(1, keepdim=True) / total for values in (depth, truth))
    deviation = weight * (depth - centre)
    variance = (deviation * (depth - centre)).sum(1, keepdim=True).clamp(min=1e-6)
    slope = (deviation * (truth - level)).sum(1, keepdim=True) / variance
    moved = centre + (truth - level) / slope.clamp(1 / MAX_SLOPE, MAX_SLOPE)
    nearest = -1 - decoder.config.offset  # below it, half of the offset is used up and the logarithm grows steep
    return decoder.to_latent(moved.clamp(min=nearest)).view_as(target)


def _weighted_mean(values: Tensor, weight: Tensor) -> Tensor:
    """(B,)"""
    return (values * weight).flatten(1).sum(1) / weight.flatten(1).sum(1).clamp(min=1.0)
