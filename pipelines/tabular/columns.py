"""From what users have (arrays, DataFrames with text, dates and gaps) to a matrix of numbers.

Errors and warnings name the column.
"""

import re
import warnings
from collections.abc import Sequence
from numbers import Number
from typing import Any

import numpy as np
from numpy.typing import NDArray

from marigold_uq.pipelines.tabular.column_kinds import (
    MAX_INDICATORS,
    CodeColumn,
    Column,
    DateColumn,
    IndicatorColumn,
    NumberColumn,
    column_from_config,
    factorised,
    label_of,
)

__all__ = ["TabularEncoder", "is_frame"]

_WORDS_OF_TEXT = 6
"""Values of more words on average are sentences, not names."""
_ISO_DATE = re.compile(r"\d{4}-\d{2}-\d{2}")
_ROWS_TO_TELL_IDS = 100
"""With fewer rows a column of counts may look like row numbers by chance."""
_PLAIN_OBJECTS = {"floating": False, "integer": False, "mixed-integer-float": False, "boolean": False, "string": True}
"""What pandas finds in a column of objects -> whether it is text."""


def is_frame(data: Any) -> bool:
    """Whether `data` is a pandas DataFrame, without importing pandas."""
    return hasattr(data, "columns") and hasattr(data, "iloc") and hasattr(data, "dtypes")


class TabularEncoder:
    """Turns a DataFrame, or an array with missing values, into numbers; `column_kinds` says how each kind is encoded.

    It is fitted on training rows and knows nothing of the targets. Constant columns stay (standardising leaves them 0).
    `to_config` and `from_config` make it part of a saved pipeline.
    """

    def __init__(self, columns: Sequence[Column]) -> None:
        self.columns = list(columns)

    @classmethod
    def fit(cls, table: Any) -> "TabularEncoder":
        """Learn the kind of every column, and what it needs. Columns that identify their row are named in a warning."""
        parts = _columns_of(table)
        columns = [_learn(name, values) for name, values in parts]
        _warn_of_ids(parts, columns)
        return cls(columns)

    @property
    def has_categories(self) -> bool:
        """Whether any column is more than a number, so that an array cannot stand for the table."""
        return any(not isinstance(column, NumberColumn) for column in self.columns)

    @property
    def has_names(self) -> bool:
        """Whether columns have names; those of an array are called by their number."""
        return [column.name for column in self.columns] != [str(number) for number in range(len(self.columns))]

    @property
    def feature_names(self) -> list[str]:
        """Names of the numbers that `transform` returns."""
        return [name for column in self.columns for name in column.feature_names]

    def transform(self, table: Any) -> NDArray[np.float64]:
        """(rows, features), finite. A DataFrame must have training's columns, in that order.

        An array may stand for a DataFrame of numbers, and the other way round.
        """
        parts = _columns_of(table)
        self._check_columns([name for name, _ in parts], is_frame(table))
        ends = np.cumsum([0, *(column.width for column in self.columns)])
        matrix = np.empty((len(table), ends[-1]))
        for column, (_, values), start, end in zip(self.columns, parts, ends, ends[1:], strict=False):
            column.encode(values, matrix[:, start:end])
        return matrix

    def _check_columns(self, names: Sequence[str], are_names: bool) -> None:
        """The columns of training; only their number where either had no names."""
        expected = [column.name for column in self.columns]
        if not are_names and self.has_categories:
            raise ValueError(
                "the model was fitted on a DataFrame with categories or dates; got an array. Pass a DataFrame with "
                f"the columns {expected}"
            )
        if len(names) != len(expected) or (are_names and self.has_names and names != expected):
            raise ValueError(f"the columns are {names}; the model was fitted on {expected}, in this order")

    def to_config(self) -> list[dict[str, Any]]:
        """JSON-ready description."""
        return [column.to_config() for column in self.columns]

    @classmethod
    def from_config(cls, config: Sequence[dict[str, Any]]) -> "TabularEncoder":
        """Rebuild from `to_config`, also of versions that only knew numbers and indicators."""
        return cls([column_from_config(entry) for entry in config])

    @classmethod
    def restore(cls, config: Sequence[dict[str, Any]] | None, num_features: int) -> "TabularEncoder":
        """Rebuild what a saved pipeline has; those of older versions have nothing for arrays, and refuse gaps."""
        if config is None:
            return cls([NumberColumn(str(number)) for number in range(num_features)])
        return cls.from_config(config)


def _columns_of(table: Any) -> list[tuple[str, Any]]:
    """Names and values: the series of a DataFrame, the columns of an array, which are called by their number."""
    if is_frame(table):
        return [(str(name), table.iloc[:, number]) for number, name in enumerate(table.columns)]
    values = np.asarray(table)
    if values.ndim != 2:
        raise ValueError(f"expected a table (rows, columns); got shape {values.shape}")
    return [(str(number), column) for number, column in enumerate(values.T)]


