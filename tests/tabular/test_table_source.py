"""Columns of a CSV that are dates, or numbers that are names."""

from pathlib import Path

import pytest

from marigold_uq.tabular.data import TableError, TableSource, read_table

pytest.importorskip("pandas")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "rows.csv"
    path.write_text("day,code,size,price\n2024-01-05,7,1.5,3\n2024-02-01,8,,4\n,7,2.5,5\n")
    return path


def test_dates_and_categories_are_read_as_such(path: Path) -> None:
    table = read_table(TableSource(path, ["price"], dates=["day"], categories=["code"]))
    assert table.features["day"].dtype.kind == "M"
    assert table.features["code"].dtype.name == "category"
    assert table.features.isna().sum().tolist() == [1, 0, 1]
    assert table.targets.tolist() == [3, 4, 5]


def test_columns_that_are_not_there_or_hold_no_dates_are_refused(path: Path) -> None:
    with pytest.raises(TableError, match="has no feature column price; it has day, code, size"):
        read_table(TableSource(path, ["price"], dates=["price"]))
    path.write_text("day,price\nsoon,3\nlater,4\n")
    with pytest.raises(TableError, match="day must hold dates"):
        read_table(TableSource(path, ["price"], dates=["day"]))
