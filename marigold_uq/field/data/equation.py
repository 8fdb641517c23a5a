"""What the generators have in common: a periodic grid, saved times, one random stream per trajectory."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from marigold_uq.models.field_grid import FieldDataError, Floats

__all__ = ["PeriodicEquation", "trajectory_generator"]


def trajectory_generator(seed: int, index: int) -> np.random.Generator:
    """The stream of trajectory `index` of `seed`: the same whatever else is generated, and in whatever batches."""
    if seed < 0 or index < 0:
        raise ValueError(f"seed and trajectory index must be at least 0; got seed={seed}, index={index}")
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(entropy=seed, spawn_key=(index,))))


@dataclass(frozen=True)
class PeriodicEquation(ABC):
    """A scalar equation on a periodic interval, saved at `first_time + save_interval * (0, 1, ...)`.

    A subclass adds its parameters and defaults, `grid`, `draw_initial_state` and `advance`.
    """

    name: ClassVar[str]
    start: float
    length: float
    num_points: int
    num_states: int
    save_interval: float
    first_time: float

    def __post_init__(self) -> None:
        if self.num_points < 8 or self.num_states < 1:
            raise ValueError(
                f"num_points must be at least 8 and num_states at least 1; got {self.num_points}, {self.num_states}"
            )
        if not (self.length > 0 and self.save_interval > 0 and self.first_time >= 0):
            raise ValueError(
                "length and save_interval are positive and first_time is not negative; got "
                f"length={self.length}, save_interval={self.save_interval}, first_time={self.first_time}"
            )

    @property
    def times(self) -> Floats:
        """The saved times, (num_states,)."""
        return self.first_time + self.save_interval * np.arange(self.num_states, dtype=np.float64)

    @property
    @abstractmethod
    def grid(self) -> Floats:
        """The points where u is known, (num_points,)."""

    @abstractmethod
    def draw_initial_state(self, generator: np.random.Generator) -> Floats:
        """One random initial state, (num_points,)."""

    @abstractmethod
    def advance(self, u: Tensor, duration: float) -> Tensor:
        """The states u (B, X), float64, `duration` later."""

    def initial_states(self, seed: int, indices: Sequence[int]) -> Floats:
        """Initial states (B, X) of the trajectories `indices` of `seed`."""
        return np.stack([self.draw_initial_state(trajectory_generator(seed, i)) for i in indices])

    @torch.no_grad()
    def solve(self, initial: Tensor | Floats) -> Tensor:
        """Trajectories (B, num_states, X), float64, on the device of the initial states (B, X)."""
        u = torch.as_tensor(initial).to(torch.float64)
        if u.ndim != 2 or u.shape[1] != self.num_points:
            raise FieldDataError(
                f"initial states of {self.name} have the shape (batch, {self.num_points}); got {tuple(u.shape)}. "
                "Interpolate to the grid, or set num_points"
            )
        if not u.isfinite().all():
            raise FieldDataError(f"initial states of {self.name} must be finite; {int((~u.isfinite()).sum())} are not")
        states, reached = [], 0.0
        for time in self.times:
            if time > reached:
                u = self.advance(u, float(time) - reached)
            states.append(u)
            reached = float(time)
        solution = torch.stack(states, 1)
        if not solution.isfinite().all():
            raise FieldDataError(f"the solution of {self.name} left the finite numbers: take a smaller time step")
        return solution

    def parameters(self) -> dict[str, Any]:
        """Everything that determines a trajectory beside its seed and index."""
        return {"equation": self.name, **asdict(self)}
