"""Learning the distribution of the next state: a field pipeline's network on transitions."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from marigold_uq.denoising import Denoiser
from marigold_uq.field.config import PlateauConfig
from marigold_uq.field.data import Transitions
from marigold_uq.field.objective import MaskedObjective
from marigold_uq.field.rollout import Rollout, RolloutConfig, Start, own_starts
from marigold_uq.pipelines.field import FieldForecastPipeline
from marigold_uq.randomness import member_seed
from marigold_uq.training.objective import ObjectiveConfig
from marigold_uq.training.order import Ordered
from marigold_uq.training.task import Stateful, TrainingTask

__all__ = ["FieldTask", "Plateau"]


LOSS = "validation/loss"
VALIDATION_STREAM = 7
VALIDATION_BATCH = 64
DIRECTION_GROUP = 8
"""Samples that share random directions."""


class Plateau:
    """The paper's recipe: halve the rate and stop when the validation loss makes no progress; a `Stateful`.

    Its state and the best weights are part of every checkpoint, so a resumed run equals an uninterrupted one.
    """

    def __init__(self, config: PlateauConfig) -> None:
        self.config = config
        self.best, self.since_best, self.since_change, self.halvings = math.inf, 0, 0, 0
        self.weights: dict[str, Tensor] | None = None

    @property
    def active(self) -> bool:
        """Whether anything is asked for."""
        return bool(self.config.halve_after or self.config.stop_after)

    @property
    def stopped(self) -> bool:
        """Whether training has made no progress for long enough."""
        return bool(self.config.stop_after) and self.since_best >= self.config.stop_after

    @property
    def factor(self) -> float:
        """What the learning rate is multiplied by."""
        return 0.5**self.halvings

    def update(self, loss: float, network: nn.Module) -> None:
        """Take in a validation loss; the weights of the best one are kept."""
        if loss < self.best:
            self.best, self.since_best, self.since_change = loss, 0, 0
            self.weights = {name: value.detach().cpu().clone() for name, value in network.state_dict().items()}
            return
        self.since_best, self.since_change = self.since_best + 1, self.since_change + 1
        if self.config.halve_after and self.since_change >= self.config.halve_after:
            self.halvings, self.since_change = self.halvings + 1, 0

    def state_dict(self) -> dict[str, Any]:
        """Everything but the config."""
        names = ("best", "since_best", "since_change", "halvings", "weights")
        return {name: getattr(self, name) for name in names}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Undo `state_dict`."""
        for name, value in state_dict.items():
            setattr(self, name, value)

    @torch.no_grad()
    def restore_best(self, network: nn.Module) -> None:
        """Put the best weights into the network, where a plateau was watched."""
        if self.active and self.weights is not None:
            network.load_state_dict(self.weights)


class FieldTask(TrainingTask):
    """A `TrainingTask`: the U-Net of a field pipeline on (history, next state) pairs, or on rollouts of its own."""

    def __init__(
        self,
        pipeline: FieldForecastPipeline,
        dataset: Ordered,
        objective: ObjectiveConfig,
        *,
        validation: Transitions | None = None,
        validation_samples: int = 256,
        plateau: PlateauConfig | None = None,
        rollout: RolloutConfig | None = None,
        seed: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        self.pipeline = pipeline
        self.rollout = Rollout(rollout or RolloutConfig(), seed)
        self._require_feedback()
        self.dataset: Ordered = dataset
        self.validation, self.validation_samples, self.seed = validation, validation_samples, seed
        self.device = torch.device(device)
        pipeline.to(self.device)
        self.network: nn.Module = pipeline.unet
        self.objective = MaskedObjective(objective, pipeline.scheduler, direction_group=DIRECTION_GROUP)
        self.objective.scale.to(self.device)
        self.plateau = Plateau(plateau or PlateauConfig())

    def _require_feedback(self) -> None:
        config = self.pipeline.encoder.config
        if self.rollout.active and list(config.targets) != list(config.variables):
            raise ValueError(
                f"rollout.num_leads={self.rollout.config.num_leads} feeds forecasts back, but the model predicts "
                f"{list(config.targets)} of {list(config.variables)}: predict them all, or set it to 1"
            )

    def states(self) -> list[Stateful]:
        """The running bandwidth, the plateau, and the place in the curriculum where there is one."""
        states: list[Stateful] = [self.objective.scale, self.plateau]
        return [*states, self.rollout] if self.rollout.active else states

    def losses(self, network: nn.Module, batch: dict[str, Any], generators: list[torch.Generator]) -> Tensor:
        """Score of the predicted distribution against the drawn target, one number per sample.

        Of a rollout the lead times whose losses count, averaged.
        """
        length = self.rollout.length()
        scored, parts = self.rollout.scored(length), []
        first = self._start(batch)
        starts = own_starts(self.pipeline, network, first, length, generators, self.rollout.config)
        for lead, start in enumerate(starts):
            if lead in scored:
                losses, residuals = self.objective.losses(*self._inputs(network, batch, start, lead), generators)
                self.objective.note(residuals)
                parts.append(losses)
        return torch.stack(parts).mean(0)

    def _start(self, batch: dict[str, Any]) -> Start:
        return Start(batch["history"].to(self.device), batch["time"])

    def _inputs(
        self, network: nn.Module, batch: dict[str, Any], start: Start, lead: int = 0
    ) -> tuple[Denoiser, Tensor]:
        """The network with its condition, and the scaled increments x_0 (B, C, *space) to the truth at `lead`."""
        encoder, future = self.pipeline.encoder, batch["future"].to(self.device)
        condition = encoder.condition(start.history, start.time)
        x_0 = encoder.encode_target(start.history[:, -1], future[:, lead])
        return self.pipeline.denoiser(condition, network), x_0

    def after_step(self, step: int) -> None:
        """Update the running residual scale, and go on in the curriculum."""
        self.objective.update()
        self.rollout.step = step

    @torch.no_grad()
    def validate(self, network: nn.Module, step: int, pictures: Path) -> dict[str, float]:
        """The loss on held-out samples, with the same noise every time (see `Objective.held_out`)."""
        if self.validation is None or self.validation_samples == 0:
            return {}
        was_training = network.training
        network.eval()
        parts = [
            self.objective.held_out(*self._inputs(network, batch, self._start(batch)), own)
            for batch, own in self._validation_batches()
        ]
        network.train(was_training)
        return {LOSS: float(torch.cat(parts).mean())}

    def after_validation(self, step: int, scores: dict[str, float], network: nn.Module) -> None:
        """Watch the validation loss for a plateau."""
        if self.plateau.active and LOSS in scores:
            self.plateau.update(scores[LOSS], network)

    def rate_factor(self) -> float:
        """Halved at every plateau."""
        return self.plateau.factor

    def finished(self) -> bool:
        """Whether the loss has made no progress for long enough."""
        return self.plateau.stopped

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
        self.plateau.restore_best(network)
        self.pipeline.save_pretrained(folder)
