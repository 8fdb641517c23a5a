"""Living rooms, offices, kitchens, basements, seen by somebody who stands or sits in them."""

from __future__ import annotations

import numpy as np

from marigold_uq.depth.scenes.furniture import AGAINST_WALLS, IN_THE_ROOM, cabinet, chair, person, sofa, table
from marigold_uq.depth.scenes.layouts.indoor import indoor_light, rug, shell, without_obstruction
from marigold_uq.depth.scenes.primitives import Primitive, box, rod
from marigold_uq.depth.scenes.scene import Scene, Stage, placed


def _dining_group(s: Stage, x: float, y: float) -> list[Primitive]:
    """A table with chairs around it."""
    yaw = s.uniform(-60, 60)
    board = table(s)
    half_x, half_y = (float(board[0].half_size[0]), float(board[0].half_size[1]))
    group = list(board)
    for side, spot in ((0, -half_y - 0.15), (180, half_y + 0.15)):
        for offset in np.linspace(-0.6, 0.6, int(s.rng.integers(1, 4))):
            group += placed(chair(s), offset * half_x, spot, 0, side + 180 + s.uniform(-20, 20))
    for side, spot in ((90, half_x + 0.15), (-90, -half_x - 0.15)):
        if s.chance(0.6):
            group += placed(chair(s), spot, 0, 0, side + 180 + s.uniform(-20, 20))
    return placed(group, x, y, 0, yaw)


def _along_walls(s: Stage, left: float, right: float, near: float, far: float) -> list[list[Primitive]]:
    """Furniture with its back to the walls, walked along in steps."""
    groups = []
    density = s.uniform(0.35, 0.95)
    for start, end, wall, yaw in ((left, right, far, 0.0), (near, far, right, -90.0), (near, far, left, 90.0)):
        along = start + s.uniform(0.3, 0.9)
        while along < end - 0.4:
            if s.chance(density):
                group = s.one_of(AGAINST_WALLS)
                back = 0.05 + max(float(p.corners[:, 1].max()) for p in group)
                x, y = {0.0: (along, wall - back), -90.0: (wall - back, along), 90.0: (wall + back, along)}[yaw]
                groups.append(placed(group, x, y, 0, yaw + (s.uniform(-15, 15) if s.chance(0.15) else 0)))
            along += s.uniform(0.9, 2.0)
    return groups


def _in_the_room(s: Stage, left: float, right: float, far: float) -> list[list[Primitive]]:
    """Free-standing pieces, dining groups, rugs, people, posts."""
    groups = []
    for _ in range(int(s.rng.integers(1, 7))):
        x, y = s.uniform(left, right) * 0.8, s.uniform(0.7, far * 0.8)
        sort = s.rng.random()
        if sort < 0.3:
            groups.append(_dining_group(s, x, y))
        elif sort < 0.42:
            groups.append(rug(s, x, y))
        elif sort < 0.48:
            groups.append(placed(person(s), x, y, 0, s.uniform(0, 360)))
        elif sort < 0.53:
            groups.append([rod((x, y, 0), (x, y, 2.6), s.uniform(0.04, 0.12), s.palette.metal())])
        else:
            group = s.one_of(IN_THE_ROOM)
            groups.append(placed(group, x, y, 0, s.uniform(0, 360)))
    return groups


def _foreground(s: Stage, x: float) -> list[list[Primitive]]:
    """Something close by that leaves the picture at a side or at the bottom."""
    if s.chance(0.6):
        return []
    side = 1 if s.chance(0.5) else -1
    piece = s.one_of((chair, chair, table, sofa, person, cabinet))
    return [placed(piece, x + side * s.uniform(0.2, 0.9), s.uniform(0.8, 1.6), 0, s.uniform(0, 360))]


def room(s: Stage) -> Scene:
    """A furnished room; eye height 0.7 to 1.8 m, mostly looking slightly down."""
    width, length, height = s.uniform(2.6, 7.5), s.uniform(2.6, 9.0), s.uniform(2.2, 3.2)
    left, right, near, far = -width / 2, width / 2, -s.uniform(0.3, 1.5), length
    eye = (s.uniform(left, right) * 0.7, s.uniform(-0.2, 0.3), s.uniform(0.7, 1.8))
    camera = s.camera(
        eye,
        yaw=s.uniform(-32, 32) + (s.uniform(-40, 40) if s.chance(0.2) else 0),
        pitch=float(np.clip(s.rng.normal(18, 10), -8, 45)),
        roll=s.rng.normal(0, 2.5) + (s.uniform(-8, 8) if s.chance(0.2) else 0),
        fov=s.uniform(48, 75),
    )
    parts = shell(s, left, right, near, far, height)
    for group in _along_walls(s, left, right, near, far) + _in_the_room(s, left, right, far) + _foreground(s, eye[0]):
        parts += without_obstruction(group, camera, 0.25)
    if s.chance(0.25):  # a neighbouring part of the wall stands forward
        depth = s.uniform(0.3, 1.5)
        pillar = box(
            (s.uniform(left, right), far - depth / 2, height / 2),
            (s.uniform(0.3, 1.5), depth, height),
            s.palette.wall(),
        )
        parts += without_obstruction([pillar], camera, 0.5)
    lights, atmosphere = indoor_light(s, left, right, near, far, height)
    return Scene(parts, camera, lights, atmosphere)


def stand_before(s: Stage) -> Scene:
    """Close to furniture at a wall: shelves, cupboards, beds, in a narrow range of depth."""
    distance, height = s.uniform(1.0, 2.6), s.uniform(2.2, 3.0)
    left, right, near, far = -s.uniform(1.2, 3), s.uniform(1.2, 3), -0.6, distance + s.uniform(0.1, 0.5)
    camera = s.camera(
        (s.uniform(-0.5, 0.5), 0, s.uniform(0.6, 1.7)),
        yaw=s.rng.normal(0, 18),
        pitch=float(np.clip(s.rng.normal(10, 12), -10, 45)),
        roll=s.rng.normal(0, 3),
        fov=s.uniform(48, 70),
    )
    parts = shell(s, left, right, near, far, height, decoration=2.0)
    groups = _along_walls(s, left, right, near, far)
    groups += [
        placed(
            s.one_of(IN_THE_ROOM),
            s.uniform(left, right),
            s.uniform(0.6, far),
            0,
            s.uniform(0, 360),
        )
    ]
    for group in groups:
        parts += without_obstruction(group, camera, 0.25)
    lights, atmosphere = indoor_light(s, left, right, near, far, height)
    return Scene(parts, camera, lights, atmosphere)
