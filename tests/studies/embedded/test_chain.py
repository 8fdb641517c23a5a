"""How the embedded model is made, from rendered scenes to a calibrated pipeline, with its own commands and configs."""

import json
from importlib import import_module
from pathlib import Path

import cv2
import pytest
import torch
from support.scripts import ROOT, load_script
from support.tiny_conditioned import conditioned_encoder

from marigold_uq import MarigoldUQDepthPipeline
from scripts.studies.embedded import assemble, cache_features, contact_sheet, evaluate, photo_sheet
from scripts.studies.embedded.reproduce import FAMILIES, ReproduceOptions, Stage, stages

pytestmark = pytest.mark.slow  # trains every stage once; tests/depth runs the same loop, calibration and evaluation

CONFIGS = ROOT / "configs" / "depth" / "embedded"
LENGTHS = {"train": 6, "validation": 2, "calibration": 24, "test": 2}


def shortened(stage: Stage) -> list[str]:
    """The words of a stage, for a few small scenes and two steps of training."""
    words, name = list(stage.words), " ".join(stage.words[:2])
    if "render_scenes" in name:
        length = LENGTHS[Path(words[words.index("--output") + 1]).name]
        return [*words, "--length", str(length), "--shard_size", "12", "--height", "64", "--width", "96"]
    if name.endswith("embedded.train"):
        words += ["--training.max_steps", "2", "--training.batch_size", "2", "--transform.size", "[64, 96]"]
    if "calibrate_depth" in name:
        words += ["--ensemble_size", "4"]
    return words


def run(stage: Stage) -> None:
    """In this process: starting Python takes longer than the stage."""
    words = shortened(stage)
    if words[0] == "-m":
        assert import_module(words[1]).main(words[2:]) == 0
    else:
        assert load_script(words[0]).main(words[1:]) == 0


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which `reproduce` would have run, with a tiny encoder in place of the published one."""
    folder = tmp_path_factory.mktemp("embedded")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(cache_features, "SHAPES", ((64, 96),))
        first, *others = stages(ReproduceOptions(configs=CONFIGS, processes=1, families=True))
        assert first.result is not None
        conditioned_encoder().save_pretrained(first.result)
        for stage in others:
            run(stage)
    return folder / "runs" / "embedded"


def test_the_assembled_model_is_the_calibrated_one_in_half_precision(made: Path) -> None:
    whole = MarigoldUQDepthPipeline.from_pretrained(made / "calibrated")
    half = MarigoldUQDepthPipeline.from_pretrained(made / "assets", torch_dtype=torch.float16)
    for name, value in whole.unet.state_dict().items():
        assert half.unet.state_dict()[name].equal(value.half())
    assert half.config.calibration == whole.config.calibration
    for path in (made / "assets").rglob("*.json"):
        assert str(made) not in path.read_text(encoding="utf-8")
        assert "_name_or_path" not in path.read_text(encoding="utf-8")


def test_every_stage_starts_from_the_one_before(made: Path) -> None:
    """Two steps of Adam at a rate of at most 1e-3 move a weight by at most 2e-3, a new start by much more."""
    base, *others = (
        MarigoldUQDepthPipeline.from_pretrained(made / name / "model")
        for name in ("base", *FAMILIES, "more", "later", "whole")
    )
    for model in others:
        difference = (model.unet.conv_in.weight - base.unet.conv_in.weight).abs().max()
        assert 0 < float(difference.detach()) < 6e-3 < float(base.unet.conv_in.weight.detach().abs().max())


def test_all_families_have_their_head_and_the_last_stages_move_the_backbone(made: Path) -> None:
    for family, size in FAMILIES.items():
        scheduler = MarigoldUQDepthPipeline.from_pretrained(made / family / "model").scheduler.config
        assert scheduler.noise_family == family
        assert all(scheduler[name] == int(value) for name, value in size.items())
    assert 0 < moved_share(made, "more", "later") < 1  # stages before the first kept level stay
    assert moved_share(made, "later", "whole") == 1


def test_what_is_calibrated_lies_half_way_between_the_last_two_stages(made: Path) -> None:
    later, whole, averaged = (
        MarigoldUQDepthPipeline.from_pretrained(made / name).unet.conv_in.weight
        for name in ("later/model", "whole/model", "averaged")
    )
    torch.testing.assert_close(averaged, (later + whole) / 2)


def moved_share(made: Path, before: str, after: str) -> float:
    """Of the backbone's weights, how many differ between two stages."""
    first, second = (
        MarigoldUQDepthPipeline.from_pretrained(made / name / "model").image_encoder.network.state_dict()
        for name in (before, after)
    )
    return sum(not value.equal(second[name]) for name, value in first.items()) / len(first)


