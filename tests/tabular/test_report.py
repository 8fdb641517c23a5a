"""The report of a model whose distributions are known."""

import base64
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from marigold_uq.tabular.figures import importance_figure, interval_figure
from marigold_uq.tabular.report import TableReport, make_report


class Known:
    """y = 3 x_0 + N(0, 1); the second column says nothing. Draws are the same for equal rows."""

    def sample(self, X: Any, ensemble_size: int) -> np.ndarray:
        x = np.asarray(X, dtype=float)[:, 0]
        return 3 * x + np.random.default_rng(1).normal(size=(ensemble_size, 1)) * np.ones(len(x))

    def predict_interval(self, X: Any, coverage: float) -> np.ndarray:
        x = np.asarray(X, dtype=float)[:, 0]
        return np.stack([3 * x - 1.959964, 3 * x + 1.959964], 1)


def rows(number: int = 1000) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(number, 2))
    return x, 3 * x[:, 0] + rng.normal(size=number)


@pytest.fixture(scope="module")
def report() -> TableReport:
    return make_report(Known(), *rows(), ensemble_size=200)


def test_scores_are_those_of_a_calibrated_model(report: TableReport) -> None:
    """CRPS of the truth: 1 / sqrt(pi) = .564; 5 standard errors of 1000 rows, .46 / sqrt(1000), and of 200 draws."""
    assert report.scores["crps"] == pytest.approx(1 / np.sqrt(np.pi), abs=0.08)
    assert report.scores["interval_coverage_95"] == pytest.approx(0.95, abs=5 * np.sqrt(0.95 * 0.05 / 1000))
    assert "| rows | 1000 |" in report.markdown()


def test_a_column_that_says_nothing_has_no_importance(report: TableReport) -> None:
    assert list(report.importance) == ["column 0", "column 1"]
    assert report.importance["column 1"] == (0.0, 0.0)


def test_importance_is_the_rise_of_the_crps_of_shuffled_rows(report: TableReport) -> None:
    """Shuffled, the truth is N(3 x, 1) with x of another row: the error is normal with variance 1 + 2 * 9 = 19.

    E CRPS of N(0, 1) with an error of variance v: sqrt(2 (v + 1) / pi) - 1 / sqrt(pi); here v + 1 = 20. 300 rows.
    """
    want = np.sqrt(2 * 20 / np.pi) - np.sqrt(2 * 2 / np.pi)
    mean, deviation = report.importance["column 0"]
    assert mean == pytest.approx(want, rel=0.15)
    assert 0 < deviation < 0.2 * want


def test_a_page_holds_every_figure(report: TableReport, tmp_path: Path) -> None:
    path = report.save(tmp_path / "report.html")
    text = path.read_text(encoding="utf-8")
    assert list(report.figures) == ["calibration", "intervals", "spread", "importance"]
    pictures = re.findall(r'src="data:image/png;base64,([^"]+)"', text)
    assert len(pictures) == 4
    assert all(base64.b64decode(one).startswith(b"\x89PNG") for one in pictures)
    assert "coverage of the 95 % interval</td><td>0.9" in text
    with pytest.raises(FileExistsError):
        report.save(path)
    with pytest.raises(ValueError, match=r"must end in .html"):
        report.save(tmp_path / "report.png")


def test_a_title_cannot_break_the_page() -> None:
    small = make_report(Known(), *rows(20), num_repeats=0, title="a <b> & c")
    assert "a &lt;b&gt; &amp; c" in small.to_html()
    assert "<b>" not in small.to_html()
    assert "importance" not in small.figures


def test_data_frames_are_shuffled_by_column_and_stay_as_they_were() -> None:
    pandas = pytest.importorskip("pandas")
    x, y = rows(200)
    frame = pandas.DataFrame({"size": x[:, 0], "colour": x[:, 1]}, index=np.arange(200)[::-1])
    before = frame.copy()
    found = make_report(Known(), frame, y, num_repeats=2).importance
    assert list(found) == ["size", "colour"]
    assert found["size"][0] > 1
    assert found["colour"][0] == 0
    pandas.testing.assert_frame_equal(frame, before)


def test_one_of_several_outputs_is_chosen() -> None:
    class Two(Known):
        def sample(self, X: Any, ensemble_size: int) -> np.ndarray:
            draws = super().sample(X, ensemble_size)
            return np.stack([draws + 100, draws], -1)

        def predict_interval(self, X: Any, coverage: float) -> np.ndarray:
            ends = super().predict_interval(X, coverage)
            return np.stack([ends + 100, ends], -1)

    x, y = rows(300)
    truth = np.stack([y, y], 1)
    scores = [make_report(Two(), x, truth, output=k, num_repeats=0).scores["crps"] for k in (0, 1)]
    assert scores[0] == pytest.approx(100, abs=2)
    assert scores[1] < 1
    with pytest.raises(ValueError, match=r"output must be within 0\.\.1; got 2"):
        make_report(Two(), x, truth, output=2)


def test_rows_without_truth_are_refused() -> None:
    x, y = rows(10)
    with pytest.raises(ValueError, match="same number of rows, at least 2; got 10 and 9"):
        make_report(Known(), x, y[:-1])


def test_many_rows_are_thinned_and_all_are_counted() -> None:
    mean = np.random.default_rng(0).normal(size=1000)
    figure = interval_figure(mean, mean, np.stack([mean - 1, mean + 1], 1), title="t", unit="y")
    (axes,) = figure.axes
    assert len(axes.lines[0].get_xdata()) == 150
    assert "truth, inside (1000 of 1000)" in axes.get_legend_handles_labels()[1]
    assert axes.get_xlabel().startswith("150 of 1000 rows")


def test_the_most_important_columns_come_first() -> None:
    figure = importance_figure({f"c{n}": (float(n), 0.1) for n in range(30)}, crps=1.0)
    (axes,) = figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()][:2] == ["c29", "c28"]
    assert len(axes.patches) == 20
    assert "10 more are not shown" in axes.get_title()
