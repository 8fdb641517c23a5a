"""What rooms have in common: shells with openings and decoration, and lamps."""

from __future__ import annotations

import numpy as np

from marigold_uq.depth.scenes.camera import Camera
from marigold_uq.depth.scenes.materials import Colour, as_colour
from marigold_uq.depth.scenes.primitives import Primitive, box, disk, frustum, quad, rod
from marigold_uq.depth.scenes.scene import Atmosphere, Light, Stage, placed


def lamp_colour(s: Stage) -> Colour:
    """From candle to daylight: red and blue gains move against each other."""
    warmth = s.rng.normal(0.05, 0.15)
    return (float(np.exp(warmth)), 1.0, float(np.exp(-warmth)))


def scaled(colour: Colour, factor: float) -> Colour:
    """A colour times a number."""
    return as_colour(np.array(colour) * factor)


def door(s: Stage) -> list[Primitive]:
    """A door leaf in a frame, as an opening into a lit or dark space at times; on the wall y = 0, front towards -y."""
    width, height = s.uniform(0.75, 1.0), s.uniform(1.95, 2.15)
    leaf, frame = s.palette.furniture(), s.palette.furniture()
    parts = [box((0, 0, height / 2), (width, 0.05, height), leaf)]
    parts += [box((a * width / 2, 0, height / 2), (0.09, 0.1, height), frame) for a in (-1, 1)]
    parts.append(box((0, 0, height), (width + 0.09, 0.1, 0.09), frame))
    parts.append(rod((width * 0.4, -0.06, 1.0), (width * 0.28, -0.06, 1.0), 0.012, s.palette.metal()))
    return parts


def window(s: Stage) -> list[Primitive]:
    """A bright pane with bars, a sill and perhaps curtains; on the wall y = 0."""
    width, height, sill = s.uniform(0.6, 2.2), s.uniform(0.7, 1.6), s.uniform(0.5, 1.1)
    middle, frame = sill + height / 2, s.palette.furniture()
    parts = [quad((0, -0.01, middle), (width / 2, 0, 0), (0, 0, height / 2), s.palette.window(), casts_shadow=False)]
    for x in np.linspace(-0.5, 0.5, int(s.rng.integers(2, 5))):
        parts.append(box((x * width, -0.02, middle), (0.05, 0.06, height), frame))
    parts += [box((0, -0.02, z), (width, 0.06, 0.05), frame) for z in (sill, sill + height)]
    if s.chance(0.45):
        cloth, drop = s.palette.fabric(), height + s.uniform(0.2, 0.8)
        parts += [
            box(
                (a * width * 0.55, -0.08, sill + height + 0.1 - drop / 2),
                (width * s.uniform(0.15, 0.5), 0.1, drop),
                cloth,
            )
            for a in (-1, 1)
        ]
    return parts


def picture(s: Stage) -> list[Primitive]:
    """A framed picture, poster, whiteboard or notice on the wall y = 0."""
    width, height, z = s.uniform(0.2, 1.2), s.uniform(0.2, 0.9), s.uniform(1.2, 1.8)
    parts = [quad((0, -0.025, z), (width / 2, 0, 0), (0, 0, height / 2), s.palette.poster(), casts_shadow=False)]
    if s.chance(0.6):
        parts.append(box((0, -0.01, z), (width * 1.1, 0.025, height * 1.1), s.palette.furniture()))
    return parts


def _wall_shelf(s: Stage) -> list[Primitive]:
    """A board on the wall with books."""
    width, z = s.uniform(0.5, 1.5), s.uniform(1.1, 1.8)
    parts = [box((0, -0.12, z), (width, 0.24, 0.03), s.palette.furniture())]
    if s.chance(0.8):
        parts.append(box((s.uniform(-0.2, 0.2) * width, -0.11, z + 0.13), (width * 0.6, 0.16, 0.23), s.palette.books()))
    return parts


_WALL_DECORATION = (door, window, window, picture, picture, picture, _wall_shelf)


