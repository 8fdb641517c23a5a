"""The tables of the ten public tables in docs/results say what the cells beside them say."""

from pathlib import Path

import pytest

from marigold_uq.tabular.public_tables import NUM_SPLITS, PUBLIC_TABLES
from scripts.studies.tables.report import render
from scripts.studies.uci.cells import Cell, CellStore
from scripts.studies.uci.tables import PEER

RESULTS = Path(__file__).parents[3] / "docs" / "results" / "more_tables"
CELLS = list(CellStore(RESULTS))


def test_the_table_is_made_from_the_cells() -> None:
    assert render(CellStore(RESULTS)) == (RESULTS / "table.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.key.name)
def test_a_cell_has_all_splits_of_the_file_described(cell: Cell) -> None:
    assert len(cell.splits) == NUM_SPLITS
    digest = PUBLIC_TABLES[cell.key.dataset].digest
    assert cell.facts["identity"] == {"data": digest, "seed": 0, "ensemble_size": 100}
    assert cell.facts["peer_versions" if cell.key.preset == PEER else "recipe"]
    rows = PUBLIC_TABLES[cell.key.dataset].num_rows
    assert all(split["num_rows"] == round(0.1 * rows) for split in cell.splits)
