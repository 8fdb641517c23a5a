"""The last layer of a field network for any family, the flat Cholesky head included."""

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from marigold_uq.distributions import CholeskyDistribution
from marigold_uq.models.unet_1d import UNet1d
from marigold_uq.models.unet_2d import UNet2d
from marigold_uq.models.widen import widen
from marigold_uq.schedulers.distributional import DistributionalScheduler

__all__ = ["build_network", "raw_output"]


NETWORKS = {1: UNet1d, 2: UNet2d}


def build_network(
    scheduler: DistributionalScheduler,
    event_shape: Sequence[int],
    condition_channels: int,
    *,
    initial_scale: float = 0.5,
    seed: int = 0,
    **options: Any,
) -> UNet1d | UNet2d:
    """A fresh U-Net with the head of the scheduler's family; the weights follow from the seed.

    Its input is [condition, x_t (, noise)]. `options` go to the network (block_out_channels, periodic, ...).
    """
    channels, config = event_shape[0], scheduler.config
    if len(event_shape) - 1 not in NETWORKS:
        raise ValueError(f"fields have 1 or 2 spatial axes; the event is {tuple(event_shape)}")
    blocks = _num_blocks(scheduler, event_shape)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        kind = NETWORKS[len(event_shape) - 1]
        network = kind(in_channels=condition_channels + channels, out_channels=blocks * channels, **options)
    if blocks > 1:
        with torch.no_grad():
            network.conv_out.weight[channels:] *= 0.1  # nearly independent coordinates to begin with
    else:
        widen(
            network,
            config.noise_family,
            num_components=config.num_components,
            rank=config.rank,
            initial_scale=initial_scale,
            seed=seed,
        )
    return network


def raw_output(scheduler: DistributionalScheduler, output: Tensor, event_shape: Sequence[int]) -> Tensor:
    """What the family reads, from the network's output (B, channels, *space): itself, or for cholesky the flat form.

    With D coordinates the network has 1 + D blocks of channels: the mean, and at coordinate i in block 1 + c the entry
    L[i, i - c] of the lower triangle, so that a convolution gives the same number to the same distance everywhere.
    """
    num_blocks, channels, dim = _num_blocks(scheduler, event_shape), event_shape[0], prod(event_shape)
    if num_blocks == 1:
        return output
    blocks = output.unflatten(1, (num_blocks, channels)).flatten(2)  # (B, 1 + D, D)
    rows, columns = torch.tril_indices(dim, dim, device=output.device)
    return torch.cat([blocks[:, 0], blocks[:, 1 + rows - columns, rows]], 1)


def _num_blocks(scheduler: DistributionalScheduler, event_shape: Sequence[int]) -> int:
    """Blocks of channels that the network itself has; other families than cholesky have their heads from `widen`."""
    return 1 + prod(event_shape) if issubclass(scheduler.family, CholeskyDistribution) else 1
