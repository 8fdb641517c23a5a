"""Nearest hits of camera rays, and visibility of a light from surface points."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from marigold_uq.depth.scenes.camera import Camera
from marigold_uq.depth.scenes.primitives import INFINITY, Primitive, intersect
from marigold_uq.depth.scenes.vectors import Array


@dataclass(frozen=True)
class Hits:
    """What each pixel sees: `depth` (H, W), infinite where there is nothing; `index` (H, W) of the primitive, or -1."""

    depth: Array
    index: NDArray[np.int32]


def cast_camera_rays(camera: Camera, primitives: Sequence[Primitive]) -> Hits:
    """Z-buffer over primitives, each tested only in the window of the screen that can see it."""
    depth = np.full((camera.height, camera.width), INFINITY)
    index = np.full((camera.height, camera.width), -1, dtype=np.int32)
    u = (np.arange(camera.width) + 0.5).astype(np.float32)
    v = (np.arange(camera.height) + 0.5).astype(np.float32)
    pixel_to_world = camera.pixel_to_world()
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        for number, primitive in enumerate(primitives):
            window = camera.screen_window(primitive.corners)
            if window is None:
                continue
            to_local = primitive.world_to_local
            origin = to_local @ (camera.position - primitive.center)
            matrix = to_local @ pixel_to_world
            rows, columns = v[window[0], None], u[None, window[1]]
            direction = [m[0] * columns + (m[1] * rows + m[2]) for m in matrix]
            hit = intersect(primitive, origin, direction)
            closer = hit < depth[window]
            depth[window][closer] = hit[closer]
            index[window][closer] = number
    return Hits(depth, index)


def light_visibility(points: Array, targets: Array, primitives: Sequence[Primitive]) -> Array:
    """1 where the segment from points (N, 3) to targets (N, 3) is free of shadow casters, else 0; (N,)."""
    visible = np.ones(len(points), dtype=bool)
    if not len(points):
        return visible.astype(np.float32)
    px, tx = np.ascontiguousarray(points.T), np.ascontiguousarray(targets.T)
    low, high = np.minimum(px.min(axis=1), tx.min(axis=1)), np.maximum(px.max(axis=1), tx.max(axis=1))
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        for primitive in primitives:
            corners = primitive.corners
            if not primitive.casts_shadow or (corners.max(axis=0) < low).any() or (corners.min(axis=0) > high).any():
                continue
            to_local = primitive.world_to_local
            start = to_local @ (px - primitive.center[:, None])  # 3, N
            step = to_local @ tx - to_local @ px
            visible &= ~(intersect(primitive, start, step, near=1e-3) < 1)
    return visible.astype(np.float32)
