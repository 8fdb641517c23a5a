"""From what users have (arrays, DataFrames with text) to a matrix of numbers, with errors that name the column."""

from dataclasses import dataclass
from numbers import Number
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Column:
    """One input column: numeric, or categorical with the categories that were seen in training."""

    name: str
    categories: tuple[str, ...] | None = None


def is_frame(data: Any) -> bool:
    """Whether `data` is a pandas DataFrame, without importing pandas."""
    return hasattr(data, "columns") and hasattr(data, "iloc") and hasattr(data, "dtypes")


def _is_categorical(series: Any, name: str) -> bool:
    """Text and pandas categories; booleans count as the numbers 0 and 1. Dates, and numbers among text, are refused."""
    dtype = series.dtype
    if getattr(dtype, "kind", None) in ("m", "M"):
        raise ValueError(f"column {name!r} holds dates or durations: turn them into numbers, days since a date say")
    is_numeric = bool(getattr(dtype, "_is_numeric", False) or getattr(dtype, "_is_boolean", False))  # pandas' own Int64
    if type(dtype).__name__ == "CategoricalDtype":
        return True
    if (isinstance(dtype, np.dtype) and dtype.kind != "O") or is_numeric:
        return False
    return _holds_text(series, name)


def _holds_text(series: Any, name: str) -> bool:
    """Whether a column of Python objects is text; False if all of it is numbers."""
    present = [value for value in series if not _is_missing(value)]
    strange = [value for value in present if not isinstance(value, Number | str)]
    if strange:
        kind = type(strange[0]).__name__
        raise ValueError(f"column {name!r} holds {strange[0]!r}, a {kind}: turn it into numbers, text or categories")
    numbers, text = ([value for value in present if isinstance(value, kind)] for kind in (Number, str))
    if numbers and text:
        raise ValueError(f"column {name!r} mixes numbers and text ({numbers[0]!r} and {text[0]!r}): clean the column")
    return not numbers


def _is_missing(value: Any) -> bool:
    is_nan = isinstance(value, float) and bool(np.isnan(value))
    return value is None or is_nan or type(value).__name__ in ("NAType", "NaTType")


class TabularEncoder:
    """Turns a DataFrame into numbers: numeric columns as they are, categories as 0/1 indicators.

    Constant columns stay (standardising leaves them 0). `to_config` and `from_config` make it part of a saved pipeline.
    """

    def __init__(self, columns: list[Column]) -> None:
        self.columns = columns

    @classmethod
    def fit(cls, frame: Any) -> "TabularEncoder":
        """Learn the kind of every column, and the categories."""
        columns = []
        for number, name in enumerate(frame.columns):
            series = frame.iloc[:, number]
            categories = None
            if _is_categorical(series, str(name)):
                categories = tuple(sorted({_label(value, str(name)) for value in series}))
            columns.append(Column(str(name), categories))
        return cls(columns)

    @property
    def has_categories(self) -> bool:
        """Whether any column is not numeric."""
        return any(column.categories is not None for column in self.columns)

    def transform(self, frame: Any) -> NDArray[np.float64]:
        """(rows, features): one per numeric column and category. Columns must have training's names, in that order."""
        names = [str(name) for name in frame.columns]
        expected = [column.name for column in self.columns]
        if names != expected:
            raise ValueError(f"the columns are {names}; the model was fitted on {expected}, in this order")
        encoded = [self._encode(column, frame.iloc[:, number]) for number, column in enumerate(self.columns)]
        return np.concatenate(encoded, axis=1)

    @staticmethod
    def _encode(column: Column, series: Any) -> NDArray[np.float64]:
        if column.categories is None:
            return _numbers(column.name, series)
        labels = [_label(value, column.name) for value in series]
        known = {label: index for index, label in enumerate(column.categories)}
        unknown = sorted(set(labels) - set(known))
        if unknown:
            raise ValueError(
                f"column {column.name!r} holds {unknown[:3]}, not seen in training; known are "
                f"{list(column.categories[:10])}. Map new categories to known ones, or train with them."
            )
        return np.eye(len(known))[[known[label] for label in labels]].reshape(len(labels), len(known))

    def to_config(self) -> list[dict[str, Any]]:
        """JSON-ready description."""
        return [
            {"name": c.name, "categories": None if c.categories is None else list(c.categories)} for c in self.columns
        ]

    @classmethod
    def from_config(cls, config: list[dict[str, Any]]) -> "TabularEncoder":
        """Rebuild from `to_config`."""
        return cls([Column(c["name"], None if c["categories"] is None else tuple(c["categories"])) for c in config])


def _label(value: Any, name: str) -> str:
    """A category as text; missing values are refused."""
    if _is_missing(value):
        raise ValueError(f"column {name!r} contains NaN or missing values; fill or drop them before fitting")
    return str(value)


def _numbers(name: str, series: Any) -> NDArray[np.float64]:
    """(rows, 1), finite."""
    try:
        values = np.asarray(series, dtype=np.float64)
    except (TypeError, ValueError) as error:
        bad = next((value for value in series if not isinstance(value, int | float | np.number)), None)
        raise ValueError(f"column {name!r} is numeric, but holds {bad!r}: clean the column") from error
    if not np.isfinite(values).all():
        what = "NaN" if np.isnan(values).any() else "infinity"
        raise ValueError(f"column {name!r} contains {what}; fill or drop such rows first")
    return values.reshape(-1, 1)
