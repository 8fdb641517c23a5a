"""Held-out parts of feature space, and which uncertainties recognise their rows."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.tiny_sets import quick_model, write_set

from marigold_uq.tabular.uci import UCISplit
from scripts.studies.uci.shift import hold_out, main, shift_scores


def split(rows: int = 300, seed: int = 0) -> UCISplit:
    """Five clouds of which the last, with a fifth of the rows, lies far from the others. Feature 2 is constant."""
    rng = np.random.default_rng(seed)
    centers = np.array([[0, 0, 1], [0, 6, 1], [6, 0, 1], [6, 6, 1], [30, 30, 1]])
    x = centers[np.arange(rows) % 5] + np.c_[rng.normal(size=(rows, 2)), np.zeros(rows)]
    y = x[:, 1] + 0.1 * rng.normal(size=rows)
    order, cut = rng.permutation(rows), rows // 4
    return UCISplit(x[order[cut:]], y[order[cut:]], x[order[:cut]], y[order[:cut]])


@pytest.mark.parametrize("kind", ["cluster", "range"])
def test_no_row_of_the_held_out_part_is_trained_on(kind: Any) -> None:
    whole = split()
    rows = hold_out(whole, kind)
    if kind == "cluster":
        assert rows.train_features[:, 0].max() < 20 < rows.shifted[:, 0].min()
        assert rows.familiar[:, 0].max() < 20
    else:
        assert len(rows.train_targets) == round(0.8 * len(whole.train_targets))
        assert rows.shifted.sum(1).min() > np.quantile(rows.train_features.sum(1), 0.9)
    total = len(whole.train_targets) + len(whole.test_targets)
    assert len(rows.train_targets) + len(rows.familiar) + len(rows.shifted) == total
    seen = {row.tobytes() for row in rows.train_features}
    assert not any(row.tobytes() in seen for row in [*rows.shifted, *rows.familiar])


def test_the_part_does_not_depend_on_targets_or_test_rows() -> None:
    whole = split()
    other = UCISplit(whole.train_features, -whole.train_targets, whole.test_features[:5], whole.test_targets[:5])
    for kind in ("cluster", "range"):
        np.testing.assert_array_equal(hold_out(whole, kind).train_features, hold_out(other, kind).train_features)
    with pytest.raises(ValueError, match="kind must be one of"):
        hold_out(whole, "corner")  # type: ignore[arg-type]


def test_the_distance_separates_a_far_cloud_and_all_estimates_are_scored() -> None:
    model = quick_model(max_epochs=5, baseline="none")
    scores = shift_scores(model, hold_out(split(120), "cluster"))
    assert scores["distance"] == 1
    assert {"epistemic", "between_models", "total"} <= set(scores)
    assert all(0 <= value <= 1 for value in scores.values())


def test_the_command_writes_a_table_and_keeps_finished_splits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = str(write_set(tmp_path / "uci", "toy"))
    arguments = ["--data", data, "--output", str(tmp_path / "out"), "--sets", "toy", "--kinds", "range"]
    arguments += ["--model.max_epochs", "2", "--model.num_models", "2", "--model.baseline", "none", "--splits", "1"]
    assert main(arguments) == 0
    kept = (tmp_path / "out" / "unfinished" / "default-range-toy-0.json").read_text()
    assert main(arguments) == 0
    assert (tmp_path / "out" / "unfinished" / "default-range-toy-0.json").read_text() == kept
    assert "| toy | range | 1 |" in (tmp_path / "out" / "table.md").read_text()
    capsys.readouterr()
    assert main([*arguments, "--model.max_epochs", "3"]) == 2
    assert "made with other settings: model was" in capsys.readouterr().err
    table = tmp_path / "uci" / "toy" / "data.txt"
    table.write_text("\n".join(table.read_text().splitlines()[::-1]))
    assert main(arguments) == 2
    assert "made with other settings: data was" in capsys.readouterr().err
