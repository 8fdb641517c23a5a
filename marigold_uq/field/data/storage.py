"""Field files: HDF5 in PDEBench's layout, with the metadata that made them.

`tensor` float32 (N, S, X), `x-coordinate` (X,), `t-coordinate` (S,), and an attribute `metadata` (JSON) in files of
ours. PDEBench's own files have one more time than states; the last one is dropped on reading.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from marigold_uq.array_files import ArrayFileError, check_bytes, hdf5_array
from marigold_uq.field.data.trajectories import Trajectories
from marigold_uq.files import atomic_path
from marigold_uq.models.field_grid import FieldDataError, Floats

__all__ = ["PAPER_POINTS", "PAPER_STATES", "h5py_module", "read_trajectories", "write_trajectories"]


TENSOR, POINTS, TIMES, METADATA = "tensor", "x-coordinate", "t-coordinate", "metadata"
READ_AT_ONCE = 64  # trajectories; a whole PDEBench file has 8 GB
MAX_FIELD_BYTES = 2**35
PAPER_STATES, PAPER_POINTS = slice(0, 104, 2), slice(None, None, 4)
"""What the paper takes of PDEBench's Burgers' file: ds = 0.02, 256 of 1024 points."""


def h5py_module() -> ModuleType:
    """h5py, or an error that says how to get it."""
    try:
        import h5py
    except ImportError as error:
        raise ImportError("field files are HDF5: pip install h5py") from error
    return h5py


def write_trajectories(
    path: Path | str,
    parts: Iterable[tuple[int, NDArray[np.float32]]],
    shape: tuple[int, int, int],
    x: Floats,
    t: Floats,
    metadata: Mapping[str, Any],
) -> None:
    """Write a tensor of `shape` from `parts`, (first trajectory, states (n, S, X)); the file appears when complete."""
    path = Path(path)
    with atomic_path(path) as temporary, h5py_module().File(temporary, "x") as file:
        tensor = file.create_dataset(TENSOR, shape, dtype="float32", chunks=(1, *shape[1:]))
        file[POINTS], file[TIMES] = x, t
        file.attrs[METADATA] = json.dumps(dict(metadata))
        written = np.zeros(shape[0], dtype=bool)
        for first, part in parts:
            tensor[first : first + len(part)] = part
            written[first : first + len(part)] = True
        if not written.all():
            raise FieldDataError(f"{path}: {shape[0]} trajectories announced, {written.sum()} came")


def read_trajectories(
    path: Path | str,
    *,
    states: slice = slice(None),
    points: slice = slice(None),
    trajectories: slice = slice(None),
    max_bytes: int = MAX_FIELD_BYTES,
    thin_again: bool = False,
) -> Trajectories:
    """Trajectories of a file of ours or of PDEBench, in memory.

    A file that was thinned when it was written is not thinned again unless `thin_again` says so: settings meant for the
    whole file would leave a coarser grid than the one they name. The metadata of what is returned hold both together.

    `states`, `points` and `trajectories` say what to take of each axis; the paper takes `PAPER_STATES` and
    `PAPER_POINTS` of PDEBench's Burgers' file. More than `max_bytes` of them are refused.
    """
    path = Path(path)
    with _open(path) as file:
        tensor, x, t = _checked_arrays(path, file)
        metadata = _metadata(path, file)
        if not thin_again:
            _require_whole(path, metadata, tensor.shape, states, points)
        picks = [range(size)[pick] for size, pick in zip(tensor.shape, (trajectories, states, points), strict=True)]
        if any(len(pick) == 0 or pick.step < 0 for pick in picks):
            raise FieldDataError(
                f"{path}: the tensor is {tensor.shape}; trajectories={trajectories}, states={states}, points={points} "
                "must take at least one of each, forwards"
            )
        try:
            check_bytes(map(len, picks), np.float32, f"what was asked of {path}", max_bytes)
        except ArrayFileError as error:
            raise FieldDataError(str(error)) from error
        values = _read(path, tensor, picks)
    coordinates = x[picks[2].start : picks[2].stop : picks[2].step], t[picks[1].start : picks[1].stop : picks[1].step]
    strides = {"state_stride": picks[1].step, "point_stride": picks[2].step}
    total = {name: step * _stride(metadata, name) for name, step in strides.items()}
    return Trajectories(torch.from_numpy(values), *coordinates, {**metadata, **total}, str(path))


def _stride(metadata: Mapping[str, Any], name: str) -> int:
    """What a file was thinned by when it was written."""
    found = metadata.get(name, 1)
    return found if isinstance(found, int) and found > 0 else 1


def _require_whole(
    path: Path, metadata: Mapping[str, Any], shape: tuple[int, ...], states: slice, points: slice
) -> None:
    """Refuse strides for a file that is thinned already, and more states than there are."""
    thinned = {
        "points": (points, _stride(metadata, "point_stride")),
        "states": (states, _stride(metadata, "state_stride")),
    }
    twice = [name for name, (pick, stride) in thinned.items() if stride > 1 and (pick.step or 1) > 1]
    if twice:
        name = twice[0]
        pick, stride = thinned[name]
        raise FieldDataError(
            f"{path}: its {name} are thinned already, by {stride}; taking every {pick.step}-th again leaves "
            f"{len(range(shape[2 if name == 'points' else 1])[pick])} of them. Set the stride to 1 "
            "(configs/field/burgers/generated.yaml), or thin_again to true if you mean it"
        )
    if states.stop is not None and states.stop > shape[1]:
        raise FieldDataError(
            f"{path} holds {shape[1]} states; the first {states.stop} were asked for. A generated file is thinned "
            "already: leave num_states and the strides out (configs/field/burgers/generated.yaml)"
        )


def _open(path: Path) -> Any:
    h5py = h5py_module()
    if not path.is_file():
        raise FileNotFoundError(f"no field file {path}: make one with scripts/generate_pde.py or get PDEBench's")
    if not h5py.is_hdf5(path):
        raise FieldDataError(f"{path} is not an HDF5 file; expected one of scripts/generate_pde.py or of PDEBench")
    try:
        return h5py.File(path, "r")
    except Exception as error:  # h5py meets damage with anything
        raise FieldDataError(f"{path} is damaged: {error}") from error


def _metadata(path: Path, file: Any) -> dict[str, Any]:
    """What made the file; {} in those of others."""
    try:
        found = json.loads(file.attrs.get(METADATA, "{}"))
    except Exception as error:
        raise FieldDataError(f"{path}: the attribute {METADATA} cannot be read as JSON: {error}") from error
    if not isinstance(found, dict):
        raise FieldDataError(f"{path}: the attribute {METADATA} is a {type(found).__name__}; expected a JSON object")
    return found


def _checked_arrays(path: Path, file: Any) -> tuple[Any, Floats, Floats]:
    """The tensor (not read yet) and its coordinates, x (X,) and t (S,)."""
    try:
        absent = [name for name in (TENSOR, POINTS, TIMES) if name not in file]
        if absent:
            raise FieldDataError(f"{path} lacks {', '.join(absent)}; it holds {', '.join(file) or 'nothing'}")
        tensor, x, t = (hdf5_array(file, name, str(path)) for name in (TENSOR, POINTS, TIMES))
        for name, axis in ((POINTS, x), (TIMES, t)):
            check_bytes(axis.shape, np.float64, f"{path}: {name}")
        x, t = np.asarray(x, np.float64), np.asarray(t, np.float64)
    except FieldDataError:
        raise
    except ArrayFileError as error:
        raise FieldDataError(str(error)) from error
    except Exception as error:
        raise FieldDataError(f"{path} is damaged: {error}") from error
    if tensor.ndim != 3 or x.ndim != 1 or t.ndim != 1:
        raise FieldDataError(
            f"{path}: tensor is (trajectory, time, point), coordinates have one axis; got {tensor.shape}, {x.shape} "
            f"and {t.shape}"
        )
    num_states, num_points = tensor.shape[1:]
    if len(x) != num_points or len(t) not in (num_states, num_states + 1):
        raise FieldDataError(
            f"{path}: wrong grid: tensor {tensor.shape} needs {num_points} x-coordinates and {num_states} "
            f"(PDEBench: one more) t-coordinates; got {len(x)} and {len(t)}"
        )
    return tensor, x, t[:num_states]


def _read(path: Path, tensor: Any, picks: list[range]) -> NDArray[np.float32]:
    """Contiguous slabs, strided in memory: HDF5's own strides are many times slower."""
    rows, times, points = picks
    values = np.empty([len(pick) for pick in picks], np.float32)
    for first in range(0, len(rows), READ_AT_ONCE):
        some = rows[first : first + READ_AT_ONCE]
        try:
            slab = tensor[some.start : some[-1] + 1, times.start : times[-1] + 1]  # (n, S, X)
        except Exception as error:
            raise FieldDataError(f"{path}: trajectories {some.start} to {some[-1]} are damaged: {error}") from error
        values[first : first + len(some)] = slab[:: rows.step, :: times.step, points.start : points.stop : points.step]
    return values
