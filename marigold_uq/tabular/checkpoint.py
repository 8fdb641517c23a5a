"""Long fits that survive an interruption: each stage of a fit keeps its trainer's state in a file of one folder."""

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from marigold_uq.files import atomic_path, make_folder


@dataclass(frozen=True)
class Checkpoints:
    """A folder with one file per stage; what was saved for other data, another recipe or other seeds is refused.

    Args:
        folder: Made if it does not exist. Delete it to start anew.
        fingerprint: Of all that the result depends on (`fingerprint_of`).
        seconds: Between two saves of one stage.
    """

    folder: Path
    fingerprint: str
    seconds: float = 300.0
    _last: dict[str, float] = field(default_factory=dict, repr=False, compare=False)

    def path(self, stage: str) -> Path:
        """The file of one stage."""
        return self.folder / f"{stage}.pt"

    def load(self, stage: str) -> Any | None:
        """The state of a stage, or None if there is none yet."""
        self._last[stage] = time.monotonic()
        path = self.path(stage)
        if not path.exists():
            return None
        saved = torch.load(path, weights_only=True)
        if saved["fingerprint"] != self.fingerprint:
            raise ValueError(
                f"{path} belongs to a fit with other data, another recipe or other seeds: choose another folder, or "
                "delete this one to start anew"
            )
        return saved["state"]

    def is_due(self, stage: str) -> bool:
        """Whether the stage was last saved (or begun) longer ago than `seconds`."""
        return time.monotonic() - self._last.setdefault(stage, time.monotonic()) >= self.seconds

    def save(self, stage: str, state: Any) -> None:
        """Write the state of a stage; an interrupted write leaves the old file."""
        make_folder(self.folder)
        with atomic_path(self.path(stage), overwrite=True) as temporary:
            torch.save({"fingerprint": self.fingerprint, "state": state}, temporary)
        self._last[stage] = time.monotonic()


def fingerprint_of(arrays: Sequence[np.ndarray], *settings: object) -> str:
    """A hash of arrays (shape and bytes) and of the text of all settings."""
    digest = hashlib.blake2b(repr(settings).encode(), digest_size=16)
    for array in arrays:
        digest.update(repr((array.shape, str(array.dtype))).encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()
