"""Damaged files, wrong configs and strange calls: a result or an error that says what is wrong.

`python -m scripts.fuzz.run` does the same for hours.
"""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from scripts.fuzz.parts import PARTS, Part
from scripts.fuzz.run import fuzz

NUMBERS = {"models": 40, "checkpoints": 15, "configs": 20, "calls": 60, "weather": 25}
EXTRA = {"weather": "zarr", "tables": "pandas", "fields": "h5py"}


@pytest.mark.parametrize("name", PARTS)
def test_every_outcome_is_a_result_or_an_error_of_ours(name: str, tmp_path: Path) -> None:
    pytest.importorskip(EXTRA.get(name, "numpy"))
    tally = fuzz(name, tmp_path, NUMBERS.get(name, 150))
    assert not tally.uncaught, "\n".join(f"case {index}: {text}" for index, text in tally.uncaught.items())
    assert not tally.lost
    assert tally.executed == 0
    assert tally.results, "no case gave a result: nothing was tried"
    assert sum(tally.errors.values()), "no case was refused: nothing was damaged"


def _hang() -> None:
    while True:
        time.sleep(1)


@pytest.mark.parametrize(
    ("harm", "found"),
    [(_hang, "no end after 2 s"), (lambda: os.kill(os.getpid(), signal.SIGKILL), f"ended with {-signal.SIGKILL}")],
)
def test_a_case_that_hangs_or_crashes_is_noted_and_the_others_are_run(
    harm: Callable[[], None], found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Harmful(Part):
        def run(self, rng: np.random.Generator) -> None:
            if rng.integers(4) == 0:
                harm()

    expected = [int(np.random.default_rng([sum(b"harmful"), index]).integers(4)) for index in range(8)]
    monkeypatch.setitem(PARTS, "harmful", Harmful)
    tally = fuzz("harmful", tmp_path, 8, patience=2.0)
    assert list(tally.lost) == [index for index, number in enumerate(expected) if number == 0]
    assert 1 <= len(tally.lost) <= 5
    assert all(found in text for text in tally.lost.values())
    assert (tally.cases, tally.results) == (8, 8 - len(tally.lost))
