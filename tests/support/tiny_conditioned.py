"""Depth pipelines with an image encoder, of a few thousand random weights."""

from typing import Any

import torch
from diffusers import DDIMScheduler, UNet2DConditionModel

from marigold_uq import MarigoldUQDepthPipeline
from marigold_uq.models.condition_encoder import ConditionEncoder
from marigold_uq.models.depth_cells import DepthCells
from marigold_uq.models.prompt_embedding import PromptEmbedding
from support.tiny_depth import FAMILIES, SCHEDULES, TEXT_DIM, prompt

BACKBONE = {
    "widths": [8, 8, 12, 16],
    "depths": [1, 1, 2, 1],
    "num_heads": [1, 2, 3, 2],
    "windows": [3, 3, 4, 3],
    "neck_channels": 6,
}
UNET: dict[str, Any] = {
    "block_out_channels": (8, 16),
    "layers_per_block": 1,
    "sample_size": 8,
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
    "cross_attention_dim": TEXT_DIM,
    "attention_head_dim": 4,
    "norm_num_groups": 4,
}


def conditioned_encoder() -> ConditionEncoder:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return ConditionEncoder(backbone_options=BACKBONE, condition_channels=10, guide_channels=8).eval()


def conditioned_pipeline(family: str = "gaussian", **config: Any) -> MarigoldUQDepthPipeline:
    """Ours, on the CPU, without progress bars; `config` goes to the constructor."""
    encoder = conditioned_encoder()
    with torch.random.fork_rng():
        torch.manual_seed(1)
        unet = UNet2DConditionModel(in_channels=encoder.out_channels + 4, out_channels=4, **UNET).eval()
        cells = DepthCells(guide_channels=8).eval()
    pipeline = MarigoldUQDepthPipeline(
        unet=unet,
        vae=cells,
        scheduler=DDIMScheduler(**{**SCHEDULES["v1-1"], "set_alpha_to_one": True, "steps_offset": 0}),
        image_encoder=encoder,
        prompt_embedding=PromptEmbedding.from_tensor(prompt()),
        **{"default_denoising_steps": 1, "default_processing_resolution": 64, **config},
    )
    pipeline.with_family(family, **FAMILIES[family])
    pipeline.set_progress_bar_config(disable=True)
    return pipeline
