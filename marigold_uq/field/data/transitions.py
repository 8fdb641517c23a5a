"""Samples of sequences: some states of the past, and what came after them."""

import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from marigold_uq.field.data.sequences import FieldSequences, masked_of, target_hours_of
from marigold_uq.models.field_grid import FieldDataError
from marigold_uq.randomness import member_seed

__all__ = ["RandomTransitions", "Transitions", "WindowedTransitions"]


ORDER_STREAM, TIME_STREAM, WINDOW_STREAM = 1, 2, 3
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
        target_hours: UTC hours that the first future state may have; None takes those of the data set, or all. (The
            paper's T2M: 6.)
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
        target_hours = target_hours_of(sequences) if target_hours is None else target_hours
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
        states = self._states(sequence, step)
        self._require_finite(states, sequence, step)
        return {
            "history": states[: self.num_history],
            "future": states[self.num_history :],
            "time": float(self.sequences.times(sequence)[step - 1]),
            "name": f"sequence {sequence}, state {step}",
        }

    def _states(self, sequence: int, step: int) -> Tensor:
        """History and future of a place, (num_history + num_leads, C, *space), a copy."""
        return self.sequences.read(sequence, step - self.num_history, step + self.num_leads).clone()

    def _require_finite(self, states: Tensor, sequence: int, step: int) -> None:
        masked = masked_of(self.sequences)
        for channel, name in enumerate(self.sequences.variables):
            values = states[:, channel]
            bad = int((values.isinf() if name in masked else ~values.isfinite()).sum())
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


class WindowedTransitions(Transitions):
    """Every place once per epoch, in an order that reads a long record window by window.

    Windows of `window` states follow each other at random; the places of `num_open` of them are shuffled together.
    While they are used, a thread reads the next ones: at most 2 `num_open` windows are in memory, and each state is
    read once per epoch (those at the ends of a window twice). The order follows from (seed, epoch) alone; call
    `set_epoch` before each epoch. Every worker process reads for itself, so one or none is right.
    """

    shares_epoch = True

    def __init__(
        self,
        sequences: FieldSequences,
        *,
        window: int,
        num_open: int = 4,
        num_history: int = 2,
        num_leads: int = 1,
        target_hours: Sequence[int] | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(sequences, num_history=num_history, num_leads=num_leads, target_hours=target_hours)
        if window < 1 or num_open < 1:
            raise ValueError(f"window and num_open must be at least 1; got {window}, {num_open}")
        self.window, self.num_open, self.seed = window, num_open, seed
        self._epoch = torch.zeros(1, dtype=torch.int64).share_memory_()
        self._plan: tuple[int, np.ndarray, np.ndarray] | None = None  # epoch, order of the places, group of each
        self._reader: tuple[int, ThreadPoolExecutor] | None = None  # process, its thread
        self._read: dict[tuple[int, int], Future[Tensor]] = {}
        self._opened = (-1, -1)  # epoch and group of the windows that are read

    def __getstate__(self) -> dict[str, Any]:
        """Without threads and what they read, which each process has for itself."""
        return {**self.__dict__, "_reader": None, "_read": {}, "_opened": (-1, -1)}

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of `epoch`, counted from 0."""
        if epoch < 0:
            raise ValueError(f"epochs count from 0; got {epoch}")
        self._epoch[0] = epoch

    def __getitem__(self, index: int) -> dict[str, Any]:
        order, groups = self._order()
        if not 0 <= index < len(self):
            raise IndexError(f"index {index} of {len(self)} transitions")
        self._open(order, groups, int(groups[index]))
        return super().__getitem__(int(order[index]))

    def _order(self) -> tuple[np.ndarray, np.ndarray]:
        """The places of this epoch in their order, and which group of windows each is of."""
        epoch = int(self._epoch[0])
        if self._plan is None or self._plan[0] != epoch:
            self._plan = (epoch, *self._draw(np.random.default_rng(member_seed(self.seed, WINDOW_STREAM, epoch))))
        return self._plan[1:]

    def _draw(self, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        keys = [self._key(place) for place in range(len(self))]
        windows = sorted(set(keys))
        rank = dict(zip([windows[i] for i in generator.permutation(len(windows))], range(len(windows)), strict=True))
        group = np.array([rank[key] // self.num_open for key in keys])
        order = np.lexsort((generator.random(len(keys)), group))
        return order, group[order]

    def _key(self, place: int) -> tuple[int, int]:
        """Sequence and number of the window of a place."""
        return self.sequence_of(place), int(self.steps[place]) // self.window

    def _open(self, order: np.ndarray, groups: np.ndarray, group: int) -> None:
        """Have the windows of this group and the next read, and forget the others."""
        if self._reader is None or self._reader[0] != os.getpid():
            self._reader, self._read, self._opened = (os.getpid(), ThreadPoolExecutor(1)), {}, (-1, -1)
        if self._opened == (int(self._epoch[0]), group):
            return
        self._opened = int(self._epoch[0]), group
        first, last = np.searchsorted(groups, [group, group + 2])
        wanted = dict.fromkeys(self._key(int(place)) for place in order[first:last])
        kept = {key: one for key, one in self._read.items() if key in wanted}
        self._read = {key: kept.get(key) or self._reader[1].submit(self._load, key) for key in wanted}

    def _load(self, key: tuple[int, int]) -> Tensor:
        """All states that the places of a window need."""
        sequence, number = key
        first = max(0, number * self.window - self.num_history)
        stop = min(len(self.sequences.times(sequence)), (number + 1) * self.window + self.num_leads - 1)
        return self.sequences.read(sequence, first, stop)

    def _states(self, sequence: int, step: int) -> Tensor:
        number = step // self.window
        if (sequence, number) not in self._read:
            return super()._states(sequence, step)
        states = self._read[(sequence, number)].result()
        first = step - self.num_history - max(0, number * self.window - self.num_history)
        return states[first : first + self.num_history + self.num_leads].clone()
