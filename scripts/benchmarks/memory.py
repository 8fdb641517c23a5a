"""Time and memory of this process while something runs, and the size of what it wrote."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Self

__all__ = ["MemoryWatch", "folder_bytes", "resident_bytes"]


INTERVAL = 0.2


def resident_bytes() -> int:
    """Resident memory of this process now (Linux)."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/self/status has no VmRSS")


def folder_bytes(folder: Path) -> int:
    """Of all files in a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


class MemoryWatch:
    """Resident memory before and at its highest within the block, looked at five times a second by a thread.

    Also the seconds of the block, and those of the processor, over all threads: a busy machine changes the former only.
    """

    def __init__(self) -> None:
        self.before = self.peak = resident_bytes()
        self.history: list[int] = []
        self.seconds = self.processor_seconds = 0.0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def _watch(self) -> None:
        while not self._done.wait(INTERVAL):
            self.history.append(resident_bytes())
            self.peak = max(self.peak, self.history[-1])

    def __enter__(self) -> Self:
        self._thread.start()
        self._started = time.perf_counter(), time.process_time()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.seconds = time.perf_counter() - self._started[0]
        self.processor_seconds = time.process_time() - self._started[1]
        self._done.set()
        self._thread.join()
