"""The tables of the UCI sets in docs/results say what the cells beside them say."""

import re
from pathlib import Path

import pytest

from scripts.studies.uci.cells import Cell, CellStore
from scripts.studies.uci.reproduce import markdown
from scripts.studies.uci.tables import PEER

RESULTS = Path(__file__).parents[3] / "docs" / "results" / "uci"
CELLS = list(CellStore(RESULTS))


def test_the_table_is_made_from_the_cells() -> None:
    text = (RESULTS / "table.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"^Last command: `(.*)`$", text, flags=re.MULTILINE)
    assert markdown(CellStore(RESULTS).furthest(), command) == text


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.key.name)
def test_a_cell_has_all_splits_and_says_how_it_was_made(cell: Cell) -> None:
    is_peer = cell.key.preset == PEER
    assert len(cell.splits) == (cell.key.epochs if is_peer else 5 if cell.key.dataset == "protein" else 20)
    # A distribution far too wide has a larger CRPS than the error of its mean, but not by more than its spread.
    assert all(0 <= split["crps"] <= split["rmse"] + split["width_95"] / 2 for split in cell.splits)
    assert cell.facts["ensemble_size"] == 100
    assert {"data", "seed", "ensemble_size"} <= set(cell.facts["identity"])
    assert cell.facts["peer_versions"] if is_peer else cell.facts["recipe"]["num_draws"] == 4
