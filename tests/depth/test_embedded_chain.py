"""How the embedded model is made, from rendered scenes to a calibrated pipeline, with its own scripts and configs."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import cv2
import numpy as np
import pytest
import torch
from diffusers.models.autoencoders.autoencoder_tiny import AutoencoderTiny
from support.tiny_training import train_depth_script

from marigold_uq import MarigoldUQDepthPipeline
from marigold_uq.depth.data import build_dataset
from marigold_uq.depth.data.shards import LatentShards
from marigold_uq.depth.evaluation.command import main as evaluate
from marigold_uq.pipelines.depth.call import stored_calibrations

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "configs" / "depth"
SIZE = ["--height", "32", "--width", "48"]
SHORT = ["--training.max_steps", "2", "--training.batch_size", "2", "--training.validate_every", "0"]


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # worker processes look its functions up by name
    spec.loader.exec_module(module)
    return module


def train(name: str) -> None:
    config = CONFIGS / f"embedded_{name}.yaml"
    assert train_depth_script().main(["--config", str(config), *SHORT, "--validation.data", "null"]) == 0


def turn() -> None:
    """The latent channels along the axes of the base's errors, as the shell script does it."""
    script("encode_latents")  # rotate_latents imports it
    common = ["--model", "runs/embedded/base_more/model", "--latents", "runs/embedded/latents/train"]
    rotate_latents = script("rotate_latents")
    rotate_latents.main(["basis", *common, "--output", "runs/embedded/rotated_vae", "--samples", "8"])
    config = ["--config", str(CONFIGS / "embedded_rotated_decoder.yaml"), *SHORT, "--loss.crop", "[16, 24]"]
    assert script("train_vae").main(config) == 0
    given = ["--vae", "runs/embedded/rotated_decoder/model", "--basis", "runs/embedded/rotated_vae/basis.npy"]
    output = ["--output", "runs/embedded/rotated/model", "--latents-output", "runs/embedded/rotated_latents/train"]
    rotate_latents.main(["apply", *common, *given, *output])


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which scripts/studies/embedded/reproduce.sh would have run, on a few small scenes."""
    folder = tmp_path_factory.mktemp("embedded")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for name, length, split, seed in (
            ("train", 6, "train", "0"),
            ("validation", 2, "validation", "0"),
            ("calibration", 60, "validation", "1"),
        ):
            output = ["--output", f"runs/embedded/scenes/{name}", "--split", split, "--seed", seed]
            script("render_scenes").main([*output, "--length", str(length), "--shard-size", "4", *SIZE])
        for name in ("vae", "decoder"):
            config = ["--config", str(CONFIGS / f"embedded_{name}.yaml"), *SHORT, "--loss.crop", "[16, 24]"]
            assert script("train_vae").main(config) == 0
        latents = ["--scenes", "runs/embedded/scenes/train", "--output", "runs/embedded/latents/train"]
        script("encode_latents").main(["--vae", "runs/embedded/vae/model", *latents, "--flip", "--processes", "2"])
        train("base")
        train("base_more")
        turn()
        train("gaussian")
        train("point")
        options = ["--scenes", "runs/embedded/scenes/calibration", "--output", "runs/embedded/calibrated"]
        script("calibrate_depth").main(["--model", "runs/embedded/gaussian/model", *options, "--members", "4"])
        script("assemble_embedded").main(["--model", "runs/embedded/calibrated", "--output", "runs/embedded/assets"])
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


def test_latents_are_those_of_the_scenes_and_of_their_mirror_images(made: Path) -> None:
    latents = LatentShards(made / "rotated_latents" / "train")
    scenes = build_dataset("scenes", made / "scenes" / "train")
    pipeline = MarigoldUQDepthPipeline.from_pretrained(made / "calibrated")
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
    rotate_latents = script("rotate_latents")
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
    calibrations = stored_calibrations(MarigoldUQDepthPipeline.from_pretrained(made / "calibrated").config.calibration)
    assert sorted(calibrations) == ["ensemble", "trajectory"]
    for calibration in calibrations.values():
        assert (calibration.num_steps, calibration.num_members, calibration.num_calibration) == (1, 4, 30)
        assert calibration.coverage == 0.9
        assert "60 procedural scenes" in calibration.note


@pytest.mark.parametrize("mode", ["ensemble", "trajectory"])
def test_on_the_scenes_of_its_calibration_the_interval_covers_what_it_promises(
    made: Path, tmp_path: Path, mode: str
) -> None:
    """The conformal half: (sum of misses + 1) / (n + 1) <= alpha, so with n = 30 scenes coverage is at least .93.

    It is no more than a pixel above that. The seed of the members differs from that of the calibration, and the
    calibration looked at 1500 pixels, hence the slack of 3 points.
    """
    data = ["--data.name", "scenes", "--data.root", str(made / "scenes" / "calibration")]
    half = ["--data.options", "{start: 30, length: 30}", "--figures", "false", "--output", str(tmp_path / "evaluation")]
    model = ["--pipeline.model", str(made / "calibrated"), "--pipeline.members", "4", "--pipeline.mode", mode]
    assert evaluate([*data, *half, *model]) == 0
    metrics = json.loads((tmp_path / "evaluation" / "metrics.json").read_text())["metrics"]
    assert 0.90 < metrics["calibrated_coverage"]["value"] < 0.96
    assert metrics["calibrated_width"]["value"] > 0


def test_a_calibrated_model_is_neither_calibrated_again_nor_replaced(
    made: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--model", str(made / "calibrated"), "--scenes", str(made / "scenes" / "calibration")]
    with pytest.raises(SystemExit):
        script("calibrate_depth").main([*options, "--output", str(made / "calibrated")])
    assert "exists" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        script("calibrate_depth").main([*options, "--output", str(made / "twice")])
    assert "calibrated already" in capsys.readouterr().err


def test_families_are_compared_scene_by_scene(made: Path, tmp_path: Path) -> None:
    data = ["--runs", str(made), "--scenes", str(made / "scenes" / "validation"), "--output", str(tmp_path / "table")]
    script("evaluate_embedded").main([*data, "--families", "point", "gaussian", "--steps", "1", "--members", "4"])
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


def test_a_sheet_has_a_row_for_each_picture_and_is_never_overwritten(made: Path, tmp_path: Path) -> None:
    contact_sheet, photo_sheet = script("contact_sheet"), script("photo_sheet")  # the second imports the first
    options = ["--name", "scenes", "--root", str(made / "scenes" / "validation"), "--model", str(made / "assets")]
    arguments = [*options, "--members", "3", "--rows", "2", "--output", str(tmp_path / "sheet.png")]
    photo_sheet.main(arguments)
    sheet = cv2.imread(str(tmp_path / "sheet.png"))
    height = round(32 * photo_sheet.WIDTH / 48) + contact_sheet.GAP
    assert sheet.shape == (contact_sheet.LABEL + 2 * height, 5 * (photo_sheet.WIDTH + contact_sheet.GAP), 3)
    second = sheet[contact_sheet.LABEL + height :, photo_sheet.WIDTH + contact_sheet.GAP :]
    assert second.std() > 10  # maps, not an empty page
    with pytest.raises(FileExistsError, match="--overwrite"):
        photo_sheet.main(arguments)
