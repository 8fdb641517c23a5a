"""What every metric does to its inputs first: precision of at least float32, and shapes that fit."""

import torch
from torch import Tensor

from marigold_uq.precision import accumulator_dtype, at_least_float32

__all__ = ["accumulator_dtype", "as_ensemble", "as_mask", "as_members", "at_least_float32"]


def as_members(samples: Tensor) -> Tensor:
    """An ensemble (M, ...) in at least float32; anything without a member axis is refused."""
    if samples.ndim == 0 or samples.shape[0] == 0:
        raise ValueError(f"samples have shape {tuple(samples.shape)}; expected (M, ...) with at least one member M.")
    return at_least_float32(samples)


def as_ensemble(samples: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Ensemble (M, ...) and target (...) in one common precision of at least float32."""
    samples, target = as_members(samples), at_least_float32(target)
    if samples.shape[1:] != target.shape:
        raise ValueError(
            f"samples {tuple(samples.shape)} do not fit target {tuple(target.shape)}: expected samples"
            f" {('M', *target.shape)}. Put the members on the first axis."
        )
    dtype = torch.promote_types(samples.dtype, target.dtype)
    return samples.to(dtype), target.to(dtype)


def as_mask(mask: Tensor | None, shape: torch.Size) -> Tensor | None:
    """A boolean validity mask (True = counts) expanded to `shape`; None stays None."""
    if mask is None:
        return None
    if mask.dtype != torch.bool:
        raise TypeError(f"mask has dtype {mask.dtype}; expected torch.bool with True where a value counts.")
    try:
        return mask.expand(shape)
    except RuntimeError:
        raise ValueError(
            f"mask {tuple(mask.shape)} does not broadcast to {tuple(shape)}: give it the same axes (size 1 to repeat)."
        ) from None
