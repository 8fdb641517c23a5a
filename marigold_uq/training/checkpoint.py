"""What a checkpoint keeps beside accelerate's files. Nothing in one is unpickled freely: loading never runs code."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from tempfile import TemporaryDirectory
from typing import Any

import torch

from marigold_uq.files import atomic_path
from marigold_uq.training.task import Stateful

__all__ = ["load_states", "safe_folder", "write_average", "write_task_states"]

_AVERAGE, _TASK = "average.pt", "task.pt"
_OLD = re.compile(r"custom_checkpoint_(\d+)\.pkl")
"""Average, then task states, as versions before the first release let accelerate pickle them."""


def write_average(folder: Path, average: Stateful | None) -> None:
    """Write the moving average of the weights, where there is one."""
    if average is not None:
        torch.save(average.state_dict(), folder / _AVERAGE)


def write_task_states(folder: Path, states: Sequence[Stateful], validated: int) -> None:
    """Write, or replace, the states of the task and the last validation that they have taken in."""
    with atomic_path(folder / _TASK, overwrite=True) as temporary:
        torch.save({"validated": validated, "states": [state.state_dict() for state in states]}, temporary)


def load_states(folder: Path, average: Stateful | None, states: Sequence[Stateful]) -> int:
    """Restore average and task states; returns the last validation that they have taken in."""
    saved = _read_states(folder)
    if (saved["average"] is None) != (average is None):
        raise ValueError(
            f"{folder} was made {'without' if saved['average'] is None else 'with'} a moving average of the weights: "
            "resume with the same ema_decay"
        )
    if len(saved["states"]) != len(states):
        raise ValueError(f"{folder} holds {len(saved['states'])} states of a task; this one has {len(states)}")
    if average is not None:
        average.load_state_dict(saved["average"])
    for state, values in zip(states, saved["states"], strict=True):
        state.load_state_dict(values)
    return int(saved["validated"])


@contextmanager
def safe_folder(checkpoint: Path) -> Iterator[Path]:
    """The checkpoint as accelerate may read it: without the old files, which it would unpickle freely."""
    if not _old_files(checkpoint):
        yield checkpoint
        return
    with TemporaryDirectory() as view:
        for file in checkpoint.iterdir():
            if not _OLD.fullmatch(file.name):
                (Path(view) / file.name).symlink_to(file.resolve())
        yield Path(view)


def _read_states(folder: Path) -> dict[str, Any]:
    if (folder / _TASK).exists():
        average = _read(folder / _AVERAGE) if (folder / _AVERAGE).exists() else None
        return {"average": average, **_read(folder / _TASK)}
    old = [_read(path) for path in _old_files(folder)]
    average = old.pop(0) if old and "shadow_params" in old[0] else None
    return {"average": average, "states": old, "validated": 0}


def _old_files(folder: Path) -> list[Path]:
    found = [(int(match[1]), path) for path in folder.iterdir() if (match := _OLD.fullmatch(path.name))]
    return [path for _, path in sorted(found)]


def _read(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except (UnpicklingError, RuntimeError, EOFError) as error:
        raise ValueError(
            f"{path} is damaged, or holds more than tensors, numbers and text, which could run code; it is not loaded"
        ) from error
