"""Kill a save at every one of its file operations; what is there afterwards must be whole, and a restart must finish.

    PYTHONPATH=tests python -m scripts.fuzz.crash_points --saves training export --output out/crashes

A layer below the C library (`crash_layer.c`, compiled here) counts operations and kills the process at a chosen one, in
the middle of a write too. Every point is tried in three ways: the process alone dies; the power fails, and what was not
forced to the disk is lost; the system cannot swap two names in one step. `--stride n` takes every n-th point. An
interrupted run continues where it was.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from tqdm import tqdm

from marigold_uq.commands.runner import Invocation, run_command
from marigold_uq.files import make_folder
from marigold_uq.results import markdown_table, write_json

LAYER = Path(__file__).with_name("crash_layer.c")
Mode = Literal["kill", "power", "no_swap"]
MODES: tuple[Mode, ...] = ("kill", "power", "no_swap")


class Save(Protocol):
    """Something that writes files, and what must hold if it dies on the way. Every method runs in a process of its own.

    `save` is called again after the crash, as a user would.
    """

    def prepare(self, folder: Path) -> None:
        """What is there before."""

    def save(self, folder: Path) -> None:
        """The save under test."""

    def check(self, folder: Path) -> None:
        """Fail unless every result is whole, the old or the new one."""

    def check_end(self, folder: Path) -> None:
        """Fail unless everything is as a save that nothing disturbed leaves it."""


@dataclass
class Outcome:
    """What happened to one save in one mode."""

    points: int = 0
    tried: list[int] = field(default_factory=list)
    losses: dict[int, str] = field(default_factory=dict)


class Crasher:
    """Runs a save in child processes below one folder."""

    def __init__(self, save: Save, work: Path) -> None:
        self.save, self.work = save, work
        self.folder, self.before, self.log = work / "folder", work / "before", work / "log"
        self.library = ctypes.CDLL(None)
        if not hasattr(self.library, "crash_arm"):
            raise RuntimeError("the layer is not loaded; start with python -m scripts.fuzz.crash_points")

    def prepare(self) -> None:
        """The state before the save, kept to begin with at every point."""
        remove_all([self.work])
        make_folder(self.folder)
        self._must("prepare", lambda: self.save.prepare(self.folder))
        shutil.copytree(self.folder, self.before, symlinks=True)

    def count(self, mode: Mode) -> int:
        """How many operations an undisturbed save makes; it must end right."""
        self._begin()
        self._must("save", lambda: self._armed(0, mode, count=True))
        self._must("check", lambda: self.save.check(self.folder))
        self._must("check_end", lambda: self.save.check_end(self.folder))
        return int((self.work / "count").read_text())

    def crash(self, point: int, mode: Mode) -> str | None:
        """Die at a point, look, start again; what went wrong, or None."""
        self._begin()
        status, error = in_child(lambda: self._armed(point, mode))
        if status != -signal.SIGKILL:
            return f"was to die at point {point}, but ended with {status}: {error}"
        if mode == "power":
            lose_unforced(self.log)
        steps: dict[str, Callable[[Path], None]] = {
            "after the crash": self.save.check,
            "restart": self.save.save,
            "after the restart": self.save.check_end,
        }
        for name, step in steps.items():
            status, error = in_child(lambda step=step: step(self.folder))  # type: ignore[misc]
            if status:
                return f"{name}: {error}"
        return leftovers(self.folder)

    def _begin(self) -> None:
        shutil.rmtree(self.folder)
        shutil.copytree(self.before, self.folder, symlinks=True)

    def _armed(self, point: int, mode: Mode, *, count: bool = False) -> None:
        folder, log = os.fsencode(self.folder), os.fsencode(self.log)
        self.library.crash_arm(folder, ctypes.c_long(point), log, int(mode != "no_swap"))
        self.save.save(self.folder)
        number = self.library.crash_count()
        if count:
            (self.work / "count").write_text(str(number))

    def _must(self, name: str, step: Callable[[], None]) -> None:
        status, error = in_child(step)
        if status:
            raise RuntimeError(f"{type(self.save).__name__}: {name} fails without a crash: {error}")


def in_child(step: Callable[[], None]) -> tuple[int, str]:
    """Run a step in a forked process; its exit status (negative: the signal that ended it) and its error."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        status = 0
        with open(os.devnull, "w") as nothing:
            for number in (1, 2):
                os.dup2(nothing.fileno(), number)
        try:
            step()
        except BaseException:
            status = 1
            os.write(writer, traceback.format_exc()[-2000:].encode())
        os._exit(status)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        error = pipe.read().decode(errors="replace")
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), error


