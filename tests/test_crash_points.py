"""A kill in the middle of a save loses nothing; every point of every save is tried by `scripts.fuzz.crash_points`."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.fuzz.crash_points import lose_unforced

ROOT = Path(__file__).parents[1]
needs_compiler = pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("cc") is None, reason="the layer needs Linux and a C compiler"
)


def crash(output: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a new process, with the layer below it."""
    command = [sys.executable, "-m", "scripts.fuzz.crash_points", "--output", str(output), *words]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, check=False)


@needs_compiler
def test_saves_that_are_killed_lose_nothing_and_finish_when_started_again(tmp_path: Path) -> None:
    """All modes; some points of the large saves, many of the small ones."""
    for saves, stride in ((["training"], "61"), (["card", "cells", "latents", "generated"], "5"), (["export"], "11")):
        run = crash(tmp_path, "--saves", *saves, "--stride", stride)
        assert run.returncode == 0, run.stderr[-3000:]
        for row in run.stdout.splitlines()[-3 * len(saves) :]:
            _, save, mode, operations, killed, lost, _ = (cell.strip() for cell in row.split("|"))
            assert (save in saves, int(killed) > 1, int(operations) >= int(killed), lost) == (True, True, True, "0"), (
                mode
            )


@needs_compiler
def test_the_layer_finds_a_save_that_is_not_safe(tmp_path: Path) -> None:
    """A file written in place is neither the old nor the new one half way, and lost with the power."""
    module = tmp_path / "unsafe_save.py"
    module.write_text(
        "from scripts.fuzz import saves\n"
        "class Unsafe(saves.Written):\n"
        "    results = ('a',)\n"
        "    def write(self, folder, version):\n"
        "        (folder / 'a').write_text(str(version) * 1000)\n"
        "saves.SAVES['unsafe'] = Unsafe\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "tests", tmp_path)))}
    command = [sys.executable, "-m", "scripts.fuzz.crash_points", "--import", "unsafe_save", "--saves", "unsafe"]
    run = subprocess.run(
        [*command, "--output", str(tmp_path / "out")], capture_output=True, text=True, cwd=ROOT, env=environment
    )
    assert run.returncode == 1, run.stdout + run.stderr
    assert "a is neither the old nor the new one" in run.stderr


def test_a_power_cut_takes_what_was_not_forced_to_the_disk(tmp_path: Path) -> None:
    for name in ("kept", "lost", "moved", "one", "other", "longer"):
        (tmp_path / name).write_text("0123456789")
    lines = [
        ("W", "kept"),
        ("F", "kept"),
        ("W", "lost"),
        ("W", "old"),
        ("R", "old", "moved"),
        ("W", "one"),
        ("X", "one", "other"),
    ]
    text = "".join(
        "\0".join([kind, *(str(tmp_path / name) for name in names), *[""] * (2 - len(names))]) + "\n"
        for kind, *names in lines
    )
    text += f"W\0{tmp_path / 'longer'}\0006\n"  # 6 of its bytes are older than what it was opened for
    (tmp_path / "log").write_text(text)
    lose_unforced(tmp_path / "log")
    sizes = {name: len((tmp_path / name).read_text()) for name in ("kept", "lost", "moved", "one", "other", "longer")}
    assert sizes == {"kept": 10, "lost": 5, "moved": 5, "one": 10, "other": 5, "longer": 8}
