"""Trajectories of a scalar field on a grid: validation and splits by trajectory."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from marigold_uq.models.field_grid import GRID_TOLERANCE, FieldDataError, Floats

__all__ = ["Split", "Trajectories"]


@dataclass(frozen=True)
class Trajectories:
    """States (N, S, X) float32 at times `t` (S,) on the points `x` (X,), and how they were made."""

    states: Tensor
    x: Floats
    t: Floats
    metadata: Mapping[str, Any] = field(default_factory=dict)
    source: str = "trajectories"

    def __post_init__(self) -> None:
        expected = ("N", len(self.t), len(self.x))
        if self.states.ndim != 3 or tuple(self.states.shape[1:]) != expected[1:]:
            raise FieldDataError(
                f"{self.source}: states are (trajectory, time, point) = {expected} by their coordinates; "
                f"got {tuple(self.states.shape)}"
            )
        for name, values in (("x", self.x), ("t", self.t)):
            _require_uniform(self.source, name, values)
        self._require_finite()

    def _require_finite(self) -> None:
        good = self.states.isfinite().flatten(1).all(1)
        if not good.all():
            bad = torch.nonzero(~good).flatten().tolist()
            raise FieldDataError(
                f"{self.source}: {len(bad)} of {len(good)} trajectories hold NaN or infinity, the first are {bad[:5]}; "
                "leave them out (`trajectories=`) or generate them again"
            )

    def __len__(self) -> int:
        return len(self.states)

    @property
    def time_step(self) -> float:
        """Time between states."""
        return float(self.t[1] - self.t[0])

    @property
    def variables(self) -> tuple[str, ...]:
        """One scalar."""
        return ("u",)

    @property
    def coordinates(self) -> Mapping[str, Floats]:
        """The one axis."""
        return {"x": self.x}

    @property
    def units(self) -> Mapping[str, str]:
        """Equations have none."""
        return {}

    @property
    def calendar(self) -> bool:
        """Times are those of the equation."""
        return False

    @property
    def num_sequences(self) -> int:
        """One per trajectory."""
        return len(self)

    def times(self, sequence: int) -> Floats:
        """The same for all."""
        return self.t

    def read(self, sequence: int, start: int, stop: int) -> Tensor:
        """States (n, 1, X)."""
        return self.states[sequence, start:stop].unsqueeze(1)

    def static_fields(self) -> Mapping[str, Tensor]:
        """None."""
        return {}

    def select(self, indices: Sequence[int]) -> "Trajectories":
        """The trajectories `indices`, in this order."""
        chosen = self.states[torch.as_tensor(list(indices), dtype=torch.int64)]
        return Trajectories(chosen, self.x, self.t, self.metadata, self.source)

    def split(self, seed: int = 0, *, test: float = 0.1, validation: float = 0.1) -> "Split":
        """Whole trajectories at random: `test` of all, then `validation` of the rest (the paper's 90/10, 90/10)."""
        if not (0 <= test < 1 and 0 <= validation < 1):
            raise ValueError(f"test and validation are fractions in [0, 1); got {test}, {validation}")
        order = np.random.default_rng(seed).permutation(len(self))
        num_test = round(test * len(self))
        num_validation = round(validation * (len(self) - num_test))
        num_train = len(self) - num_test - num_validation
        wanted = {"train": (num_train, 1.0), "validation": (num_validation, validation), "test": (num_test, test)}
        empty = [name for name, (count, fraction) in wanted.items() if fraction > 0 and count == 0]
        if empty:
            raise FieldDataError(f"{self.source}: {len(self)} trajectories leave none for {', '.join(empty)}")
        bounds = np.cumsum([num_train, num_validation])
        return Split(*(self.select(part.tolist()) for part in np.split(order, bounds)))


class Split(NamedTuple):
    """Parts that share no trajectory."""

    train: Trajectories
    validation: Trajectories
    test: Trajectories


def _require_uniform(source: str, name: str, values: Floats) -> None:
    if len(values) < 2:
        raise FieldDataError(f"{source}: {name} needs at least 2 values; got {len(values)}")
    if not np.isfinite(values).all():
        raise FieldDataError(f"{source}: {name} holds NaN or infinity")
    steps = np.diff(values)
    spacing = (values[-1] - values[0]) / len(steps)
    # float32 coordinates carry rounding of their own magnitude on top
    slack = GRID_TOLERANCE * abs(spacing) + 2 * np.finfo(np.float32).eps * np.abs(values).max()
    if spacing <= 0 or np.abs(steps - spacing).max() > slack:
        raise FieldDataError(
            f"{source}: {name} must rise in equal steps; its steps are between {steps.min():g} and {steps.max():g}. "
            "Sort or interpolate it first"
        )
