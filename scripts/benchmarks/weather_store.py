"""How fast a training reads weather: copying from full-globe chunks, and streaming from the copy.

    python -m scripts.benchmarks.weather_store --output weather_store.json

Both stores are synthetic. The first has WeatherBench 2's grid and chunks, one state of the globe each; the T2M region
is copied from it as `scripts/prepare_weather.py` does. The second has the layout of such a copy and is as large as
`--gigabytes` says; transitions are read from it one by one in random order, and window by window. What was written is
dropped from the system's cache before each reading. Everything is deleted afterwards.
"""

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate

from marigold_uq.commands.runner import Invocation, run_command
from marigold_uq.field.data import Transitions, WindowedTransitions, open_weather
from marigold_uq.field.data.preparation import WeatherCopy, prepare_weather
from marigold_uq.files import atomic_path
from marigold_uq.pipelines.field.zarr_store import EmptyArray, create_store, finish_store
from scripts.benchmarks.memory import MemoryWatch, folder_bytes

VARIABLES = [
    "10m_u_component_of_wind",
    "10m_v_component_of_wind",
    "2m_temperature",
    "temperature_850",
    "geopotential_500",
]
GLOBE = (721, 1440)
REGION = {"latitude": (35.0, 75.0), "longitude": (-12.5, 42.5)}
REGION_SHAPE = (161, 221)
FLOAT_BYTES = 4
WARM_UP = 0.25
"""Share of a reading after which memory must not grow any more."""


@dataclass(frozen=True)
class Options:
    """Throughput of a weather store.

    Args:
        gigabytes: Of the copy that is streamed, before compression.
        globe_states: States of the store with full-globe chunks.
        chunk: States per chunk of the copy.
        window: States per window.
        open_windows: Windows that are shuffled together.
        batch: Samples per batch.
        random_batches: Batches that are read in random order.
        threads: Of the copy.
        folder: Where the stores are written; the system's temporary folder by default.
        output: JSON file of the results.
    """

    gigabytes: float = 3.0
    globe_states: int = 64
    chunk: int = 16
    window: int = 64
    open_windows: int = 8
    batch: int = 64
    random_batches: int = 2
    threads: int = 2
    folder: Path | None = None
    output: Path = Path("weather_store.json")


def write_synthetic(
    path: Path, num_states: int, shape: tuple[int, int], chunk: int, coordinates: dict[str, Any]
) -> int:
    """Smooth waves and noise in hundredths, six-hourly; returns the bytes of its values."""
    time_axis = np.datetime64("2011-01-01", "ns") + np.arange(num_states) * np.timedelta64(6, "h")
    arrays = {
        name: EmptyArray(("time", "latitude", "longitude"), (num_states, *shape), (chunk, *shape)) for name in VARIABLES
    }
    axes = {"time": ("time", time_axis), **{name: (name, values) for name, values in coordinates.items()}}
    group, generator = create_store(path, axes, {}, arrays), np.random.default_rng(0)
    noise = generator.standard_normal((8, *shape), dtype=np.float32)
    wave = np.sin(np.arange(shape[1]) / 40)[None] * np.cos(np.arange(shape[0]) / 30)[:, None]
    for number, name in enumerate(VARIABLES):
        for start in range(0, num_states, chunk):
            stop = min(start + chunk, num_states)
            steps = np.arange(start, stop)[:, None, None]
            block = 280 + 10 * np.roll(wave, start + number, 1) + np.sin(steps / 4) + noise[steps[:, 0, 0] % 8]
            group[name][start:stop] = np.round(block, 2).astype(np.float32)
    finish_store(path)
    return num_states * len(VARIABLES) * shape[0] * shape[1] * FLOAT_BYTES


