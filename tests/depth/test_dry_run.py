"""The dry run and the estimate: what they say is so, and nothing is left behind."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny_baselines import write_model
from support.tiny_training import train_depth_script, write_config, write_everything
from support.toy_task import ToyTask, toy_config

from marigold_uq.depth import dry_run as module
from marigold_uq.training.config import OptimizerConfig
from marigold_uq.training.estimate import memory_of
from marigold_uq.training.loop import Trainer

main = train_depth_script().main


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    return tmp_path, write_everything(tmp_path)


def everything_below(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*")}


def test_a_sound_training_passes_and_leaves_nothing(files, capsys, monkeypatch) -> None:
    root, config = files
    monkeypatch.setattr(module, "NUM_SAMPLES", 6)
    config["validation"] = {"data": config["data"][0], "num_inference_steps": 1}
    config["baseline"] = write_model("glpn", root / "glpn")
    path = write_config(root / "config.yaml", config)
    before = everything_below(root)
    assert main(["--config", str(path), "--dry-run"]) == 0
    assert everything_below(root) == before
    text = capsys.readouterr().out
    for stage in ("open hypersim", "reading", "encoding", "step", "validation", "saving"):
        assert re.search(rf"^  {stage} +\d+\.\d\d s", text, re.MULTILINE), stage
    assert "bottleneck: " in text
    assert "nothing found that would stop the run" in text
    assert re.search(r"memory of each process: weights .*Adam .*before activations", text)
    assert re.search(r"6 steps of 2 micro batches .*about \d+\.\d h", text)
    assert "sizes: " in text
    assert "32 x 48" in text


def test_everything_that_would_fail_later_is_said_at_once(files, capsys, monkeypatch) -> None:
    """A broken picture, validation data that are not there, and an upload without a token: one report."""
    root, config = files
    monkeypatch.setattr(module, "NUM_SAMPLES", 6)
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    config["data"] = [{**config["data"][0], "probability": 1.0}]
    next((root / "hypersim").rglob("rgb_cam_00_fr0002.png")).write_bytes(b"no picture")
    config["validation"] = {"data": {"name": "vkitti2", "root": str(root / "nowhere")}}
    config["push_to_hub"] = "me/my-depth"
    assert main(["--config", str(write_config(root / "config.yaml", config)), "--dry-run"]) == 1
    text = capsys.readouterr().out
    problems = text.split("the run would fail:")[1]
    assert "fr0002" in problems
    assert "nowhere" in problems
    assert "no token" in problems
    assert "encoding" in text.split("the run would fail:")[0]


def test_the_estimate_changes_nothing_of_the_run(files, capsys, monkeypatch) -> None:
    """The run with its rehearsal equals one whose task cannot rehearse, bit for bit; and the estimate is printed."""
    from marigold_uq.depth.task import PictureTask

    root, config = files
    first = write_config(root / "one.yaml", config, output=str(root / "one"), max_steps=3)
    assert main(["--config", str(first)]) == 0
    assert "3 steps of 2 micro batches" in capsys.readouterr().out
    monkeypatch.setattr(PictureTask, "can_rehearse", False)
    assert main(["--config", str(write_config(root / "two.yaml", config, output=str(root / "two"), max_steps=3))]) == 0
    records = [(root / name / "metrics.jsonl").read_text() for name in ("one", "two")]
    assert records[0] == records[1]
    weights = [root / name / "model" / "unet" / "diffusion_pytorch_model.safetensors" for name in ("one", "two")]
    assert weights[0].read_bytes() == weights[1].read_bytes()


def test_memory_is_counted_from_the_weights(tmp_path: Path) -> None:
    network = torch.nn.Linear(100, 10)  # 1010 numbers
    network.bias.requires_grad_(False)
    found = memory_of(network, toy_config(tmp_path, ema_decay=0.9), [torch.nn.Linear(10, 10, bias=False)])
    assert (found.weights, found.gradients, found.optimizer) == (4040, 4000, 8000)
    assert (found.average, found.frozen, found.total) == (4000, 400, 20440)
    small = replace(toy_config(tmp_path), optimizer=OptimizerConfig(kind="adamw8bit"))
    assert memory_of(network, small).optimizer == 2000


def test_a_task_that_cannot_rehearse_still_says_its_memory(tmp_path: Path, capsys) -> None:
    Trainer(ToyTask(hidden=4), toy_config(tmp_path)).run()
    text = capsys.readouterr().out
    assert "memory of each process: weights" in text
    assert "about" not in text
    assert json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[0])["step"] == 1
