"""What a checkpoint keeps beside accelerate's files. Nothing in one is unpickled freely: loading never runs code."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import load as load_safely

from marigold_uq.files import atomic_path
from marigold_uq.training.sharding import is_sharded
from marigold_uq.training.task import Stateful

__all__ = ["load_accelerator", "load_states", "write_average", "write_task_states"]

_AVERAGE, _TASK = "average.pt", "task.pt"
_WITHOUT_RANDOM = "Without this file training goes on, with other random numbers of dropout"
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
    if not isinstance(saved.get("states"), list) or not isinstance(saved.get("validated"), int):
        raise ValueError(f"{folder / _TASK} is damaged: it holds {sorted(map(str, saved))}")
    if (saved["average"] is None) != (average is None):
        raise ValueError(
            f"{folder} was made {'without' if saved['average'] is None else 'with'} a moving average of the weights: "
            "resume with the same ema_decay"
        )
    if len(saved["states"]) != len(states):
        raise ValueError(f"{folder} holds {len(saved['states'])} states of a task; this one has {len(states)}")
    try:
        if average is not None:
            average.load_state_dict(saved["average"])
        for state, values in zip(states, saved["states"], strict=True):
            state.load_state_dict(values)
    except Exception as error:  # whatever is missing or of another type
        raise ValueError(f"{folder} is damaged, or of another task: {error!r}") from error
    return int(saved["validated"])


def load_accelerator(accelerator: Accelerator, checkpoint: Path) -> None:
    """Restore what accelerate keeps: weights, optimiser, and the random states of dropout.

    accelerate alone goes on with other random states where the file is damaged; here that is an error, as everything
    else that a damaged or foreign file makes its readers raise.
    """
    by_fsdp = any(checkpoint.glob("pytorch_model_fsdp*"))
    if by_fsdp != is_sharded(accelerator):
        raise ValueError(f"{checkpoint} was written {'with' if by_fsdp else 'without'} FSDP: resume it in the same way")
    random_states = checkpoint / f"random_states_{accelerator.process_index}.pkl"
    saved = _read(random_states, load_safely) if random_states.exists() else None
    if saved is None:
        warnings.warn(
            f"{checkpoint} was written by fewer processes than the {accelerator.num_processes} of now: the random "
            "state of dropout is not restored",
            stacklevel=2,
        )
    with _safe_folder(checkpoint) as folder:
        try:
            accelerator.load_state(str(folder))
        except Exception as error:  # damage takes the readers anywhere
            raise ValueError(f"{checkpoint} is damaged, or of another model: {error}") from error
    state = saved.get("torch_manual_seed") if isinstance(saved, dict) else None
    if saved is not None and not (isinstance(state, torch.Tensor) and torch.equal(state, torch.get_rng_state())):
        raise ValueError(f"{random_states} is damaged: the random state of dropout is not restored. {_WITHOUT_RANDOM}")


@contextmanager
def _safe_folder(checkpoint: Path) -> Iterator[Path]:
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
        saved = _read(folder / _TASK)
        return {"average": average, **(saved if isinstance(saved, dict) else {})}
    old = [_read(path) for path in _old_files(folder)]
    average = old.pop(0) if old and "shadow_params" in old[0] else None
    return {"average": average, "states": old, "validated": 0}


def _old_files(folder: Path) -> list[Path]:
    found = [(int(match[1]), path) for path in folder.iterdir() if (match := _OLD.fullmatch(path.name))]
    return [path for _, path in sorted(found)]


def _load_tensors(path: Path) -> Any:
    return torch.load(path, map_location="cpu", weights_only=True)


def _read(path: Path, load: Callable[[Path], Any] = _load_tensors) -> Any:
    try:
        return load(path)
    except FileNotFoundError:
        raise
    except Exception as error:  # damage takes the unpickler anywhere
        raise ValueError(
            f"{path} is damaged, or holds more than tensors, numbers and text, which could run code; it is not loaded"
            + (f". {_WITHOUT_RANDOM}" if path.name.startswith("random_states") else "")
        ) from error
