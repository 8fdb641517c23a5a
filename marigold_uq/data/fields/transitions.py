"""Training samples (u_{s-2}, u_{s-1}) -> u_s of trajectories."""

from typing import Any

import numpy as np
from torch.utils.data import Dataset

from marigold_uq.data.depth.epochs import SharedEpoch, stream
from marigold_uq.data.fields.equation import FieldDataError
from marigold_uq.data.fields.trajectories import Trajectories

ORDER_STREAM, TIME_STREAM = 1, 2


class Transitions(Dataset[dict[str, Any]]):
    """Every transition of every trajectory, in order: for evaluation, or for training with a shuffling loader.

    A sample has `history` (num_history, X), oldest state first, `target` (1, X), and the indices `trajectory` and
    `step` (of the target's time).
    """

    def __init__(self, trajectories: Trajectories, *, num_history: int = 2) -> None:
        num_states = trajectories.states.shape[1]
        if not 1 <= num_history < num_states:
            raise FieldDataError(
                f"{trajectories.source}: num_history={num_history} earlier states and a target need more than the "
                f"{num_states} states there are (and num_history is at least 1)"
            )
        self.trajectories, self.num_history = trajectories, num_history
        self.per_trajectory = num_states - num_history

    def __len__(self) -> int:
        return len(self.trajectories) * self.per_trajectory

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < len(self):
            raise IndexError(f"index {index} of {len(self)} transitions")
        trajectory, offset = divmod(index, self.per_trajectory)
        return self.transition(trajectory, self.num_history + offset)

    def transition(self, trajectory: int, step: int) -> dict[str, Any]:
        """The sample whose target is state `step` of `trajectory`."""
        states = self.trajectories.states[trajectory]  # (S, X)
        return {
            "history": states[step - self.num_history : step].clone(),
            "target": states[step : step + 1].clone(),
            "trajectory": trajectory,
            "step": step,
        }


class RandomTransitions(Transitions):
    """One random time per trajectory and epoch, as the paper trains: an epoch has as many samples as trajectories.

    Order and times follow from (seed, epoch) alone, in any number of workers; call `set_epoch` before each epoch.
    """

    def __init__(self, trajectories: Trajectories, *, num_history: int = 2, seed: int = 0) -> None:
        super().__init__(trajectories, num_history=num_history)
        self.seed, self._epoch = seed, SharedEpoch()
        self._order = (-1, np.empty(0, dtype=np.int64))  # epoch, its permutation of the trajectories

    def set_epoch(self, epoch: int) -> None:
        """Choose the order and times of `epoch`, counted from 0."""
        self._epoch.set(epoch)

    def __len__(self) -> int:
        return len(self.trajectories)

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < len(self):
            raise IndexError(f"index {index} of {len(self)} transitions")
        epoch = self._epoch.get()
        if self._order[0] != epoch:
            self._order = epoch, stream(self.seed, ORDER_STREAM, epoch).permutation(len(self))
        trajectory = int(self._order[1][index])
        offset = int(stream(self.seed, TIME_STREAM, epoch, trajectory).integers(self.per_trajectory))
        return self.transition(trajectory, self.num_history + offset)
