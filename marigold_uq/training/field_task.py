"""Learning the law of the next state: a field pipeline's network on transitions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from marigold_uq.data.fields import Transitions
from marigold_uq.denoising import predict_output
from marigold_uq.pipelines.field import FieldForecastPipeline
from marigold_uq.randomness import member_seed
from marigold_uq.training.field_config import FieldObjective, PlateauConfig
from marigold_uq.training.field_plateau import Plateau, restore_best
from marigold_uq.training.law_scores import LawScores, residual_rows
from marigold_uq.training.noise import training_timesteps
from marigold_uq.training.order import Ordered
from marigold_uq.training.task import Stateful

VALIDATION_STREAM = 7
VALIDATION_BATCH = 64
DIRECTION_GROUP = 8
"""Samples that share random directions."""


class FieldTask:
    """A `TrainingTask`: the U-Net of a field pipeline on (history, next state) pairs."""

    def __init__(
        self,
        pipeline: FieldForecastPipeline,
        dataset: Ordered,
        objective: FieldObjective,
        *,
        validation: Transitions | None = None,
        validation_samples: int = 256,
        plateau: PlateauConfig | None = None,
        seed: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        self.pipeline, self.objective = pipeline, objective
        self.dataset: Ordered = dataset
        self.validation, self.validation_samples, self.seed = validation, validation_samples, seed
        self.device = torch.device(device)
        pipeline.to(self.device)
        self.network: nn.Module = pipeline.unet
        scheduler = pipeline.scheduler
        self.scores = LawScores(
            objective.score or scheduler.family.default_score,
            objective.score_options,
            adaptive_bandwidth=objective.adaptive_bandwidth,
            num_train_timesteps=scheduler.config.num_train_timesteps,
            direction_group=DIRECTION_GROUP,
        )
        self.scores.scale.to(self.device)
        self.plateau = Plateau(plateau or PlateauConfig())

    def states(self) -> list[Stateful]:
        """The running bandwidth and the plateau."""
        return [self.scores.scale, self.plateau]

    def describe(self, batch: dict[str, Any]) -> list[str]:
        """Names of the samples."""
        return list(batch["name"])

    def losses(self, network: nn.Module, batch: dict[str, Any], generators: list[torch.Generator]) -> Tensor:
        """Score of the law of the model output against the drawn target, one number per sample."""
        return self._losses(network, batch, generators, learns=True)

    def _losses(
        self, network: nn.Module, batch: dict[str, Any], generators: list[torch.Generator], *, learns: bool
    ) -> Tensor:
        encoder, scheduler = self.pipeline.encoder, self.pipeline.scheduler
        history, future = batch["history"].to(self.device), batch["future"].to(self.device)
        x_0 = encoder.encode_target(history[:, -1], future[:, 0])  # (B, C, *space)
        condition = encoder.condition(history, batch["time"])
        steps = scheduler.config.num_train_timesteps
        timesteps = training_timesteps(steps, generators, uniform=self.objective.uniform_timesteps).to(self.device)
        noise = torch.stack([torch.randn(x_0.shape[1:], generator=own) for own in generators]).to(x_0)
        x_t = scheduler.add_noise(x_0, noise, timesteps)
        target = scheduler.training_target(x_0, noise, timesteps)
        law = predict_output(
            self.pipeline.denoiser(condition, network),
            scheduler,
            x_t,
            timesteps,
            num_draws=self.objective.num_draws,
            generator=generators,
        )
        if not learns:
            return self.scores.held_out(law, target, timesteps, generators)
        self.scores.note(residual_rows(law, target, timesteps))
        return self.scores(law, target, timesteps, generators)

    def after_step(self, step: int) -> None:
        """Update the running residual scale."""
        self.scores.update()

    @torch.no_grad()
    def validate(self, network: nn.Module, step: int, pictures: Path) -> dict[str, float]:
        """The loss on held-out samples, with the same noise every time (see `LawScores.held_out`)."""
        if self.validation is None or self.validation_samples == 0:
            return {}
        was_training = network.training
        network.eval()
        losses = torch.cat([self._losses(network, *part, learns=False) for part in self._validation_batches()])
        network.train(was_training)
        loss = float(losses.mean())
        self.plateau.update(step, loss, network)
        return {"validation/loss": loss}

    def _validation_batches(self) -> list[tuple[dict[str, Any], list[torch.Generator]]]:
        assert self.validation is not None
        count = min(self.validation_samples, len(self.validation))
        chosen = np.random.default_rng(member_seed(self.seed, VALIDATION_STREAM))
        indices = np.sort(chosen.choice(len(self.validation), count, replace=False)).tolist()
        batches = []
        for first in range(0, count, VALIDATION_BATCH):
            some = indices[first : first + VALIDATION_BATCH]
            seeds = [member_seed(self.seed, VALIDATION_STREAM, index) for index in some]
            generators = [torch.Generator().manual_seed(seed) for seed in seeds]
            batches.append((default_collate([self.validation[index] for index in some]), generators))
        return batches

    def save(self, network: nn.Module, folder: Path) -> None:
        """A pipeline folder that `from_pretrained` loads; with the best weights where a plateau was watched."""
        restore_best(self.plateau, network)
        self.pipeline.save_pretrained(folder)
