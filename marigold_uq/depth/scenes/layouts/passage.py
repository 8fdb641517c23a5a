"""Corridors and stairs."""

from __future__ import annotations

import numpy as np

from marigold_uq.depth.scenes.furniture import carton, chair, person, plant
from marigold_uq.depth.scenes.layouts.indoor import door, indoor_light, picture, shell, window, without_obstruction
from marigold_uq.depth.scenes.layouts.open_air import daylight
from marigold_uq.depth.scenes.primitives import Primitive, box, quad, rod
from marigold_uq.depth.scenes.scene import Atmosphere, Light, Scene, Stage, placed


def corridor(s: Stage) -> Scene:
    """A long narrow passage with doors, lamps, things along the walls, and a wall or bright window at its end."""
    width, length, height = s.uniform(1.1, 3.2), s.uniform(4, 25), s.uniform(2.2, 3.0)
    left, right = -width / 2, width / 2
    camera = s.camera(
        (s.uniform(-0.25, 0.25) * width, 0, s.uniform(0.8, 1.75)),
        yaw=s.rng.normal(0, 9),
        pitch=float(np.clip(s.rng.normal(16, 10), -6, 42)),
        roll=s.rng.normal(0, 3),
        fov=s.uniform(50, 80),
    )
    parts = shell(s, left, right, -1.0, length, height, decoration=0.8)
    for side, yaw in ((left, 90.0), (right, -90.0)):
        spot = s.uniform(0.8, 3)
        while spot < length:
            item = s.one_of((door, door, picture, window))
            parts += placed(item, side, spot, 0, yaw)
            spot += s.uniform(1.2, 4)
    if s.chance(0.5):
        parts += placed(window(s) if s.chance(0.6) else door(s), s.uniform(-0.2, 0.2), length, 0)
    for _ in range(int(s.rng.integers(0, 5))):
        group = s.one_of((carton, chair, plant, person, carton))
        side = s.uniform(0.55, 0.85) * right * (1 if s.chance(0.5) else -1)
        parts += without_obstruction(placed(group, side, s.uniform(1.2, length), 0, s.uniform(0, 360)), camera, 0.3)
    lights, atmosphere = indoor_light(s, left, right, -0.5, length, height)
    return Scene(parts, camera, lights, atmosphere)


def _flight(s: Stage, width: float, start: float, count: int, rise: float, going: float) -> list[Primitive]:
    """Steps from y = start upwards (rise > 0) or downwards (rise < 0) away from the camera."""
    material, nosing = s.palette.floor(), s.palette.furniture()
    strip = s.chance(0.4)
    parts = []
    for k in range(count):
        top, y = (k + (1 if rise > 0 else 0)) * rise, start + (k + 0.5) * going
        parts.append(box((0, y, top - 1.0), (width, going, 2.0), material))
        if strip:
            parts.append(box((0, y - going / 2 + 0.02, top), (width, 0.05, 0.012), nosing))
    return parts


def _handrail(s: Stage, x: float, start: float, count: int, rise: float, going: float) -> list[Primitive]:
    """A rail on posts beside a flight."""
    metal, end = s.palette.metal(), start + count * going
    posts = [(y, (y - start) / going * rise) for y in np.arange(start, end, 0.6)]
    parts = [rod((x, y, z), (x, y, z + 0.95), 0.015, metal) for y, z in posts]
    return [rod((x, start, 0.95), (x, end, count * rise + 0.95), 0.025, metal), *parts]


def _stairwell(s: Stage, width: float, end: float, level: float) -> tuple[list[Primitive], list[Light], Atmosphere]:
    """Walls beside and behind a flight that ends at (end, level)."""
    wall, back = s.palette.wall(), end + s.uniform(0.8, 5)
    parts = [quad((a * width * 0.51, 4, 1), (0, 8, 0), (0, 0, 6), wall, casts_shadow=False) for a in (-1, 1)]
    parts.append(quad((0, back, 1), (6, 0, 0), (0, 0, 6), s.palette.wall(), casts_shadow=False))
    parts += placed(s.one_of((door, picture)), s.uniform(-0.2, 0.2) * width, back, level)
    return parts, *indoor_light(s, -width / 2, width / 2, 0, back, max(level, 0) + 2.5)


def _open_ground(s: Stage, level: float) -> tuple[list[Primitive], list[Light], Atmosphere]:
    """A meadow around and a house front beyond a flight."""
    parts = [quad((0, 60, min(level, 0) - 0.02), (80, 0, 0), (0, 70, 0), s.palette.grass(), casts_shadow=False)]
    front = (0, s.uniform(20, 50), level + 2)
    parts.append(quad(front, (40, 0, 0), (0, 0, s.uniform(3, 9)), s.palette.facade(), casts_shadow=False))
    return parts, *daylight(s)


def stairs(s: Stage) -> Scene:
    """A flight of steps, up or down, between walls or in the open, with a handrail."""
    width, count, upwards = s.uniform(0.9, 4.0), int(s.rng.integers(5, 16)), s.chance(0.7)
    rise, going, start = s.uniform(0.14, 0.2) * (1 if upwards else -1), s.uniform(0.25, 0.36), s.uniform(0.6, 2.5)
    camera = s.camera(
        (s.uniform(-0.3, 0.3) * width, 0, s.uniform(1.0, 1.8)),
        yaw=s.rng.normal(0, 10),
        pitch=s.uniform(-5, 22) if upwards else s.uniform(15, 45),
        roll=s.rng.normal(0, 3),
        fov=s.uniform(50, 72),
    )
    end, level, floor = start + count * going, count * rise, s.palette.floor()
    parts = _flight(s, width, start, count, rise, going)
    parts.append(quad((0, start / 2 - 1, 0), (6, 0, 0), (0, start / 2 + 1, 0), floor, casts_shadow=False))
    parts.append(quad((0, end + 5, level), (6, 0, 0), (0, 5, 0), floor, casts_shadow=False))
    for side in (-1, 1):
        if s.chance(0.6):
            parts += _handrail(s, side * width * 0.485, start, count, rise, going)
    around, lights, atmosphere = _stairwell(s, width, end, level) if s.chance(0.65) else _open_ground(s, level)
    return Scene(parts + around, camera, lights, atmosphere)
