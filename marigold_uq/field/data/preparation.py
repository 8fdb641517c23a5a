"""A local copy of what a training needs of a large weather record: a region, some variables, hours and years.

The record's own chunks hold the whole globe; a copy with chunks of some states of the region is read many times faster.
Blocks of states are copied by several threads into a folder beside the output, each is noted when it is complete, and
the store appears under its name when all are there: a run that was cut short resumes.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from tqdm.auto import tqdm

from marigold_uq.field.data.weather import AXES, IDENTITY, open_weather
from marigold_uq.files import atomic_path, discard, make_folder, put_in_place, require_same
from marigold_uq.folder_lock import folder_lock
from marigold_uq.models.field_grid import FieldDataError
from marigold_uq.pipelines.field.states import find_variable
from marigold_uq.pipelines.field.zarr_store import EmptyArray, create_store, finish_store, open_store
from marigold_uq.results import write_json

__all__ = ["Estimate", "WeatherCopy", "estimate", "prepare_weather"]


PLAN, STORE, DONE = "plan.json", "store.zarr", "done"
FLOAT_BYTES = 4


@dataclass(frozen=True)
class WeatherCopy:
    """Copy a region, variables, hours and years of a weather record into a local zarr store; resumable.

    Args:
        path: The record: a zarr folder, a URL that fsspec knows (gs://..., s3://...) or a netCDF file.
        output: The store to write, a folder that ends in .zarr and must not exist.
        variables: Variables of the state; name_level for one level.
        static: Fields without time.
        latitude: [south, north].
        longitude: [west, east].
        period: First and last date.
        hours: UTC hours that are kept, equally spaced; null keeps all.
        chunk: States per chunk of the copy; a training reads whole chunks.
        threads: Blocks that are copied at once.
        dry_run: Only estimate size and time, from the first block.
        storage_options: For fsspec, for instance {token: anon}.
    """

    path: str = ""
    output: Path = Path("data/weather.zarr")
    variables: list[str] = field(default_factory=list)
    static: list[str] = field(default_factory=list)
    latitude: tuple[float, float] | None = None
    longitude: tuple[float, float] | None = None
    period: tuple[str, str] = ("1900", "2100")
    hours: list[int] | None = None
    chunk: int = 16
    threads: int = 8
    dry_run: bool = False
    storage_options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.chunk < 1 or self.threads < 1:
            raise ValueError(f"chunk and threads must be at least 1; got {self.chunk} and {self.threads}")
        if self.output.suffix != ".zarr":
            raise ValueError(f"output must end in .zarr; got {self.output}")

    def selection(self) -> dict[str, Any]:
        """What decides the content of the copy, as JSON has it."""
        ways = {"output", "threads", "dry_run", "storage_options"}
        kept = {name: value for name, value in asdict(self).items() if name not in ways}
        return json.loads(json.dumps(kept))


@dataclass(frozen=True)
class Estimate:
    """What a copy takes: states, bytes before compression, bytes of the record's chunks to read, seconds."""

    states: int
    bytes_kept: int
    bytes_read: int
    seconds: float

    def __str__(self) -> str:
        return (
            f"{self.states} states, {self.bytes_kept / 1e9:.2f} GB before compression, from "
            f"{self.bytes_read / 1e9:.2f} GB of the record's chunks, about {self.seconds / 3600:.2f} hours"
        )


def prepare_weather(options: WeatherCopy, *, progress: bool = True) -> Path:
    """Write the copy, or what is missing of it."""
    if options.output.exists():
        raise FileExistsError(f"{options.output} exists: remove it or choose another output")
    source = _Source.of(options)
    parts = options.output.with_name(f"{options.output.name}.parts")
    _start_or_resume(parts, source)
    with folder_lock(parts):
        missing = [block for block in source.blocks() if not _mark(parts, block).exists()]
        _copy_all(source, parts, missing, progress)
        finish_store(parts / STORE)
        put_in_place(parts / STORE, options.output)
    discard(parts)
    return options.output


def estimate(options: WeatherCopy) -> Estimate:
    """Size and time of a copy: one block is read and timed."""
    source = _Source.of(options)
    first = next(source.blocks())
    started = time.perf_counter()
    _read(source, first)
    seconds = (time.perf_counter() - started) * math.ceil(source.num_states / options.chunk) / options.threads
    kept = source.num_states * len(options.variables) * math.prod(source.space) * FLOAT_BYTES
    return Estimate(source.num_states, kept, sum(map(source.bytes_behind, options.variables)), seconds)


@dataclass(frozen=True)
class _Source:
    """The selection, not read yet."""

    options: WeatherCopy
    data: Any

    @classmethod
    def of(cls, options: WeatherCopy) -> _Source:
        record = open_weather(
            options.path,
            options.variables,
            static=options.static,
            latitude=options.latitude,
            longitude=options.longitude,
            storage_options=options.storage_options or None,
        ).between(*options.period)
        return cls(options, _at_hours(record.data, options))

    @property
    def num_states(self) -> int:
        """States of the copy."""
        return int(self.data.sizes["time"])

    @property
    def space(self) -> tuple[int, ...]:
        """Points per axis."""
        return tuple(int(self.data.sizes[axis]) for axis in AXES)

    def blocks(self) -> Iterator[range]:
        """States that make up one chunk each."""
        size = self.options.chunk
        return (range(start, min(start + size, self.num_states)) for start in range(0, self.num_states, size))

    def array(self, name: str) -> Any:
        """A variable or a level of it."""
        return find_variable(self.data, name, self.options.path)

    def bytes_behind(self, name: str) -> int:
        """Of the record's chunks that hold a variable: all levels and points of a chunk are read for one of them."""
        stem = name if name in self.data.data_vars else name.rpartition("_")[0]
        encoding = self.data[stem].encoding
        chunks, dims = encoding.get("preferred_chunks") or {}, self.data[stem].dims
        if not chunks:
            return self.num_states * math.prod(self.space) * FLOAT_BYTES
        sizes = {dim: chunks.get(dim, 1) for dim in dims}
        reads = math.ceil(self.num_states / sizes["time"])
        for axis in AXES:
            reads *= math.ceil(self.data.sizes[axis] / sizes[axis])
        return reads * math.prod(sizes.values()) * self.data[stem].dtype.itemsize


def _at_hours(data: Any, options: WeatherCopy) -> Any:
    """The states at the hours that are kept, which must be equally far apart."""
    if options.hours is None:
        return data
    hours = data["time"].values.astype("datetime64[h]").astype(np.int64) % 24
    places = np.flatnonzero(np.isin(hours, options.hours))
    times = data["time"].values[places].astype("datetime64[s]").astype(np.int64)
    if len(times) < 2 or len(set(np.diff(times).tolist())) != 1:
        raise FieldDataError(
            f"{options.path}: hours must leave states in equal steps; {options.hours} leaves {len(times)} states "
            f"with steps of {sorted(set((np.diff(times) / 3600).tolist()))[:5]} hours"
        )
    step = int(places[1] - places[0])
    return data.isel(time=slice(int(places[0]), int(places[-1]) + 1, step))


def _start_or_resume(parts: Path, source: _Source) -> None:
    plan = {**source.options.selection(), "states": source.num_states, "space": list(source.space)}
    if (parts / PLAN).exists():
        require_same(parts, json.loads((parts / PLAN).read_text(encoding="utf-8")), plan)
        return
    make_folder(parts / DONE)
    identity = sha256(json.dumps(plan, sort_keys=True).encode()).hexdigest()[:16]
    _create(parts / STORE, source, {IDENTITY: identity, "source": source.options.path})
    write_json(parts / PLAN, plan)  # last: without it the next run starts anew


def _create(path: Path, source: _Source, attributes: dict[str, Any]) -> None:
    """Coordinates, static fields and empty arrays."""
    chunk, space = min(source.options.chunk, source.num_states), source.space
    arrays = {
        name: EmptyArray(("time", *AXES), (source.num_states, *space), (chunk, *space), _attributes(source.array(name)))
        for name in source.options.variables
    }
    statics = {name: EmptyArray(AXES, space, space, _attributes(source.array(name))) for name in source.options.static}
    coordinates = {axis: (axis, source.data[axis].values) for axis in ("time", *AXES)}
    if path.exists():
        discard(path)
    group = create_store(path, coordinates, attributes, {**arrays, **statics})
    for name in statics:
        group[name][:] = source.array(name).transpose(*AXES).values.astype(np.float32)


def _attributes(array: Any) -> dict[str, Any]:
    return {key: str(array.attrs[key]) for key in ("units", "long_name", "standard_name") if key in array.attrs}


def _copy_all(source: _Source, parts: Path, missing: list[range], progress: bool) -> None:
    """Copy blocks with several threads; the first error ends all."""
    group = open_store(parts / STORE)
    with (
        ThreadPoolExecutor(source.options.threads) as pool,
        tqdm(total=source.num_states, unit="state", disable=not progress) as bar,
    ):
        bar.update(source.num_states - sum(map(len, missing)))
        waiting = [pool.submit(_copy, source, group, parts, block) for block in missing]
        try:
            for one in as_completed(waiting):
                bar.update(one.result())
        finally:
            pool.shutdown(cancel_futures=True)


def _copy(source: _Source, group: Any, parts: Path, block: range) -> int:
    """Copy one block, then note it."""
    for name, values in _read(source, block).items():
        group[name][block.start : block.stop] = values
    with atomic_path(_mark(parts, block), overwrite=True) as temporary:
        temporary.write_text("", encoding="utf-8")
    return len(block)


def _read(source: _Source, block: range) -> dict[str, np.ndarray]:
    """Variable -> values (n, latitude, longitude)."""
    times = slice(block.start, block.stop)
    return {
        name: source.array(name).isel(time=times).transpose("time", *AXES).values.astype(np.float32)
        for name in source.options.variables
    }


def _mark(parts: Path, block: range) -> Path:
    return parts / DONE / f"{block.start:08d}"
