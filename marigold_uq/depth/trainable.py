"""Which parameters learn: all of the U-Net, its new output channels alone, or low-rank adapters."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from marigold_uq.pipelines.depth import MarigoldUQDepthPipeline

_LORA_TARGETS = ["to_q", "to_k", "to_v", "to_out.0", "conv1", "conv2", "proj_in", "proj_out"]


def choose_trainable(
    pipeline: MarigoldUQDepthPipeline, mode: Literal["full", "head", "lora"], *, lora_rank: int = 16, seed: int = 0
) -> None:
    """Set `requires_grad` throughout the U-Net.

    "head": only the channels of conv_out that leave the law's mean alone, so the prediction of a published checkpoint
    stays what it was, to the bit. "lora": adapters of rank `lora_rank` (peft), and the first and last convolution.
    """
    if mode == "full":
        pipeline.unet.requires_grad_(True)
    elif mode == "head":
        _train_head(pipeline)
    elif mode == "lora":
        _add_adapters(pipeline.unet, lora_rank, seed)
    else:
        raise ValueError(f"trainable is 'full', 'head' or 'lora'; got {mode!r}")


def _train_head(pipeline: MarigoldUQDepthPipeline) -> None:
    config = pipeline.scheduler.config
    blocks = pipeline.scheduler.family.initial_blocks(pipeline.scheduler.head_options, 1.0)
    free = torch.tensor([not block.moves_mean for block in blocks])
    if not bool(free.any()):
        raise ValueError(f"family {config.noise_family!r} has no output channels besides its mean: nothing to learn")
    head = pipeline.unet.conv_out
    rows = free.repeat_interleave(head.out_channels // len(blocks))
    pipeline.unet.requires_grad_(False)
    for parameter in (head.weight, head.bias):
        parameter.requires_grad_(True)
        parameter.register_hook(_keep_rows(rows))


def _keep_rows(rows: Tensor) -> Callable[[Tensor], Tensor]:
    """Gradient hook: zero for the rows that must not move, and with Adam and no weight decay they do not."""

    def hook(gradient: Tensor) -> Tensor:
        return gradient * rows.to(gradient).reshape(-1, *[1] * (gradient.ndim - 1))

    return hook


def _add_adapters(unet: Any, rank: int, seed: int) -> None:
    try:
        from peft import LoraConfig
    except ImportError as error:
        raise ImportError("LoRA needs peft: pip install 'marigold_uq[lora]'") from error
    unet.requires_grad_(False)
    config = LoraConfig(r=rank, lora_alpha=rank, init_lora_weights="gaussian", target_modules=_LORA_TARGETS)
    with torch.random.fork_rng(devices=[]):  # peft draws the first weights from the global stream
        torch.manual_seed(seed)
        unet.add_adapter(config)
    for convolution in (unet.conv_in, unet.conv_out):
        convolution.requires_grad_(True)


def plain_network(network: nn.Module) -> nn.Module:
    """The network without adapters: itself, or a copy on the CPU with its adapters folded into the weights."""
    if not getattr(network, "peft_config", None):
        return network
    merged: Any = copy.deepcopy(network).cpu()
    merged.fuse_lora()
    merged.unload_lora()
    return merged