def shell(
    s: Stage, left: float, right: float, near: float, far: float, height: float, decoration: float = 1.6
) -> list[Primitive]:
    """Floor, ceiling, four walls around [left, right] x [near, far]; `decoration`: mean number of things per wall."""
    x, y = (left + right) / 2, (near + far) / 2
    half_x, half_y = (right - left) / 2, (far - near) / 2
    paint, other = s.palette.wall(), s.palette.wall()
    parts = [
        quad((x, y, 0), (half_x, 0, 0), (0, half_y, 0), s.palette.floor(), casts_shadow=False),
        quad((x, y, height), (half_x, 0, 0), (0, half_y, 0), s.palette.wall(), casts_shadow=False),
    ]
    sides = [(x, far, half_x, 0.0), (right, y, half_y, -90.0), (x, near, half_x, 180.0), (left, y, half_y, 90.0)]
    skirting = s.palette.furniture() if s.chance(0.5) else None
    for wall_x, wall_y, half, yaw in sides:
        material = paint if s.chance(0.8) else other
        face = [quad((0, 0, height / 2), (half, 0, 0), (0, 0, height / 2), material, casts_shadow=False)]
        if skirting is not None:
            face.append(box((0, -0.01, 0.05), (2 * half, 0.02, 0.1), skirting))
        for _ in range(int(s.rng.poisson(decoration))):
            item = s.one_of(_WALL_DECORATION)
            face += placed(item, s.uniform(-0.85, 0.85) * half, 0)
        parts += placed(face, wall_x, wall_y, 0, yaw)
    return parts + (_ceiling_lamps(s, x, y, half_x, half_y, height) if s.chance(0.7) else [])


def _ceiling_lamps(s: Stage, x: float, y: float, half_x: float, half_y: float, height: float) -> list[Primitive]:
    """Tubes, panels or pendants."""
    parts: list[Primitive] = []
    for _ in range(int(s.rng.integers(1, 4))):
        spot = (x + s.uniform(-0.8, 0.8) * half_x, y + s.uniform(-0.8, 0.8) * half_y, height - 0.03)
        if s.chance(0.6):
            parts.append(
                box(spot, (s.uniform(0.1, 0.6), s.uniform(0.4, 1.3), 0.05), s.palette.lamp(), yaw=s.uniform(0, 90))
            )
        else:
            drop = s.uniform(0.1, 0.8)
            parts += [rod(spot, (spot[0], spot[1], height - drop), 0.008, s.palette.metal())]
            parts += [frustum((spot[0], spot[1], height - drop), 0.18, 0.2, s.palette.lamp(), taper=0.5)]
    return parts


def rug(s: Stage, x: float, y: float) -> list[Primitive]:
    """A carpet on the floor."""
    if s.chance(0.3):
        return [disk((x, y, 0.006), s.uniform(0.5, 1.3), 0.012, s.palette.fabric())]
    return [
        box((x, y, 0.006), (s.uniform(0.8, 2.5), s.uniform(0.8, 2.5), 0.012), s.palette.fabric(), yaw=s.uniform(0, 90))
    ]


def indoor_light(
    s: Stage, left: float, right: float, near: float, far: float, height: float
) -> tuple[list[Light], Atmosphere]:
    """One to three lamps anywhere in the room, and ambient light that may hide or dominate them."""
    lights = []
    for number in range(int(s.rng.integers(1, 4))):
        spot = np.array([s.uniform(left, right), s.uniform(near, far), height * s.uniform(0.55, 0.97)], np.float32)
        colour = scaled(lamp_colour(s), s.uniform(0.3, 1.2))
        lights.append(Light(spot, colour, radius=s.uniform(0.05, 0.7), reach=s.uniform(1.5, 6.0), shadows=number == 0))
    ambient = s.uniform(0.1, 0.8)
    above, below = scaled(lamp_colour(s), ambient), scaled(lamp_colour(s), ambient * s.uniform(0.3, 1.1))
    return lights, Atmosphere(above, below, visibility=s.uniform(20, 60) if s.chance(0.08) else float("inf"))


def without_obstruction(group: list[Primitive], camera: Camera, margin: float) -> list[Primitive]:
    """The group, or nothing if the camera is inside its bounding box grown by `margin` metres."""
    corners = np.concatenate([p.corners for p in group])
    inside = (camera.position > corners.min(axis=0) - margin) & (camera.position < corners.max(axis=0) + margin)
    return [] if inside.all() else group
