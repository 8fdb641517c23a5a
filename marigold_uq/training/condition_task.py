"""Training a depth pipeline with an image encoder: its head, U-Net and decoder together, and at last its backbone."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from marigold_uq.data.depth.normalization import normalize_depth
from marigold_uq.denoising import predict_noise
from marigold_uq.models.condition_encoder import ConditionEncoder
from marigold_uq.models.depth_cells import DepthCells
from marigold_uq.pipelines.depth import MarigoldUQDepthPipeline
from marigold_uq.randomness import randn
from marigold_uq.training.depth_task import Batch, Validation
from marigold_uq.training.law_scores import LawScores, residual_rows
from marigold_uq.training.order import Ordered
from marigold_uq.training.task import Stateful

Seen: TypeAlias = Tensor | tuple[list[Tensor], Tensor]
"""Pictures (B, 3, H, W) in [-1, 1], or what the backbone made of them: features and thumbnails."""


@dataclass(frozen=True)
class ConditionObjective:
    """What is minimised: the score of the law of the latents, and the error of the decoded mean.

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
        self.decoder: DepthCells = pipeline.vae  # type: ignore[assignment]

    def forward(self, seen: Seen, x_t: Tensor, t: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
        """Raw output of the U-Net, and the weights of the decoder."""
        condition = self.encoder(seen) if isinstance(seen, Tensor) else self.encoder.fuse(*seen)
        inputs = torch.cat([condition.channels, x_t], 1)
        return self.unet(inputs, t, encoder_hidden_states=text, return_dict=False)[0], self.decoder.convex_weights(
            condition.guide
        )


class ConditionTask:
    """A `TrainingTask` on samples with depth, valid, and either image, or features_0, features_1, ... and thumbnail.

    Only the last timestep is trained, where a model of one step is used: at zero terminal SNR its law of x_0 is the
    predictive law of the depth map.
    """

    def __init__(
        self,
        pipeline: MarigoldUQDepthPipeline,
        dataset: Ordered,
        objective: ConditionObjective,
        *,
        train_backbone: bool = False,
        validation: Validation | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.pipeline, self.dataset, self.objective, self.validation = pipeline, dataset, objective, validation
        self.device = torch.device(device)
        pipeline.to(self.device)
        self.last = int(pipeline.scheduler.config.num_train_timesteps) - 1
        self.network: nn.Module = ConditionedNetwork(pipeline)
        self.network.requires_grad_(True)
        pipeline.image_encoder.network.requires_grad_(train_backbone)
        self.scores = LawScores(
            objective.score or pipeline.scheduler.family.default_score,
            objective.score_options,
            adaptive_bandwidth=True,
            num_train_timesteps=pipeline.scheduler.config.num_train_timesteps,
        )

    def states(self) -> list[Stateful]:
        """The running bandwidth of an adaptive score."""
        return [self.scores.scale]

    def collate(self, samples: list[dict[str, Any]]) -> Batch:
        """Group samples by the shape of their pictures."""
        groups: dict[torch.Size, list[int]] = {}
        for place, sample in enumerate(samples):
            groups.setdefault(sample["depth"].shape, []).append(place)
        return [(places, default_collate([samples[place] for place in places])) for places in groups.values()]

    def describe(self, batch: Batch) -> list[str]:
        """Names of the samples."""
        names = {place: str(name) for places, part in batch for place, name in zip(places, part["name"], strict=True)}
        return [names[place] for place in sorted(names)]

    def losses(self, network: nn.Module, batch: Batch, generators: list[torch.Generator]) -> Tensor:
        """One number per sample."""
        parts = [self._part(network, part, [generators[place] for place in places]) for places, part in batch]
        order = torch.tensor([place for places, _ in batch for place in places], device=self.device).argsort()
        return torch.cat(parts)[order]

    def _part(self, network: nn.Module, batch: dict[str, Any], generators: list[torch.Generator]) -> Tensor:
        """Losses (B,) of samples of one shape."""
        decoder: DepthCells = self.pipeline.vae  # type: ignore[assignment]
        scheduler = self.pipeline.scheduler
        depth, valid = self._targets(batch)
        x_0, known = decoder.encode(depth, valid)
        noise = randn((), x_0.shape, like=x_0, generator=generators)
        timesteps = torch.full((len(x_0),), self.last, device=self.device)
        x_t = scheduler.add_noise(x_0, noise, timesteps)
        target = scheduler.training_target(x_0, noise, timesteps)
        seen = self._seen(batch)
        text = self.pipeline.encode_prompt()(len(x_0)).to(x_0)
        weights: list[Tensor] = []

        def denoiser(x: Tensor, t: Tensor | int) -> Tensor:
            raw, own = network(seen, x, t, text)
            weights.append(own)
            return raw

        law = predict_noise(denoiser, scheduler, x_t, timesteps, generator=generators)
        score = self._score(law, target, known, timesteps, generators)
        mean = scheduler.original_distribution(law, self.last, x_t).mean
        return score + self.objective.decoded_weight * self._decoded_error(mean, weights[0], depth, valid)

    def _targets(self, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Depth normalised as the pipeline predicts it, and where it is known."""
        step = self._pixels_per_value(batch)
        depth, valid = batch["depth"][..., ::step, ::step].float(), batch["valid"][..., ::step, ::step]
        maps = [normalize_depth(own, there)[0] for own, there in zip(depth, valid, strict=True)]
        return torch.stack(maps).to(self.device), valid.to(self.device)

    def _pixels_per_value(self, batch: dict[str, Any]) -> int:
        """How many pixels of the depth map there are for a value that is decoded; kept depth has just one."""
        config = self.pipeline.vae.config
        decoder: DepthCells = self.pipeline.vae  # type: ignore[assignment]
        return int(config.cell) // (decoder.parts * int(config.upsampling)) if "image" in batch else 1

    def _seen(self, batch: dict[str, Any]) -> Seen:
        if "image" in batch:
            return 2 * batch["image"].to(self.device) - 1
        names = sorted(name for name in batch if name.startswith("features_"))
        features = [batch[name].to(self.device).float() for name in names]
        return features, batch["thumbnail"].to(self.device).float() / 127.5 - 1

    def _score(
        self, law: Any, target: Tensor, known: Tensor, timesteps: Tensor, generators: list[torch.Generator]
    ) -> Tensor:
        """Score of the law (B,), of known places and a little of the others."""
        score = self.scores(law, target, timesteps, generators, known)
        if not law.joint:
            score = score + self.objective.invalid_weight * self.scores(law, target, timesteps, generators, ~known)
        self.scores.note(residual_rows(law, target, timesteps, known))
        return score

    def _decoded_error(self, latents: Tensor, weights: Tensor, depth: Tensor, valid: Tensor) -> Tensor:
        """Absolute error (B,) of the decoded latents and of their edges, on the scale of the latents."""
        decoder: DepthCells = self.pipeline.vae  # type: ignore[assignment]
        importance = valid + self.objective.invalid_weight * ~valid
        error = decoder.combine(latents, weights) - decoder.to_latent(depth)
        total = _weighted_mean(error.abs(), importance)
        for dim in (-1, -2):
            size = importance.shape[dim] - 1
            both = importance.narrow(dim, 1, size) * importance.narrow(dim, 0, size)
            total = total + self.objective.edge_weight * _weighted_mean(error.diff(dim=dim).abs(), both)
        return total

    def after_step(self, step: int) -> None:
        """Update the running residual scale."""
        self.scores.update()

    def validate(self, network: nn.Module, step: int, pictures: Path) -> dict[str, float]:
        """Whatever the validation given at construction measures."""
        if self.validation is None:
            return {}
        network.eval()
        scores = self.validation(self.pipeline, step, pictures)
        network.train()
        return scores

    def save(self, network: nn.Module, folder: Path) -> None:
        """A pipeline folder that `from_pretrained` loads."""
        self.pipeline.save_pretrained(folder)


def _weighted_mean(values: Tensor, weight: Tensor) -> Tensor:
    """(B,)"""
    return (values * weight).flatten(1).sum(1) / weight.flatten(1).sum(1).clamp(min=1.0)
