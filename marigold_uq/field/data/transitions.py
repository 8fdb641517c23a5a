"""Samples of sequences: some states of the past, and what came after them."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from marigold_uq.field.data.sequences import FieldSequences
from marigold_uq.models.field_grid import FieldDataError
from marigold_uq.randomness import member_seed

__all__ = ["RandomTransitions", "Transitions"]


ORDER_STREAM, TIME_STREAM = 1, 2
HOUR = 3600


class Transitions(Dataset[dict[str, Any]]):
    """Every place of every sequence, in order: for evaluation, or for training with a shuffling loader.

    A sample has `history` (num_history, C, *space), oldest state first, `future` (num_leads, C, *space), the `time` of
    the last state of the history, and its `name`.

    Args:
        sequences: Where the states come from.
        num_history: States before the first future one.
        num_leads: Future states.
        stride: Take every so many-th place of a sequence.
        target_hours: UTC hours that the first future state may have; None takes all. (The paper's T2M: 6.)
    """

    def __init__(
        self,
        sequences: FieldSequences,
        *,
        num_history: int = 2,
        num_leads: int = 1,
        stride: int = 1,
        target_hours: Sequence[int] | None = None,
    ) -> None:
        if num_history < 1 or num_leads < 1 or stride < 1:
            raise ValueError(
                f"num_history, num_leads and stride must be at least 1; got {num_history}, {num_leads}, {stride}"
            )
        self.sequences, self.num_history, self.num_leads = sequences, num_history, num_leads
        places = [self._places(number, stride, target_hours) for number in range(sequences.num_sequences)]
        self.starts = [0, *np.cumsum([len(steps) for steps in places]).tolist()]
        self.steps = np.concatenate(places) if places else np.empty(0, np.int64)
        if not len(self.steps):
            length = max((len(sequences.times(i)) for i in range(sequences.num_sequences)), default=0)
            raise FieldDataError(
                f"{sequences.source}: num_history={num_history} earlier states and {num_leads} future ones do not fit "
                f"the {length} states there are" + (f" at hours {list(target_hours)}" if target_hours else "")
            )

    def _places(self, sequence: int, stride: int, hours: Sequence[int] | None) -> np.ndarray:
        """Indices of the first future state."""
        times = self.sequences.times(sequence)
        steps = np.arange(self.num_history, len(times) - self.num_leads + 1, stride)
        if hours is None:
            return steps
        if not self.sequences.calendar:
            raise FieldDataError(f"{self.sequences.source}: target_hours={list(hours)}, but its times are not dates")
        return steps[np.isin(times[steps] // HOUR % 24, list(hours))]

    def __len__(self) -> int:
        return len(self.steps)

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < len(self):
            raise IndexError(f"index {index} of {len(self)} transitions")
        return self.transition(self.sequence_of(index), int(self.steps[index]))

    def sequence_of(self, index: int) -> int:
        """The sequence that a place belongs to."""
        return int(np.searchsorted(self.starts, index, side="right")) - 1

    def transition(self, sequence: int, step: int) -> dict[str, Any]:
        """The sample whose first future state is number `step` of a sequence."""
        states = self.sequences.read(sequence, step - self.num_history, step + self.num_leads).clone()
        self._require_finite(states, sequence, step)
        return {
            "history": states[: self.num_history],
            "future": states[self.num_history :],
            "time": float(self.sequences.times(sequence)[step - 1]),
            "name": f"sequence {sequence}, state {step}",
        }

    def _require_finite(self, states: Tensor, sequence: int, step: int) -> None:
        for channel, name in enumerate(self.sequences.variables):
            bad = int((~states[:, channel].isfinite()).sum())
            if bad:
                raise FieldDataError(
                    f"{self.sequences.source}: {name} holds NaN or infinity at {bad} places around state {step} of "
                    f"sequence {sequence}: fill them, or leave this period or variable out"
                )


class RandomTransitions(Transitions):
    """One random time per sequence and epoch, as the paper trains: an epoch has as many samples as sequences.

    Order and times follow from (seed, epoch) alone, in any number of workers; call `set_epoch` before each epoch.
    """

    def __init__(self, sequences: FieldSequences, *, num_history: int = 2, seed: int = 0) -> None:
        super().__init__(sequences, num_history=num_history)
        self.seed = seed
        self._epoch = torch.zeros(1, dtype=torch.int64).share_memory_()  # seen by workers that are already running
        self._order = (-1, np.empty(0, dtype=np.int64))  # epoch, its permutation of the sequences

    def set_epoch(self, epoch: int) -> None:
        """Choose the order and times of `epoch`, counted from 0."""
        if epoch < 0:
            raise ValueError(f"epochs count from 0; got {epoch}")
        self._epoch[0] = epoch

    def __len__(self) -> int:
        return self.sequences.num_sequences

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < len(self):
            raise IndexError(f"index {index} of {len(self)} transitions")
        epoch = int(self._epoch[0])
        if self._order[0] != epoch:
            self._order = epoch, self._stream(ORDER_STREAM, epoch).permutation(len(self))
        sequence = int(self._order[1][index])
        choices = self.steps[self.starts[sequence] : self.starts[sequence + 1]]
        place = self._stream(TIME_STREAM, epoch, sequence).integers(len(choices))
        return self.transition(sequence, int(choices[place]))

    def _stream(self, *key: int) -> np.random.Generator:
        return np.random.default_rng(member_seed(self.seed, *key))
