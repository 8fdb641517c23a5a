"""The paper's recipe for fields: halve the rate and stop when the validation loss makes no progress.

The plateau's state and the best weights are part of every checkpoint, so a resumed run equals an uninterrupted one.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from marigold_uq.field.config import PlateauConfig


class Plateau:
    """Best loss so far, validations since then, halvings; a `Stateful`."""

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
