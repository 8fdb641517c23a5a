"""Weights, gradients and Adam's averages shared out over processes (FSDP), as `accelerate config` asks for it."""

from __future__ import annotations

import copy
import os
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from marigold_uq.training.config import TrainingConfig

__all__ = ["gathered", "is_sharded", "prepare_sharding", "whole_copy", "whole_number"]


def prepare_sharding(accelerator: Accelerator, config: TrainingConfig) -> None:
    """Check what the launcher asks for; on CPUs, where accelerate leaves FSDP out, turn it on.

    FSDP's second version is needed, whose weights keep their names and can be gathered one by one.
    """
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        raise ValueError(
            "DeepSpeed steps and accumulates by itself, against the order and the sizes of this loop: run "
            "`accelerate config` again and choose FSDP, which shares out the same memory"
        )
    asked = os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"
    if asked and accelerator.distributed_type == DistributedType.MULTI_CPU:
        state: Any = accelerator.state
        state.fsdp_plugin = FullyShardedDataParallelPlugin()
        for shared in (state, PartialState()):  # whoever asks for a state takes over what the partial one says
            shared.distributed_type = DistributedType.FSDP
    if not is_sharded(accelerator):
        return
    plugin: Any = accelerator.state.fsdp_plugin
    if plugin.fsdp_version != 2:
        raise ValueError("FSDP's first version is not supported: choose 2 in `accelerate config` (fsdp_version)")
    if config.ema_decay:
        raise ValueError(
            f"a moving average needs whole weights, and FSDP shares them out: set training.ema_decay to 0; got "
            f"{config.ema_decay}"
        )


def is_sharded(accelerator: Accelerator) -> bool:
    """Whether no process holds the whole network: then all of them must call it equally often."""
    return bool(accelerator.distributed_type == DistributedType.FSDP)


def whole_copy(accelerator: Accelerator, network: nn.Module) -> nn.Module | None:
    """A copy of the network before it is shared out, which takes the gathered weights; None where it stays whole."""
    if not is_sharded(accelerator):
        return None
    if any(parameter._backward_hooks for parameter in network.parameters()):
        raise ValueError(
            "FSDP puts other parameters in the place of those whose gradients are held back (trainable 'head'): train "
            "those without FSDP; they take little memory"
        )
    if not accelerator.is_main_process:
        return None
    return copy.deepcopy(network).cpu()


def gathered(accelerator: Accelerator, network: nn.Module, whole: nn.Module | None) -> nn.Module:
    """The network with all of its weights, on the main process; all processes must call it."""
    if not is_sharded(accelerator):
        return accelerator.unwrap_model(network)
    state = accelerator.get_state_dict(network)
    if whole is None:
        return network
    whole.load_state_dict(state)
    return whole


def whole_number(value: Tensor | float | None) -> float:
    """A number of which every process may hold a part."""
    if isinstance(value, DTensor):
        value = value.full_tensor()
    return float(torch.nan if value is None else value)
