"""What users' tables become: gaps, categories seen and unseen, many labels, dates, and tables of any size."""

import json
import time
import tracemalloc
from typing import Any

import numpy as np
import pytest

from marigold_uq.pipelines.tabular.column_kinds import MAX_INDICATORS, CodeColumn, IndicatorColumn, NumberColumn
from marigold_uq.pipelines.tabular.columns import TabularEncoder

pandas = pytest.importorskip("pandas")


def encode(train: Any, new: Any) -> dict[str, list[float]]:
    """The new rows, by the names of the numbers, after a way through JSON."""
    fitted = TabularEncoder.fit(pandas.DataFrame(train))
    encoder = TabularEncoder.from_config(json.loads(json.dumps(fitted.to_config())))
    matrix = encoder.transform(pandas.DataFrame(new))
    assert matrix.shape == (len(pandas.DataFrame(new)), len(encoder.feature_names))
    assert np.isfinite(matrix).all()
    return dict(zip(encoder.feature_names, matrix.T.tolist(), strict=True))


def test_missing_numbers_become_the_median_of_training_and_say_so() -> None:
    """The median of 1, 2 and 9 is 2, whatever the new rows hold."""
    assert encode({"a": [1.0, 2.0, np.nan, 9.0]}, {"a": [np.nan, 100.0]}) == {"a": [2, 100], "a is missing": [1, 0]}


def test_a_number_that_is_missing_only_later_becomes_the_median() -> None:
    assert encode({"a": [1.0, 2.0, 9.0]}, {"a": [np.nan, 3.0]}) == {"a": [2, 3]}


def test_a_column_without_any_number_is_a_constant() -> None:
    assert encode({"a": [np.nan, np.nan]}, {"a": [np.nan, 3.0]}) == {"a": [0, 3], "a is missing": [1, 0]}


def test_an_unseen_category_has_a_code_of_its_own() -> None:
    """Also one that is missing only later: neither is any of those known."""
    found = encode({"c": ["red", "blue", "red"]}, {"c": ["blue", "green", None, "red"]})
    assert found == {"c=blue": [1, 0, 0, 0], "c=red": [0, 0, 0, 1]}


def test_codes_that_are_numbers_keep_their_labels_where_some_are_missing() -> None:
    """pandas turns whole numbers into floats where one is missing: 1 and 1.0 are one category."""
    train = {"c": pandas.Categorical([1, 2, 1])}
    assert encode(train, {"c": [1.0, np.nan, 2.0]}) == {"c=1": [1, 0, 0], "c=2": [0, 0, 1]}
    old = TabularEncoder.from_config([{"name": "c", "categories": ["1.0", "2.0"]}])
    np.testing.assert_array_equal(old.transform(pandas.DataFrame({"c": [2.0, 1.0]})), [[0, 1], [1, 0]])


def test_missing_is_a_category_where_training_rows_are_missing() -> None:
    found = encode({"c": ["red", None, "blue"]}, {"c": [None, "green", "red"]})
    assert found == {"c=blue": [0, 0, 0], "c=red": [0, 0, 1], "c is missing": [1, 0, 0]}


def test_many_labels_need_no_column_each() -> None:
    """Label i occurs i + 1 times, so the last ones are the most frequent; places are those in sorted order."""
    labels = [f"l{number:04d}" for number in range(100)]
    train = np.repeat(labels, np.arange(1, 101))
    found = encode({"c": train}, {"c": [labels[0], labels[99], "new", None]})
    assert len(found) == MAX_INDICATORS + 2
    assert found["c=l0099"] == [0, 1, 0, 0]
    assert "c=l0069" not in found
    np.testing.assert_allclose(found["c: share of rows"], [1 / 5050, 100 / 5050, 0, 0])
    assert found["c: place"] == [0, 99, -1, -1]


def test_the_share_of_missing_labels_is_kept() -> None:
    train = [f"l{number % 40}" for number in range(150)] + [None] * 50
    assert encode({"c": train}, {"c": [None]})["c: share of rows"] == [0.25]


def test_columns_that_name_their_row_are_left_out_with_a_warning() -> None:
    frame = pandas.DataFrame({"name": [f"customer {n}" for n in range(200)], "x": np.arange(200) * 0.5})
    with pytest.warns(UserWarning, match="left out, since nearly every row has a value of its own: 'name'"):
        encoder = TabularEncoder.fit(frame)
    assert encoder.transform(frame).shape == (200, 1)


