"""Read a table for regression: CSV, npz, or a UCI folder with its splits."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from marigold_uq.array_files import MAX_BYTES, npz_names, read_npz
from marigold_uq.tabular.uci import UCIDataset

Array = NDArray[np.float64]


class TableError(ValueError):
    """A file does not hold what was asked for."""


@dataclass(frozen=True)
class TableSource:
    """Where rows come from.

    Args:
        path: NAME.csv (first line: column names; needs pandas), NAME.npz with `X` (rows, features) and `y` (rows,) or
            (rows, outputs), or the folder of a UCI set.
        target: Target columns of a CSV, at least one.
        features: Feature columns of a CSV; all others by default.
        dates: Feature columns of a CSV that hold dates; their parts become features.
        categories: Feature columns of a CSV that hold numbers which are names, such as codes.
        weight: Column of a CSV (array of an npz) with the weights of the rows.
        split: Of a UCI set.
        part: Which rows of that split.
        max_bytes: An npz whose arrays unpack to more is refused.
    """

    path: Path
    target: list[str] | None = None
    features: list[str] | None = None
    dates: list[str] | None = None
    categories: list[str] | None = None
    weight: str | None = None
    split: int = 0
    part: Literal["train", "test"] = "train"
    max_bytes: int = MAX_BYTES


@dataclass(frozen=True)
class LoadedTable:
    """Rows ready for `DiffusionRegressor.fit`."""

    features: Any  # (rows, F), an array or a DataFrame
    targets: Array  # (rows,) or (rows, outputs)
    weights: Array | None  # (rows,)
    feature_names: list[str] | None
    target_names: list[str]


def read_table(source: TableSource) -> LoadedTable:
    """Read the rows of a source; what is missing is named."""
    path = Path(source.path)
    if path.is_dir():
        return _read_uci(path, source)
    readers = {".csv": _read_csv, ".npz": _read_npz}
    if path.suffix not in readers:
        raise TableError(f"{path} is neither a .csv, nor a .npz, nor the folder of a UCI set")
    if not path.is_file():
        raise TableError(f"no file {path}")
    return readers[path.suffix](path, source)


def _read_uci(path: Path, source: TableSource) -> LoadedTable:
    split = UCIDataset.load(path.parent, path.name).split(source.split)
    rows = (split.train_features, split.train_targets)
    features, targets = rows if source.part == "train" else (split.test_features, split.test_targets)
    return LoadedTable(features, targets, None, None, ["y"])


def _read_npz(path: Path, source: TableSource) -> LoadedTable:
    wanted = ["X", "y", *([source.weight] if source.weight else [])]
    held = npz_names(path, str(path))
    missing = [name for name in wanted if name not in held]
    if missing:
        raise TableError(f"{path} has no array {', '.join(missing)}; it has {', '.join(held)}")
    arrays = read_npz(path, str(path), wanted, max_bytes=source.max_bytes)
    features, targets = arrays["X"], arrays["y"]
    weights = arrays[source.weight] if source.weight else None
    names = ["y"] if targets.ndim == 1 else [f"y{number}" for number in range(targets.shape[1])]
    return LoadedTable(features, targets, weights, None, names)


def _read_csv(path: Path, source: TableSource) -> LoadedTable:
    try:
        import pandas
    except ImportError as error:
        raise ImportError("reading a CSV needs pandas: `pip install pandas`, or store X and y in an npz") from error
    try:
        frame = pandas.read_csv(path)
    except Exception as error:  # its parser meets damage with anything
        raise TableError(f"{path} cannot be read as CSV: {error or type(error).__name__}") from error
    if not source.target:
        raise TableError(f"name the target column of {path}; it has {', '.join(map(str, frame.columns))}")
    taken = [*source.target, *([source.weight] if source.weight else [])]
    features = source.features or [name for name in frame.columns if name not in taken]
    missing = [name for name in [*taken, *features] if name not in frame.columns]
    if missing:
        raise TableError(f"{path} has no column {', '.join(missing)}; it has {', '.join(map(str, frame.columns))}")
    both = sorted(set(features) & set(source.target))
    if both:
        raise TableError(f"a target cannot be a feature; {', '.join(both)} is both")
    targets = _column_numbers(frame, source.target, path)
    weights = _column_numbers(frame, [source.weight], path)[:, 0] if source.weight else None
    flat = targets[:, 0] if len(source.target) == 1 else targets
    return LoadedTable(_typed(frame[features], source, path), flat, weights, list(features), list(source.target))


def _typed(features: Any, source: TableSource, path: Path) -> Any:
    """Feature columns with dates and categories as what they are."""
    import pandas

    named = [*(source.dates or []), *(source.categories or [])]
    missing = [name for name in named if name not in features.columns]
    if missing:
        raise TableError(f"{path} has no feature column {', '.join(missing)}; it has {', '.join(features.columns)}")
    features = features.astype(dict.fromkeys(source.categories or [], "category"))
    for name in source.dates or []:
        try:
            features[name] = pandas.to_datetime(features[name])
        except (TypeError, ValueError) as error:
            raise TableError(f"{path}: {name} must hold dates: {error}") from error
    return features


def _column_numbers(frame: Any, columns: list[str], path: Path) -> Array:
    """Columns of a CSV as numbers, (rows, columns)."""
    try:
        return np.asarray(frame[columns].to_numpy(dtype=np.float64))
    except (TypeError, ValueError) as error:
        raise TableError(f"{path}: {', '.join(columns)} must hold numbers: {error}") from error
