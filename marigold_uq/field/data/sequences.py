"""What training and forecasting need to know of a data set of fields: sequences of states, equally spaced in time."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from torch import Tensor

from marigold_uq.models.field_grid import Floats

__all__ = ["FieldSequences", "block_size", "blocks", "masked_of", "target_hours_of", "units_of"]


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


def units_of(sequences: FieldSequences) -> dict[str, str]:
    """Variable -> unit; data sets without an attribute `units` know none."""
    return dict(getattr(sequences, "units", {}))


def masked_of(sequences: FieldSequences) -> tuple[str, ...]:
    """Variables that may hold NaN, where the data set has an attribute `masked`."""
    return tuple(getattr(sequences, "masked", ()))


def target_hours_of(sequences: FieldSequences) -> Sequence[int] | None:
    """UTC hours that are forecast, where the data set has an attribute `target_hours`."""
    return getattr(sequences, "target_hours", None)


BLOCK_STATES, BLOCK_NUMBERS = 64, 2**25


def block_size(sequences: FieldSequences, most: int = BLOCK_STATES) -> int:
    """How many states are read at once: at most `most`, and fewer of a large grid."""
    numbers = len(sequences.variables) * math.prod(len(values) for values in sequences.coordinates.values())
    return max(1, min(most, BLOCK_NUMBERS // numbers))


def blocks(sequences: FieldSequences) -> Iterator[tuple[int, int, int, Tensor]]:
    """All states in pieces of one sequence, each with the last state of the piece before it.

    Yields (sequence, first new state, how many of the first states were seen before: 0 or 1, states (n, C, *space)).
    """
    size = block_size(sequences)
    for sequence in range(sequences.num_sequences):
        length = len(sequences.times(sequence))
        for start in range(0, length, size):
            overlap = min(start, 1)
            yield sequence, start, overlap, sequences.read(sequence, start - overlap, min(length, start + size))
