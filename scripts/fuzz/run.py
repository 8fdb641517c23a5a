"""Fuzz readers, configs and calls: every outcome is a result or an error that says what is wrong.

    PYTHONPATH=tests python -m scripts.fuzz.run --parts pictures exif --number 10000 --output out/fuzz

Case i of a part is the same in every run. An interrupted run continues where it was; `--first i --number 1` repeats a
case alone.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from tqdm import tqdm

from marigold_uq.commands.runner import Invocation, run_command
from marigold_uq.files import make_folder
from marigold_uq.results import markdown_table, write_json

_WRITE_EVERY = 200


@dataclass
class Tally:
    """What came of the cases of a part."""

    cases: int = 0
    results: int = 0
    errors: dict[str, int] = field(default_factory=dict)
    uncaught: dict[int, str] = field(default_factory=dict)
    executed: int = 0


@dataclass(frozen=True)
class FuzzOptions:
    """Fuzz the package.

    Args:
        output: Folder for the state; the same one continues an interrupted run.
        parts: Which, by name; default: all.
        number: Cases of each part.
        first: The first case.
        seconds: Stop after so many seconds, with what was done.
    """

    output: Path
    parts: list[str] = field(default_factory=list)
    number: int = 1000
    first: int = 0
    seconds: float = float("inf")


def fuzz(name: str, folder: Path, number: int, *, first: int = 0, tally: Tally | None = None,
         until: float = float("inf"), state: Path | None = None) -> Tally:  # fmt: skip
    """Cases `first` to `first + number - 1` of a part, those already in `tally` left out."""
    from scripts.fuzz.parts import PARTS

    with quiet():
        part = PARTS[name](folder / name)
    tally = tally or Tally()
    errors = Counter(tally.errors)
    for index in tqdm(range(first + tally.cases, first + number), desc=name, unit="case", mininterval=10):
        if time.monotonic() > until:
            break
        try:
            with quiet():
                part.run(np.random.default_rng([sum(name.encode()), index]))
            tally.results += 1
        except part.errors as error:
            errors[type(error).__name__] += 1
        except Exception:
            tally.uncaught[index] = traceback.format_exc()[-1500:]
        if part.witness.exists():
            part.witness.rmdir()
            tally.executed += 1
        tally.cases += 1
        tally.errors = dict(errors)
        if state is not None and (tally.cases % _WRITE_EVERY == 0 or index == first + number - 1):
            write_json(state, tally, overwrite=True)
    if state is not None:
        write_json(state, tally, overwrite=True)
    return tally


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
    """All parts; 1 if anything came out uncaught or any code was executed."""
    from scripts.fuzz.parts import PARTS

    make_folder(options.output)
    until, rows, bad = time.monotonic() + options.seconds, [], 0
    for name in options.parts or list(PARTS):
        state = options.output / f"{name}.json" if options.first == 0 else None
        known = Tally(**json.loads(state.read_text())) if state is not None and state.exists() else None
        tally = fuzz(name, options.output, options.number, first=options.first, tally=known, until=until, state=state)
        for index, text in tally.uncaught.items():
            print(f"{name}, case {index}: {text}", file=sys.stderr)
        bad += len(tally.uncaught) + tally.executed
        errors = ", ".join(f"{kind} {count}" for kind, count in sorted(tally.errors.items()))
        rows.append([name, tally.cases, tally.results, errors, len(tally.uncaught), tally.executed])
    print(markdown_table(["part", "cases", "results", "errors of ours", "uncaught", "code executed"], rows))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(run_command("scripts.fuzz.run", FuzzOptions, run))
