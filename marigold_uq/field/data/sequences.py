"""What training and forecasting need to know of a data set of fields: sequences of states, equally spaced in time."""

from collections.abc import Iterator, Mapping
from typing import Protocol

from torch import Tensor

from marigold_uq.models.field_grid import Floats

__all__ = ["FieldSequences", "blocks"]


class FieldSequences(Protocol):
    """Sequences of states (C, *space) of named variables on one grid; trajectories, or stretches of a weather record.

    Times are float64: seconds since 1970 where `calendar` is True, otherwise the time of the equation.
    """

    @property
    def source(self) -> str:
        """Where the data came from, for messages."""

    @property
    def variables(self) -> tuple[str, ...]:
        """Names of the channels, in their order."""

    @property
    def coordinates(self) -> Mapping[str, Floats]:
        """Name of each spatial axis, in their order, and its values."""

    @property
    def calendar(self) -> bool:
        """Whether times are dates."""

    @property
    def time_step(self) -> float:
        """Time between states."""

    @property
    def num_sequences(self) -> int:
        """How many sequences there are."""

    def times(self, sequence: int) -> Floats:
        """Times of all states of a sequence."""

    def read(self, sequence: int, start: int, stop: int) -> Tensor:
        """States start .. stop - 1, (n, C, *space) float32."""

    def static_fields(self) -> Mapping[str, Tensor]:
        """Fields that do not change with time, each (*space)."""


def blocks(sequences: FieldSequences, size: int = 64) -> Iterator[tuple[int, Tensor]]:
    """All states in pieces of at most `size` of one sequence, each with the last state of the piece before it.

    Yields (how many of the first states were seen before: 0 or 1, states (n, C, *space)).
    """
    for sequence in range(sequences.num_sequences):
        length = len(sequences.times(sequence))
        for start in range(0, length, size):
            overlap = min(start, 1)
            yield overlap, sequences.read(sequence, start - overlap, min(length, start + size))
