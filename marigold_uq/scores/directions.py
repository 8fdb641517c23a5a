"""Directions to look along: isotropic, patches, boxes. They never depend on the target, so scores stay proper."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from marigold_uq.randomness import rand, randn


def isotropic_directions(
    event_shape: Sequence[int], num_directions: int, *, like: Tensor, generator: torch.Generator | None = None
) -> Tensor:
    """Unit vectors (N, *event), uniform on the sphere; complete orthonormal blocks while D of them are asked for.

    Orthogonal directions share no information, which lowers the variance; an incomplete block would bias nothing but
    gains nothing either in high dimension, so the remainder is drawn independently.
    """
    dim = math.prod(event_shape)
    blocks = [
        torch.linalg.qr(randn((), (dim, dim), like=like, generator=generator))[0].mT
        for _ in range(num_directions // dim)
    ]
    rest = num_directions - dim * len(blocks)
    gauss = randn((), (rest, dim), like=like, generator=generator)
    blocks.append(gauss / gauss.norm(dim=1, keepdim=True).clamp(min=torch.finfo(like.dtype).tiny))
    return torch.cat(blocks).reshape(num_directions, *event_shape)


def box_directions(
    event_shape: Sequence[int], num_directions: int, *, like: Tensor, generator: torch.Generator | None = None
) -> Tensor:
    """Unit vectors (N, *event) supported on random boxes: constant in space, random over channels, any size and place.

    They compare sums over regions, where correlated noise does not average out, so they see correlations at all scales.
    """
    channels, *space = event_shape
    weights = randn((), (num_directions, channels), like=like, generator=generator)
    weights = weights.reshape(num_directions, channels, *[1] * len(space))
    for axis, length in enumerate(space):
        corners = rand((), (num_directions, 2), like=like, generator=generator)
        size = torch.exp(corners[:, 0] * math.log(length)).round().clamp(1, length)  # log-uniform in 1 .. length
        start = ((length - size + 1) * corners[:, 1]).floor()
        position = torch.arange(length, dtype=like.dtype, device=like.device)
        inside = (position >= start[:, None]) & (position < (start + size)[:, None])  # (N, length)
        shape = [num_directions, 1, *[1] * len(space)]
        shape[2 + axis] = length
        weights = weights * inside.reshape(shape)
    weights = weights.expand(num_directions, *event_shape)
    norm = weights.flatten(1).norm(dim=1).reshape(-1, *[1] * len(event_shape))
    return weights / norm.clamp(min=torch.finfo(like.dtype).tiny)


def patch_shape(event_shape: Sequence[int], patch_size: int) -> tuple[int, ...]:
    """All channels, and patch_size along every axis of space."""
    return (event_shape[0], *[patch_size] * (len(event_shape) - 1))


def check_patch_size(patch_size: int | None) -> None:
    """A patch has at least one coordinate along every axis."""
    if patch_size is not None and patch_size < 1:
        raise ValueError(f"patch_size must be a positive number of coordinates; got {patch_size}")


def fold_patches(value: Tensor, patch_size: int, space: int) -> Tensor:
    """(B, ..., *space) -> (B P, ..., patch_size, ..): the P patches of the last `space` axes join the batch.

    Sizes that patch_size does not divide are padded with zeros (False in a mask).
    """
    check_patch_size(patch_size)
    if space == 0:
        return value
    for axis in range(value.ndim - space, value.ndim):
        missing = -value.shape[axis] % patch_size
        if missing:
            padding = value.new_zeros(*value.shape[:axis], missing, *value.shape[axis + 1 :])
            value = torch.cat([value, padding], axis)
    middle = value.ndim - space
    for axis in reversed(range(middle, value.ndim)):
        value = value.unflatten(axis, (-1, patch_size))
    grid = [middle + 2 * k for k in range(space)]
    inner = [middle + 2 * k + 1 for k in range(space)]
    return value.permute(0, *grid, *range(1, middle), *inner).flatten(0, space)
