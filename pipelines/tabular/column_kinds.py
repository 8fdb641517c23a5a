"""Kinds of input columns: what each learns from training rows, and how it turns values into numbers.

Every kind is a frozen dataclass whose fields are what a saved pipeline keeps of the column. `encode` writes (rows,
width) numbers into a given block, so that a large table is encoded in place. What was missing only after training has
no column of its own: a number takes the median of the training rows, a category the code of an unseen one.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

Block = NDArray[np.float64]

MAX_INDICATORS = 30
"""A column of more categories has an indicator for this many of the most frequent, and two numbers for all."""
_DATE_PARTS = ("year", "month", "day", "weekday")
_MICROSECONDS_PER_DAY = 86400e6


@dataclass(frozen=True)
class Column:
    """One input column, by name; columns of an array are called by their number."""

    name: str
    kind: ClassVar[str] = "ignored"

    @property
    def width(self) -> int:
        """Numbers per row."""
        return 0

    @property
    def label(self) -> str:
        """How messages call it."""
        return f"column {self.name!r}"

    @property
    def feature_names(self) -> list[str]:
        """One name per number."""
        return []

    def encode(self, series: Any, out: Block) -> None:
        """Write the values of a pandas series into a block (rows, width)."""

    def to_config(self) -> dict[str, Any]:
        """JSON-ready."""
        return {"kind": self.kind, **asdict(self)}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        """Rebuild from `to_config`."""
        options: dict[str, Any] = {n: tuple(value) if isinstance(value, list) else value for n, value in config.items()}
        return cls(**options)


@dataclass(frozen=True)
class NumberColumn(Column):
    """A number; booleans are 0 and 1, durations days.

    Args:
        fill: What a missing value becomes, the median of the training rows. None refuses missing values, as pipelines
            did that were saved before this was learnt.
        has_missing: Whether training rows were missing; then an indicator says so.
    """

    fill: float | None = None
    has_missing: bool = False
    kind: ClassVar[str] = "number"

    @classmethod
    def learn(cls, name: str, series: Any) -> Self:
        """The median of the training rows, 0 if all are missing."""
        values = _numbers(name, series)
        present = values[~np.isnan(values)]
        return cls(name, float(np.median(present)) if len(present) else 0.0, len(present) < len(values))

    @property
    def width(self) -> int:
        """The number, and the indicator."""
        return 1 + self.has_missing

    @property
    def feature_names(self) -> list[str]:
        """The column, and whether it is missing."""
        return [self.name, f"{self.name} is missing"][: self.width]

    def encode(self, series: Any, out: Block) -> None:
        """Missing numbers become the training median."""
        values = _numbers(self.name, series)
        is_missing = np.isnan(values)
        if self.fill is None and is_missing.any():
            raise ValueError(f"{self.label} contains NaN, which this model was not fitted for; fill or drop such rows")
        out[:, 0] = np.where(is_missing, self.fill or 0.0, values)
        if self.has_missing:
            out[:, 1] = is_missing


@dataclass(frozen=True)
class IndicatorColumn(Column):
    """A category: one 0/1 indicator each. An unseen one has the code of its own that no indicator is 1.

    Args:
        categories: Those of training, sorted.
        has_missing: Whether training rows were missing; then missing is a category too.
    """

    categories: tuple[str, ...] = ()
    has_missing: bool = False
    kind: ClassVar[str] = "indicators"

    @property
    def width(self) -> int:
        """One per category."""
        return len(self.categories) + self.has_missing

    @property
    def feature_names(self) -> list[str]:
        """COLUMN=CATEGORY."""
        names = [f"{self.name}={category}" for category in self.categories]
        return names + [f"{self.name} is missing"] * self.has_missing

    def encode(self, series: Any, out: Block) -> None:
        """1 in the column of the category."""
        codes, is_missing = category_codes(series, self.categories)
        out[:] = 0.0
        known = np.flatnonzero(codes >= 0)
        out[known, codes[known]] = 1.0
        if self.has_missing:
            out[:, -1] = is_missing


@dataclass(frozen=True)
class CodeColumn(Column):
    """A category of many: indicators of the most frequent ones, the share of training rows, the place in sorted order.

    Nothing here grows with the number of categories but the stored list. An unseen category has share 0 and place -1,
    a missing one the share of missing rows and place -1.

    Args:
        categories: Those of training, sorted.
        shares: Of each in the training rows.
        frequent: Places of those with an indicator.
        share_missing: Of the training rows.
    """

    categories: tuple[str, ...] = ()
    shares: tuple[float, ...] = ()
    frequent: tuple[int, ...] = ()
    share_missing: float = 0.0
    kind: ClassVar[str] = "codes"

    @classmethod
    def learn(cls, name: str, categories: Sequence[str], counts: NDArray[np.int64], num_rows: int) -> Self:
        """The most frequent by their counts, the first in sorted order among equals."""
        frequent = np.sort(np.argsort(-counts, kind="stable")[:MAX_INDICATORS])
        shares = counts / num_rows
        missing = 1.0 - float(shares.sum()) if counts.sum() < num_rows else 0.0
        return cls(name, tuple(categories), tuple(shares.tolist()), tuple(frequent.tolist()), missing)

    @property
    def width(self) -> int:
        """Indicators, share and place."""
        return len(self.frequent) + 2

    @property
    def feature_names(self) -> list[str]:
        """COLUMN=CATEGORY, then the two numbers."""
        names = [f"{self.name}={self.categories[place]}" for place in self.frequent]
        return [*names, f"{self.name}: share of rows", f"{self.name}: place"]

    def encode(self, series: Any, out: Block) -> None:
        """Look every category up once, then its row in a small table."""
        codes, is_missing = category_codes(series, self.categories)
        table = np.zeros((len(self.categories) + 1, self.width))  # the last row is for code -1
        table[list(self.frequent), range(len(self.frequent))] = 1.0
        table[:-1, -2], table[:-1, -1], table[-1, -1] = self.shares, range(len(self.categories)), -1.0
        out[:] = table[codes]
        out[is_missing, -2] = self.share_missing


@dataclass(frozen=True)
class DateColumn(Column):
    """A date as parts: year, month, day, weekday (Monday is 0), and days since the first date of training.

    Args:
        first: The first date of training, ISO format, UTC where it has a zone.
        fill: Days of a missing date, the median of training; its other parts are those of that date.
        has_missing: Whether training rows were missing; then an indicator says so.
        has_time: Whether training rows had a time of day; then the hour is a part, and days have fractions.
    """

    first: str = "1970-01-01"
    fill: float = 0.0
    has_missing: bool = False
    has_time: bool = False
    kind: ClassVar[str] = "date"

    @classmethod
    def learn(cls, name: str, series: Any) -> Self:
        """What training rows say of a column of dates."""
        dates = _dates(series)
        present = dates[~np.isnat(dates)]
        if not len(present):
            return cls(name, has_missing=True)
        first = present.min().astype("datetime64[D]")
        days = (present - first).astype(np.float64) / _MICROSECONDS_PER_DAY
        has_time = bool((days != np.floor(days)).any())
        fill = float(np.floor(np.median(days)))
        return cls(name, str(first), fill, len(present) < len(dates), has_time)

    @property
    def width(self) -> int:
        """Days, year, month, day and weekday; hour; indicator."""
        return 5 + self.has_time + self.has_missing

    @property
    def feature_names(self) -> list[str]:
        """COLUMN: PART."""
        parts = [f"days since {self.first}", *_DATE_PARTS, *["hour"] * self.has_time]
        return [f"{self.name}: {part}" for part in parts] + [f"{self.name} is missing"] * self.has_missing

    def encode(self, series: Any, out: Block) -> None:
        """Parts of the proleptic Gregorian calendar."""
        dates, first = _dates(series), np.datetime64(self.first, "D")
        is_missing = np.isnat(dates)
        dates = np.where(is_missing, first + np.timedelta64(int(self.fill), "D"), dates).astype("datetime64[us]")
        day, month, year = (dates.astype(f"datetime64[{unit}]") for unit in "DMY")
        elapsed = (dates - first).astype(np.float64) / _MICROSECONDS_PER_DAY
        numbers = day.astype(np.int64)  # days since 1970-01-01, a Thursday
        out[:, 0] = elapsed if self.has_time else np.floor(elapsed)
        out[:, 1] = year.astype(np.int64) + 1970
        out[:, 2] = month.astype(np.int64) % 12 + 1
        out[:, 3] = numbers - month.astype("datetime64[D]").astype(np.int64) + 1
        out[:, 4] = (numbers + 3) % 7
        if self.has_time:
            out[:, 5] = (dates - day).astype(np.float64) / (_MICROSECONDS_PER_DAY / 24)
        if self.has_missing:
            out[:, -1] = is_missing


KINDS: dict[str, type[Column]] = {
    kind.kind: kind for kind in (Column, NumberColumn, IndicatorColumn, CodeColumn, DateColumn)
}
"""Name in a config -> class."""


def column_from_config(config: dict[str, Any]) -> Column:
    """Rebuild a column; configs without a kind are older and hold numbers, or indicators of their categories."""
    given = dict(config)
    kind = given.pop("kind", None)
    if kind is None:
        categories = given["categories"]
        return NumberColumn(given["name"]) if categories is None else IndicatorColumn(given["name"], tuple(categories))
    if kind not in KINDS:
        raise ValueError(f"column {given['name']!r} is of kind {kind!r}, which this version does not know")
    return KINDS[kind].from_config(given)


def category_codes(series: Any, categories: Sequence[str]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Place of each value among `categories`, -1 for others; and which are missing."""
    codes, values = factorised(series)
    places = {category: place for place, category in enumerate(categories)}
    found = [places.get(label_of(value), places.get(str(value), -1)) for value in values]  # older ones have "1.0"
    return np.array([*found, -1], dtype=np.int64)[codes], codes < 0  # the last is for missing


