"""Fuzz readers, configs and calls: every outcome is a result or an error that says what is wrong.

    PYTHONPATH=tests python -m scripts.fuzz.run --parts pictures exif --number 10000 --output out/fuzz

Case i of a part is the same in every run. An interrupted run continues where it was; `--first i --number 1` repeats a
case alone. Cases run in a process of their own, which libraries in C may crash or keep busy for ever: then the case is
noted and the next one follows in a new process.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import sys
import time
import traceback
import warnings
from collections.abc import Generator, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tqdm import tqdm

from marigold_uq.commands.runner import Invocation, run_command
from marigold_uq.files import make_folder
from marigold_uq.results import markdown_table, write_json

if TYPE_CHECKING:
    from scripts.fuzz.parts import Part

_WRITE_EVERY = 200


@dataclass(frozen=True)
class Outcome:
    """What came of a case: nothing of this is a result."""

    error: str | None = None
    uncaught: str | None = None
    executed: bool = False
    lost: str | None = None


@dataclass
class Tally:
    """What came of the cases of a part; `lost` are those that hung, or took their process with them."""

    cases: int = 0
    results: int = 0
    errors: dict[str, int] = field(default_factory=dict)
    uncaught: dict[int, str] = field(default_factory=dict)
    executed: int = 0
    lost: dict[int, str] = field(default_factory=dict)

    def add(self, index: int, outcome: Outcome) -> None:
        """Count one more case."""
        self.cases += 1
        self.executed += outcome.executed
        if outcome.error is not None:
            self.errors[outcome.error] = self.errors.get(outcome.error, 0) + 1
        elif outcome.uncaught is not None:
            self.uncaught[index] = outcome.uncaught
        elif outcome.lost is not None:
            self.lost[index] = outcome.lost
        else:
            self.results += 1


@dataclass(frozen=True)
class FuzzOptions:
    """Fuzz the package.

    Args:
        output: Folder for the state; the same one continues an interrupted run.
        parts: Which, by name; default: all.
        number: Cases of each part.
        first: The first case.
        seconds: Stop after so many seconds, with what was done.
        patience: Seconds after which a case counts as one that never ends.
    """

    output: Path
    parts: list[str] = field(default_factory=list)
    number: int = 1000
    first: int = 0
    seconds: float = float("inf")
    patience: float = 60.0


def fuzz(name: str, folder: Path, number: int, *, first: int = 0, tally: Tally | None = None,
         until: float = float("inf"), state: Path | None = None, patience: float = 60.0) -> Tally:  # fmt: skip
    """Cases `first` to `first + number - 1` of a part, those already in `tally` left out."""
    from scripts.fuzz.parts import PARTS

    with quiet():
        part = PARTS[name](folder / name)
    tally = tally or Tally()
    left = range(first + tally.cases, first + number)
    found = outcomes(part, name, left, patience)
    for index, outcome in tqdm(zip(left, found, strict=True), desc=name, total=len(left), unit="case", mininterval=10):
        tally.add(index, outcome)
        if state is not None and (tally.cases % _WRITE_EVERY == 0 or index == left[-1] or outcome.lost):
            write_json(state, tally, overwrite=True)
        if time.monotonic() > until:
            break
    found.close()
    if state is not None:
        write_json(state, tally, overwrite=True)
    return tally


def outcomes(part: Part, name: str, indices: range, patience: float) -> Generator[Outcome, None, None]:
    """One per case, each at most `patience` seconds after the one before."""
    fork = multiprocessing.get_context("fork")
    while indices:
        ours, theirs = fork.Pipe(duplex=False)
        process = fork.Process(target=_work, args=(part, name, indices, theirs), daemon=True)
        process.start()
        theirs.close()
        try:
            while indices and ours.poll(patience):
                yield ours.recv()
                indices = indices[1:]
            lost = f"no end after {patience:g} s"
        except EOFError:
            process.join()
            lost = f"its process ended with {process.exitcode}"
        finally:
            process.kill()
            process.join()
        if indices:
            yield Outcome(lost=lost)
            indices = indices[1:]


def _work(part: Part, name: str, indices: range, results: Any) -> None:
    """The cases one after the other, in a process of their own."""
    with quiet():
        for index in indices:
            results.send(_run_case(part, np.random.default_rng([sum(name.encode()), index])))


def _run_case(part: Part, rng: np.random.Generator) -> Outcome:
    error = uncaught = None
    try:
        part.run(rng)
    except part.errors as refusal:
        error = type(refusal).__name__
    except Exception:
        uncaught = traceback.format_exc()[-1500:]
    executed = part.witness.exists()
    if executed:
        part.witness.rmdir()
    return Outcome(error, uncaught, executed)


@contextmanager
def quiet() -> Iterator[None]:
    """What libraries say about damaged files is not read here."""
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with (
            Path(os.devnull).open("w") as nothing,
            redirect_stdout(nothing),
            redirect_stderr(nothing),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)


def run(options: FuzzOptions, invocation: Invocation | None = None) -> int:
    """All parts; 1 if anything came out uncaught, hung or crashed, or any code was executed."""
    from scripts.fuzz.parts import PARTS

    make_folder(options.output)
    until, rows, bad = time.monotonic() + options.seconds, [], 0
    for name in options.parts or list(PARTS):
        state = options.output / f"{name}.json" if options.first == 0 else None
        known = Tally(**json.loads(state.read_text())) if state is not None and state.exists() else None
        tally = fuzz(name, options.output, options.number, first=options.first, tally=known, until=until, state=state,
                     patience=options.patience)  # fmt: skip
        for index, text in [*tally.uncaught.items(), *tally.lost.items()]:
            print(f"{name}, case {index}: {text}", file=sys.stderr)
        bad += len(tally.uncaught) + len(tally.lost) + tally.executed
        errors = ", ".join(f"{kind} {count}" for kind, count in sorted(tally.errors.items()))
        rows.append([name, tally.cases, tally.results, errors, len(tally.uncaught), len(tally.lost), tally.executed])
    heads = ["part", "cases", "results", "errors of ours", "uncaught", "hung or crashed", "code executed"]
    print(markdown_table(heads, rows))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(run_command("scripts.fuzz.run", FuzzOptions, run))
