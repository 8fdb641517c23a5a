"""Depth pipelines of a few thousand random weights, in every family, beside diffusers' own of the same weights."""

from typing import Any

import numpy as np
import torch
from diffusers import AutoencoderKL, AutoencoderTiny, DDIMScheduler, MarigoldDepthPipeline, UNet2DConditionModel
from torch import Tensor
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

from marigold_uq import MarigoldUQDepthPipeline
from marigold_uq.models.prompt_embedding import PromptEmbedding

FAMILIES: dict[str, dict[str, int]] = {
    "point": {},
    "gaussian": {},
    "mixture": {"num_components": 3},
    "low_rank": {"rank": 2},
    "low_rank_mixture": {"num_components": 2, "rank": 2},
    "sample": {},
}
"""Every family a depth model can have, with the sizes it needs."""
LAWS = [name for name in FAMILIES if name not in ("point", "sample")]
"""Those whose single network call tells the spread."""

TEXT_DIM = 16
SD_SCHEDULE: dict[str, Any] = {
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "clip_sample": False,
    "set_alpha_to_one": False,
    "steps_offset": 1,
    "prediction_type": "v_prediction",
}
SCHEDULES: dict[str, dict[str, Any]] = {
    "v1-0": SD_SCHEDULE,
    "v1-1": {**SD_SCHEDULE, "timestep_spacing": "trailing", "rescale_betas_zero_snr": True},
}
"""The schedules of Marigold's two generations of checkpoints."""


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def tiny_unet(in_channels: int = 8) -> UNet2DConditionModel:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return UNet2DConditionModel(
            block_out_channels=(8, 16),
            layers_per_block=1,
            sample_size=8,
            in_channels=in_channels,
            out_channels=4,
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
            cross_attention_dim=TEXT_DIM,
            attention_head_dim=4,
            norm_num_groups=4,
        ).eval()


def tiny_vae() -> AutoencoderKL:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return AutoencoderKL(
            block_out_channels=[8, 8],
            down_block_types=["DownEncoderBlock2D"] * 2,
            up_block_types=["UpDecoderBlock2D"] * 2,
            latent_channels=4,
            norm_num_groups=4,
        ).eval()


def tiny_autoencoder_tiny() -> AutoencoderTiny:
    with torch.random.fork_rng():
        torch.manual_seed(2)
        return AutoencoderTiny(
            encoder_block_out_channels=(8, 8),
            decoder_block_out_channels=(8, 8),
            num_encoder_blocks=(1, 1),
            num_decoder_blocks=(1, 1),
        ).eval()


def tiny_text_encoder() -> tuple[CLIPTextModel, CLIPTokenizer]:
    """A text encoder and its tokenizer, made without any file."""
    config = CLIPTextConfig(
        vocab_size=4,
        hidden_size=TEXT_DIM,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        bos_token_id=0,
        eos_token_id=1,
    )
    tokenizer = CLIPTokenizer({"<|startoftext|>": 0, "<|endoftext|>": 1, "a</w>": 2, "a": 3}, [], model_max_length=77)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return CLIPTextModel(config).eval(), tokenizer


def prompt() -> Tensor:
    return torch.randn(1, 2, TEXT_DIM, generator=generator(7))


def tiny_pipeline(
    family: str = "point", *, schedule: str = "v1-1", eta: float = 0.0, vae: Any = None, **config: Any
) -> MarigoldUQDepthPipeline:
    """Ours, on the CPU, without progress bars; `config` goes to the constructor."""
    config = {"default_denoising_steps": 2, "default_processing_resolution": 32, **config}
    pipeline = MarigoldUQDepthPipeline(
        unet=tiny_unet(),
        vae=vae or tiny_vae(),
        scheduler=DDIMScheduler(**SCHEDULES[schedule]),
        prompt_embedding=PromptEmbedding.from_tensor(prompt()),
        **config,
    )
    pipeline.with_family(family, **FAMILIES[family])
    pipeline.scheduler.register_to_config(eta=eta)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def stock_pipeline(*, schedule: str = "v1-1", vae: Any = None, **config: Any) -> MarigoldDepthPipeline:
    """diffusers' own, with the weights of `tiny_pipeline`."""
    config = {"default_denoising_steps": 2, "default_processing_resolution": 32, **config}
    scheduler = DDIMScheduler(**SCHEDULES[schedule])
    stock = MarigoldDepthPipeline(
        tiny_unet(), vae or tiny_vae(), scheduler, None, None, prediction_type="depth", **config
    )
    stock.empty_text_embedding = prompt()
    stock.set_progress_bar_config(disable=True)
    return stock


def picture(height: int = 24, width: int = 32, seed: int = 0) -> np.ndarray:
    """(H, W, 3) in [0, 1]: a ramp with noise on it."""
    noise = np.random.default_rng(seed).random((height, width, 3))
    ramp = np.linspace(0, 1, height)[:, None, None]
    return (0.6 * ramp + 0.4 * noise).astype(np.float32)
