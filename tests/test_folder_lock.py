"""One process per folder: who comes second is told who is there."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from marigold_uq.folder_lock import LOCK_FILE, FolderInUseError, folder_lock

HOLDER = """
import sys, time
from marigold_uq.folder_lock import folder_lock
with folder_lock(sys.argv[1]):
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_second_process_is_told_who_is_there_until_the_first_is_dead(tmp_path: Path) -> None:
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(FolderInUseError, match=rf"is in use by process {holder.pid} on .* since 20.*; wait for it"):
            folder_lock(tmp_path).__enter__()
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    with folder_lock(tmp_path):
        assert f"process {os.getpid()} on" in (tmp_path / LOCK_FILE).read_text()


def test_a_process_cannot_enter_a_folder_twice_and_leaves_it_after_an_error(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    with folder_lock(tmp_path), pytest.raises(FolderInUseError, match="in use by another run of this process"):
        folder_lock(tmp_path / "link").__enter__()
    with pytest.raises(KeyError), folder_lock(tmp_path):
        raise KeyError
    with folder_lock(tmp_path):
        pass


def test_a_disk_without_locks_warns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fcntl = pytest.importorskip("fcntl")

    def unsupported(file: object, flags: int) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "lockf", unsupported)
    with folder_lock(tmp_path):
        assert "cannot be locked" in caplog.text
