"""How the embedded model is made, from rendered scenes to a calibrated pipeline, with its own commands and configs."""

import json
from importlib import import_module
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from diffusers.models.autoencoders.autoencoder_tiny import AutoencoderTiny
from support.scripts import ROOT, load_script

from marigold_uq import MarigoldUQDepthPipeline
from marigold_uq.depth.data import LatentShards, build_dataset
from scripts.studies.embedded import assemble, contact_sheet, evaluate, photo_sheet, rotate_latents
from scripts.studies.embedded.reproduce import ReproduceOptions, Stage, stages

pytestmark = pytest.mark.slow  # trains every stage once; tests/depth runs the same loop, calibration and evaluation

CONFIGS = ROOT / "configs" / "depth" / "embedded"
LENGTHS = {"train": 6, "validation": 2, "calibration": 24}


def shortened(stage: Stage) -> list[str]:
    """The words of a stage, for a few small scenes and two steps of training."""
    words, name = list(stage.words), " ".join(stage.words[:2])
    if "render_scenes" in name:
        length = LENGTHS[Path(words[words.index("--output") + 1]).name]
        return [*words, "--length", str(length), "--shard_size", "12", "--height", "32", "--width", "48"]
    if "train" in name:
        words += ["--training.max_steps", "2", "--training.batch_size", "2", "--training.validate_every", "0"]
        words += ["--loss.crop", "[16, 24]"] if "vae" in name else ["--validation.data", "null"]
    if "basis" in words:
        words += ["--samples", "8"]
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
    """The folder in which `reproduce` would have run, for the families gaussian and point."""
    folder = tmp_path_factory.mktemp("embedded")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for stage in stages(ReproduceOptions(configs=CONFIGS, processes=1)):
            run(stage)
        point = [stage for stage in stages(ReproduceOptions("point", CONFIGS)) if "point.yaml" in " ".join(stage.words)]
        run(*point)
    return folder / "runs" / "embedded"


