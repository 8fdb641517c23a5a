"""Types and devices of maps."""

from torch import Tensor


def like(x: Tensor, maps: Tensor) -> Tensor:
    """`x` in the type and on the device of `maps`; the type first, for devices without float64."""
    return x.to(maps.dtype).to(maps.device)
