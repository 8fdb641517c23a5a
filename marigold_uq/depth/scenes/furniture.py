"""Furniture and fittings, built around the origin on the floor z = 0, front towards -y."""

from __future__ import annotations

import numpy as np

from marigold_uq.depth.scenes.clutter import scattered
from marigold_uq.depth.scenes.materials import Material
from marigold_uq.depth.scenes.primitives import Primitive, box, disk, ellipsoid, frustum, heightfield, quad, rod
from marigold_uq.depth.scenes.scene import Stage, placed
from marigold_uq.depth.scenes.textures import spectral_noise


def _legs(s: Stage, width: float, depth: float, height: float, thickness: float) -> list[Primitive]:
    """Four straight legs, square or round, under a top of the given extents."""
    material = s.palette.furniture() if s.chance(0.6) else s.palette.metal()
    inset = thickness * s.uniform(0.6, 1.5)
    corners = [(a * (width / 2 - inset), b * (depth / 2 - inset)) for a in (-1, 1) for b in (-1, 1)]
    if s.chance(0.6):
        return [box((x, y, height / 2), (thickness, thickness, height), material) for x, y in corners]
    return [frustum((x, y, height / 2), thickness / 2, height, material, taper=s.uniform(0.7, 1.5)) for x, y in corners]


def table(s: Stage, clutter: int | None = None) -> list[Primitive]:
    """A table or desk with things on it."""
    width, depth, height = s.uniform(0.7, 2.2), s.uniform(0.5, 1.1), s.uniform(0.45, 0.8)
    top, thickness = s.palette.furniture(), s.uniform(0.02, 0.07)
    if s.chance(0.2):
        radius = width * 0.35
        parts = [
            disk((0, 0, height), radius, thickness, top),
            frustum((0, 0, height / 2), 0.06, height, s.palette.metal()),
        ]
        width = depth = radius * 1.3
    else:
        parts = [
            box((0, 0, height), (width, depth, thickness), top),
            *_legs(s, width, depth, height, s.uniform(0.03, 0.09)),
        ]
    if s.chance(0.25):
        parts.append(
            box((width * 0.28, 0, height / 2), (width * 0.35, depth * 0.9, height * 0.95), s.palette.furniture())
        )
    count = int(s.rng.integers(0, 7)) if clutter is None else clutter
    return parts + scattered(s, count, width * 0.9, depth * 0.9, height + thickness / 2)


def desk(s: Stage) -> list[Primitive]:
    """A desk with a monitor, a keyboard and clutter."""
    parts = table(s, clutter=int(s.rng.integers(1, 6)))
    height = float(parts[0].center[2] + parts[0].half_size[2])
    return parts + placed(monitor(s), s.uniform(-0.3, 0.3), 0.12, height, s.uniform(-30, 30))


def monitor(s: Stage) -> list[Primitive]:
    """A flat screen on a foot, and perhaps a keyboard before it."""
    width, lift, body = s.uniform(0.35, 0.75), s.uniform(0.05, 0.2), s.palette.plastic()
    tall = width * s.uniform(0.55, 0.8)
    parts = [
        box((0, 0, lift + tall / 2), (width, 0.04, tall), body),
        quad(
            (0, -0.0215, lift + tall / 2),
            (width / 2 * 0.93, 0, 0),
            (0, 0, tall / 2 * 0.9),
            s.palette.screen(),
            casts_shadow=False,
        ),
        box((0, 0.03, lift / 2), (0.08, 0.05, lift), body),
        disk((0, 0.02, 0.01), 0.12, 0.02, body),
    ]
    if s.chance(0.6):
        parts.append(
            box((s.uniform(-0.1, 0.1), -0.28, 0.012), (0.44, 0.15, 0.024), s.palette.keyboard(), yaw=s.uniform(-10, 10))
        )
    return parts