def test_a_finished_stage_is_skipped_and_nothing_runs_in_a_dry_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "embedded" / "rotated_vae").mkdir(parents=True)
    assert import_module("scripts.studies.embedded.reproduce").main(["--dry_run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("done")] == [line for line in lines if "--stage basis" in line]
    assert lines[-1].startswith("run: python -m scripts.studies.embedded.assemble")


def test_the_assembled_model_is_the_calibrated_one_in_half_precision(made: Path) -> None:
    whole = MarigoldUQDepthPipeline.from_pretrained(made / "calibrated_gaussian")
    half = MarigoldUQDepthPipeline.from_pretrained(made / "assets_gaussian", torch_dtype=torch.float16)
    for name, value in whole.unet.state_dict().items():
        assert half.unet.state_dict()[name].equal(value.half())
    assert half.config.calibration == whole.config.calibration
    for path in (made / "assets_gaussian").rglob("*.json"):
        assert str(made) not in path.read_text(encoding="utf-8")
        assert "_name_or_path" not in path.read_text(encoding="utf-8")


def test_latents_are_those_of_the_scenes_and_of_their_mirror_images(made: Path) -> None:
    latents = LatentShards(made / "rotated_latents" / "train")
    scenes = build_dataset("scenes", made / "scenes" / "train")
    pipeline = MarigoldUQDepthPipeline.from_pretrained(made / "calibrated_gaussian")
    by_name = {latents.name_of(i): latents[i]["image_latent"] for i in range(len(latents))}
    assert len(by_name) == 2 * len(scenes) == 12
    for index in (0, 5):
        sample = scenes[index]
        for image, name in ((sample["image"], ""), (sample["image"].flip(-1), "-flipped")):
            expected = pipeline.vae.encode(2 * image[None] - 1).latents[0] * pipeline.vae.config.scaling_factor
            # stored in half precision, 11 bits, once before and once after they were turned
            torch.testing.assert_close(by_name[sample["name"] + name].float(), expected.detach(), rtol=3e-3, atol=5e-3)


def test_the_second_stage_of_the_autoencoder_changes_the_decoder_alone(made: Path) -> None:
    before = AutoencoderTiny.from_pretrained(made / "vae" / "model")
    after = AutoencoderTiny.from_pretrained(made / "decoder" / "model")
    changed = {name for name, value in after.state_dict().items() if not value.equal(before.state_dict()[name])}
    assert changed
    assert all(name.startswith("decoder.") for name in changed)
    assert after.config.scaling_factor == before.config.scaling_factor


def test_a_turned_model_says_the_same_in_the_new_basis(made: Path) -> None:
    basis = torch.from_numpy(np.load(made / "rotated_vae" / "basis.npy"))
    torch.testing.assert_close(basis.T @ basis, torch.eye(len(basis)), rtol=0, atol=1e-5)

    def turned(latents: torch.Tensor) -> torch.Tensor:
        return torch.einsum("ji,...jhw->...ihw", basis, latents)

    old = MarigoldUQDepthPipeline.from_pretrained(made / "base_more" / "model")
    new = MarigoldUQDepthPipeline.from_pretrained(made / "rotated" / "model")
    before, after = LatentShards(made / "latents" / "train"), LatentShards(made / "rotated_latents" / "train")
    assert [before.name_of(i) for i in range(12)] == [after.name_of(i) for i in range(12)]
    sample, x = before[3], torch.randn(1, 16, 4, 6, generator=torch.Generator().manual_seed(0))
    image = sample["image_latent"].float()
    torch.testing.assert_close(after[3]["image_latent"].float(), turned(image), rtol=2e-3, atol=2e-3)  # half precision
    said, says = (
        pipeline.unet(torch.cat([picture[None], noise], 1), 999, encoder_hidden_states=pipeline.prompt_embedding(1))
        for pipeline, picture, noise in ((old, image, x), (new, turned(image), turned(x)))
    )
    torch.testing.assert_close(says.sample, turned(said.sample), rtol=1e-4, atol=1e-5)
    # the encoder too: its latents, scaled as the pipeline does, are the stored ones
    pixels = 2 * build_dataset("scenes", made / "scenes" / "train")[0]["image"][None] - 1
    first, second = (
        pipeline.vae.config.scaling_factor * pipeline.vae.encode(pixels).latents for pipeline in (old, new)
    )
    torch.testing.assert_close(second, turned(first), rtol=1e-4, atol=1e-4)


def test_in_the_new_basis_errors_of_the_base_are_uncorrelated(made: Path) -> None:
    shares = []
    for model, latents in (("base_more", "latents"), ("rotated", "rotated_latents")):
        pipeline = MarigoldUQDepthPipeline.from_pretrained(made / model / "model")
        covariance = rotate_latents.error_covariance(pipeline, LatentShards(made / latents / "train"), 8)
        shares.append(1 - float(covariance.diag().square().sum() / covariance.square().sum()))
    assert int(covariance.diag().argmax()) == 0
    # The same samples as when the basis was found, but other noise in the new basis, stored in half precision.
    assert shares[1] < 0.01 * shares[0]


def test_the_family_starts_from_the_base(made: Path) -> None:
    family = MarigoldUQDepthPipeline.from_pretrained(made / "gaussian" / "model")
    assert family.scheduler.config.noise_family == "gaussian"
    assert family.scheduler.config.rescale_betas_zero_snr
    base = MarigoldUQDepthPipeline.from_pretrained(made / "rotated" / "model")
    # two steps of Adam at a rate of at most 5e-4 move a weight by at most 1e-3, a new start by much more
    difference = (family.unet.conv_in.weight - base.unet.conv_in.weight).abs().max()
    assert 0 < float(difference.detach()) < 1e-3 < float(base.unet.conv_in.weight.detach().abs().max())


def test_both_modes_are_calibrated_for_the_steps_and_members_asked_for(made: Path) -> None:
    records = MarigoldUQDepthPipeline.from_pretrained(made / "calibrated_gaussian").calibrations
    assert sorted(str(record.uncertainty) for record in records) == ["ensemble", "trajectory"]
    for record in records:
        assert (record.num_inference_steps, record.ensemble_size, record.num_calibration) == (1, 4, 12)
        assert record.interval is not None
        assert 0.9 in record.interval.coverages
        assert "12 images for kappa, 12 others" in record.note


def test_families_are_compared_scene_by_scene(made: Path, tmp_path: Path) -> None:
    data = ["--runs", str(made), "--scenes", str(made / "scenes" / "validation"), "--output", str(tmp_path / "table")]
    families = ["--families", "point", "gaussian", "--steps", "1", "--ensemble_size", "4"]
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
    model = ["--pipeline.model", str(made / "assets_gaussian"), "--pipeline.ensemble_size", "3"]
    data = ["--data.name", "scenes", "--data.root", str(made / "scenes" / "validation")]
    arguments = [*data, *model, "--rows", "2", "--output", str(tmp_path / "sheet.png")]
    assert photo_sheet.main(arguments) == 0
    sheet = cv2.imread(str(tmp_path / "sheet.png"))
    height = round(32 * photo_sheet.WIDTH / 48) + contact_sheet.GAP
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
    assert assemble.main(["--model", str(made / "calibrated_gaussian"), "--output", str(made / "assets_gaussian")]) == 2
    assert "exists" in capsys.readouterr().err
