"""One process per folder: a second one is told who is there, instead of mixing its files with theirs."""

from __future__ import annotations

import errno
import logging
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import IO

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

__all__ = ["LOCK_FILE", "FolderInUseError", "folder_lock"]

logger = logging.getLogger(__name__)

LOCK_FILE = ".marigold-uq.lock"
_TAKEN = (errno.EACCES, errno.EAGAIN)
_HELD: dict[tuple[int, Path], object] = {}
"""(process, folder) -> its holder: the system would let a process lock a file twice."""


class FolderInUseError(OSError):
    """Another process, or another part of this one, works in the folder."""


@contextmanager
def folder_lock(folder: str | Path) -> Iterator[None]:
    """Within the block no other block of this kind can be entered for an existing folder, by any process.

    The lock goes with the process, however that ends; the file that carries it stays. On disks that know no locks there
    is a warning instead.

    Raises:
        FolderInUseError: The folder is in use; the message says by which process, and since when.
    """
    folder = Path(folder).resolve()
    key, holder = (os.getpid(), folder), object()
    if _HELD.setdefault(key, holder) is not holder:
        raise FolderInUseError(
            f"{folder} is in use by another run of this process; wait for its end, or choose another output"
        )
    try:
        with (folder / LOCK_FILE).open("a+", encoding="utf-8") as file:
            _take(file, folder)
            yield
    finally:
        del _HELD[key]


def _take(file: IO[str], folder: Path) -> None:
    """Lock the file and write the own name into it; closing it gives the lock back."""
    if fcntl is None:
        return
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in _TAKEN:
            logger.warning("%s cannot be locked (%s): take care that one process works there at a time", folder, error)
            return
        file.seek(0)
        holder = file.read().strip() or "another process"
        raise FolderInUseError(
            f"{folder} is in use by {holder}; wait for it, stop it, or choose another output"
        ) from error
    file.truncate(0)
    file.write(f"process {os.getpid()} on {platform.node()} since {datetime.now():%Y-%m-%d %H:%M:%S}\n")
    file.flush()
