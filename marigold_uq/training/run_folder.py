"""A run's folder: what was asked for, with which versions, what was measured, and its checkpoints."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from marigold_uq.files import (
    atomic_folder,
    atomic_path,
    clear_leftovers,
    discard,
    make_folder,
    put_in_place,
    remove,
    sync,
)
from marigold_uq.folder_lock import folder_lock
from marigold_uq.results import versions, write_json

__all__ = ["CHECKPOINT", "RunFolder", "checkpoint_step"]

CHECKPOINT = "checkpoint-"
_MODEL_STEP = "training.json"


class RunFolder:
    """Paths and files of one run; only the main process writes."""

    def __init__(self, root: Path) -> None:
        self.root = Path(root)
        self.checkpoints = self.root / "checkpoints"
        self.pictures = self.root / "validation"
        self.model = self.root / "model"
        self.metrics = self.root / "metrics.jsonl"

    def create(self, resume: str) -> None:
        """Make the folders; one that already holds a run is refused unless that run resumes from its newest state."""
        if resume == "never" and (self.metrics.exists() or self.list_checkpoints()):
            raise FileExistsError(f"{self.root} already holds a run; choose another output, or resume='latest'")
        start = self.find_checkpoint(resume)
        later = [
            path.name for path in self.list_checkpoints() if start and checkpoint_step(path) > checkpoint_step(start)
        ]
        if later:
            raise FileExistsError(
                f"{self.checkpoints} holds checkpoints later than {start}: {', '.join(later)}. Resume from the newest "
                "with resume='latest', move them away, or choose another output"
            )
        make_folder(self.checkpoints)
        for folder in (self.root, self.checkpoints):
            clear_leftovers(folder, alone=True)
        for leftover in self.checkpoints.glob(f".{CHECKPOINT}*"):
            remove(leftover)  # of a run that was killed while it saved

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Make the folder and keep other trainings out of it."""
        make_folder(self.root)
        with folder_lock(self.root):
            yield

    def write_text(self, name: str, text: str) -> None:
        """Write or replace a small text file."""
        with atomic_path(self.root / name, overwrite=True) as temporary:
            temporary.write_text(text, encoding="utf-8")

    def write_config(self, text: str, step: int) -> None:
        """config.yaml; where a resumed run was asked for something else before, that stays under another name."""
        path = self.root / "config.yaml"
        if path.exists() and path.read_text(encoding="utf-8") != text:
            os.replace(path, self.root / f"config-until-step-{step}.yaml")
        self.write_text(path.name, text)

    def write_versions(self, **facts: str | int) -> None:
        """versions.json: Python, the packages that matter, and `facts` about this run."""
        write_json(self.root / "versions.json", {**versions(), **facts}, overwrite=True)

    def log(self, record: dict[str, Any]) -> None:
        """Append a line to metrics.jsonl."""
        with self.metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

    def records(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl up to the first that a killed run or a power cut left damaged.

        Those before the newest checkpoint are whole: they were forced to the disk with it.
        """
        if not self.metrics.exists():
            return []
        complete, _, _ = self.metrics.read_text(encoding="utf-8", errors="replace").rpartition("\n")
        found = []
        for line in complete.splitlines():
            try:
                found.append(json.loads(line))
            except ValueError:
                break
        return found

    def forget_after(self, step: int) -> None:
        """Drop metrics of steps that a resumed run makes again."""
        if self.metrics.exists():
            kept = [record for record in self.records() if record["step"] <= step]
            self.write_text("metrics.jsonl", "".join(json.dumps(record) + "\n" for record in kept))

    def validated_at(self, step: int) -> bool:
        """Whether metrics.jsonl has the validation of a step, besides its loss."""
        return any(record["step"] == step and "loss" not in record for record in self.records())

    def add_problems(self, problems: list[tuple[str, str]]) -> Path:
        """Enter (sample, reason) pairs into data_problems.json, which keeps those of earlier parts of the run."""
        path = self.root / "data_problems.json"
        known = dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else {}
        write_json(path, dict(sorted({**known, **dict(problems)}.items())), overwrite=True)
        return path

    def list_checkpoints(self) -> list[Path]:
        """Finished checkpoints, oldest first."""
        found = self.checkpoints.glob(f"{CHECKPOINT}*") if self.checkpoints.exists() else iter(())
        return sorted(found, key=checkpoint_step)

    def find_checkpoint(self, resume: str) -> Path | None:
        """The checkpoint to resume from, or None for a fresh start."""
        if resume == "never":
            return None
        if resume == "latest":
            return next(reversed(self.list_checkpoints()), None)
        path = Path(resume)
        if not path.is_dir():
            raise FileNotFoundError(f"no checkpoint folder {path}; resume is 'latest', 'never' or a checkpoint's path")
        checkpoint_step(path)
        return path

    def keep_newest(self, limit: int) -> None:
        """Remove all but the newest `limit` checkpoints."""
        for old in self.list_checkpoints()[:-limit]:
            discard(old)

    def unfinished_checkpoint(self, step: int) -> Path:
        """Where all processes write the checkpoint of a step until it is complete."""
        return self.checkpoints / f".{CHECKPOINT}{step}"

    def finish_checkpoint(self, step: int, limit: int) -> None:
        """Give a complete checkpoint its name, together with the metrics up to it, and keep the newest `limit`."""
        if self.metrics.exists():
            sync(self.metrics)
        put_in_place(self.unfinished_checkpoint(step), self.checkpoints / f"{CHECKPOINT}{step}")
        self.keep_newest(limit)

    @contextmanager
    def new_model(self, step: int) -> Iterator[Path]:
        """A folder to write the model of a step to, which takes the old one's place when it is complete."""
        with atomic_folder(self.model, overwrite=True) as folder:
            yield folder
            write_json(folder / _MODEL_STEP, {"step": step}, overwrite=True)

    def model_step(self) -> int | None:
        """The step that the finished model is from; None without a model, or where it does not say."""
        path = self.model / _MODEL_STEP
        return int(json.loads(path.read_text(encoding="utf-8"))["step"]) if path.exists() else None


def checkpoint_step(path: Path) -> int:
    """The step in a checkpoint's name."""
    number = path.name.removeprefix(CHECKPOINT)
    if not number.isdecimal():
        raise ValueError(f"{path} is not a checkpoint: expected a folder named {CHECKPOINT}<step>")
    return int(number)
