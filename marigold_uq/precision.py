"""Which floating-point types numbers are kept and added up in."""

from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
T = TypeVar("T")

AUTOCAST_DEVICES = ("cuda", "cpu", "mps", "xpu")


def at_least_float32(value: Tensor) -> Tensor:
    """Half precision and integers become float32; float32 and float64 stay."""
    return value if value.dtype in (torch.float32, torch.float64) else value.to(torch.float32)


def accumulator_dtype(device: torch.device) -> torch.dtype:
    """float64 for long sums, float32 on Apple's MPS, which has no float64."""
    return torch.float32 if device.type == "mps" else torch.float64


def full_precision(function: Callable[P, T]) -> Callable[P, T]:
    """Run without autocast: inside it even float32 matrix products would be done in half precision."""

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        with ExitStack() as stack:
            for device in AUTOCAST_DEVICES:
                if torch.is_autocast_enabled(device):
                    stack.enter_context(torch.autocast(device, enabled=False))
            return function(*args, **kwargs)

    return run
