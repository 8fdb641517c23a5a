"""The optimiser that a config asks for."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from marigold_uq.training.config import OptimizerConfig

__all__ = ["make_optimizer"]


def make_optimizer(
    parameters: Sequence[torch.nn.Parameter], config: OptimizerConfig, device: torch.device
) -> torch.optim.Optimizer:
    """Adam with decoupled weight decay, on the device where the parameters will be."""
    betas = (config.beta1, config.beta2)
    if config.kind == "adamw8bit":
        return _eight_bit(parameters, config, device)
    fused = device.type == "cuda" if config.fused is None else config.fused
    return torch.optim.AdamW(
        parameters, lr=config.learning_rate, betas=betas, weight_decay=config.weight_decay, fused=fused
    )


def _eight_bit(
    parameters: Sequence[torch.nn.Parameter], config: OptimizerConfig, device: torch.device
) -> torch.optim.Optimizer:
    if device.type != "cuda":
        raise ValueError(f"optimizer kind 'adamw8bit' needs a GPU; this run is on {device.type}: take 'adamw'")
    try:
        from bitsandbytes.optim import AdamW8bit  # type: ignore[import-not-found,import-untyped,unused-ignore]
    except ImportError as error:
        raise ImportError("optimizer kind 'adamw8bit' needs bitsandbytes: pip install bitsandbytes") from error
    betas = (config.beta1, config.beta2)
    optimizer: torch.optim.Optimizer = AdamW8bit(
        parameters, lr=config.learning_rate, betas=betas, weight_decay=config.weight_decay
    )
    return optimizer
