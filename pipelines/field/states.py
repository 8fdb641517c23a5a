"""Initial states of a forecast, from tensors or from xarray, checked against what the model knows."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from marigold_uq.models.field_encoder import FieldEncoder
from marigold_uq.models.field_grid import GRID_TOLERANCE, FieldDataError, Floats, require_grid

__all__ = ["FULL_CIRCLE", "RENAMED", "InitialStates", "as_seconds", "find_variable", "read_states", "xarray_module"]


FULL_CIRCLE = 360.0
RENAMED = {"lat": "latitude", "lon": "longitude", "pressure_level": "level"}


@dataclass(frozen=True)
class InitialStates:
    """States (B, num_history, C, *space), oldest first, and the times (B,) of the last ones."""

    history: Tensor
    time: Floats | None
    from_xarray: bool = False


def read_states(state: Any, time: ArrayLike | None, encoder: FieldEncoder) -> InitialStates:
    """Initial states of any form that `FieldForecastPipeline` takes."""
    if hasattr(state, "data_vars") or hasattr(state, "to_dataset"):
        if time is not None:
            raise ValueError("an xarray state has its own time: leave `time` out")
        return _from_xarray(state, encoder)
    history = _as_numbers(state)
    axes = len(encoder.space)
    if history.ndim == 1 + axes and len(encoder.config.variables) == 1:  # (history, *space)
        history = history.unsqueeze(1)
    if history.ndim == 2 + axes:  # (history, C, *space), or (B, history, *space) of one variable
        single = history.shape[1] == encoder.config.num_history and len(encoder.config.variables) == 1
        history = history.unsqueeze(2) if single and history.shape[1] != 1 else history.unsqueeze(0)
    if history.ndim and not len(history):
        raise FieldDataError(f"there is no initial state: the batch is empty, {tuple(history.shape)}")
    encoder.check_history(history)
    return InitialStates(history, _times(time, len(history), encoder))


def _as_numbers(state: Any) -> Tensor:
    """Real numbers as a float32 tensor."""
    if isinstance(state, Tensor):
        if state.is_complex():
            raise FieldDataError(f"states must be real numbers; got {state.dtype}")
        return state.float()
    try:
        array = np.asarray(state)
    except ValueError as error:  # lists of different lengths
        raise FieldDataError(f"states must be one array of numbers: {error}") from error
    if array.dtype.kind not in "biuf":
        raise FieldDataError(f"states must be real numbers; got an array of {array.dtype}")
    return torch.from_numpy(array.astype(np.float32))


def _times(time: ArrayLike | None, batch: int, encoder: FieldEncoder) -> Floats | None:
    """Times as float64; dates as seconds since 1970."""
    if time is None:
        if encoder.needs_time:
            raise ValueError("this model knows the time: pass `time`, the date of the last state of each forecast")
        return None
    values = as_seconds(time)
    values = np.broadcast_to(values.astype(np.float64), (batch,)) if len(values) == 1 else values.astype(np.float64)
    if values.shape != (batch,):
        raise ValueError(f"time has one entry per forecast, {batch}; got {values.shape}")
    return values


def as_seconds(time: ArrayLike) -> Floats:
    """Times (n,) as float64; dates of any unit, or as text, become seconds since 1970."""
    values = np.atleast_1d(np.asarray(time))
    if np.issubdtype(values.dtype, np.datetime64) or values.dtype.kind in "UO":
        values = values.astype("datetime64[s]")
    return values.astype(np.float64)


def xarray_module() -> ModuleType:
    """xarray, or an error that says how to get it."""
    try:
        import xarray
    except ImportError as error:
        raise ImportError("weather records need xarray: pip install 'marigold_uq[weather]'") from error
    return xarray


def find_variable(data: Any, name: str, source: str) -> Any:
    """The array of a variable of a Dataset, one level of it where the name ends in a level."""
    if name in data.data_vars:
        return data[name]
    stem, _, level = name.rpartition("_")
    if stem in data.data_vars and level.isdecimal() and "level" in data[stem].dims:
        levels = data[stem]["level"].values
        if int(level) not in levels:
            raise FieldDataError(f"{source}: {stem} has the levels {levels.tolist()}, not {level}")
        return data[stem].sel(level=int(level))
    raise FieldDataError(
        f"{source}: missing variable {name!r}; it holds {sorted(map(str, data.data_vars))}"
        " (one level of a variable: name_level)"
    )


def _from_xarray(state: Any, encoder: FieldEncoder) -> InitialStates:
    """One forecast from the last states of a Dataset (or of a DataArray of the only variable).

    As in `open_weather` a level of a variable is name_level.
    """
    config = encoder.config
    data = state if hasattr(state, "data_vars") else state.to_dataset(name=state.name or config.variables[0])
    data = data.rename({old: new for old, new in RENAMED.items() if old in data.dims})
    absent = [axis for axis in ("time", *encoder.coordinates) if axis not in data.coords]
    if absent:
        raise FieldDataError(f"the state lacks the coordinates {absent}; it has {sorted(map(str, data.coords))}")
    data = _model_grid(data, encoder)
    require_grid("the state", {axis: data[axis].values for axis in encoder.coordinates}, encoder.coordinates)
    times = _checked_times(data["time"].values, encoder)
    dims = ("time", *encoder.coordinates)
    last = data.isel(time=slice(-config.num_history, None))
    fields = [find_variable(last, name, "the state").transpose(*dims) for name in config.variables]
    history = torch.from_numpy(np.stack([one.values.astype(np.float32) for one in fields], 1)).unsqueeze(0)
    encoder.check_history(history)
    return InitialStates(history, times[-1:], from_xarray=True)


def _model_grid(data: Any, encoder: FieldEncoder) -> Any:
    """The model's own grid points of a larger or differently sorted grid; longitudes may differ by whole circles."""
    for axis, wanted in encoder.coordinates.items():
        distance = np.abs(np.asarray(data[axis].values, np.float64) - wanted[:, None])  # (wanted, given)
        if axis == "longitude":
            distance = np.minimum(distance % FULL_CIRCLE, -distance % FULL_CIRCLE)
        nearest = distance.argmin(1)
        slack = GRID_TOLERANCE * float(np.abs(np.diff(wanted)).min()) if len(wanted) > 1 else GRID_TOLERANCE
        if (distance[np.arange(len(wanted)), nearest] <= slack).all():
            data = data.isel({axis: nearest}).assign_coords({axis: wanted})
    return data


def _checked_times(values: Any, encoder: FieldEncoder) -> Floats:
    """The last times, sorted and as far apart as the model steps."""
    config = encoder.config
    times = values.astype("datetime64[s]").astype(np.float64) if config.calendar else np.asarray(values, np.float64)
    if len(times) < config.num_history:
        raise FieldDataError(
            f"the model needs {config.num_history} states, {config.time_step:g} apart; got {len(times)}"
        )
    steps = np.diff(times[-config.num_history :])
    if (steps <= 0).any():
        raise FieldDataError("the states are unsorted in time: sort them by time first")
    if steps.size and np.abs(steps / config.time_step - 1).max() > 1e-4:
        raise FieldDataError(
            f"time gap: the last {config.num_history} states are {steps.tolist()} apart, the model steps by "
            f"{config.time_step:g}" + (" seconds" if config.calendar else "")
        )
    return times
