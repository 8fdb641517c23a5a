"""Things on tables, seen obliquely with the room behind, or straight from above."""

from __future__ import annotations

import numpy as np

from marigold_uq.depth.scenes.camera import Camera
from marigold_uq.depth.scenes.clutter import CLUTTER, scattered
from marigold_uq.depth.scenes.furniture import AGAINST_WALLS, chair, monitor
from marigold_uq.depth.scenes.layouts.indoor import indoor_light, shell, without_obstruction
from marigold_uq.depth.scenes.primitives import Primitive, box, disk, heightfield, quad
from marigold_uq.depth.scenes.scene import Scene, Stage, placed
from marigold_uq.depth.scenes.textures import spectral_noise


def _aimed_camera(
    s: Stage, target: tuple[float, float, float], distance: float, pitch: float, yaw: float, roll: float
) -> Camera:
    """A camera at `distance` metres whose optical axis passes through the target."""
    down, turn = np.deg2rad([pitch, yaw])
    forward = np.array([-np.sin(turn) * np.cos(down), np.cos(turn) * np.cos(down), -np.sin(down)])
    x, y, z = np.asarray(target) - distance * forward
    fov = s.uniform(45, 70)
    return s.camera((x, y, z), yaw=yaw, pitch=pitch, roll=roll, fov=fov)


def _top(s: Stage, width: float, depth: float, z: float) -> list[Primitive]:
    """The table itself: rectangular or round, with an apron and legs, a cloth at times; or a bed or sofa seat."""
    material = (
        s.palette.wood(tile=(0.3, 1.5))
        if s.chance(0.5)
        else s.palette.floor()
        if s.chance(0.3)
        else s.palette.furniture()
    )
    thick = s.uniform(0.02, 0.06)
    if s.chance(0.2):
        return [
            disk((0, 0, z - thick / 2), max(width, depth) / 2, thick, material),
            box((0, 0, z / 2), (0.1, 0.1, z - thick), s.palette.metal()),
        ]
    parts = [box((0, 0, z - thick / 2), (width, depth, thick), material)]
    if s.chance(0.12):
        relief = spectral_noise(s.rng, 1.7, size=32) * 2 - 1
        parts.append(heightfield((0, 0, z + 0.01), (width, depth, s.uniform(0.02, 0.08)), relief, s.palette.fabric()))
    legs = s.palette.furniture()
    parts += [
        box((a * (width / 2 - 0.05), b * (depth / 2 - 0.05), z / 2 - thick / 2), (0.06, 0.06, z - thick), legs)
        for a in (-1, 1)
        for b in (-1, 1)
    ]
    return parts


def _things(s: Stage, width: float, depth: float, z: float) -> list[Primitive]:
    """Loose clutter, a heap near the middle, a monitor, or almost nothing."""
    sort = s.rng.random()
    if sort < 0.25:
        return placed(
            scattered(s, int(s.rng.integers(1, 5)), 0.25, 0.25, 0), s.uniform(-0.1, 0.1), s.uniform(-0.1, 0.1), z
        )
    parts = scattered(s, int(s.rng.integers(3, 16)), min(width, 1.1), min(depth, 0.9), z)
    if sort > 0.75:
        parts += placed(monitor(s), s.uniform(-0.3, 0.3), depth * s.uniform(0.1, 0.35), z, s.uniform(-35, 35))
    return parts


def tabletop(s: Stage) -> Scene:
    """A table with clutter, 15 to 65 degrees from above, the room or a wall behind it."""
    width, depth, z = s.uniform(0.7, 2.2), s.uniform(0.5, 1.4), s.uniform(0.4, 0.95)
    pitch = float(np.clip(s.rng.normal(34, 14), 8, 65))
    target = (s.uniform(-0.2, 0.2), s.uniform(-0.25, 0.3) * depth, z + s.uniform(0.0, 0.15))
    camera = _aimed_camera(s, target, s.uniform(0.55, 1.5), pitch, s.uniform(-40, 40), s.rng.normal(0, 4))
    left, right = -s.uniform(1.4, 4), s.uniform(1.4, 4)
    near, far = -3.0, depth / 2 + (s.uniform(0.02, 0.3) if s.chance(0.3) else s.uniform(0.4, 4.5))
    parts = shell(s, left, right, near, far, s.uniform(2.3, 3.0))
    parts += _top(s, width, depth, z) + _things(s, width, depth, z)
    for group in _surroundings(s, width, depth, left, right, far):
        parts += without_obstruction(group, camera, 0.25)
    lights, atmosphere = indoor_light(s, left, right, near, far, 2.6)
    return Scene(parts, camera, lights, atmosphere)


