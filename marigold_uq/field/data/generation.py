"""Resumable generation: finished batches wait beside the file until all are there; a killed run resumes."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm.auto import tqdm

from marigold_uq.field.data.equation import PeriodicEquation
from marigold_uq.field.data.storage import h5py_module, write_trajectories
from marigold_uq.files import atomic_path, discard, make_folder, require_same
from marigold_uq.folder_lock import folder_lock
from marigold_uq.results import write_json

__all__ = ["generate", "parts_folder"]


PLAN = "plan.json"
FORMAT_VERSION = 1


def generate(
    equation: PeriodicEquation,
    path: Path | str,
    num_trajectories: int,
    *,
    seed: int = 0,
    batch_size: int = 64,
    point_stride: int = 1,
    device: torch.device | str = "cpu",
    progress: bool = True,
) -> Path:
    """Trajectories 0 .. num_trajectories - 1 of `seed` in a field file; the same whatever the batch size.

    Every `point_stride`-th point is stored (the paper's Burgers' data: solved on 1024, 256 kept). A run that was cut
    short resumes where it stopped when it is started again with the same settings.
    """
    path, parts = Path(path), parts_folder(path)
    if num_trajectories < 1 or batch_size < 1 or not 1 <= point_stride <= equation.num_points // 2:
        raise ValueError(
            "num_trajectories, batch_size and point_stride (at most half the points) must be at least 1; got "
            f"{num_trajectories}, {batch_size}, {point_stride}"
        )
    if path.exists():
        raise FileExistsError(f"{path} exists: remove it or choose another name")
    h5py_module()  # its absence is noticed now, not after hours
    metadata = {
        "format_version": FORMAT_VERSION,
        **equation.parameters(),
        "seed": seed,
        "num_trajectories": num_trajectories,
        "point_stride": point_stride,
    }
    _start_or_resume(parts, metadata)
    with folder_lock(parts), tqdm(total=num_trajectories, unit="trajectory", disable=not progress) as bar:
        bar.update(num_trajectories - len(_missing(parts, num_trajectories)))
        for indices in _batches(_missing(parts, num_trajectories), batch_size):
            initial = torch.from_numpy(equation.initial_states(seed, indices)).to(device)
            solution = equation.solve(initial)[..., ::point_stride].to("cpu", torch.float32)
            _save_part(parts, indices, solution.numpy())
            bar.update(len(indices))
    x = equation.grid[::point_stride]
    shape = (num_trajectories, equation.num_states, len(x))
    states = ((_bounds(part)[0], np.load(part)) for part in _parts(parts))
    write_trajectories(path, states, shape, x, equation.times, metadata)
    discard(parts)
    return path


def parts_folder(path: Path | str) -> Path:
    """Where the batches of an unfinished file are kept."""
    return Path(path).with_name(f"{Path(path).name}.parts")


def _start_or_resume(parts: Path, metadata: dict[str, Any]) -> None:
    plan = parts / PLAN
    if plan.exists():
        require_same(parts, json.loads(plan.read_text(encoding="utf-8")), metadata)
        return
    make_folder(parts)
    write_json(plan, metadata)


def _save_part(parts: Path, indices: range, states: np.ndarray) -> None:
    with atomic_path(parts / f"{indices.start:08d}-{indices.stop:08d}.npy", overwrite=True) as temporary:
        np.save(temporary, states)


def _parts(parts: Path) -> list[Path]:
    return sorted(parts.glob("[0-9]*-[0-9]*.npy"))


def _bounds(part: Path) -> tuple[int, int]:
    first, stop = part.stem.split("-")
    return int(first), int(stop)


def _missing(parts: Path, num_trajectories: int) -> list[int]:
    done = np.zeros(num_trajectories, dtype=bool)
    for part in _parts(parts):
        first, stop = _bounds(part)
        done[first:stop] = True
    return np.flatnonzero(~done).tolist()


def _batches(missing: list[int], batch_size: int) -> Iterator[range]:
    """Runs of consecutive missing indices, at most `batch_size` long."""
    first = 0
    for position in range(1, len(missing) + 1):
        at_end = position == len(missing)
        if at_end or missing[position] != missing[position - 1] + 1 or position - first == batch_size:
            yield range(missing[first], missing[position - 1] + 1)
            first = position
