"""Weather records: WeatherBench2's zarr (a folder or an object store) and netCDF, read lazily, checked at the door."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from marigold_uq.array_files import check_bytes
from marigold_uq.field.data.storage import MAX_FIELD_BYTES, h5py_module
from marigold_uq.models.field_grid import FieldDataError, Floats
from marigold_uq.models.field_grid import area_weights as latitude_weights
from marigold_uq.pipelines.field.states import FULL_CIRCLE, RENAMED, find_variable, xarray_module

__all__ = ["AXES", "IDENTITY", "WEATHERBENCH2", "WeatherSequences", "_region", "latitude_weights", "open_weather"]


AXES = ("latitude", "longitude")
_HDF5 = b"\x89HDF\r\n\x1a\n"
IDENTITY = "marigold_uq_identity"
"""The attribute of a prepared record that names it."""
TUTORIAL = "air_temperature"
"""Also the name under which `xarray.tutorial` downloads the small record."""
WEATHERBENCH2 = "gs://weatherbench2/datasets/era5/1959-2023_01_10-wb13-6h-1440x721_with_derived_variables.zarr"


def open_weather(
    path: Path | str,
    variables: Sequence[str],
    *,
    static: Sequence[str] = (),
    latitude: tuple[float, float] | None = None,
    longitude: tuple[float, float] | None = None,
    masked: Sequence[str] = (),
    target_hours: Sequence[int] | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> "WeatherSequences":
    """A record as one sequence of states; nothing but its coordinates is read yet.

    Args:
        path: A zarr folder, a URL that fsspec knows (gs://..., s3://...), a netCDF file, or "air_temperature", the
            tutorial's record, which is downloaded.
        variables: Names in the record; one with pressure levels as name_level, for instance temperature_850.
        static: Names of fields without time, for instance land_sea_mask.
        latitude: (south, north) of the region, or all.
        longitude: (west, east) of the region, in degrees east; west > east, or west < 0, crosses Greenwich.
        masked: Variables that may hold NaN, for instance those of the ocean.
        target_hours: UTC hours that are forecast; None takes all.
        storage_options: For fsspec, for instance {"token": "anon"}.
    """
    data = _open(path, storage_options)
    data = data.rename({old: new for old, new in RENAMED.items() if old in data.dims or old in data.coords})
    missing = [name for name in ("time", *AXES) if name not in data.coords]
    if missing:
        raise FieldDataError(f"{path} lacks the coordinates {missing}; it has {sorted(map(str, data.coords))}")
    data = _region(data, str(path), latitude, longitude)
    hours = None if target_hours is None else tuple(target_hours)
    return WeatherSequences(data, tuple(variables), tuple(static), str(path), masked=tuple(masked), target_hours=hours)


def _open(path: Path | str, storage_options: Mapping[str, Any] | None) -> Any:
    xarray, name = xarray_module(), str(path)
    if name == TUTORIAL:
        return xarray.tutorial.open_dataset(TUTORIAL)
    if "://" not in name and not Path(name).exists():
        raise FileNotFoundError(f"no weather record {name}: give a zarr folder, a netCDF file or a URL")
    try:
        if name.rstrip("/").endswith(".zarr") or "://" in name:
            options = {"storage_options": dict(storage_options)} if storage_options else {}
            return xarray.open_zarr(name, chunks=None, **options)  # lazy without dask: only what is indexed is read
        _require_own_values(Path(name))
        return xarray.open_dataset(name)
    except (FileNotFoundError, FieldDataError, ImportError):
        raise
    except Exception as error:  # readers meet damage with anything
        raise FieldDataError(f"{name} cannot be read as a weather record: {error or type(error).__name__}") from error


def _require_own_values(path: Path) -> None:
    """Refuse a netCDF file in HDF5 whose variables lie in other files, which its library would read."""
    with path.open("rb") as file:
        if file.read(len(_HDF5)) != _HDF5:
            return
    h5py = h5py_module()
    with h5py.File(path, "r") as file:
        for key in file:
            if not isinstance(file.get(key, getlink=True), h5py.HardLink):
                raise FieldDataError(f"{path}: {key!r} is a link, perhaps to another file, which is not followed")
            item = file[key]
            if isinstance(item, h5py.Dataset) and (item.is_virtual or item.external):
                raise FieldDataError(f"{path}: the values of {key!r} lie in other files, which are not read")


def _region(data: Any, source: str, latitude: Any, longitude: Any) -> Any:
    """The grid points of a region; longitudes of one that crosses Greenwich follow each other from west to east."""
    if latitude is not None:
        south, north = sorted(latitude)
        inside = (data.latitude.values >= south) & (data.latitude.values <= north)
        data = data.isel(latitude=_as_slice(np.flatnonzero(inside)))
    if longitude is not None:
        west, east = longitude
        width = (east - west) % FULL_CIRCLE or FULL_CIRCLE
        offset = (data.longitude.values - west) % FULL_CIRCLE
        order = np.argsort(offset, kind="stable")
        order = order[offset[order] <= width]
        data = data.isel(longitude=_as_slice(order)).assign_coords(longitude=west + offset[order])
    if not (data.sizes["latitude"] and data.sizes["longitude"]):
        raise FieldDataError(f"{source}: no grid point in latitude={latitude}, longitude={longitude}")
    return data


def _as_slice(places: Any) -> Any:
    """Neighbouring places as a slice, which readers take many times faster than a list."""
    if len(places) and (np.diff(places) == 1).all():
        return slice(int(places[0]), int(places[-1]) + 1)
    return places


@dataclass(frozen=True)
class WeatherSequences:
    """States (C, latitude, longitude) of one record: a `FieldSequences` with one sequence.

    `data` is an xarray Dataset with time, latitude, longitude; `keep` holds all states once `load` has read them.
    `masked` variables may hold NaN. `target_hours` are the UTC hours that are forecast.
    """

    data: Any
    variables: tuple[str, ...]
    static: tuple[str, ...] = ()
    source: str = "weather record"
    keep: Tensor | None = field(default=None, repr=False)
    masked: tuple[str, ...] = ()
    target_hours: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if not set(self.masked) <= set(self.variables):
            raise FieldDataError(
                f"{self.source}: masked must be among the variables {list(self.variables)}; got {list(self.masked)}"
            )
        if not self.variables or len(set(self.variables)) != len(self.variables):
            raise FieldDataError(f"{self.source}: give at least one variable, each once; got {list(self.variables)}")
        for name in self.variables:
            self._find(name, needs_time=True)
        for name in self.static:
            self._find(name, needs_time=False)
        self._check_times()
        for axis in AXES:
            steps = np.diff(self.data[axis].values)
            if not (np.all(steps > 0) or np.all(steps < 0)):
                raise FieldDataError(f"{self.source}: {axis} is not sorted; sort the record by it first")

    def _find(self, name: str, *, needs_time: bool) -> Any:
        array = find_variable(self.data, name, self.source)
        expected = {"time", *AXES} if needs_time else set(AXES)
        if set(array.dims) != expected:
            raise FieldDataError(f"{self.source}: {name} has the dimensions {array.dims}, expected {sorted(expected)}")
        return array

    def _check_times(self) -> None:
        values = self.data["time"].values
        if len(values) < 2 or not np.issubdtype(values.dtype, np.datetime64):
            raise FieldDataError(
                f"{self.source}: time must be at least 2 dates; got {len(values)} of type {values.dtype}"
            )
        steps = np.diff(values.astype("datetime64[s]").astype(np.int64))
        if (steps <= 0).any():
            where = int(np.flatnonzero(steps <= 0)[0])
            raise FieldDataError(
                f"{self.source}: time is unsorted: {_date(values[where + 1])} follows {_date(values[where])}; "
                "sort by time and drop duplicates first"
            )
        usual = int(np.median(steps))
        if (steps != usual).any():
            where = int(np.flatnonzero(steps != usual)[0])
            raise FieldDataError(
                f"{self.source}: time gap: {_date(values[where])} is followed by {_date(values[where + 1])}, the usual "
                f"step is {usual / 3600:g} h; fill the gap or take the parts before and after it by `between`"
            )

    @property
    def coordinates(self) -> Mapping[str, Floats]:
        """Latitude and longitude."""
        return {axis: self.data[axis].values.astype(np.float64) for axis in AXES}

    @property
    def calendar(self) -> bool:
        """Times are dates."""
        return True

    @property
    def num_sequences(self) -> int:
        """One."""
        return 1

    @property
    def time_step(self) -> float:
        """Seconds between states."""
        times = self.times(0)
        return float(times[1] - times[0])

    def times(self, sequence: int) -> Floats:
        """Seconds since 1970."""
        return self.data["time"].values.astype("datetime64[s]").astype(np.float64)

    def read(self, sequence: int, start: int, stop: int) -> Tensor:
        """States (n, C, latitude, longitude), finite."""
        if self.keep is not None:
            return self.keep[start:stop]
        arrays = [self._find(name, needs_time=True).isel(time=slice(start, stop)) for name in self.variables]
        size = (len(arrays), *arrays[0].sizes.values())
        try:
            check_bytes(size, np.float32, f"{self.source}, states {start} to {stop},", MAX_FIELD_BYTES)
            values = [array.transpose("time", *AXES).values.astype(np.float32) for array in arrays]
        except Exception as error:
            raise FieldDataError(f"{self.source}: states {start} to {stop} cannot be read: {error}") from error
        return torch.from_numpy(np.stack(values, 1))

    def load(self) -> "WeatherSequences":
        """The same with all states in memory."""
        return replace(self, keep=self.read(0, 0, len(self.times(0))))

    def between(self, first: str, last: str) -> "WeatherSequences":
        """The states from date `first` to date `last`, both included ("2013-01-01", "2014-06-30")."""
        indices = self.data.indexes["time"].slice_indexer(first, last)
        part = self.data.isel(time=indices)
        if part.sizes["time"] < 2:
            raise FieldDataError(
                f"{self.source}: no two states between {first} and {last}; it reaches from "
                f"{_date(self.data['time'].values[0])} to {_date(self.data['time'].values[-1])}"
            )
        return replace(self, data=part, keep=None if self.keep is None else self.keep[indices])

    @property
    def units(self) -> Mapping[str, str]:
        """Variable -> unit, as the record says."""
        found = {name: self._find(name, needs_time=True).attrs.get("units") for name in self.variables}
        return {name: str(unit) for name, unit in found.items() if unit}

    @property
    def identity(self) -> str | None:
        """What tells a record of `scripts/prepare_weather.py` from all others; None for a record of others."""
        return self.data.attrs.get(IDENTITY)

    @property
    def statistics_file(self) -> Path | None:
        """Where statistics of a prepared record are kept: beside it, where that is a folder that can be written."""
        path = Path(f"{self.source.rstrip('/')}.statistics.json")
        local = "://" not in self.source and os.access(path.parent, os.W_OK)
        return path if local and self.identity is not None else None

    def static_fields(self) -> Mapping[str, Tensor]:
        """Fields without time, (latitude, longitude)."""
        found = {}
        for name in self.static:
            values = torch.from_numpy(self._find(name, needs_time=False).transpose(*AXES).values.astype(np.float32))
            if not bool(values.isfinite().all()):
                raise FieldDataError(f"{self.source}: the static field {name} holds NaN or infinity; fill it first")
            found[name] = values
        return found


def _date(value: Any) -> str:
    return str(np.datetime_as_string(value.astype("datetime64[m]")))
