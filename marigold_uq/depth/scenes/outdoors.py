"""Things found out of doors, built around the origin on the ground z = 0, front towards -y."""

from __future__ import annotations

import numpy as np

from marigold_uq.depth.scenes.camera import rotation_about
from marigold_uq.depth.scenes.primitives import Primitive, box, ellipsoid, frustum, quad, rod
from marigold_uq.depth.scenes.scene import Stage

Group = list[Primitive]


def car(s: Stage) -> Group:
    """Body, cabin with dark windows, wheels, lights; its length along y."""
    length, width, paint = s.uniform(3.6, 4.9), s.uniform(1.6, 1.9), s.palette.plastic()
    dark = s.palette.metal()
    tall = s.uniform(1.35, 2.1)
    cabin = length * s.uniform(0.45, 0.8)
    parts = [
        box((0, 0, 0.58), (width, length, 0.62), paint),
        box((0, length * 0.03, (0.85 + tall) / 2), (width * 0.88, cabin, tall - 0.85), dark),
        box((0, length * 0.03, tall), (width * 0.84, cabin * 0.8, 0.08), paint),
    ]
    for x in (-1, 1):
        for y in (-0.31, 0.31):
            tyre = s.palette.plastic() if s.chance(0.1) else dark
            parts.append(
                frustum((x * width * 0.46, y * length, 0.32), 0.32, 0.22, tyre, rotation=rotation_about(1, np.pi / 2))
            )
        for y in (-1, 1):
            parts.append(
                box(
                    (x * width * 0.36, y * length / 2, 0.68),
                    (0.3, 0.06, 0.14),
                    s.palette.lamp() if s.chance(0.4) else s.palette.ceramic(),
                )
            )
    return parts


def pole(s: Stage) -> Group:
    """A lamp post, traffic sign or bollard."""
    height, metal = s.uniform(1.0, 7.0), s.palette.metal()
    parts = [rod((0, 0, 0), (0, 0, height), s.uniform(0.03, 0.1), metal)]
    if height > 4:
        parts.append(rod((0, 0, height), (s.uniform(-1.5, 1.5), 0, height + 0.2), 0.05, metal))
    elif s.chance(0.7):
        cutout = s.mask("oval") if s.chance(0.5) else None
        parts.append(quad((0, -0.1, height), (0.35, 0, 0), (0, 0, 0.35), s.palette.poster(), cutout=cutout))
    return parts


def tree(s: Stage) -> Group:
    """A trunk and a crown of crossed leaf sheets around a dark core, or bare branches."""
    height, spread = s.uniform(3, 12), s.uniform(0.25, 0.5)
    crown = height * spread
    bark, green = s.palette.wood(), s.palette.foliage()
    parts = [frustum((0, 0, height * 0.3), height * s.uniform(0.015, 0.035), height * 0.6, bark, taper=0.6)]
    sort = "foliage" if s.chance(0.8) else "branches"
    middle = height - crown
    if sort == "foliage":
        parts.append(ellipsoid((0, 0, middle), (crown * 1.3, crown * 1.3, crown * 1.6), green))
    for angle in np.arange(4) * np.pi / 4 + s.uniform(0, 1):
        right = crown * np.array([np.cos(angle), np.sin(angle), 0])
        parts.append(
            quad((0, 0, middle), right, (0, 0, crown), green if sort == "foliage" else bark, cutout=s.mask(sort))
        )
    return parts


def bush(s: Stage) -> Group:
    """A few leafy ellipsoids with ragged sheets before them."""
    green, size = s.palette.foliage(), s.uniform(0.6, 2.0)
    parts = []
    for _ in range(int(s.rng.integers(2, 5))):
        extent = s.rng.uniform(0.5, 1.0, 3) * size
        parts.append(
            ellipsoid((s.uniform(-0.5, 0.5) * size, s.uniform(-0.5, 0.5) * size, extent[2] * 0.4), extent, green)
        )
    for _ in range(2):
        parts.append(
            quad(
                (s.uniform(-0.4, 0.4) * size, -size * 0.5, size * 0.4),
                (size * 0.6, 0, 0),
                (0, 0, size * 0.5),
                green,
                cutout=s.mask("foliage"),
            )
        )
    return parts


def fence(s: Stage, length: float) -> Group:
    """A wall, hedge, railing or lattice fence along y."""
    height = s.uniform(0.6, 2.2)
    sort = s.rng.integers(3)
    if sort == 0:
        material = s.palette.facade() if s.chance(0.5) else s.palette.wall()
        return [box((0, 0, height / 2), (s.uniform(0.15, 0.4), length, height), material)]
    if sort == 1:
        return [box((0, 0, height / 2), (s.uniform(0.5, 1.2), length, height), s.palette.foliage())]
    cutout, metal, count = (
        s.mask("bars" if s.chance(0.5) else "lattice"),
        s.palette.metal(),
        max(1, round(length / (2 * height))),
    )
    run = length / count
    spots = (np.arange(count) + 0.5) * run - length / 2
    return [quad((0, y, height / 2), (0, run / 2, 0), (0, 0, height / 2), metal, cutout=cutout) for y in spots]


def building(s: Stage, width: float, depth: float) -> Group:
    """A block with windows, ledges and a door; its front is x = 0 and runs along y, its body extends towards +x."""
    height = s.uniform(4, 18)
    parts = [box((depth / 2, 0, height / 2), (depth, width, height), s.palette.facade())]
    if s.chance(0.5):
        parts.append(
            box(
                (depth / 2, 0, height), (depth + s.uniform(0.2, 1.0), width, s.uniform(0.2, 1.2)), s.palette.furniture()
            )
        )
    if s.chance(0.6):
        parts.append(
            box((-0.03, s.uniform(-0.3, 0.3) * width, 1.1), (0.1, s.uniform(0.9, 2.5), 2.2), s.palette.furniture())
        )
    for _ in range(int(s.rng.integers(0, 4))):
        z = s.uniform(1.5, height)
        parts.append(
            box(
                (-0.1, s.uniform(-0.4, 0.4) * width, z),
                (s.uniform(0.1, 0.9), s.uniform(0.5, 3), s.uniform(0.1, 0.6)),
                s.palette.anything(),
            )
        )
    return parts


def bicycle(s: Stage) -> Group:
    """Two ring wheels and a frame."""
    metal, tyre = s.palette.metal(), s.palette.plastic()
    ring = np.hypot(*np.mgrid[-1:1:96j, -1:1:96j])
    wheel = (ring < 1) & (ring > 0.86)
    parts = [quad((0, y, 0.34), (0, 0.34, 0), (0, 0, 0.34), tyre, cutout=wheel) for y in (-0.55, 0.55)]
    joints: list[tuple[tuple[float, ...], tuple[float, ...]]] = [
        ((0, -0.55, 0.34), (0, -0.4, 0.95)),
        ((0, -0.42, 0.8), (0, 0.15, 0.8)),
        ((0, -0.42, 0.75), (0, 0.05, 0.3)),
        ((0, 0.05, 0.3), (0, 0.2, 0.9)),
        ((0, 0.05, 0.3), (0, 0.55, 0.34)),
        ((-0.25, -0.4, 0.97), (0.25, -0.4, 0.97)),
    ]
    return parts + [rod(a, b, 0.02, metal) for a, b in joints]
