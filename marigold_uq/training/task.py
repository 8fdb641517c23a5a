"""What a task gives to the loop."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from marigold_uq.training.order import Ordered

__all__ = ["Stateful", "TrainingTask"]


class Stateful(Protocol):
    """Anything that is saved with a checkpoint: tensors, numbers, strings, and lists and dicts of them."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


class TrainingTask(ABC):
    """A network, its data and its loss; whatever else the loop asks for has a default.

    The loop calls every method on every process, except `save`.
    """

    network: nn.Module
    dataset: Ordered
    can_rehearse: bool = False
    """Whether `rehearse` leaves no trace in the task, so that a step can be timed before the first."""

    def rehearse(self, network: nn.Module, batch: Any, generators: list[torch.Generator]) -> Tensor:
        """`losses` without a trace."""
        return self.losses(network, batch, generators)

    def frozen_networks(self) -> list[nn.Module]:
        """Networks that take memory and do not learn."""
        return []

    @abstractmethod
    def losses(self, network: nn.Module, batch: Any, generators: list[torch.Generator]) -> Tensor:
        """Loss of each sample, (B,).

        Everything random comes from the generators, one per sample. They follow from (seed, step, place in the
        effective batch): the same whatever the number of processes, and the same again after a resume.
        """

    @abstractmethod
    def save(self, network: nn.Module, folder: Path) -> None:
        """Write the finished model into a folder, with the averaged weights in place; called on one process."""

    def collate(self, samples: list[Any]) -> Any:
        """A micro batch from its samples."""
        return default_collate(samples)

    def describe(self, batch: Any) -> list[str]:
        """Names of the samples of a batch, for error messages."""
        return [str(name) for name in batch["name"]]

    def states(self) -> list[Stateful]:
        """What checkpoints keep besides the network and its optimiser."""
        return []

    def after_step(self, step: int) -> None:
        """Called after each optimiser step."""
        return

    def rate_factor(self) -> float:
        """A factor on the learning rate, asked before each step."""
        return 1.0

    def validate(self, network: nn.Module, step: int, pictures: Path) -> dict[str, float]:
        """Scores on held-out data, with the averaged weights in place; {} if there are none.

        May write PNGs into the folder `pictures`, which is the step's own and need not exist yet; trackers show them
        under their file names.
        """
        return {}

    def after_validation(self, step: int, scores: dict[str, float], network: nn.Module) -> None:
        """Take in the scores, with the averaged weights in place; called once per validated step, also after a resume.

        Checkpoints keep the `states` as they are after this call.
        """
        return

    def finished(self) -> bool:
        """Whether training may end before `max_steps`; asked before the first step and after each validation."""
        return False