def lose_unforced(log: Path) -> None:
    """What a power cut does: of what was written to a file and not forced to the disk since, half is gone."""
    kept: dict[str, int] = {}  # bytes that stay of a file, were forced before
    for line in log.read_bytes().decode(errors="surrogateescape").split("\n"):
        kind, one, other = [*line.split("\0"), "", ""][:3]
        if kind == "W":
            kept.setdefault(one, int(other or 0))
        elif kind == "R":
            kept = {name: size for name, size in kept.items() if not _is_below(name, other)} | _moved(kept, one, other)
            kept = {name: size for name, size in kept.items() if not _is_below(name, one)}
        elif kind == "X":
            rest = {name: kept[name] for name in kept if not (_is_below(name, one) or _is_below(name, other))}
            kept = rest | _moved(kept, one, other) | _moved(kept, other, one)
        elif kind in ("F", "D"):
            kept.pop(one, None)
    for name, size in kept.items():
        if os.path.isfile(name):
            os.truncate(name, size + max(0, os.path.getsize(name) - size) // 2)


def _is_below(name: str, folder: str) -> bool:
    return name == folder or name.startswith(f"{folder}/")


def _moved(sizes: Mapping[str, int], old: str, new: str) -> dict[str, int]:
    """Those at or below a name, under their new one."""
    return {new + name[len(old) :]: size for name, size in sizes.items() if _is_below(name, old)}


def leftovers(folder: Path) -> str | None:
    """What a restart should have cleared away."""
    found = [str(path.relative_to(folder)) for path in folder.rglob(".marigold-uq-*")]
    return f"left behind: {', '.join(sorted(found))}" if found else None


def remove_all(paths: Iterable[Path]) -> None:
    """Delete folders of earlier attempts."""
    for path in paths:
        shutil.rmtree(path, ignore_errors=True)


def run_points(save: Save, work: Path, mode: Mode, stride: int, state: Path | None = None) -> Outcome:
    """Every `stride`-th point of a save; finished points of an earlier run are taken from `state`."""
    crasher = Crasher(save, work)
    crasher.prepare()
    outcome = Outcome(crasher.count(mode))
    if state is not None and state.exists():
        known = json.loads(state.read_text())
        outcome.tried = known["tried"] if known["points"] == outcome.points else []
        outcome.losses = {int(key): value for key, value in known["losses"].items()} if outcome.tried else {}
    left = [point for point in range(1, outcome.points + 1, stride) if point not in outcome.tried]
    for point in tqdm(left, desc=f"{type(save).__name__} {mode}", unit="point"):
        loss = crasher.crash(point, mode)
        outcome.tried.append(point)
        if loss is not None:
            outcome.losses[point] = loss
        if state is not None:
            write_json(state, outcome, overwrite=True)
    return outcome


def preload(output: Path) -> None:
    """Compile the layer and start this command again with it; once it is loaded nothing."""
    if os.environ.get("LD_PRELOAD", "").endswith("crash_layer.so"):
        return
    make_folder(output)
    library = compile_layer(output)
    os.execve(
        sys.executable,
        [sys.executable, "-m", "scripts.fuzz.crash_points", *sys.argv[1:]],
        {**os.environ, "LD_PRELOAD": str(library), "OMP_NUM_THREADS": "1"},
    )


def compile_layer(folder: Path) -> Path:
    """The layer as a library."""
    library = (folder / "crash_layer.so").resolve()
    subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", str(library), str(LAYER), "-ldl"], check=True)
    return library


@dataclass(frozen=True)
class CrashPoints:
    """Kill saves at their file operations.

    Args:
        output: Folder for the state and the table; the same one continues an interrupted run.
        saves: Which, by name; default: all.
        modes: kill, power, no_swap.
        stride: Every n-th point.
    """

    output: Path
    saves: list[str] = field(default_factory=list)
    modes: list[Mode] = field(default_factory=lambda: list(MODES))
    stride: int = 1


def run(options: CrashPoints, invocation: Invocation | None = None) -> int:
    """All saves in all modes; 1 if anything was lost."""
    preload(options.output)
    import torch

    from scripts.fuzz.saves import SAVES

    torch.set_num_threads(1)
    rows, lost = [], 0
    for name in options.saves or list(SAVES):
        for mode in options.modes:
            state = options.output / f"{name}-{mode}.json"
            outcome = run_points(SAVES[name](), options.output / "work", mode, options.stride, state)
            lost += len(outcome.losses)
            rows.append([name, mode, outcome.points, len(outcome.tried), len(outcome.losses)])
            for point, loss in outcome.losses.items():
                print(f"{name} {mode} point {point}: {loss}", file=sys.stderr)
    print(markdown_table(["save", "mode", "operations", "killed at", "lost"], rows))
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(run_command("scripts.fuzz.crash_points", CrashPoints, run))
