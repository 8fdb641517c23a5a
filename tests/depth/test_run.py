"""train/train_depth.py from files in the data sets' own formats to a pipeline folder, in one process."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DDIMScheduler, MarigoldDepthPipeline, PNDMScheduler, StableDiffusionPipeline
from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel
from PIL import Image
from support.tiny_depth import SCHEDULES, SD_SCHEDULE, tiny_text_encoder, tiny_unet
from support.tiny_training import tiny_pipeline, tiny_vae, train_depth_script, write_config, write_everything
from support.toy_task import metrics_of

import marigold_uq.hub
from marigold_uq.depth.config import DataPart, DepthTrainConfig, StartConfig
from marigold_uq.depth.run import start_pipeline, training_data
from marigold_uq.pipelines.depth import MarigoldUQDepthPipeline

main = train_depth_script().main
LOAD = """
import sys
from marigold_uq import MarigoldUQDepthPipeline
pipeline = MarigoldUQDepthPipeline.from_pretrained(sys.argv[1])
output = pipeline(sys.argv[2], uncertainty="trajectory", ensemble_size=2, num_inference_steps=1)
print("shape", output.prediction.shape, output.uncertainty.shape)
"""


@pytest.fixture
def config(tmp_path: Path) -> dict[str, Any]:
    return write_everything(tmp_path)


def test_a_run_ends_in_a_pipeline_with_its_card_that_a_fresh_process_loads(
    tmp_path: Path, config: dict[str, Any]
) -> None:
    held_out = {
        "data": {**config["data"][1]},
        "num_samples": 2,
        "num_inference_steps": 1,
        "num_pictures": 1,
        "uncertainty": "trajectory",
    }
    path = write_config(tmp_path / "c.yaml", {**config, "validation": held_out}, validate_every=3, ema_decay=0.5)
    assert main(["--config", str(path)]) == 0

    run = tmp_path / "run"
    stock = UNet2DConditionModel.from_pretrained(run / "model" / "unet")
    assert stock.conv_out.out_channels == 8
    start = UNet2DConditionModel.from_pretrained(tmp_path / "start" / "unet")
    assert not torch.equal(stock.conv_in.weight, start.conv_in.weight)
    assert "library_name: diffusers" in (run / "model" / "README.md").read_text()
    assert (run / "model" / "pipeline.py").exists()
    validations = [record for record in metrics_of(run) if "loss" not in record]
    assert [record["step"] for record in validations] == [3, 6]
    assert set(validations[0]) == {"step", "validation/abs_rel", "validation/delta1", "validation/relative_crps"}
    with Image.open(run / "validation" / "step-0000006" / "000_sheet.png") as sheet:
        assert sheet.width > 64
    assert "noise_family: gaussian" in (run / "config.yaml").read_text()

    picture = next((tmp_path / "hypersim").rglob("rgb*.png"))
    loaded = subprocess.run(
        [sys.executable, "-c", LOAD, str(run / "model"), str(picture)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "shape (1, 32, 48, 1) (1, 32, 48, 1)" in loaded.stdout, loaded.stderr


@pytest.mark.parametrize(
    ("start", "changes"),
    [
        ({"noise_family": "mixture", "num_components": 2}, {}),
        ({"noise_family": "point"}, {}),
        ({"noise_family": "sample"}, {"objective": {"num_draws": 2}}),
        ({"noise_family": "low_rank", "rank": 2}, {"objective": {"score": "projected"}}),
        ({"noise_family": "low_rank", "rank": 1}, {"trainable": "head"}),
        ({"noise_family": "gaussian"}, {"trainable": "lora", "lora_rank": 2}),
    ],
)
def test_every_family_and_mode_runs_from_its_yaml_to_a_pipeline(
    tmp_path: Path, config: dict[str, Any], start: dict[str, Any], changes: dict[str, Any]
) -> None:
    config = {**config, "start": {**config["start"], **start}, **changes}
    path = write_config(tmp_path / "c.yaml", config, max_steps=2, mixed_precision="bf16", batch_size=2)
    assert main(["--config", str(path)]) == 0
    pipeline = MarigoldUQDepthPipeline.from_pretrained(tmp_path / "run" / "model")
    assert pipeline.scheduler.config.noise_family == start["noise_family"]
    assert all(parameter.isfinite().all() for parameter in pipeline.unet.parameters())
    assert all(record["loss"] == record["loss"] for record in metrics_of(tmp_path / "run"))


def write_stable_diffusion(folder: Path) -> None:
    encoder, tokenizer = tiny_text_encoder()
    schedule = {name: value for name, value in SD_SCHEDULE.items() if name != "clip_sample"}
    StableDiffusionPipeline(
        unet=tiny_unet(4),
        vae=tiny_vae(),
        scheduler=PNDMScheduler(**schedule, skip_prk_steps=True),
        text_encoder=encoder,
        tokenizer=tokenizer,
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    ).save_pretrained(folder)


def write_marigold(folder: Path) -> None:
    encoder, tokenizer = tiny_text_encoder()
    scheduler = DDIMScheduler(**SCHEDULES["v1-1"])
    MarigoldDepthPipeline(
        unet=tiny_unet(8),
        vae=tiny_vae(),
        scheduler=scheduler,
        text_encoder=encoder,
        tokenizer=tokenizer,
        prediction_type="depth",
        scale_invariant=True,
        shift_invariant=True,
        default_denoising_steps=4,
        default_processing_resolution=768,
    ).save_pretrained(folder)


def test_stable_diffusion_is_a_start_and_its_text_encoder_is_left_behind(
    tmp_path: Path, config: dict[str, Any]
) -> None:
    write_stable_diffusion(tmp_path / "sd")
    config["start"] = {"name": str(tmp_path / "sd"), "noise_family": "low_rank", "rank": 3}
    assert main(["--config", str(write_config(tmp_path / "c.yaml", config, max_steps=1))]) == 0
    model = tmp_path / "run" / "model"
    assert not (model / "text_encoder").exists()
    pipeline = MarigoldUQDepthPipeline.from_pretrained(model)
    assert (pipeline.unet.config.in_channels, pipeline.unet.config.out_channels) == (8, 4 * 5)
    assert pipeline.scheduler.config.rescale_betas_zero_snr
    assert pipeline.scheduler.config.timestep_spacing == "trailing"
    assert pipeline.config.default_denoising_steps == 4


def test_a_published_marigold_gets_its_head_and_keeps_its_prediction(tmp_path: Path, config: dict[str, Any]) -> None:
    write_marigold(tmp_path / "marigold")
    config = {**config, "start": {"name": str(tmp_path / "marigold"), "kind": "pipeline"}, "trainable": "head"}
    assert main(["--config", str(write_config(tmp_path / "c.yaml", config, max_steps=3))]) == 0
    old = UNet2DConditionModel.from_pretrained(tmp_path / "marigold" / "unet").state_dict()
    new = UNet2DConditionModel.from_pretrained(tmp_path / "run" / "model" / "unet").state_dict()
    for name, value in old.items():
        kept = new[name][:4] if name.startswith("conv_out") else new[name]
        assert torch.equal(kept, value), name
    assert new["conv_out.weight"][4:].abs().max() > 0  # the scale started constant and has learned
    assert (
        MarigoldUQDepthPipeline.from_pretrained(tmp_path / "run" / "model").config.default_processing_resolution == 768
    )


def test_a_new_network_beside_a_trained_vae_is_the_same_for_the_same_seed(tmp_path: Path) -> None:
    tiny_pipeline().save_pretrained(tmp_path / "start")
    unet = {
        "block_out_channels": [8, 8],
        "layers_per_block": 1,
        "down_block_types": ["DownBlock2D", "DownBlock2D"],
        "up_block_types": ["UpBlock2D", "UpBlock2D"],
        "mid_block_type": "UNetMidBlock2D",
        "norm_num_groups": 4,
        "cross_attention_dim": 8,
    }
    start = StartConfig(name=str(tmp_path / "start"), kind="components", unet=unet, eta=1.0, default_denoising_steps=2)
    torch.manual_seed(1)
    one = start_pipeline(start, seed=3)
    torch.manual_seed(2)
    two = start_pipeline(start, seed=3)
    assert torch.equal(one.unet.conv_in.weight, two.unet.conv_in.weight)
    assert not torch.equal(one.unet.conv_in.weight, start_pipeline(start, seed=4).unet.conv_in.weight)
    assert one.config.default_denoising_steps == 2
    assert one.config.default_processing_resolution == 768
    one.save_pretrained(tmp_path / "new")
    again = MarigoldUQDepthPipeline.from_pretrained(tmp_path / "new")
    assert again.scheduler.config.eta == 1.0
    assert again.scheduler.config.rescale_betas_zero_snr


def test_a_model_with_another_head_than_asked_for_is_refused(tmp_path: Path) -> None:
    tiny_pipeline().with_family("mixture", num_components=3).save_pretrained(tmp_path / "mixture")
    name = str(tmp_path / "mixture")
    with pytest.raises(ValueError, match=r"has the head .*'mixture'.*3.* asks for .*'gaussian'"):
        start_pipeline(StartConfig(name=name, kind="pipeline"))
    same = start_pipeline(StartConfig(name=name, kind="pipeline", noise_family="mixture", num_components=3))
    assert same.unet.conv_out.out_channels == 36


def test_calibration_of_the_old_weights_is_forgotten_and_other_defaults_are_kept(tmp_path: Path) -> None:
    pipeline = tiny_pipeline().with_family("gaussian")
    pipeline.register_to_config(calibration={"ensemble": {"kappa": 2.0}})
    pipeline.scheduler.calibrate(0.3)
    pipeline.save_pretrained(tmp_path / "calibrated")
    start = start_pipeline(StartConfig(name=str(tmp_path / "calibrated"), kind="pipeline"))
    assert start.config.calibration is None
    assert start.scheduler.config.tau == 1.0
    assert start.config.default_denoising_steps == 1


def test_broken_files_stop_the_run_or_are_listed_as_configured(
    tmp_path: Path, config: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "hypersim" / "ai_001_001" / "depth_plane_cam_00_fr0002.png"
    broken.write_bytes(broken.read_bytes()[:60])
    path = write_config(tmp_path / "c.yaml", config)
    assert main(["--config", str(path)]) == 2
    assert "fr0002" in capsys.readouterr().err
    config["data"][0]["options"]["on_error"] = "skip"
    path = write_config(tmp_path / "c.yaml", config, output=str(tmp_path / "skipping"))
    assert main(["--config", str(path)]) == 0
    problems = json.loads((tmp_path / "skipping" / "data_problems.json").read_text())
    assert list(problems) == ["ai_001_001/rgb_cam_00_fr0002"]


def test_push_to_hub_uploads_the_finished_run(
    tmp_path: Path, config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    pushed: list[tuple[Path, str, bool]] = []

    def push(folder: Path, repo_id: str) -> str:
        pushed.append((folder, repo_id, (folder / "model" / "README.md").exists()))
        return "https://example.org/commit"

    monkeypatch.setattr(marigold_uq.hub, "push_to_hub", push)
    path = write_config(tmp_path / "c.yaml", config, max_steps=1)
    assert main(["--config", str(path), "--push_to_hub", "me/tiny-depth"]) == 0
    assert pushed == [(tmp_path / "run", "me/tiny-depth", True)]
    assert 'from_pretrained("me/tiny-depth")' in (tmp_path / "run" / "model" / "README.md").read_text()


def test_the_mixture_is_at_least_one_batch_long_and_micro_batches_are_of_one_part(config: dict[str, Any]) -> None:
    """The two parts have pictures of different sizes, and a network call takes one size."""
    parts = [DataPart(**part) for part in config["data"]]
    training = DepthTrainConfig(data=parts).training.__class__(batch_size=16, micro_batch_size=4)
    data: Any = training_data(DepthTrainConfig(data=parts, training=training))
    assert len(data) == 16  # 9 files
    folders = [data.name_of(i).split("/")[0] for i in range(16)]
    assert len(set(folders)) == 2
    assert all(len(set(folders[first : first + 4])) == 1 for first in range(0, 16, 4))


def test_no_data_is_an_error_that_says_what_to_give() -> None:
    with pytest.raises(ValueError, match="no training data"):
        training_data(DepthTrainConfig(data=[]))
