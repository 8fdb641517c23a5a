"""The measure of how much an uncertainty says, where the answer is known."""

import json
from pathlib import Path

import pytest
import torch
from support.photographs import write_photographs
from support.tiny_conditioned import conditioned_pipeline

from marigold_uq.calibration import Calibration, IntervalGrid
from scripts.studies.embedded.readable import grouped, main, mean_correlation, signs_of_error, texture


def speckled(seed: int, slope: float) -> torch.Tensor:
    """A smooth map with speckle."""
    noise = torch.randn(384, 512, generator=torch.Generator().manual_seed(seed))
    return torch.linspace(1, 1 + slope, 512).expand(384, 512) * (0.1 * noise).exp()


def test_speckle_that_two_pictures_share_is_found_under_different_smooth_parts() -> None:
    assert mean_correlation([texture(speckled(0, 0.5)), texture(speckled(0, 3.0))]) > 0.95


def test_speckle_of_their_own_and_smooth_parts_do_not_correlate() -> None:
    assert abs(mean_correlation([texture(speckled(0, 3.0)), texture(speckled(1, 3.0))])) < 0.05


def test_the_row_grows_upwards_and_all_signs_have_the_valid_pixels() -> None:
    valid = torch.tensor([[True, False], [True, True]])
    signs = signs_of_error(torch.zeros(1, 3), torch.ones(1, 3), valid)
    assert signs["row"].tolist() == [[2.0, 1.0, 1.0]]
    assert {tuple(sign.shape) for sign in signs.values()} == {(1, 3)}


def test_groups_count_alike_however_many_pictures_they_have() -> None:
    rows = [{"a": 0.0}, {"a": 0.0}, {"a": 0.0}, {"a": 1.0}]
    assert grouped(rows, ["x", "x", "x", "y"])["a"] == {"value": 0.5, "standard_error": pytest.approx(0.5)}


def test_the_script_scores_photographs_with_a_calibrated_model_only(tmp_path: Path, capsys) -> None:
    root = write_photographs(tmp_path / "photographs", 4, 2)
    pipeline = conditioned_pipeline()
    pipeline.save_pretrained(tmp_path / "model")
    model, output = tmp_path / "model", tmp_path / "readable.json"
    words = ["--data.root", str(root), "--pipeline.model", str(model), "--output", str(output)]
    assert main(words) == 2
    assert "must be calibrated" in capsys.readouterr().err
    wide = IntervalGrid(coverages=(0.5, 0.9), scales=((50.0,), (100.0,)))
    pipeline.calibrate(Calibration(uncertainty="marginal", num_inference_steps=1, ensemble_size=10, interval=wide))
    pipeline.save_pretrained(tmp_path / "calibrated")
    words[3] = str(tmp_path / "calibrated")
    assert main(words) == 0
    found = json.loads(output.read_text())
    assert found["pictures"] == 4
    assert found["whole range"]["value"] == 1.0
    assert -1 <= found["spearman of uncertainty"]["value"] <= 1
