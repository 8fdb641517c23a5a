"""Pinhole camera in a world whose z axis points up."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from marigold_uq.depth.scenes.vectors import Array

NEAR = 0.05  # metres; nothing closer to the camera plane than this is seen


@dataclass(frozen=True)
class Camera:
    """A pinhole camera; the ray of pixel (u, v) is `position + t * rotation @ ((u-cx)/fx, (v-cy)/fy, 1)`.

    The third camera coordinate of the direction is one, hence the ray parameter t *is* the planar depth along the
    optical axis.
    `rotation` has the camera's right, down and forward axes, expressed in world coordinates, as columns.
    """

    position: Array  # (3,)
    rotation: Array  # (3, 3)
    fx: float
    fy: float
    height: int
    width: int

    def pixel_to_world(self) -> Array:
        """The matrix G with ray direction = G @ (u, v, 1), (u, v) = (column + 0.5, row + 0.5)."""
        intrinsics_inverse = np.array(
            [
                [1 / self.fx, 0.0, -self.width / 2 / self.fx],
                [0.0, 1 / self.fy, -self.height / 2 / self.fy],
                [0.0, 0.0, 1.0],
            ]
        )
        return (self.rotation @ intrinsics_inverse).astype(np.float32)

    def directions(self) -> Array:
        """Ray directions of all pixel centres, with unit depth; (H, W, 3)."""
        matrix = self.pixel_to_world()
        across = matrix[:, 0] * (np.arange(self.width, dtype=np.float32) + 0.5)[:, None]  # W, 3
        down = matrix[:, 1] * (np.arange(self.height, dtype=np.float32) + 0.5)[:, None] + matrix[:, 2]  # H, 3
        return across[None] + down[:, None]

    def screen_window(self, corners: Array) -> tuple[slice, slice] | None:
        """Rows and columns that can see the convex hull of `corners` (N, 3); None if no pixel can."""
        local = (corners - self.position) @ self.rotation  # N, 3
        depth = local[:, 2]
        if (depth < NEAR).all():
            return None
        if (depth < NEAR).any():  # crosses the camera plane: its projection is unbounded
            return slice(0, self.height), slice(0, self.width)
        columns = local[:, 0] / depth * self.fx + self.width / 2
        rows = local[:, 1] / depth * self.fy + self.height / 2
        top, bottom = max(int(rows.min()) - 1, 0), min(int(rows.max()) + 2, self.height)
        left, right = max(int(columns.min()) - 1, 0), min(int(columns.max()) + 2, self.width)
        return (slice(top, bottom), slice(left, right)) if top < bottom and left < right else None


def rotation_about(axis: int, angle: float) -> Array:
    """Right-handed rotation by `angle` (radians) about a coordinate axis; (3, 3)."""
    cos, sin = np.cos(angle), np.sin(angle)
    i, j = [(1, 2), (2, 0), (0, 1)][axis]
    matrix = np.eye(3)
    matrix[i, i] = matrix[j, j] = cos
    matrix[i, j], matrix[j, i] = -sin, sin
    return matrix.astype(np.float32)


def make_camera(
    position: tuple[float, float, float],
    *,
    yaw: float,
    pitch: float,
    roll: float,
    horizontal_fov: float,
    height: int,
    width: int,
    pixel_aspect: float = 1.0,
) -> Camera:
    """A camera looking along +y, turned left by `yaw`, down by `pitch` and rolled by `roll` (all in degrees).

    `pixel_aspect` > 1 squeezes the picture horizontally, as when a panorama is resized to fewer columns:
    fy = pixel_aspect * fx.
    """
    yaw, pitch, roll, fov = np.deg2rad([yaw, pitch, roll, horizontal_fov])
    level = np.array([[1, 0, 0], [0, 0, 1], [0, -1, 0]], dtype=np.float32)  # columns: right, down, forward
    rotation = rotation_about(2, yaw) @ rotation_about(0, -pitch) @ level @ rotation_about(2, roll)
    fx = width / 2 / np.tan(fov / 2)
    return Camera(np.asarray(position, np.float32), rotation, float(fx), float(fx * pixel_aspect), height, width)
