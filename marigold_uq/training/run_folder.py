"""A run's folder: what was asked for, with which versions, what was measured, and its checkpoints."""

from __future__ import annotations

import json
import platform
import shutil
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from marigold_uq.export import atomic_path

PACKAGES = ("marigold_uq", "torch", "diffusers", "transformers", "accelerate", "safetensors", "numpy", "peft")
CHECKPOINT = "checkpoint-"


class RunFolder:
    """Paths and files of one run; only the main process writes."""

    def __init__(self, root: Path) -> None:
        self.root = Path(root)
        self.checkpoints = self.root / "checkpoints"
        self.pictures = self.root / "validation"
        self.model = self.root / "model"
        self.metrics = self.root / "metrics.jsonl"

    def create(self, resume: str) -> None:
        """Make the folders; with resume="never" a folder that holds a run already is refused."""
        if resume == "never" and (self.metrics.exists() or self.list_checkpoints()):
            raise FileExistsError(f"{self.root} holds a run already; choose another output, or resume='latest'")
        for folder in (self.root, self.checkpoints, self.pictures):
            folder.mkdir(parents=True, exist_ok=True)
        for leftover in self.checkpoints.glob(".*"):  # of a run that was killed while it saved
            shutil.rmtree(leftover)

    def write_text(self, name: str, text: str) -> None:
        """Write or replace a small text file."""
        with atomic_path(self.root / name, overwrite=True) as temporary:
            temporary.write_text(text, encoding="utf-8")

    def write_versions(self) -> None:
        """versions.json: Python and the packages that matter."""
        self.write_text("versions.json", json.dumps(versions(), indent=2) + "\n")

    def log(self, record: dict[str, Any]) -> None:
        """Append a line to metrics.jsonl."""
        with self.metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

    def forget_after(self, step: int) -> None:
        """Drop metrics of steps that a resumed run makes again."""
        if not self.metrics.exists():
            return
        lines = self.metrics.read_text(encoding="utf-8").splitlines()
        kept = [line for line in lines if line.strip() and _step_of(line) <= step]
        self.write_text("metrics.jsonl", "".join(line + "\n" for line in kept))

    def list_checkpoints(self) -> list[Path]:
        """Finished checkpoints, oldest first."""
        found = self.checkpoints.glob(f"{CHECKPOINT}*") if self.checkpoints.exists() else iter(())
        return sorted(found, key=checkpoint_step)

    def find_checkpoint(self, resume: str) -> Path | None:
        """The checkpoint to go on from, or None for a fresh start."""
        if resume == "never":
            return None
        if resume == "latest":
            return next(reversed(self.list_checkpoints()), None)
        path = Path(resume)
        if not path.is_dir():
            raise FileNotFoundError(f"no checkpoint folder {path}; resume is 'latest', 'never' or a checkpoint's path")
        return path

    def keep_newest(self, limit: int) -> None:
        """Remove all but the newest `limit` checkpoints."""
        for old in self.list_checkpoints()[: -max(1, limit)]:
            shutil.rmtree(old)


def checkpoint_step(path: Path) -> int:
    """The step in a checkpoint's name."""
    number = path.name.removeprefix(CHECKPOINT)
    if not number.isdecimal():
        raise ValueError(f"{path} is not a checkpoint: expected a folder named {CHECKPOINT}<step>")
    return int(number)


def _step_of(line: str) -> int:
    return int(json.loads(line)["step"])


def versions() -> dict[str, str]:
    """Versions of what a result depends on."""
    found = {"python": platform.python_version(), "platform": platform.platform()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
