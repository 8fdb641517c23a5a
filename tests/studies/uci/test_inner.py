"""The study that judges a recipe on training rows alone."""

import json
from pathlib import Path

import pytest
from support.tiny_sets import write_set

from scripts.studies.uci.inner import main


def test_each_split_gives_a_line_of_scores(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--data", str(write_set(tmp_path, "toy")), "--set", "toy", "--splits", "0", "1"]
    assert main([*arguments, "--model.max_epochs", "2", "--model.training_options.baseline_epochs", "3"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["split"] for line in lines] == [0, 1]
    assert all(line["num_rows"] == 5 for line in lines)  # a tenth of 54 training rows
    assert all(len(line["expert_weights"]) == 5 for line in lines)


def test_the_ablation_scores_each_distribution_around_the_same_experts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--data", str(write_set(tmp_path, "toy")), "--set", "toy", "--splits", "0", "--ablation", "true"]
    assert main([*arguments, "--model.max_epochs", "2", "--model.training_options.baseline_epochs", "3"]) == 0
    line = json.loads(capsys.readouterr().out)
    assert set(line["ablation"]) == {"head", "leaves", "kernel", "normal", "ten_steps"}
    assert sum(line["weights"].values()) == pytest.approx(1, abs=0.02)
    scores = [line["ablation"][name] for name in ("head", "leaves", "kernel")]
    assert 0 < line["crps"] <= max(scores)  # the CRPS is convex in the distribution
