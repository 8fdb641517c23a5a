"""Arrangements before a backdrop."""

from __future__ import annotations

import numpy as np

from marigold_uq.depth.scenes.clutter import CLUTTER
from marigold_uq.depth.scenes.layouts.indoor import indoor_light, without_obstruction
from marigold_uq.depth.scenes.primitives import Primitive, box, quad
from marigold_uq.depth.scenes.scene import Scene, Stage, placed


def _card(s: Stage, far: float) -> list[Primitive]:
    """A printed board, turned and leaning, that stands on the ground and may leave the picture."""
    turn, lean = s.uniform(-1.0, 1.0), s.uniform(-0.5, 0.6)
    width, height, y = s.uniform(0.1, 0.6), s.uniform(0.15, 0.6), s.uniform(0.55, 0.95) * far
    right = np.array([np.cos(turn), np.sin(turn), 0])
    up = np.cos(lean) * np.array([0, 0, 1]) + np.sin(lean) * np.array([-np.sin(turn), np.cos(turn), 0])
    spin = s.uniform(-0.5, 0.5) if s.chance(0.5) else 0.0
    right, up = np.cos(spin) * right + np.sin(spin) * up, np.cos(spin) * up - np.sin(spin) * right
    center = (s.uniform(-0.5, 0.5) * y, y, height * s.uniform(0.4, 1.0))
    return [quad(center, width * right, height * up, s.palette.packaging())]


def _board(s: Stage, y: float) -> list[Primitive]:
    """A plank across the whole picture."""
    size = (3, s.uniform(0.02, 0.2), s.uniform(0.1, 0.4))
    return [box((0, y, s.uniform(0, 0.5)), size, s.palette.wood(), tilt=s.uniform(-30, 30))]


def _thing(s: Stage, far: float) -> list[Primitive]:
    """Clutter on the ground, at times raised on something unseen."""
    y = s.uniform(0.55, 0.95) * far
    lift = s.uniform(0, 0.25) if s.chance(0.2) else 0.0
    return placed(s.one_of(CLUTTER), s.uniform(-0.5, 0.5) * y, y, lift, s.uniform(0, 360))


def still_life(s: Stage) -> Scene:
    """Upright and slanted cards, cones, tools and boxes before a backdrop, seen nearly level."""
    far, slant = s.uniform(1.2, 2.6), s.uniform(-0.5, 0.5)
    camera = s.camera(
        (0, 0, s.uniform(0.15, 0.5)),
        yaw=s.rng.normal(0, 5),
        pitch=s.uniform(-4, 22),
        roll=s.rng.normal(0, 2),
        fov=s.uniform(32, 55),
    )
    along = 3 * np.array([np.cos(slant), np.sin(slant), 0])
    parts = [
        quad((0, 2, 0), (4, 0, 0), (0, 4, 0), s.palette.anything(), casts_shadow=False),
        quad((0, far, 0.8), along, (0, 0, 1.0), s.palette.poster(), casts_shadow=False),
    ]
    groups = [_card(s, far) for _ in range(int(s.rng.integers(0, 5)))]
    groups += [_thing(s, far) for _ in range(int(s.rng.integers(0, 12)))]
    if s.chance(0.3):
        spot = (s.uniform(-0.6, 0.6), far * 0.9, 0.4)
        groups.append([quad(spot, (0.5, 0, 0), (0, 0, 0.5), s.palette.wood(), cutout=s.mask("lattice"))])
    if s.chance(0.2):
        groups += [_board(s, s.uniform(0.5, 1.0) * far) for _ in range(3)]
    for group in groups:
        parts += without_obstruction(group, camera, 0.2)
    lights, atmosphere = indoor_light(s, -1.5, 1.5, -1.0, far, 2.0)
    return Scene(parts, camera, lights, atmosphere)
