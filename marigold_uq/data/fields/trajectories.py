"""Trajectories of a scalar field on a grid: validation, splits by trajectory, statistics of the training part."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from marigold_uq.data.fields.equation import FieldDataError, Floats

GRID_TOLERANCE = 1e-4  # of a spacing: coordinates stored as float32 are not exactly equidistant


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

    def require_grid(self, x: Floats) -> None:
        """Raise unless these trajectories live on the points `x`."""
        spacing = float(self.x[1] - self.x[0])
        if len(x) != len(self.x) or np.abs(np.asarray(x) - self.x).max() > GRID_TOLERANCE * spacing:
            raise FieldDataError(
                f"{self.source}: {len(self.x)} points from {self.x[0]:g} to {self.x[-1]:g}, but the grid asked for has "
                f"{len(x)} from {x[0]:g} to {x[-1]:g}; read with another `points` stride or generate on that grid"
            )

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


@dataclass(frozen=True)
class FieldStatistics:
    """Mean and standard deviation of the states and of the increments u_s - u_{s-1}; one number each."""

    mean: float
    std: float
    increment_mean: float
    increment_std: float

    @classmethod
    def of(cls, train: Trajectories) -> "FieldStatistics":
        """Over all points, times and trajectories of the *training* part; sums in float64."""
        states = train.states.double()
        increments = states[:, 1:] - states[:, :-1]
        values = (states.mean(), states.std(), increments.mean(), increments.std())
        statistics = cls(*(float(value) for value in values))
        if not (statistics.std > 0 and statistics.increment_std > 0):
            raise FieldDataError(
                f"{train.source}: states or increments do not vary ({statistics}); nothing to scale by"
            )
        return statistics

    def normalize_state(self, states: Tensor) -> Tensor:
        """States with mean 0 and variance 1 over the training part."""
        return (states - self.mean) / self.std

    def normalize_increment(self, increments: Tensor) -> Tensor:
        """Increments with mean 0 and variance 1 over the training part."""
        return (increments - self.increment_mean) / self.increment_std

    def restore_increment(self, normalized: Tensor) -> Tensor:
        """Undo `normalize_increment`."""
        return normalized * self.increment_std + self.increment_mean

    def to_dict(self) -> dict[str, float]:
        """For a config or checkpoint; `FieldStatistics(**stored)` reads it."""
        return asdict(self)


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