def _surroundings(s: Stage, width: float, depth: float, left: float, right: float, far: float) -> list[list[Primitive]]:
    """Chairs at the table and furniture beyond it."""
    groups = []
    for _ in range(int(s.rng.integers(0, 4))):
        groups.append(
            placed(chair(s), s.uniform(-0.8, 0.8) * width, depth / 2 + s.uniform(0.1, 0.6), 0, s.uniform(-50, 50))
        )
    if s.chance(0.4):
        groups.append(
            placed(chair(s), np.sign(s.uniform(-1, 1)) * (width / 2 + 0.3), s.uniform(-0.3, 0.3), 0, s.uniform(0, 360))
        )
    spot = left + s.uniform(0.2, 0.8)
    while spot < right and far > depth / 2 + 0.8:
        group = s.one_of(AGAINST_WALLS)
        if s.chance(0.7):
            back = 0.05 + max(float(p.corners[:, 1].max()) for p in group)
            groups.append(placed(group, spot, far - back, 0))
        spot += s.uniform(0.9, 1.8)
    return groups


def _bin(s: Stage, width: float, depth: float, z: float) -> list[Primitive]:
    """Four low walls around the working area."""
    height, wall = s.uniform(0.05, 0.2), s.palette.plastic()
    sides = [box((a * width / 2, 0, z + height / 2), (0.02, depth, height), wall) for a in (-1, 1)]
    return sides + [box((0, a * depth / 2, z + height / 2), (width, 0.02, height), wall) for a in (-1, 1)]


def from_above(s: Stage) -> Scene:
    """A working surface or bin full of things, 60 to 90 degrees from above."""
    z, distance = s.uniform(0.3, 1.0), s.uniform(0.5, 1.2)
    pitch = 90 - abs(float(s.rng.normal(0, 18)))
    camera = _aimed_camera(
        s, (s.uniform(-0.1, 0.1), s.uniform(-0.1, 0.1), z), distance, pitch, s.uniform(-20, 20), s.rng.normal(0, 5)
    )
    width, depth = s.uniform(0.6, 2.2), s.uniform(0.5, 1.8)
    top = s.palette.plastic() if s.chance(0.4) else s.palette.furniture()
    parts = [box((0, 0, z - 0.02), (width, depth, 0.04), top)]
    parts.append(quad((0, 0, 0), (4, 0, 0), (0, 4, 0), s.palette.floor(), casts_shadow=False))
    if s.chance(0.4):
        width, depth = s.uniform(0.35, 0.7), s.uniform(0.3, 0.5)
        parts += _bin(s, width, depth, z)
    spread = s.uniform(0.3, 0.9)
    for _ in range(int(s.rng.integers(2, 22))):
        group = s.one_of(CLUTTER)
        x, y = s.uniform(-0.5, 0.5) * spread * width, s.uniform(-0.5, 0.5) * spread * depth
        parts += placed(group, x, y, z + (s.uniform(0, 0.06) if s.chance(0.3) else 0), s.uniform(0, 360))
    if s.chance(0.3):  # something reaches into the picture from the near side
        parts.append(
            box(
                (s.uniform(-0.4, 0.4), -depth / 2, z + 0.1),
                (s.uniform(0.1, 0.3), 0.3, s.uniform(0.1, 0.3)),
                s.palette.anything(),
            )
        )
    lights, atmosphere = indoor_light(s, -1.5, 1.5, -1.5, 1.5, 2.6)
    return Scene(parts, camera, lights, atmosphere)
