"""The paper's recipe for fields: halve the rate and stop when the validation loss makes no progress.

The plateau's state is part of every checkpoint, so a resumed run goes on exactly; the best weights are, too.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from marigold_uq.field.config import PlateauConfig
from marigold_uq.training.interrupt import InterruptGuard
from marigold_uq.training.loop import Trainer
from marigold_uq.training.run_folder import CHECKPOINT


class Plateau:
    """Best loss so far, validations since then, halvings; a `Stateful`."""

    def __init__(self, config: PlateauConfig) -> None:
        self.config = config
        self.best, self.since_best, self.since_change, self.halvings, self.step = math.inf, 0, 0, 0, 0
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

    def update(self, step: int, loss: float, network: nn.Module) -> None:
        """Take in the validation loss of a step; the weights of the best one are kept."""
        self.step = step
        if loss < self.best:
            self.best, self.since_best, self.since_change = loss, 0, 0
            self.weights = {name: value.detach().cpu().clone() for name, value in network.state_dict().items()}
            return
        self.since_best, self.since_change = self.since_best + 1, self.since_change + 1
        if self.config.halve_after and self.since_change >= self.config.halve_after:
            self.halvings, self.since_change = self.halvings + 1, 0

    def state_dict(self) -> dict[str, Any]:
        """Everything but the config."""
        names = ("best", "since_best", "since_change", "halvings", "step", "weights")
        return {name: getattr(self, name) for name in names}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Undo `state_dict`."""
        for name, value in state_dict.items():
            setattr(self, name, value)


class PlateauTrainer(Trainer):
    """A `Trainer` whose rate and end follow the task's `plateau`; without one it is the `Trainer`."""

    @property
    def _plateau(self) -> Plateau:
        plateau = getattr(self.task, "plateau", None)
        return plateau if isinstance(plateau, Plateau) else Plateau(PlateauConfig())

    def _train(self, start: int, description: str) -> int:
        if not self._plateau.stopped:
            try:
                start = super()._train(start, description)
            except _PlateauReachedError as reached:
                start = reached.step
        if self._plateau.stopped:
            self.config = replace(self.config, max_steps=max(1, start))  # this is the end: `run` saves the model
        return start

    def _catch_up_validation(self, step: int) -> None:
        """A checkpoint is written before the validation of its step: the plateau has not seen that one."""
        super()._catch_up_validation(step)
        if self._plateau.active and self._validation_due(step) and self._plateau.step < step:
            with self.averaged_weights():
                self.task.validate(self.accelerator.unwrap_model(self.network), step, self.folder.pictures)

    def _step(self, step: int, batches: list[Any], guard: InterruptGuard) -> tuple[dict[str, Any], bool]:
        asked = self.config
        rate = replace(asked.optimizer, learning_rate=asked.optimizer.learning_rate * self._plateau.factor)
        self.config = replace(asked, optimizer=rate)
        try:
            return super()._step(step, batches, guard)
        finally:
            self.config = asked

    def _after_step(self, record: dict[str, Any], stop: bool) -> None:
        super()._after_step(record, stop)
        if self._plateau.stopped:
            if not (self.folder.checkpoints / f"{CHECKPOINT}{record['step']}").exists():
                self._save_checkpoint(record["step"])
            raise _PlateauReachedError(record["step"])


class _PlateauReachedError(Exception):
    """Ends the loop from within; carries the number of steps done."""

    def __init__(self, step: int) -> None:
        super().__init__(step)
        self.step = step


@torch.no_grad()
def restore_best(plateau: Plateau, network: nn.Module) -> None:
    """Put the best weights into the network, where a plateau kept some."""
    if plateau.active and plateau.weights is not None:
        network.load_state_dict(plateau.weights)
