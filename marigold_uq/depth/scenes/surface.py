"""Normals and texture coordinates at the points that rays hit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from marigold_uq.depth.scenes.primitives import Primitive, sample_heights
from marigold_uq.depth.scenes.vectors import Array, dominant_axis, dot, norm


@dataclass(frozen=True)
class SurfacePoints:
    """N points seen by N pixels: position and unit normal (N, 3), tile coordinates (N, 2), owner (N,)."""

    position: Array
    normal: Array
    uv: Array
    owner: NDArray[np.int32]


def _local_normal(primitive: Primitive, local: Array) -> Array:
    """Outward normal of the unit shape at local points (N, 3), up to its length."""
    if primitive.shape in ("ellipsoid", "bowl"):
        return local
    normal = np.zeros_like(local)
    if primitive.shape == "quad":
        normal[:, 2] = 1
    elif primitive.shape == "box":
        axis = dominant_axis(local)
        rows = np.arange(len(local))
        normal[rows, axis] = local[rows, axis]
    elif primitive.shape == "frustum":
        wide = max(1.0, primitive.taper)
        slope = (primitive.taper - 1) / wide / 2
        normal[:, :2] = local[:, :2]
        normal[:, 2] = -slope * np.hypot(local[:, 0], local[:, 1])
        radius = (primitive.taper + 1) / wide / 2 + slope * local[:, 2]
        cap = (np.abs(local[:, 2]) > 0.999) & (np.hypot(local[:, 0], local[:, 1]) < 0.998 * radius)
        normal[cap] = [0, 0, 1]
    else:
        normal = _heightfield_normal(primitive, local)
    return normal


def _heightfield_normal(primitive: Primitive, local: Array) -> Array:
    """(-dh/dx, -dh/dy, 1) by central differences of two cells' width."""
    assert primitive.heights is not None
    step = np.float32(2 / primitive.heights.shape[0])
    x, y, h = local[:, 0], local[:, 1], primitive.heights
    along_x = (sample_heights(h, x + step, y) - sample_heights(h, x - step, y)) / (2 * step)
    along_y = (sample_heights(h, x, y + step) - sample_heights(h, x, y - step)) / (2 * step)
    return np.stack([-along_x, -along_y, np.ones_like(x)], axis=1)


def _tile_coordinates(primitive: Primitive, local: Array, normal: Array) -> Array:
    """Box projection along the dominant normal axis, or unrolling for round things; (N, 2) in tiles."""
    material = primitive.material
    half = primitive.half_size
    if primitive.shape == "frustum":
        turn = np.arctan2(local[:, 1], local[:, 0]) / np.float32(np.pi)
        pair, extents = np.stack([turn, -local[:, 2]], axis=1), np.array([np.pi * half[0], half[2]])
        cap = np.abs(normal[:, 2]) > 0.99
        pair[cap] = local[cap, :2]
    else:
        axis = dominant_axis(normal)
        first = np.where(axis == 0, 1, 0)
        second = np.where(axis == 2, 1, 2)
        rows = np.arange(len(local))
        pair = np.stack([local[rows, first], -local[rows, second]], axis=1)
        extents = np.stack([half[first], half[second]], axis=1)
    uv = pair * extents / material.tile if material.tile > 0 else (pair + 1) / 2
    uv = uv[:, ::-1] if material.turned and material.tile > 0 else uv
    return (uv + np.asarray(material.offset)).astype(np.float32)


def surface_points(
    primitives: Sequence[Primitive], position: Array, viewing: Array, owner: NDArray[np.int32]
) -> SurfacePoints:
    """Evaluate all hit points (N, 3), seen along `viewing` (N, 3); normals are turned towards the viewer."""
    order = np.argsort(owner.astype(np.int16), kind="stable")  # 16 bits: numpy sorts them by radix
    numbers, starts = np.unique(owner[order], return_index=True)
    normal, uv = np.empty_like(position), np.empty((len(position), 2), dtype=np.float32)
    for number, rows in zip(numbers, np.split(order, starts[1:]), strict=True):
        primitive = primitives[number]
        to_local = primitive.world_to_local
        local = (np.take(position, rows, axis=0) - primitive.center) @ to_local.T
        direction = _local_normal(primitive, local)
        uv[rows] = _tile_coordinates(primitive, local, direction)
        normal[rows] = direction @ to_local  # normals transform with the inverse transpose
    normal /= norm(normal)[:, None] + np.float32(1e-9)
    normal *= np.where(dot(normal, viewing) > 0, np.float32(-1), np.float32(1))[:, None]
    return SurfacePoints(position, normal, uv, owner)