def test_all_modes_are_calibrated_for_the_steps_and_members_asked_for(made: Path) -> None:
    records = MarigoldUQDepthPipeline.from_pretrained(made / "calibrated").calibrations
    assert sorted(str(record.uncertainty) for record in records) == ["ensemble", "marginal", "trajectory"]
    for record in records:
        assert (record.num_inference_steps, record.ensemble_size, record.num_calibration) == (1, 4, 12)
        assert record.interval is not None
        assert 0.9 in record.interval.coverages
        assert "12 images for kappa, 12 others" in record.note


def test_families_are_compared_scene_by_scene(made: Path, tmp_path: Path) -> None:
    data = ["--runs", str(made), "--scenes", str(made / "scenes" / "validation"), "--output", str(tmp_path / "table")]
    families = [
        "--families",
        "point",
        "gaussian",
        "--steps",
        "1",
        "--ensemble_size",
        "4",
        "--modes",
        "ensemble",
        "trajectory",
    ]
    assert evaluate.main([*data, *families]) == 0
    rows = (tmp_path / "table" / "table-1.md").read_text(encoding="utf-8").splitlines()
    named = [row.split("|")[2:4] for row in rows if row.startswith("| 1 |")]
    cells = [("ensemble", "point"), ("ensemble", "gaussian"), ("trajectory", "gaussian")]
    assert [tuple(part.strip() for part in row) for row in named] == 2 * cells
    means = [
        json.loads((tmp_path / "table" / f"{family}-{mode}-1" / "metrics.json").read_text())["metrics"]["energy_score"]
        for mode, family in cells
    ]
    for row, cell in zip(rows[-3:], means, strict=True):
        shown = float(row.split("|")[-3].split("+-")[0])
        assert shown == pytest.approx(100 * (cell["value"] / means[0]["value"] - 1), abs=0.051)
    crps = [
        json.loads((tmp_path / "table" / f"gaussian-{mode}-1" / "metrics.json").read_text())["metrics"]["relative_crps"]
        for mode in ("trajectory", "ensemble")
    ]
    assert [row.split("|")[-2].strip() for row in rows[-3:-1]] == ["", ""]
    shown = float(rows[-1].split("|")[-2].split("+-")[0])
    assert shown == pytest.approx(100 * (crps[0]["value"] / crps[1]["value"] - 1), abs=0.051)


def test_a_sheet_has_a_row_for_each_picture_and_is_never_overwritten(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = ["--pipeline.model", str(made / "assets"), "--pipeline.ensemble_size", "3"]
    data = ["--data.name", "scenes", "--data.root", str(made / "scenes" / "validation")]
    arguments = [*data, *model, "--rows", "2", "--output", str(tmp_path / "sheet.png")]
    assert photo_sheet.main(arguments) == 0
    sheet = cv2.imread(str(tmp_path / "sheet.png"))
    height = round(64 * photo_sheet.WIDTH / 96) + contact_sheet.GAP
    assert sheet.shape == (contact_sheet.LABEL + 2 * height, 5 * (photo_sheet.WIDTH + contact_sheet.GAP), 3)
    second = sheet[contact_sheet.LABEL + height :, photo_sheet.WIDTH + contact_sheet.GAP :]
    assert second.std() > 10  # maps, not an empty page
    assert photo_sheet.main(arguments) == 2
    assert "overwrite" in capsys.readouterr().err
    assert photo_sheet.main([*arguments, "--overwrite"]) == 0


def test_the_contact_sheet_has_a_row_per_kind(tmp_path: Path) -> None:
    size = ["--columns", "2", "--height", "32", "--width", "48", "--scale", "1.0"]
    assert contact_sheet.main(["--output", str(tmp_path / "s.png"), "--kinds", "room", "street", *size]) == 0
    tile = (32 + contact_sheet.GAP, 2 * 48 + contact_sheet.GAP)
    assert cv2.imread(str(tmp_path / "s.png")).shape == (2 * (tile[0] + contact_sheet.LABEL), 2 * tile[1], 3)


def test_the_assembled_model_replaces_nothing(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert assemble.main(["--model", str(made / "calibrated"), "--output", str(made / "assets")]) == 2
    assert "exists" in capsys.readouterr().err
