"""Test rows that are among the training rows."""

from pathlib import Path

import numpy as np
import pytest
from support.tiny_sets import write_set

from marigold_uq.tabular.duplicates import duplicate_rows, score_apart
from marigold_uq.tabular.uci import UCISplit
from scripts.studies.uci.cells import Cell, CellKey, CellStore
from scripts.studies.uci.duplicates import Shares, duplicate_shares, main


def test_rows_count_as_duplicates_if_all_features_agree() -> None:
    """Of four test rows one is new, one has another target, one has two targets in training, one is the same."""
    train = np.array([[1.0, 2.0], [3.0, 4.0], [3.0, 4.0], [5.0, 6.0]])
    test = np.array([[1.0, 3.0], [1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    split = UCISplit(train, np.array([0.0, 1.0, 2.0, 3.0]), test, np.array([0.0, 9.0, 1.0, 3.0]))
    assert duplicate_shares(split) == Shares(features=0.75, target=0.25)


def test_the_command_prints_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--data", str(write_set(tmp_path, "toy")), "--sets", "toy"]) == 0
    assert "| toy | 0.0% (0.0% to 0.0%) |  |" in capsys.readouterr().out


def test_scores_of_new_rows_and_of_duplicates_are_kept_apart() -> None:
    """Draws that all say 1 have a CRPS of |1 - y|: 1 and 3 on the two duplicates, 9 on the new row."""
    train, test = np.array([[1.0], [0.0]]), np.array([[1.0], [-0.0], [2.0]])
    split = UCISplit(train, np.zeros(2), test, np.array([2.0, 4.0, 10.0]))
    assert duplicate_rows(split).tolist() == [True, True, False]
    found = score_apart(np.ones((5, 3)), split)
    assert found == {"duplicates": pytest.approx(2 / 3), "crps_new": 9.0, "crps_duplicates": 2.0}
    alone = UCISplit(train + 7, np.zeros(2), test, split.test_targets)
    assert score_apart(np.ones((5, 3)), alone) == {"duplicates": 0.0, "crps_new": pytest.approx(13 / 3)}


def test_the_command_averages_over_splits_that_have_such_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    splits = [{"crps": 1.0, "crps_new": 2.0, "crps_duplicates": 0.5}, {"crps": 3.0, "crps_new": 3.0}]
    CellStore(tmp_path / "run").save(Cell(CellKey("peer", "forest_leaf5", "toy", 0), None, splits))
    CellStore(tmp_path / "run").save(Cell(CellKey("paper", "point", "toy", 1), 10, [{"crps": 1.0}]))
    data = str(write_set(tmp_path / "uci", "toy"))
    assert main(["--data", data, "--sets", "toy", "--cells", str(tmp_path / "run")]) == 0
    out = capsys.readouterr().out
    assert "| toy | forest_leaf5 | 2 | 2 | 2.5 | 0.5 |" in out
    assert "point" not in out
