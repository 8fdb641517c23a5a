"""Test rows that are among the training rows."""

from pathlib import Path

import numpy as np
import pytest
from support.tiny_sets import write_set

from marigold_uq.tabular.uci import UCISplit
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
