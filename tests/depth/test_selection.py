"""start.noise_family auto: the family is chosen on held-out pictures, and the model carries the table on its card."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny_training import tiny_pipeline, train_depth_script, write_config, write_everything

from marigold_uq.pipelines.depth import MarigoldUQDepthPipeline

main = train_depth_script().main


@pytest.fixture
def config(tmp_path: Path) -> dict[str, Any]:
    """Six training pictures, and three others that choose."""
    made = write_everything(tmp_path)
    made["start"]["noise_family"] = "auto"
    made["validation"] = {"data": made["data"].pop()}
    made["data"][0]["probability"] = 1.0
    candidates = [{"noise_family": "gaussian"}, {"noise_family": "low_rank", "rank": 1}]
    made["selection"] = {"candidates": candidates, "num_units": 3, "ensemble_size": 3, "num_inference_steps": 1}
    made["selection"] |= {"trunk_steps": 1, "final_steps": 1}
    made["training"] |= {"max_steps": 2, "batch_size": 2}
    return made


def test_the_command_ends_in_a_model_of_the_chosen_family_with_the_table_on_its_card(
    tmp_path: Path, config: dict[str, Any]
) -> None:
    assert main(["--config", str(write_config(tmp_path / "c.yaml", config))]) == 0
    run = tmp_path / "run"
    found = json.loads((run / "selection.json").read_text())
    assert [row["noise_family"] for row in found["rows"]] == ["gaussian", "low_rank"]
    assert found["num_units"] == 3
    pipeline = MarigoldUQDepthPipeline.from_pretrained(run / "model")
    assert pipeline.scheduler.config.noise_family == found["chosen"]["noise_family"]
    assert "## Choice of the family" in (run / "model" / "README.md").read_text()

    named = {**config, "start": {**config["start"], **found["chosen"]}}
    named["training"] = {**config["training"], "output": str(tmp_path / "named")}
    assert main(["--config", str(write_config(tmp_path / "n.yaml", named))]) == 0
    other = MarigoldUQDepthPipeline.from_pretrained(tmp_path / "named" / "model")
    for left, right in zip(pipeline.unet.parameters(), other.unet.parameters(), strict=True):
        assert torch.equal(left, right)


def test_a_head_alone_is_chosen_without_a_trunk_and_without_point(tmp_path: Path, config: dict[str, Any]) -> None:
    families = [{"noise_family": "point"}, *config["selection"]["candidates"]]
    config |= {"trainable": "head", "selection": {**config["selection"], "candidates": families}}
    assert main(["--config", str(write_config(tmp_path / "c.yaml", config))]) == 0
    rows = json.loads((tmp_path / "run" / "selection.json").read_text())["rows"]
    assert {row["noise_family"] for row in rows} == {"gaussian", "low_rank"}


def test_what_cannot_be_chosen_is_explained(
    tmp_path: Path, config: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    without = {**config, "validation": {}}
    assert main(["--config", str(write_config(tmp_path / "c.yaml", without))]) == 2
    assert "set validation.data" in capsys.readouterr().err
    tiny_pipeline().with_family("gaussian").save_pretrained(tmp_path / "gaussian")
    start = {**config["start"], "name": str(tmp_path / "gaussian")}
    assert main(["--config", str(write_config(tmp_path / "c.yaml", {**config, "start": start}))]) == 2
    assert "has the family 'gaussian' already, so there is nothing to choose" in capsys.readouterr().err