def chair(s: Stage) -> list[Primitive]:
    """Seat, legs and a back: solid, slatted, oval or upholstered."""
    width, seat, back = s.uniform(0.4, 0.55), s.uniform(0.4, 0.5), s.uniform(0.35, 0.65)
    frame = s.palette.furniture() if s.chance(0.7) else s.palette.plastic()
    cushion = s.palette.fabric() if s.chance(0.5) else frame
    parts = [box((0, 0, seat), (width, width, s.uniform(0.03, 0.1)), cushion)]
    if s.chance(0.75):
        parts += _legs(s, width, width, seat, s.uniform(0.025, 0.05))
    else:
        parts += [rod((0, 0, 0.08), (0, 0, seat), 0.03, s.palette.metal())]
        parts += [
            rod((0, 0, 0.08), (0.3 * np.cos(a), 0.3 * np.sin(a), 0.04), 0.02, frame) for a in np.arange(5) * 1.2566
        ]
    middle, rear = seat + back / 2, width / 2
    sort = s.rng.choice(["solid", "bars", "oval"])
    if sort == "solid":
        parts.append(box((0, rear, middle), (width, s.uniform(0.02, 0.1), back), cushion, tilt=s.uniform(-12, 0)))
    else:
        lean = back / 2 * np.array([0, s.uniform(0, 0.2), 1.0])
        for gap in (-0.012, 0.012):
            parts.append(
                quad(
                    (0, rear + gap, middle),
                    (width / 2, 0, 0),
                    lean,
                    frame if sort == "bars" else cushion,
                    cutout=s.mask(sort),
                )
            )
    return parts + (_armrests(width, seat, cushion) if s.chance(0.25) else [])


def _armrests(width: float, seat: float, material: Material) -> list[Primitive]:
    return [box((a * width / 2, 0, seat + 0.13), (0.06, width * 0.9, 0.22), material) for a in (-1, 1)]


def sofa(s: Stage) -> list[Primitive]:
    """Base, back, arms and cushions; an armchair if narrow."""
    width, depth, cloth = s.uniform(0.8, 2.3), s.uniform(0.75, 1.0), s.palette.fabric()
    parts = [
        box((0, 0, 0.21), (width, depth, 0.42), cloth),
        box((0, depth / 2 - 0.1, 0.45), (width, 0.22, s.uniform(0.75, 1.1)), cloth, tilt=s.uniform(-10, 0)),
        *[box((a * (width / 2 - 0.08), 0, 0.32), (0.18, depth, s.uniform(0.5, 0.7)), cloth) for a in (-1, 1)],
    ]
    for _ in range(int(s.rng.integers(0, 4))):
        parts.append(
            ellipsoid(
                (s.uniform(-0.4, 0.4) * width, 0.1, 0.55), (0.45, 0.2, 0.38), s.palette.fabric(), yaw=s.uniform(-30, 30)
            )
        )
    return parts


def bed(s: Stage) -> list[Primitive]:
    """Frame, a rumpled cover, pillows, headboard."""
    width, length, height = s.uniform(0.9, 1.9), 2.0, s.uniform(0.35, 0.6)
    relief = spectral_noise(s.rng, 1.6, size=32) * 2 - 1
    parts = [
        box((0, 0, height / 2), (width, length, height), s.palette.fabric()),
        heightfield((0, 0, height + 0.02), (width, length, s.uniform(0.03, 0.12)), relief, s.palette.fabric()),
        box((0, length / 2, 0.5), (width, 0.06, s.uniform(0.7, 1.2)), s.palette.furniture()),
    ]
    for x in (-0.25, 0.25):
        parts.append(
            ellipsoid((x * width, length / 2 - 0.3, height + 0.1), (width * 0.4, 0.4, 0.2), s.palette.fabric())
        )
    return parts


def _shelf(s: Stage) -> list[Primitive]:
    """Boards between two sides, with books and things, or empty."""
    width, depth, height = s.uniform(0.6, 1.4), s.uniform(0.25, 0.45), s.uniform(0.8, 2.2)
    wood, count, board = s.palette.furniture(), int(s.rng.integers(2, 6)), 0.025
    parts = [box((a * width / 2, 0, height / 2), (board, depth, height), wood) for a in (-1, 1)]
    if s.chance(0.8):
        parts.append(quad((0, depth / 2, height / 2), (width / 2, 0, 0), (0, 0, height / 2), wood))
    step = height / count
    fullness = s.uniform(0, 1)
    for k in range(count + 1):
        parts.append(box((0, 0, max(k * step, board)), (width, depth, board), wood))
        if k < count and s.chance(fullness):
            parts += _shelf_content(s, width, depth, k * step + board, step)
    return parts


def _shelf_content(s: Stage, width: float, depth: float, z: float, step: float) -> list[Primitive]:
    """A block of books, or things."""
    if s.chance(0.6):
        run, tall = width * s.uniform(0.3, 0.95), step * s.uniform(0.5, 0.9)
        center = (s.uniform(-0.5, 0.5) * (width - run), depth * 0.1, z + tall / 2)
        return [box(center, (run, depth * 0.6, tall), s.palette.books())]
    return scattered(s, int(s.rng.integers(1, 4)), width * 0.8, depth * 0.5, z, largest=step * 0.8)


