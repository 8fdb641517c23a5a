"""Figures show what they are given."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.tiny_sets import write_set

from marigold_uq.tabular.figures import calibration_figure, interval_figure
from marigold_uq.tabular.scores import PIT_BINS, RELIABILITY_LEVELS
from scripts.studies.uci.cells import Cell, CellKey, CellStore
from scripts.studies.uci.figures import main, scores_figure
from scripts.studies.uci.tables import Reference

CURVES = (list(RELIABILITY_LEVELS), [5] * PIT_BINS)


def cell(preset: str, family: str, epochs: int = 5) -> Cell:
    split = {"num_rows": 100, "crps": 0.4, "reliability": CURVES[0], "pit": CURVES[1]}
    return Cell(CellKey(preset, family, "yacht", epochs), 10, [split, {**split, "crps": 0.6}], {"ensemble_size": 99})


def test_calibration_has_a_curve_and_a_flat_histogram_per_label() -> None:
    figure = calibration_figure({"before": CURVES, "after": CURVES}, title="t", ensemble_size=99)
    coverage, before, after = figure.axes
    assert [line.get_label() for line in coverage.lines] == ["calibrated", "before", "after"]
    np.testing.assert_allclose(coverage.lines[0].get_ydata(), RELIABILITY_LEVELS, atol=2e-3)  # what 99 draws reach
    assert {round(bar.get_height(), 6) for axes in (before, after) for bar in axes.patches} == {1.0}


def test_intervals_are_sorted_by_prediction_and_misses_are_counted() -> None:
    mean, truth = np.array([3.0, 1.0, 2.0]), np.array([3.2, 5.0, 2.1])
    figure = interval_figure(truth, mean, np.stack([mean - 1, mean + 1], 1), title="t", unit="y")
    labels = figure.axes[0].get_legend_handles_labels()[1]
    assert "truth, inside (2 of 3)" in labels
    assert "truth, outside (1)" in labels
    np.testing.assert_array_equal(figure.axes[0].lines[0].get_ydata(), [1, 2, 3])


def test_partial_cells_are_pale() -> None:
    cells = {
        ("paper", "point", "yacht"): cell("paper", "point"),
        ("default", "own", "yacht"): cell("default", "own", 10),
    }
    (axes, *hidden) = scores_figure(cells, ["yacht"]).axes
    assert [container.lines[0].get_alpha() for container in axes.containers] == [0.4, 1.0]
    assert not any(one.get_visible() for one in hidden)


def test_a_score_of_next_to_nothing_is_shown_beside_others() -> None:
    cells = {("default", "own", "yacht"): replace(cell("default", "own"), splits=[{"num_rows": 1, "crps": 0.0}])}
    others = [Reference("one", "", {"yacht": (0.5, 1.0)}, {}), Reference("two", "", {"yacht": (12.0, 30.0)}, {})]
    axes = scores_figure(cells, ["yacht"], others).axes[0]
    low, high = axes.get_xlim()
    assert low <= 0 < 12 <= high


def test_the_command_draws_from_fits_and_from_cells(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = str(write_set(tmp_path / "uci", "toy"))
    quick = ["--model.max_epochs", "2", "--model.num_models", "1", "--model.baseline", "none"]
    common = ["--output", str(tmp_path / "out"), "--splits", "1", "--set"]
    assert main(["--data", data, *common, "toy", *quick, "--model.calibration_fraction", "0.5"]) == 0
    CellStore(tmp_path / "run").save(cell("paper", "gaussian"))
    assert main(["--cells", str(tmp_path / "run"), *common, "yacht"]) == 0
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"calibration.png", "comparison.png", "intervals.png"}
    assert main(["--cells", str(tmp_path / "run"), *common, "wine"]) == 2
    assert "no finished cell of wine" in capsys.readouterr().err
    assert main([*common, "wine"]) == 2
    assert "pass either data" in capsys.readouterr().err
