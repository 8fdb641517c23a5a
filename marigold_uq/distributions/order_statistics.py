"""Order statistics of an ensemble and quantiles between them; members on the first axis."""

from collections.abc import Sequence
from contextlib import suppress
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

QuantileMethod = Literal["weibull", "linear"]


def sort_members(samples: Tensor) -> Tensor:
    """Members in ascending order along the first axis, (M, ...).

    Without a gradient on the CPU numpy does it: its vectorised sort is about 14 times faster than torch's,
    which also carries indices that nobody needs here.
    """
    if samples.device.type == "cpu" and not (torch.is_grad_enabled() and samples.requires_grad):
        with suppress(RuntimeError):  # inside vmap a tensor has no array
            return torch.from_numpy(np.sort(samples.detach().numpy(), axis=0))
    return samples.sort(dim=0).values


def member_quantiles(samples: Tensor, levels: Sequence[float], method: QuantileMethod = "weibull") -> Tensor:
    """Quantiles (Q, ...) of members (M, ...), linear between order statistics and constant beyond the outermost."""
    ordered = sort_members(samples)
    positions = [quantile_position(samples.shape[0], level, method) for level in levels]
    below = torch.tensor([int(p) for p in positions], device=samples.device)
    above = (below + 1).clamp(max=samples.shape[0] - 1)
    fraction = torch.tensor([p - int(p) for p in positions], dtype=samples.dtype, device=samples.device)
    return torch.lerp(ordered[below], ordered[above], fraction.reshape(-1, *(1,) * (samples.ndim - 1)))


def quantile_position(num_members: int, level: float, method: str) -> float:
    """Where level q falls among the sorted members, counted from 0 and clamped to 0..M-1."""
    if method == "weibull":
        position = (num_members + 1) * level - 1
    elif method == "linear":
        position = (num_members - 1) * level
    else:
        raise ValueError(f"method is {method!r}; quantiles know {get_args(QuantileMethod)}.")
    # 40 * (1 - 0.95)/2 is 1.0000000000000009 in floating point, and the first order statistic itself is meant.
    position = round(position) if abs(position - round(position)) < 1e-9 else position
    return min(max(position, 0.0), num_members - 1.0)