def _learn(name: str, series: Any) -> Column:
    """The kind of a column and what training rows say of it."""
    kind = getattr(series.dtype, "kind", None)
    if kind == "M":
        return DateColumn.learn(name, series)
    if isinstance(series, np.ndarray) or kind == "m" or not _is_categorical(series, name):
        return NumberColumn.learn(name, series)
    return _learn_categories(name, series)


def _learn_categories(name: str, series: Any) -> Column:
    """Indicators of few categories, codes of many; one that is nearly always another is no category."""
    codes, values = factorised(series)
    labels = [label_of(value) for value in values]
    counts = np.bincount(codes[codes >= 0], minlength=len(labels))
    merged: dict[str, int] = {}
    for label, count in zip(labels, counts.tolist(), strict=True):
        if count:
            merged[label] = merged.get(label, 0) + count
    categories, num_rows = sorted(merged), len(codes)
    if len(categories) <= MAX_INDICATORS:
        return IndicatorColumn(name, tuple(categories), int(counts.sum()) < num_rows)
    _refuse_text(name, categories)
    if 2 * len(categories) > num_rows:
        return Column(name)
    return CodeColumn.learn(name, categories, np.array([merged[category] for category in categories]), num_rows)


def _refuse_text(name: str, categories: Sequence[str]) -> None:
    """Dates as text say nothing as labels, and sentences need a model that reads."""
    if all(_ISO_DATE.match(category) for category in categories):
        raise ValueError(
            f"column {name!r} holds dates as text ({categories[0]!r}): turn them into dates with pandas.to_datetime, "
            "or name the column in `dates` where a CSV is read"
        )
    words = sum(category.count(" ") + 1 for category in categories) / len(categories)
    if words > _WORDS_OF_TEXT:
        raise ValueError(
            f"column {name!r} holds free text ({categories[0][:40]!r}...): turn it into numbers, embeddings or counts "
            "of words, or drop the column"
        )


def _warn_of_ids(parts: Sequence[tuple[str, Any]], columns: Sequence[Column]) -> None:
    """Names that are nearly all different are left out; row numbers stay, but say so."""
    left_out = [column.name for column in columns if type(column) is Column]
    if left_out:
        warnings.warn(
            f"left out, since nearly every row has a value of its own: {', '.join(map(repr, left_out))}. Drop such "
            "columns, or turn them into something that rows share",
            stacklevel=4,
        )
    numbers = [
        name
        for (name, values), column in zip(parts, columns, strict=True)
        if isinstance(column, NumberColumn) and _counts_rows(values)
    ]
    if numbers:
        warnings.warn(
            f"each value is one more than another row's, like a row number: {', '.join(map(repr, numbers))}. Drop such "
            "columns unless the order of the rows means something",
            stacklevel=4,
        )


def _counts_rows(series: Any) -> bool:
    """Whether whole numbers without gap or repetition."""
    is_whole = getattr(series.dtype, "kind", None) in ("i", "u") and not getattr(series, "hasnans", False)
    if not is_whole or len(series) < _ROWS_TO_TELL_IDS:
        return False
    if int(series.max()) - int(series.min()) != len(series) - 1:
        return False
    return len(np.unique(np.asarray(series))) == len(series)


def _is_categorical(series: Any, name: str) -> bool:
    """Text and pandas categories; booleans count as the numbers 0 and 1. Numbers among text are refused."""
    dtype = series.dtype
    is_numeric = bool(getattr(dtype, "_is_numeric", False) or getattr(dtype, "_is_boolean", False))  # pandas' own Int64
    if type(dtype).__name__ == "CategoricalDtype":
        return True
    if (isinstance(dtype, np.dtype) and dtype.kind != "O") or is_numeric:
        return False
    return _holds_text(series, name)


def _holds_text(series: Any, name: str) -> bool:
    """Whether a column of Python objects is text; False if all of it is numbers."""
    import pandas

    found = pandas.api.types.infer_dtype(series, skipna=True)
    if found in _PLAIN_OBJECTS:
        return _PLAIN_OBJECTS[found]
    present = [value for value in series if not _is_missing(value)]
    strange = [value for value in present if not isinstance(value, Number | str)]
    if strange:
        kind = type(strange[0]).__name__
        advice = "numbers, text or categories (dates with pandas.to_datetime)"
        raise ValueError(f"column {name!r} holds {strange[0]!r}, a {kind}: turn it into {advice}")
    numbers, text = ([value for value in present if isinstance(value, kind)] for kind in (Number, str))
    if numbers and text:
        raise ValueError(f"column {name!r} mixes numbers and text ({numbers[0]!r} and {text[0]!r}): clean the column")
    return not numbers


def _is_missing(value: Any) -> bool:
    is_nan = isinstance(value, float) and bool(np.isnan(value))
    return value is None or is_nan or type(value).__name__ in ("NAType", "NaTType")
