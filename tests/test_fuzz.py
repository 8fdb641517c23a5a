"""Damaged files, wrong configs and strange calls: a result or an error that says what is wrong.

`python -m scripts.fuzz.run` does the same for hours.
"""

from pathlib import Path

import pytest

from scripts.fuzz.parts import PARTS
from scripts.fuzz.run import fuzz

NUMBERS = {"models": 40, "checkpoints": 15, "configs": 20, "calls": 60, "weather": 25}
EXTRA = {"weather": "zarr", "tables": "pandas", "fields": "h5py"}


@pytest.mark.parametrize("name", PARTS)
def test_every_outcome_is_a_result_or_an_error_of_ours(name: str, tmp_path: Path) -> None:
    pytest.importorskip(EXTRA.get(name, "numpy"))
    tally = fuzz(name, tmp_path, NUMBERS.get(name, 150))
    assert not tally.uncaught, "\n".join(f"case {index}: {text}" for index, text in tally.uncaught.items())
    assert tally.executed == 0
    assert tally.results, "no case gave a result: nothing was tried"
    assert sum(tally.errors.values()), "no case was refused: nothing was damaged"
