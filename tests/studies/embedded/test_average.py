"""Two models of one kind become one, half way between them."""

from pathlib import Path

import pytest
import torch
from support.tiny_conditioned import conditioned_pipeline

from marigold_uq import MarigoldUQDepthPipeline
from scripts.studies.embedded.average import LEARNING, main


def test_every_weight_lies_half_way_and_the_rest_is_the_first_model_s(tmp_path: Path) -> None:
    first, second = conditioned_pipeline(), conditioned_pipeline(default_denoising_steps=4)
    with torch.no_grad():
        for name in LEARNING:
            for weight in getattr(second, name).parameters():
                weight.add_(2.0)
    for name, pipeline in {"first": first, "second": second}.items():
        pipeline.save_pretrained(tmp_path / name)
    words = [
        "--first",
        str(tmp_path / "first"),
        "--second",
        str(tmp_path / "second"),
        "--output",
        str(tmp_path / "out"),
    ]
    assert main(words) == 0
    found = MarigoldUQDepthPipeline.from_pretrained(tmp_path / "out")
    assert found.config.default_denoising_steps == 1
    for name in LEARNING:
        own = dict(getattr(first, name).named_parameters())
        for key, weight in getattr(found, name).named_parameters():
            torch.testing.assert_close(weight, own[key] + 1)
    assert main(words) == 2  # the output exists


def test_models_of_different_families_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for family in ("gaussian", "point"):
        conditioned_pipeline(family).save_pretrained(tmp_path / family)
    words = ["--first", str(tmp_path / "gaussian"), "--second", str(tmp_path / "point")]
    assert main([*words, "--output", str(tmp_path / "out")]) == 2
    assert "must have" in capsys.readouterr().err
