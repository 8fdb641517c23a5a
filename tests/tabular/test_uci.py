"""The UCI reader, on tiny files and on the real sets."""

import re
from pathlib import Path

import numpy as np
import pytest

from marigold_uq.tabular.uci import UCI_SETS, UCIDataError, UCIDataset


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "toy"
    folder.mkdir()
    files = {
        "data.txt": "1.0 2.0\t3.0 \n4 5 6\n7 8 9\n\n",  # ends in an empty line, as concrete does
        "index_features.txt": "0\n2\n",
        "index_target.txt": "1\n",
        "n_splits.txt": "1\n",
        "index_train_0.txt": "2.000e+00\n0.000e+00\n",
        "index_test_0.txt": "1\n",
    }
    for name, text in files.items():
        (folder / name).write_text(text)
    return tmp_path


def test_splits_are_rows_in_the_order_of_their_index(root: Path) -> None:
    dataset = UCIDataset.load(root, "toy")
    split = dataset.split(0)
    np.testing.assert_array_equal(split.train_features, [[7, 9], [1, 3]])
    np.testing.assert_array_equal(split.train_targets, [8, 2])
    np.testing.assert_array_equal(split.test_features, [[4, 6]])
    assert len(list(dataset)) == 1


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("index_test_0.txt", "0\n", "both training and test"),
        ("index_test_0.txt", "3\n", "within 0..2"),
        ("data.txt", "1 2 3\n4 5\n", "lines of one length"),
        ("data.txt", "1 2 nan\n", "NaN"),
        ("index_target.txt", "0\n", "one target column"),
    ],
)
def test_broken_files_are_named(root: Path, name: str, text: str, message: str) -> None:
    (root / "toy" / name).write_text(text)
    with pytest.raises(UCIDataError, match=re.escape(message)):
        UCIDataset.load(root, "toy")


def test_a_missing_file_is_named(root: Path) -> None:
    (root / "toy" / "index_train_0.txt").unlink()
    with pytest.raises(UCIDataError, match=r"missing .*index_train_0.txt"):
        UCIDataset.load(root, "toy")


@pytest.mark.parametrize("name", ["concrete", "naval", "yacht"])
def test_real_sets_have_the_published_sizes(data_root: Path, name: str) -> None:
    if not (data_root / "uci" / name).is_dir():
        pytest.skip(f"real data not available: no folder uci/{name}")
    dataset, source = UCIDataset.load(data_root / "uci", name), UCI_SETS[name]
    assert (*dataset.features.shape, dataset.num_splits) == (source.num_rows, source.num_features, source.num_splits)
    for train, test in dataset.indices:
        assert len(train) + len(test) == source.num_rows