def factorised(series: Any) -> tuple[NDArray[np.int64], list[Any]]:
    """A number per row, -1 where it is missing, and the value that each number stands for."""
    import pandas

    if type(series.dtype).__name__ == "CategoricalDtype":
        return np.asarray(series.cat.codes, dtype=np.int64), list(series.cat.categories)
    codes, values = pandas.factorize(series, use_na_sentinel=True)
    return np.asarray(codes, dtype=np.int64), list(values)


def label_of(value: Any) -> str:
    """A category as text; 1.0 is 1, since a column of whole numbers becomes one of floats where one is missing."""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def _numbers(name: str, series: Any) -> Block:
    """(rows,), finite or NaN; of a series or an array."""
    if getattr(series.dtype, "kind", None) == "m":
        return np.asarray(series.dt.total_seconds(), dtype=np.float64) / 86400
    try:
        is_array = isinstance(series, np.ndarray)
        values: Block = series.astype(np.float64) if is_array else series.to_numpy(dtype=np.float64, na_value=np.nan)
    except (TypeError, ValueError) as error:
        bad = next((value for value in series if not isinstance(value, int | float | np.number)), None)
        raise ValueError(f"column {name!r} is numeric, but holds {bad!r}: clean the column") from error
    if np.isinf(values).any():
        raise ValueError(f"column {name!r} contains infinity; fill or drop such rows first")
    return values


def _dates(series: Any) -> NDArray[np.datetime64]:
    """(rows,) in microseconds, UTC where there is a zone."""
    kind = getattr(series.dtype, "kind", None)
    if kind in tuple("iufbc"):
        raise ValueError(f"column {series.name!r} held dates in training; got {series.dtype}")
    if kind != "M":
        import pandas

        series = pandas.to_datetime(series)
    if getattr(series.dtype, "tz", None) is not None:
        series = series.dt.tz_convert("UTC").dt.tz_localize(None)
    return np.asarray(series.to_numpy(dtype="datetime64[us]"))
