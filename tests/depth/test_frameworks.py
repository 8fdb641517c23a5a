"""train/train_depth.py under DDIM, EDM and flow matching: from a YAML file to a pipeline that predicts."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel
from support.tiny_depth import generator, picture
from support.tiny_training import train_depth_script, write_config, write_everything
from support.toy_task import metrics_of
from torch import Tensor, nn

from marigold_uq.depth.config import StartConfig
from marigold_uq.pipelines.depth import MarigoldUQDepthPipeline
from marigold_uq.schedulers import FRAMEWORKS

main = train_depth_script().main
UNET = {
    "block_out_channels": [8, 8],
    "layers_per_block": 1,
    "down_block_types": ["CrossAttnDownBlock2D", "DownBlock2D"],
    "up_block_types": ["UpBlock2D", "CrossAttnUpBlock2D"],
    "cross_attention_dim": 8,
    "attention_head_dim": 4,
    "norm_num_groups": 4,
}
SCHEDULES: dict[str, dict[str, Any]] = {"ddim": {}, "edm": {"sigma_data": 0.7}, "flow": {"shift": 3.0}}


def drawn(framework: str, timesteps: Tensor) -> Tensor:
    """What is standard normal if the framework's training draws were used: of ln sigma, or of logit s before shift."""
    if framework == "edm":
        return (4 * timesteps + 1.2) / 1.2
    s = timesteps / 1000
    return torch.logit(s / (3 - 2 * s))


@pytest.mark.parametrize("family", ["gaussian", "point"])
@pytest.mark.parametrize("framework", SCHEDULES)
def test_a_model_of_every_framework_trains_saves_loads_and_predicts(
    framework: str, family: str, tmp_path: Path
) -> None:
    config = write_everything(tmp_path)
    start = {"name": str(tmp_path / "start"), "kind": "components", "unet": UNET, "noise_family": family}
    config["start"] = {**start, "framework": framework, "schedule": SCHEDULES[framework], "default_denoising_steps": 2}
    held_out = {"data": config["data"][1], "num_samples": 1, "num_inference_steps": 2, "ensemble_size": 2}
    seen: list[Tensor] = []

    def watch(module: nn.Module, args: tuple[Any, ...]) -> None:
        if isinstance(module, UNet2DConditionModel) and module.training:
            seen.append(torch.as_tensor(args[1]).detach().clone())

    hook = nn.modules.module.register_module_forward_pre_hook(watch)
    try:
        path = write_config(tmp_path / "c.yaml", {**config, "validation": held_out}, batch_size=8, validate_every=6)
        assert main(["--config", str(path)]) == 0
    finally:
        hook.remove()
    assert all(math.isfinite(record["loss"]) for record in metrics_of(tmp_path / "run") if "loss" in record)

    timesteps = torch.cat([t.reshape(-1) for t in seen])
    assert len(timesteps) == 52  # a micro batch of 4 is rehearsed, then come 6 steps of 8
    timesteps = timesteps[4:]
    if framework == "ddim":
        assert not timesteps.is_floating_point()
    else:
        z = drawn(framework, timesteps.double())
        assert abs(float(z.mean())) < 5 / math.sqrt(48)
        assert abs(float(z.std()) - 1) < 5 / math.sqrt(96)

    pipeline = MarigoldUQDepthPipeline.from_pretrained(tmp_path / "run" / "model")
    pipeline.set_progress_bar_config(disable=True)
    assert type(pipeline.scheduler) is FRAMEWORKS[framework]
    assert all(pipeline.scheduler.config[name] == value for name, value in SCHEDULES[framework].items())
    output = pipeline(
        picture(32, 48), ensemble_size=3, uncertainty="ensemble", processing_resolution=0, generator=generator()
    )
    assert np.isfinite(output.prediction).all()
    assert float(output.uncertainty.max()) > 0


def test_a_start_that_brings_its_schedule_along_takes_no_other() -> None:
    for bad in ({"framework": "edm"}, {"schedule": {"shift": 3.0}}):
        with pytest.raises(ValueError, match="brings its schedule along"):
            StartConfig(kind="pipeline", **bad)