def test_a_row_number_is_kept_with_a_warning() -> None:
    frame = pandas.DataFrame({"id": np.random.default_rng(0).permutation(200) + 7, "age": np.arange(200) // 2})
    with pytest.warns(UserWarning, match="like a row number: 'id'"):
        assert TabularEncoder.fit(frame).feature_names == ["id", "age"]


def test_sentences_are_refused_by_name() -> None:
    reviews = [f"it took {n} days until the parcel came and then it was broken" for n in range(50)]
    with pytest.raises(ValueError, match=r"'review' holds free text .*embeddings or counts of words, or drop"):
        TabularEncoder.fit(pandas.DataFrame({"review": reviews}))


def test_dates_as_text_are_refused_by_name() -> None:
    days = pandas.Series(pandas.date_range("2024-01-01", periods=50)).astype(str)
    with pytest.raises(ValueError, match=r"'day' holds dates as text \('2024-01-01'\): .* pandas.to_datetime"):
        TabularEncoder.fit(pandas.DataFrame({"day": days}))


def test_dates_become_parts() -> None:
    """2024-02-29 was a Thursday, 2023-12-25 a Monday; 59 days lie between 2024-01-01 and 2024-02-29."""
    train = pandas.to_datetime(["2024-01-01", "2024-01-03", "2024-01-09"])
    found = encode({"d": train}, {"d": pandas.to_datetime(["2024-02-29", "2023-12-25", None])})
    assert found["d: days since 2024-01-01"] == [59, -7, 2]
    assert found["d: year"] == [2024, 2023, 2024]
    assert found["d: month"] == [2, 12, 1]
    assert found["d: day"] == [29, 25, 3]
    assert found["d: weekday"] == [3, 0, 2]


def test_parts_of_dates_are_those_of_pandas() -> None:
    days = pandas.date_range("1890-01-01", "2110-01-01", freq="97D")
    found = encode({"d": days}, {"d": days})
    assert found["d: year"] == days.year.tolist()
    assert found["d: month"] == days.month.tolist()
    assert found["d: day"] == days.day.tolist()
    assert found["d: weekday"] == days.weekday.tolist()
    assert found["d: days since 1890-01-01"] == (days - days[0]).days.tolist()


def test_dates_with_a_time_have_hours_and_zones_are_utc() -> None:
    train = pandas.DataFrame({"d": pandas.to_datetime(["2024-01-01T06:00Z", None, "2024-01-02T18:30Z"])})
    new = train.assign(d=train["d"].dt.tz_convert("Asia/Tokyo"))
    found = encode(train, new)
    assert found["d: hour"] == [6, 0, 18.5]
    assert found["d: days since 2024-01-01"] == pytest.approx([0.25, 1, 1 + 18.5 / 24])
    assert found["d is missing"] == [0, 1, 0]


@pytest.mark.parametrize(
    ("values", "want"),
    [
        (pandas.array([1, None, 3], dtype="Int64"), [1, 2, 3]),
        (pandas.array([True, None, True], dtype="boolean"), [1, 1, 1]),
        (pandas.array([0.5, None, 1.5], dtype="Float64"), [0.5, 1, 1.5]),
        ([True, False, True], [1, 0, 1]),
        (np.array([1, None, 3], dtype=object), [1, 2, 3]),
        (pandas.to_timedelta(["1D", None, "12h"]), [1, 0.75, 0.5]),
    ],
)
def test_other_kinds_of_numbers_are_numbers(values: Any, want: list[float]) -> None:
    assert encode({"a": values}, {"a": values})["a"] == want


@pytest.mark.parametrize("dtype", ["string", "category", object])
def test_text_is_text_in_every_dtype(dtype: Any) -> None:
    column = pandas.Series(["b", None, "a"]).astype(dtype)
    assert encode({"c": column}, {"c": column}) == {"c=a": [0, 0, 1], "c=b": [1, 0, 0], "c is missing": [0, 1, 0]}


def test_arrays_may_have_gaps_too() -> None:
    encoder = TabularEncoder.fit(np.array([[1.0, np.nan], [3.0, 5.0], [4.0, 7.0]]))
    np.testing.assert_array_equal(encoder.transform(np.array([[np.nan, np.nan]])), [[3, 6, 1]])
    with pytest.raises(ValueError, match="contains infinity"):
        encoder.transform(np.array([[np.inf, 0.0]]))


def test_descriptions_of_older_pipelines_still_encode_as_they_did() -> None:
    """They listed names and categories, and refused what was missing."""
    old = [{"name": "a", "categories": None}, {"name": "c", "categories": ["blue", "red"]}]
    encoder = TabularEncoder.from_config(old)
    rows = pandas.DataFrame({"a": [1.5, 2.0], "c": ["red", "blue"]})
    np.testing.assert_array_equal(encoder.transform(rows), [[1.5, 0, 1], [2, 1, 0]])
    with pytest.raises(ValueError, match="'a' contains NaN"):
        encoder.transform(rows.assign(a=np.nan))
    with pytest.raises(ValueError, match="of kind 'picture', which this version does not know"):
        TabularEncoder.from_config([{"name": "p", "kind": "picture"}])


def test_an_older_pipeline_of_an_array_takes_numbers_and_refuses_gaps() -> None:
    encoder = TabularEncoder.restore(None, 2)
    rows = np.array([[1.0, 2.0], [3.0, 4.0]])
    np.testing.assert_array_equal(encoder.transform(rows), rows)
    assert not encoder.has_names
    with pytest.raises(ValueError, match="column '1' contains NaN, which this model was not fitted for"):
        encoder.transform(np.array([[1.0, np.nan]]))
    assert TabularEncoder.restore([{"name": "a", "categories": None}], 1).has_names


def test_numbers_where_training_had_dates_are_refused() -> None:
    encoder = TabularEncoder.fit(pandas.DataFrame({"d": pandas.to_datetime(["2024-01-01", "2024-01-02"])}))
    with pytest.raises(ValueError, match="'d' held dates in training; got int64"):
        encoder.transform(pandas.DataFrame({"d": [1, 2]}))


def test_other_columns_are_refused() -> None:
    encoder = TabularEncoder.fit(pandas.DataFrame({"a": [1, 2], "b": [3, 4]}))
    with pytest.raises(ValueError, match=r"the columns are \['b', 'a'\]; the model was fitted on \['a', 'b'\]"):
        encoder.transform(pandas.DataFrame({"b": [1], "a": [2]}))


def test_kinds_are_chosen_by_the_number_of_labels() -> None:
    frame = pandas.DataFrame(
        {"x": np.arange(300) / 7, "few": ["a", "b", "c"] * 100, "many": [*map(str, range(100))] * 3}
    )
    kinds = [type(column) for column in TabularEncoder.fit(frame).columns]
    assert kinds == [NumberColumn, IndicatorColumn, CodeColumn]


def test_wide_tables_are_encoded_column_by_column() -> None:
    values = np.random.default_rng(0).normal(size=(100, 2000))
    values[::7, ::3] = np.nan
    frame = pandas.DataFrame(values)
    assert TabularEncoder.fit(frame).transform(frame).shape == (100, 2000 + 667)


@pytest.mark.slow
def test_a_million_rows_take_seconds_and_little_more_memory_than_the_result() -> None:
    """20 numbers, five of them with gaps, 8 columns of 10 labels, one of 8,000, one of dates: 30 columns."""
    rng, rows = np.random.default_rng(0), 1_000_000
    numbers = rng.normal(size=(rows, 20))
    numbers[rng.random((rows, 20)) < 0.01] = np.nan
    frame = pandas.DataFrame(numbers, columns=[f"x{n}" for n in range(20)])
    for n in range(8):
        frame[f"c{n}"] = np.array(list("abcdefghij"))[rng.integers(10, size=rows)]
    frame["label"] = np.array([f"label {n}" for n in range(8000)])[rng.integers(8000, size=rows)]
    frame["date"] = np.datetime64("2020-01-01") + rng.integers(1000, size=rows).astype("timedelta64[D]")
    encoder = TabularEncoder.fit(frame)
    start = time.process_time()
    matrix = encoder.transform(frame)
    seconds = time.process_time() - start
    tracemalloc.start()
    encoder.transform(frame)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    print(f"{matrix.shape}: {seconds:.1f} s, {peak / matrix.nbytes:.2f} times the result")
    assert seconds < 30
    assert peak < 2 * matrix.nbytes
