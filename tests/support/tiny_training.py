"""The smallest depth model and data set files that train_depth.py takes: real formats, a few pixels, a few weights."""

from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
import yaml
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL

from marigold_uq.depth.run import SCHEDULE
from marigold_uq.models.prompt_embedding import PromptEmbedding
from marigold_uq.pipelines.depth import MarigoldUQDepthPipeline
from marigold_uq.schedulers.scheduling_distributional_ddim import DistributionalDDIMScheduler
from support.depth_files import write_image, write_png16
from support.scripts import load_script
from support.tiny_unets import EMBEDDING_DIM, tiny_unet


def tiny_vae(levels: int = 4) -> AutoencoderKL:
    """Random, 2^(levels - 1) pixels per latent cell, 4 latent channels."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return AutoencoderKL(
            block_out_channels=(4,) * levels,
            down_block_types=("DownEncoderBlock2D",) * levels,
            up_block_types=("UpDecoderBlock2D",) * levels,
            layers_per_block=1,
            norm_num_groups=2,
            latent_channels=4,
            mid_block_add_attention=False,
        )


def tiny_pipeline(prediction_type: str = "v_prediction") -> MarigoldUQDepthPipeline:
    """A "published" point model with random weights and a stored prompt embedding."""
    embedding = torch.randn(1, 2, EMBEDDING_DIM, generator=torch.Generator().manual_seed(2))
    schedule = {**SCHEDULE, "prediction_type": prediction_type}
    if prediction_type == "v_prediction":
        schedule |= {"rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}
    return MarigoldUQDepthPipeline(
        unet=tiny_unet(8, 4),
        vae=tiny_vae(),
        scheduler=DistributionalDDIMScheduler(**schedule),
        prompt_embedding=PromptEmbedding.from_tensor(embedding),
        default_denoising_steps=1,
        default_processing_resolution=0,
    )


def write_hypersim(root: Path, count: int) -> None:
    """Prepared frames of 32 x 48, depth in millimetres, with a few invalid pixels."""
    for i in range(count):
        folder, frame = root / "ai_001_001", f"cam_00_fr{i:04d}"
        write_image(folder / f"rgb_{frame}.png", 32, 48, seed=i)
        depth = np.random.default_rng(i).integers(1000, 9000, (32, 48))
        depth[:4, :4] = 0
        write_png16(folder / f"depth_plane_{frame}.png", depth)


def write_vkitti2(root: Path, count: int) -> None:
    """Frames of 16 x 64, depth in centimetres."""
    for i in range(count):
        write_image(root / f"rgb/Scene02/clone/frames/rgb/Camera_0/rgb_{i:05d}.jpg", 16, 64, seed=100 + i)
        depth = np.random.default_rng(100 + i).integers(300, 7000, (16, 64))
        write_png16(root / f"depth/Scene02/clone/frames/depth/Camera_0/depth_{i:05d}.png", depth)


def write_everything(root: Path) -> dict[str, Any]:
    """Data sets and start model below `root`; the config of a short run on them, as the YAML holds it."""
    write_hypersim(root / "hypersim", 6)
    write_vkitti2(root / "vkitti2", 3)
    tiny_pipeline().save_pretrained(root / "start")
    return {
        "start": {"name": str(root / "start"), "kind": "pipeline", "noise_family": "gaussian"},
        "data": [
            {"name": "hypersim", "root": str(root / "hypersim"), "probability": 0.6, "options": {"resize": None}},
            {"name": "vkitti2", "root": str(root / "vkitti2"), "probability": 0.4, "options": {"crop": None}},
        ],
        "training": {
            "output": str(root / "run"),
            "max_steps": 6,
            "batch_size": 4,
            "micro_batch_size": 2,
            "checkpoint_every": 2,
            "validate_every": 0,
            "log_every": 1,
            "tracker": "none",
            "cpu": True,
            "optimizer": {"learning_rate": 1e-3, "warmup_steps": 2},
        },
    }


def write_config(path: Path, config: dict[str, Any], **training: Any) -> Path:
    """The config as YAML, with other training settings."""
    path.write_text(yaml.safe_dump({**config, "training": {**config["training"], **training}}))
    return path


def train_depth_script() -> ModuleType:
    """train/train_depth.py as a module."""
    return load_script("train/train_depth.py")
