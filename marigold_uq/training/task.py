"""What a task gives to the loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from marigold_uq.training.order import Ordered


class Stateful(Protocol):
    """Anything that is saved with a checkpoint."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


class TrainingTask(Protocol):
    """A network, its data and its loss.

    Everything random in `losses` comes from the generators, one per sample, which follow from (seed, step, place in the
    effective batch): the same whatever the number of processes, and the same again after a resume.

    A task may have a method `collate(samples) -> batch` for its micro batches; without one torch's default is taken.
    """

    network: nn.Module
    dataset: Ordered

    def losses(self, network: nn.Module, batch: Any, generators: list[torch.Generator]) -> Tensor:
        """Loss of each sample, (B,)."""

    def after_step(self, step: int) -> None:
        """Called after each optimiser step, on every process."""

    def describe(self, batch: Any) -> list[str]:
        """Names of the samples of a batch, for error messages."""

    def states(self) -> list[Stateful]:
        """Further things to save in checkpoints."""

    def validate(self, network: nn.Module, step: int, pictures: Path) -> dict[str, float]:
        """Scores on held-out data, with the averaged weights in place, called on every process; {} if there are none.

        May write PNGs into the folder `pictures`, which is the step's own and need not exist yet; trackers show them
        under their file names.
        """

    def save(self, network: nn.Module, folder: Path) -> None:
        """Write the finished model, with the averaged weights in place."""