def forget(path: Path) -> None:
    """Ask the system to drop a store from its cache, so that the disk is read."""
    for file in (one for one in path.rglob("*") if one.is_file()):
        with file.open("rb") as handle, suppress(AttributeError, OSError):
            os.fsync(handle.fileno())
            os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure_copy(folder: Path, options: Options) -> dict[str, float]:
    """Copy the T2M region out of full-globe chunks."""
    latitude, longitude = np.linspace(90, -90, GLOBE[0]), np.arange(GLOBE[1]) * 0.25
    axes = {"latitude": latitude, "longitude": longitude}
    source, copy = folder / "globe.zarr", folder / "copy.zarr"
    values = write_synthetic(source, options.globe_states, GLOBE, 1, axes)
    forget(source)
    settings = WeatherCopy(
        str(source),
        copy,
        VARIABLES,
        chunk=options.chunk,
        threads=options.threads,
        **REGION,  # type: ignore[arg-type]
    )
    with MemoryWatch() as memory:
        prepare_weather(settings, progress=False)
    return {
        **rates(memory, options.globe_states, values),
        "compression": values / folder_bytes(source),
        "memory_added_megabytes": (memory.peak - memory.before) / 1e6,
    }


def measure_streaming(folder: Path, options: Options) -> dict[str, dict[str, float]]:
    """Read transitions from a store as large as asked for."""
    state = len(VARIABLES) * REGION_SHAPE[0] * REGION_SHAPE[1] * FLOAT_BYTES
    count = int(options.gigabytes * 1e9 / state)
    axes = {"latitude": 75 - 0.25 * np.arange(REGION_SHAPE[0]), "longitude": -12.5 + 0.25 * np.arange(REGION_SHAPE[1])}
    store = folder / "region.zarr"
    values = write_synthetic(store, count, REGION_SHAPE, options.chunk, axes)
    data = open_weather(store, VARIABLES)
    windowed = WindowedTransitions(data, window=options.window, num_open=options.open_windows)
    order = np.random.default_rng(0).permutation(len(windowed)).tolist()[: options.random_batches * options.batch]
    ways: dict[str, tuple[Transitions, list[int]]] = {
        "random": (Transitions(data), order),
        "windows": (windowed, list(range(len(windowed)))),
    }
    found = {"store": {"gigabytes": values / 1e9, "states": float(count), "compression": values / folder_bytes(store)}}
    for name, (dataset, places) in ways.items():
        forget(store)
        found[name] = read_all(dataset, places, options.batch, state)
    return found


def read_all(dataset: Transitions, places: Sequence[int], size: int, state: int) -> dict[str, float]:
    """Read the samples in batches; memory is that added after a first part, which fills what is kept."""
    warm = 0
    with MemoryWatch() as memory:
        for number, _ in enumerate(batches(dataset, places, size)):
            if number == int(WARM_UP * len(places) / size):
                warm = len(memory.history)
    early, late = memory.history[: max(1, warm)], memory.history[max(1, warm) :]
    growth = (max(late) - max(early)) / 1e6 if warm and late else 0.0
    return {
        **rates(memory, len(places), 3 * state * len(places)),
        "memory_added_megabytes": (memory.peak - memory.before) / 1e6,
        "memory_growth_after_a_quarter_megabytes": growth,
    }


def rates(memory: MemoryWatch, count: int, size: float) -> dict[str, float]:
    """States or samples and megabytes per second, of the clock and of the processor."""
    found = {"seconds": memory.seconds, "processor_seconds": memory.processor_seconds}
    for name, seconds in list(found.items()):
        found[f"number_per_{name[:-1]}"] = count / seconds
        found[f"megabytes_per_{name[:-1]}"] = size / 1e6 / seconds
    return found


def batches(dataset: Transitions, places: Sequence[int], size: int) -> Iterator[dict[str, Any]]:
    """Whole batches, as a training's loader makes them."""
    for first in range(0, len(places) - size + 1, size):
        yield default_collate([dataset[place] for place in places[first : first + size]])


def run(options: Options, invocation: Invocation) -> int:
    """Measure, print, write."""
    torch.set_num_threads(1)
    with TemporaryDirectory(dir=options.folder) as name:
        found = {"copy": measure_copy(Path(name), options), **measure_streaming(Path(name), options)}
    settings = {key: str(value) for key, value in asdict(options).items()}
    with atomic_path(options.output, overwrite=True) as temporary:
        temporary.write_text(json.dumps({**found, "options": settings}, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(found, indent=1))
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the options, run."""
    return run_command("scripts.benchmarks.weather_store", Options, run, arguments)


if __name__ == "__main__":
    sys.exit(main())
