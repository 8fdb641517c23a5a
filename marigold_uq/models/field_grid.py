"""What a field model remembers of its data: statistics by variable, the grid, and waves of the day and the year."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = [
    "DAY",
    "FULL_CIRCLE",
    "GRID_TOLERANCE",
    "NUM_WAVES",
    "YEAR",
    "FieldDataError",
    "FieldStatistics",
    "Floats",
    "area_weights",
    "harmonic_basis",
    "num_waves",
    "periodic_axes",
    "require_grid",
    "require_statistics",
]


Floats = NDArray[np.float64]

FULL_CIRCLE = 360.0
DAY, YEAR = 86_400.0, 365.2425 * 86_400.0
NUM_WAVES = 9
"""1, sine and cosine of the year and of the day, and their four products: days are longer in summer."""
GRID_TOLERANCE = 1e-4  # of a spacing: coordinates stored as float32 are not exactly equidistant


class FieldDataError(ValueError):
    """A field file or array that cannot be used, with the reason and what to do."""


@dataclass(frozen=True)
class FieldStatistics:
    """Mean and standard deviation of the states and of the increments u_s - u_{s-1}; one number each.

    Where a model predicts some hours of the day alone, increments are those that end at these hours.
    """

    mean: float
    std: float
    increment_mean: float
    increment_std: float

    def normalize_state(self, states: Tensor) -> Tensor:
        """States with mean 0 and variance 1 over the training part."""
        return (states - self.mean) / self.std

    def to_dict(self) -> dict[str, float]:
        """For a config or checkpoint; `FieldStatistics(**stored)` reads it."""
        return asdict(self)


def require_statistics(source: str, statistics: Mapping[str, object], variables: tuple[str, ...]) -> None:
    """Raise unless there are statistics of each variable and of no other: they are looked up by name."""
    if set(statistics) != set(variables):
        raise FieldDataError(
            f"{source}: mismatched statistics: they are of {sorted(statistics)}, but the variables are "
            f"{sorted(variables)}; compute them from the training part of the same variables"
        )


def require_grid(source: str, found: Mapping[str, Floats], expected: Mapping[str, Floats]) -> None:
    """Raise unless the axes `found` are those `expected`: names, order, sizes and values."""
    if list(found) != list(expected):
        raise FieldDataError(f"{source}: wrong grid: axes {list(found)}, expected {list(expected)}, in this order")
    for name, values in expected.items():
        wanted, given = np.asarray(values, np.float64), np.asarray(found[name], np.float64)
        slack = GRID_TOLERANCE * float(np.abs(np.diff(wanted)).min()) if len(wanted) > 1 else GRID_TOLERANCE
        if len(given) != len(wanted) or np.abs(given - wanted).max() > slack:
            raise FieldDataError(
                f"{source}: wrong grid: {name} has {len(given)} points from {given[0]:g} to {given[-1]:g}, but the "
                f"grid asked for has {len(wanted)} from {wanted[0]:g} to {wanted[-1]:g}; interpolate to it first"
            )


def area_weights(coordinates: Mapping[str, Floats]) -> Tensor | None:
    """cos(latitude) with mean 1, (latitude, 1), for a geographic grid; None for another."""
    if tuple(coordinates) != ("latitude", "longitude"):
        return None
    weights = torch.from_numpy(np.cos(np.deg2rad(np.asarray(coordinates["latitude"], np.float64)))).clamp(min=0)
    return (weights / weights.mean()).unsqueeze(-1)


def periodic_axes(coordinates: Mapping[str, Floats], calendar: bool) -> tuple[bool, ...]:
    """Whether each axis closes on itself: longitudes around the globe do, latitudes never, axes of an equation do.

    `calendar` says that the data are a record with dates: its other axes end.
    """
    return tuple(_closes(name, np.asarray(values, np.float64), calendar) for name, values in coordinates.items())


def _closes(name: str, values: Floats, calendar: bool) -> bool:
    if name == "latitude":
        return False
    if name != "longitude":
        return not calendar
    step = float(np.abs(np.diff(values)).mean()) if len(values) > 1 else 0.0
    return abs(step * len(values) - FULL_CIRCLE) < 0.5 * step


def num_waves(num_annual: int = 1) -> int:
    """Of a basis with so many harmonics of the year."""
    return NUM_WAVES + 2 * (num_annual - 1)


def harmonic_basis(seconds: Floats | Tensor, num_annual: int = 1) -> Tensor:
    """Waves (n, num_waves), float64, at times (n,) in seconds since 1970."""
    time = torch.as_tensor(seconds, dtype=torch.float64).reshape(-1)
    year, day = 2 * torch.pi * (time / YEAR % 1), 2 * torch.pi * (time / DAY % 1)
    annual, daily = [year.sin(), year.cos()], [day.sin(), day.cos()]
    products = [a * d for a in annual for d in daily]
    higher = [wave(k * year) for k in range(2, num_annual + 1) for wave in (torch.sin, torch.cos)]
    return torch.stack([torch.ones_like(time), *annual, *daily, *products, *higher], 1)
