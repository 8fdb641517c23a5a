"""Small things that stand or lie on a surface z = 0."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from marigold_uq.depth.scenes.camera import rotation_about
from marigold_uq.depth.scenes.primitives import Primitive, bowl, box, disk, ellipsoid, frustum, quad, rod
from marigold_uq.depth.scenes.scene import Stage, placed

Group = list[Primitive]


def package(s: Stage) -> Group:
    """A printed carton, standing or lying."""
    size = np.array([s.uniform(0.05, 0.22), s.uniform(0.03, 0.1), s.uniform(0.06, 0.3)])
    size = size if s.chance(0.6) else size[[0, 2, 1]]
    return [box((0, 0, size[2] / 2), size, s.palette.packaging())]


def book(s: Stage) -> Group:
    """One or more books or magazines, lying."""
    parts, z = [], 0.0
    for _ in range(int(s.rng.integers(1, 5)) if s.chance(0.4) else 1):
        thick, wide = s.uniform(0.004, 0.045), s.uniform(0.12, 0.22)
        parts.append(
            box(
                (0, 0, z + thick / 2),
                (wide, wide * s.uniform(1.1, 1.5), thick),
                s.palette.packaging(),
                yaw=s.uniform(-30, 30),
            )
        )
        z += thick
    return parts


def sheet(s: Stage) -> Group:
    """A sheet of paper, lying."""
    return [box((0, 0, 0.001), (0.21, 0.297, 0.002), s.palette.paper())]


def can(s: Stage) -> Group:
    """A tin, jar or roll, standing or lying."""
    radius, height = s.uniform(0.025, 0.06), s.uniform(0.04, 0.2)
    label = s.palette.packaging() if s.chance(0.6) else s.palette.plastic()
    if s.chance(0.2):
        return [frustum((0, 0, radius), radius, height, label, rotation=rotation_about(1, np.pi / 2))]
    parts = [frustum((0, 0, height / 2), radius, height, label)]
    if s.chance(0.5):
        parts.append(disk((0, 0, height + 0.004), radius * 0.98, 0.008, s.palette.metal()))
    return parts


def _bottle(s: Stage) -> Group:
    """Body, shoulder, neck and cap."""
    radius, height = s.uniform(0.025, 0.05), s.uniform(0.1, 0.22)
    body, neck = s.palette.plastic() if s.chance(0.7) else s.palette.packaging(), radius * s.uniform(0.3, 0.5)
    return [
        frustum((0, 0, height / 2), radius, height, body, taper=s.uniform(0.8, 1.1)),
        frustum((0, 0, height + radius / 2), radius * 0.95, radius, body, taper=neck / radius),
        frustum((0, 0, height + radius + 0.02), neck, 0.04, s.palette.plastic()),
    ]


def _mug(s: Stage) -> Group:
    """An open cup with a handle, or a beaker."""
    radius, height, glaze = s.uniform(0.03, 0.05), s.uniform(0.06, 0.13), s.palette.ceramic()
    parts = [frustum((0, 0, height / 2), radius, height, glaze, opened=True, taper=s.uniform(0.95, 1.3))]
    if s.chance(0.6):
        parts += [
            rod((radius, 0, height * 0.25), (radius * 1.6, 0, height * 0.35), 0.006, glaze),
            rod((radius * 1.6, 0, height * 0.35), (radius * 1.6, 0, height * 0.65), 0.006, glaze),
            rod((radius, 0, height * 0.75), (radius * 1.6, 0, height * 0.65), 0.006, glaze),
        ]
    return parts


def _dish(s: Stage) -> Group:
    """A bowl or plate."""
    radius, height = s.uniform(0.06, 0.14), s.uniform(0.02, 0.09)
    return [bowl((0, 0, height), (2 * radius, 2 * radius, 2 * height), s.palette.ceramic())]


def fruit(s: Stage) -> Group:
    """Something round."""
    size = s.rng.uniform(0.05, 0.12, 3)
    return [ellipsoid((0, 0, size[2] / 2), size, s.palette.plastic())]


def tool(s: Stage) -> Group:
    """A drill, lamp, stapler, toy: a few solids joined at odd angles."""
    parts, spot = [], np.array([0.0, 0.0, 0.04])
    for _ in range(int(s.rng.integers(2, 5))):
        step = np.append(s.rng.uniform(-0.12, 0.12, 2), s.uniform(-0.02, 0.12))
        end = np.maximum(spot + step, [-1, -1, 0.02])
        material = s.palette.plastic() if s.chance(0.7) else s.palette.metal()
        if s.chance(0.6):
            parts.append(rod(spot, end, s.uniform(0.008, 0.03), material))
        else:
            parts.append(box((spot + end) / 2, np.abs(end - spot) + 0.03, material, yaw=s.uniform(0, 90)))
        spot = end
    return parts


def _desk_lamp(s: Stage) -> Group:
    """Foot, two arms and a conical shade."""
    metal, reach = s.palette.plastic(), s.uniform(0.15, 0.35)
    elbow, head = (0.05, 0, reach), (s.uniform(0.1, 0.3), s.uniform(-0.1, 0.1), reach * s.uniform(1.0, 1.5))
    shade = frustum((head[0], head[1], head[2] - 0.05), 0.08, 0.12, metal, taper=0.4)
    return [
        disk((0, 0, 0.01), 0.08, 0.02, metal),
        rod((0, 0, 0), elbow, 0.01, metal),
        rod(elbow, head, 0.01, metal),
        shade,
    ]


def cone(s: Stage) -> Group:
    """A cone or pyramid-like toy."""
    radius = s.uniform(0.04, 0.1)
    return [frustum((0, 0, radius * 1.5), radius, radius * 3, s.palette.anything(), taper=s.uniform(0, 0.2))]


def _flowers(s: Stage) -> Group:
    """A bunch of blossoms or leaves."""
    petals, size = s.palette.plastic(), s.uniform(0.1, 0.25)
    parts = [ellipsoid((0, 0, size / 2), (size * 0.6, size * 0.6, size * 0.6), petals)]
    sort = str(s.rng.choice(["foliage", "fronds"]))
    for angle in np.arange(3) * np.pi / 3 + s.uniform(0, 1):
        right = size * 0.7 * np.array([np.cos(angle), np.sin(angle), 0])
        parts.append(quad((0, 0, size / 2), right, (0, 0, size / 2), s.palette.foliage(), cutout=s.mask(sort)))
    return parts


def _standing_figure(s: Stage) -> Group:
    """A flat cut-out figure, for outlines that no solid has."""
    size = s.uniform(0.08, 0.25)
    angle = s.uniform(0, np.pi)
    right = size / 2 * np.array([np.cos(angle), np.sin(angle), 0])
    return [quad((0, 0, size / 2), right, (0, 0, size / 2), s.palette.anything(), cutout=s.mask("silhouette"))]


def _lump(s: Stage) -> Group:
    """A few merged ellipsoids: soft toys, fruit, crumpled cloth, stones."""
    material = s.palette.fabric()
    parts = []
    for _ in range(int(s.rng.integers(2, 6))):
        size = s.rng.uniform(0.05, 0.16, 3)
        parts.append(ellipsoid((*s.rng.uniform(-0.06, 0.06, 2), s.uniform(0.03, 0.12)), size, material))
    return parts


CLUTTER: tuple[Callable[[Stage], Group], ...] = (
    package, package, package, book, book, sheet, can, can, _bottle, _bottle, _mug, _mug, _dish, fruit, tool, tool,
    _desk_lamp, cone, _flowers, _standing_figure, _lump,
)  # fmt: skip


def scattered(s: Stage, count: int, width: float, depth: float, z: float, largest: float = 0.5) -> Group:
    """`count` random things on a rectangle around the origin at height z; none taller than `largest` metres."""
    parts: Group = []
    for _ in range(count):
        group = s.one_of(CLUTTER)
        if max(float(p.corners[:, 2].max()) for p in group) > largest:
            continue
        parts += placed(group, s.uniform(-0.5, 0.5) * width, s.uniform(-0.5, 0.5) * depth, z, s.uniform(0, 360))
    return parts