def cabinet(s: Stage) -> list[Primitive]:
    """A cupboard, drawers or a kitchen unit with door fronts, and things on it when low."""
    width, depth = s.uniform(0.4, 1.8), s.uniform(0.35, 0.65)
    height = s.uniform(0.5, 1.0) if s.chance(0.6) else s.uniform(1.4, 2.3)
    body, front = s.palette.furniture(), s.palette.furniture()
    parts = [box((0, 0, height / 2), (width, depth, height), body)]
    columns, rows = int(s.rng.integers(1, 4)), int(s.rng.integers(1, 5))
    for i in range(columns):
        for j in range(rows):
            center = ((i + 0.5) / columns - 0.5) * width, -depth / 2 - 0.008, (j + 0.5) / rows * height
            parts.append(box(center, (width / columns * 0.94, 0.016, height / rows * 0.92), front))
            if s.chance(0.6):
                parts.append(box((center[0], center[1] - 0.02, center[2]), (0.1, 0.02, 0.02), s.palette.metal()))
    return parts + (scattered(s, int(s.rng.integers(0, 5)), width * 0.9, depth * 0.8, height) if height < 1.3 else [])


def _floor_lamp(s: Stage) -> list[Primitive]:
    """A pole with a shade."""
    height = s.uniform(0.5, 1.8)
    shade = s.palette.lamp() if s.chance(0.5) else s.palette.fabric()
    radius = s.uniform(0.1, 0.25)
    return [
        disk((0, 0, 0.015), 0.14, 0.03, s.palette.metal()),
        rod((0, 0, 0), (0, 0, height), 0.015, s.palette.metal()),
        frustum((0, 0, height), radius, radius * 1.3, shade, taper=s.uniform(0.4, 1.0)),
    ]


def plant(s: Stage) -> list[Primitive]:
    """A pot with crossed sheets of leaves."""
    pot, size = s.uniform(0.08, 0.2), s.uniform(0.3, 1.2)
    parts = [frustum((0, 0, pot), pot, 2 * pot, s.palette.ceramic(), taper=s.uniform(1.0, 1.4), opened=s.chance(0.5))]
    green, sort = s.palette.foliage(), str(s.rng.choice(["fronds", "foliage"]))
    for angle in np.arange(4) * np.pi / 4 + s.uniform(0, 1):
        right = size / 2 * np.array([np.cos(angle), np.sin(angle), 0])
        parts.append(quad((0, 0, 2 * pot + size / 2), right, (0, 0, size / 2), green, cutout=s.mask(sort)))
    return parts


def person(s: Stage) -> list[Primitive]:
    """A standing figure."""
    height = s.uniform(1.5, 1.9)
    trousers, shirt, skin = s.palette.fabric(), s.palette.fabric(), s.palette.skin()
    stride, hip = s.uniform(0.05, 0.25), height * 0.48
    parts = [rod((a * 0.09, a * stride, 0), (a * 0.08, 0, hip), 0.075, trousers) for a in (-1, 1)]
    parts += [
        rod((a * 0.22, 0, height * 0.8), (a * 0.27, s.uniform(-0.25, 0.2), height * 0.47), 0.045, shirt)
        for a in (-1, 1)
    ]
    parts.append(ellipsoid((0, 0, height * 0.66), (0.45, 0.27, height * 0.42), shirt))
    parts.append(ellipsoid((0, 0, height * 0.93), (0.17, 0.2, 0.25), skin))
    parts.append(ellipsoid((0, 0.02, height * 0.95), (0.19, 0.2, 0.23), s.palette.fabric()))
    return parts


def carton(s: Stage) -> list[Primitive]:
    """Boxes, cases, bins and bags that stand about on floors, perhaps stacked."""
    parts, z = [], 0.0
    for _ in range(int(s.rng.integers(1, 4))):
        size = s.rng.uniform(0.2, 0.7, 3)
        material = s.palette.anything()
        if s.chance(0.75):
            parts.append(box((0, 0, z + size[2] / 2), size, material, yaw=s.uniform(-20, 20)))
        else:
            parts.append(ellipsoid((0, 0, z + size[2] / 2), size, material))
            break
        z += float(size[2])
    return parts


AGAINST_WALLS = (_shelf, _shelf, cabinet, cabinet, sofa, desk, desk, bed, table, carton, plant, _floor_lamp)
IN_THE_ROOM = (table, table, chair, chair, chair, sofa, carton, desk, plant)
