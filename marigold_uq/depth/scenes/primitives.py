"""Solids and surfaces that rays can hit.

Every primitive is a *unit shape* seen through an affine map,
    local = diag(1 / half_size) @ rotation.T @ (world - center).
An affine map keeps the ray parameter, so the unit shapes below return depths directly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

from marigold_uq.depth.scenes.camera import NEAR, rotation_about
from marigold_uq.depth.scenes.materials import Material
from marigold_uq.depth.scenes.vectors import Array, cross

Scalars = Sequence[Array] | Array  # x, y, z parts, each a number or an array that broadcasts with the others
INFINITY = np.float32(np.inf)
_CORNERS = np.array([[x, y, z] for x in (-1, 1) for y in (-1, 1) for z in (-1, 1)], dtype=np.float32)


@dataclass(frozen=True)
class Primitive:
    """One shape with its pose and material.

    `taper` is the top radius over the bottom radius of a frustum; `opened` removes its top cap; `cutout` is a mask of
    holes for a quad, (S, S) booleans, True where there is matter; `heights` are the samples (S, S) of a height field
    on [-1, 1]^2, which is solid below and cut off at the border of that square.
    """

    shape: str
    center: Array  # (3,)
    rotation: Array  # (3, 3), local axes as columns
    half_size: Array  # (3,)
    material: Material
    taper: float = 1.0
    opened: bool = False
    casts_shadow: bool = True
    cutout: NDArray[np.bool_] | None = None
    heights: Array | None = None

    @cached_property
    def world_to_local(self) -> Array:
        """Linear part of the map from world to the unit shape; (3, 3)."""
        return (self.rotation / self.half_size).T

    @cached_property
    def corners(self) -> Array:
        """The eight corners of the oriented bounding box; (8, 3)."""
        return (_CORNERS * self.half_size) @ self.rotation.T + self.center

    def moved(self, rotation: Array, translation: Array) -> Primitive:
        """The primitive after the rigid motion x -> rotation @ x + translation."""
        return replace(self, center=rotation @ self.center + translation, rotation=rotation @ self.rotation)


def _vector(values: ArrayLike) -> Array:
    return np.asarray(values, dtype=np.float32)


def box(center: ArrayLike, size: ArrayLike, material: Material, *, yaw: float = 0.0, tilt: float = 0.0) -> Primitive:
    """A box of full extents `size`, tilted about its x axis and then turned about the vertical (degrees)."""
    rotation = rotation_about(2, np.deg2rad(yaw)) @ rotation_about(0, np.deg2rad(tilt))
    return Primitive("box", _vector(center), rotation, _vector(size) / 2, material)


def ellipsoid(center: ArrayLike, size: ArrayLike, material: Material, *, yaw: float = 0.0) -> Primitive:
    """An ellipsoid of full extents `size`."""
    return Primitive("ellipsoid", _vector(center), rotation_about(2, np.deg2rad(yaw)), _vector(size) / 2, material)


def bowl(center: ArrayLike, size: ArrayLike, material: Material) -> Primitive:
    """The lower half shell of an ellipsoid of full extents `size`."""
    return Primitive("bowl", _vector(center), np.eye(3, dtype=np.float32), _vector(size) / 2, material)


def frustum(
    center: ArrayLike,
    radius: float,
    height: float,
    material: Material,
    *,
    taper: float = 1.0,
    opened: bool = False,
    rotation: Array | None = None,
) -> Primitive:
    """A cylinder (taper 1), cone (taper 0) or anything between, its axis along local z."""
    pose = np.eye(3, dtype=np.float32) if rotation is None else rotation
    widest = radius * max(1.0, taper)  # the bounding box must hold the wider end
    half = _vector([widest, widest, height / 2])
    return Primitive("frustum", _vector(center), pose, half, material, taper=taper, opened=opened)


def rod(start: ArrayLike, end: ArrayLike, radius: float, material: Material) -> Primitive:
    """A thin cylinder from `start` to `end`."""
    a, b = _vector(start), _vector(end)
    length = float(np.linalg.norm(b - a))
    axis = (b - a) / max(length, 1e-6)
    side = cross(axis, _vector([1, 0, 0] if abs(axis[0]) < 0.9 else [0, 1, 0]))
    side /= np.linalg.norm(side)
    pose = np.stack([side, cross(axis, side), axis], axis=1).astype(np.float32)
    return frustum((a + b) / 2, radius, length, material, rotation=pose)


def quad(
    center: ArrayLike,
    right: ArrayLike,
    up: ArrayLike,
    material: Material,
    *,
    cutout: NDArray[np.bool_] | None = None,
    casts_shadow: bool = True,
) -> Primitive:
    """A two-sided rectangle center + a * right + b * up, |a|, |b| <= 1; `right` and `up` must be orthogonal."""
    x, y = _vector(right), _vector(up)
    half = np.array([np.linalg.norm(x), np.linalg.norm(y), 1e-3], dtype=np.float32)
    x, y = x / half[0], y / half[1]
    pose = np.stack([x, y, cross(x, y)], axis=1).astype(np.float32)
    return Primitive("quad", _vector(center), pose, half, material, casts_shadow=casts_shadow, cutout=cutout)


def disk(center: ArrayLike, radius: float, thickness: float, material: Material) -> Primitive:
    """A flat upright cylinder, such as a round table top."""
    return frustum(center, radius, thickness, material)


def heightfield(
    center: ArrayLike, size: ArrayLike, heights: Array, material: Material, *, yaw: float = 0.0
) -> Primitive:
    """The surface z = heights(x, y) * size[2] / 2 over a rectangle; heights (S, S) lie in [-1, 1], rows along y."""
    pose = rotation_about(2, np.deg2rad(yaw))
    return Primitive(
        "heightfield", _vector(center), pose, _vector(size) / 2, material, heights=heights, casts_shadow=False
    )


# Unit shapes: origin and direction in local coordinates -> nearest ray parameter above NEAR, or infinity.


def _nearest(*candidates: tuple[Array, NDArray[np.bool_]], near: float) -> Array:
    """The smallest admissible ray parameter among (parameter, admissible) pairs."""
    best: Array | None = None
    for t, admissible in candidates:
        kept = np.where(admissible & (t > near), t, INFINITY)
        best = kept if best is None else np.minimum(best, kept)
    assert best is not None, "no candidate was given"
    return best


def _hit_box(p: Primitive, o: Scalars, d: Scalars, near: float) -> Array:
    enter: Array | None = None
    leave: Array | None = None
    for origin, direction in zip(o, d, strict=True):
        inverse = np.float32(1) / direction
        first, second = (-1 - origin) * inverse, (1 - origin) * inverse  # also right for directions of zero
        low, high = np.minimum(first, second), np.maximum(first, second)
        enter = low if enter is None else np.maximum(enter, low)
        leave = high if leave is None else np.minimum(leave, high)
    assert enter is not None
    assert leave is not None
    return np.where((enter < leave) & (enter > near), enter, INFINITY)


def _quadratic(a: Array, b: Array, c: Array) -> tuple[Array, Array, NDArray[np.bool_]]:
    """Both roots of a t^2 + 2 b t + c, and whether they are real."""
    discriminant = b * b - a * c
    root = np.sqrt(np.maximum(discriminant, 0))
    inverse = np.float32(1) / a
    return (-b - root) * inverse, (-b + root) * inverse, discriminant > 0


def _hit_ellipsoid(p: Primitive, o: Scalars, d: Scalars, near: float) -> Array:
    a = d[0] * d[0] + d[1] * d[1] + d[2] * d[2]
    b = o[0] * d[0] + o[1] * d[1] + o[2] * d[2]
    c = o[0] * o[0] + o[1] * o[1] + o[2] * o[2] - np.float32(1)
    first, second, real = _quadratic(a, b, c)
    if p.shape == "ellipsoid":
        return _nearest((first, real), near=near)
    return _nearest((first, real & (o[2] + first * d[2] < 0)), (second, real & (o[2] + second * d[2] < 0)), near=near)


def _hit_frustum(p: Primitive, o: Scalars, d: Scalars, near: float) -> Array:
    """Side x^2 + y^2 = r(z)^2 with r linear in z, and two caps."""
    bottom, top = 1 / max(1.0, p.taper), p.taper / max(1.0, p.taper)
    mean, slope = np.float32((bottom + top) / 2), np.float32((top - bottom) / 2)
    radius = mean + slope * o[2]
    a = d[0] * d[0] + d[1] * d[1] - slope * slope * d[2] * d[2]
    b = o[0] * d[0] + o[1] * d[1] - slope * radius * d[2]
    c = o[0] * o[0] + o[1] * o[1] - radius * radius
    first, second, real = _quadratic(a, b, c)
    sides = [(t, real & (np.abs(o[2] + t * d[2]) < 1)) for t in (first, second)]
    caps = []
    for level, cap_radius in ((-1, bottom),) if p.opened else ((-1, bottom), (1, top)):
        t = (np.float32(level) - o[2]) / d[2]
        x, y = o[0] + t * d[0], o[1] + t * d[1]
        caps.append((t, x * x + y * y < np.float32(cap_radius**2)))
    return _nearest(*sides, *caps, near=near)


def _hit_quad(p: Primitive, o: Scalars, d: Scalars, near: float) -> Array:
    t = -o[2] / d[2]
    x, y = o[0] + t * d[0], o[1] + t * d[1]
    inside = (np.abs(x) < 1) & (np.abs(y) < 1)
    if p.cutout is not None:
        size = p.cutout.shape[0]
        column = np.where(inside, (x + 1) * (size / 2), 0).astype(np.int32)
        row = np.where(inside, (1 - y) * (size / 2), 0).astype(np.int32)
        inside &= p.cutout[np.minimum(row, size - 1), np.minimum(column, size - 1)]
    return _nearest((t, inside), near=near)


def sample_heights(heights: Array, x: Array, y: Array) -> Array:
    """Bilinear interpolation of a height field at local x, y in [-1, 1] (clamped)."""
    last = heights.shape[0] - 1
    column = np.clip((x + 1) * (last / 2), 0, last - 1e-3).astype(np.float32)
    row = np.clip((y + 1) * (last / 2), 0, last - 1e-3).astype(np.float32)
    j, i = column.astype(np.int32), row.astype(np.int32)
    u, v = column - j, row - i
    flat = heights.ravel()
    index = i * (last + 1) + j
    upper = flat[index] * (1 - u) + flat[index + 1] * u
    lower = flat[index + last + 1] * (1 - u) + flat[index + last + 2] * u
    return upper * (1 - v) + lower * v


def _hit_heightfield(p: Primitive, o: Scalars, d: Scalars, near: float, steps: int = 72, refinements: int = 9) -> Array:
    """March geometrically growing steps through the bounding box, then bisect the first crossing from above."""
    heights = p.heights
    assert heights is not None
    slabs = [(-origin / direction, np.abs(1 / direction)) for origin, direction in zip(o, d, strict=True)]
    enter = np.maximum.reduce([middle - reach for middle, reach in slabs])
    leave = np.minimum.reduce([middle + reach for middle, reach in slabs])
    result = np.full(enter.shape, INFINITY)
    start = np.maximum(enter, near)
    active = np.flatnonzero(leave > start)
    direction = [np.broadcast_to(c, enter.shape).ravel()[active] for c in d]
    begin, ratio = start.ravel()[active], (leave.ravel()[active] / start.ravel()[active]) ** (1 / steps)

    def above(t: Array, rows: NDArray[np.intp] | slice = slice(None)) -> NDArray[np.bool_]:
        x, y, z = (origin + t * c[rows] for origin, c in zip(o, direction, strict=True))
        return z > sample_heights(heights, x, y)

    pending, low = np.arange(len(active)), begin.copy()
    high = np.full_like(begin, INFINITY)
    for _ in range(steps):
        ahead = low[pending] * ratio[pending]
        over = above(ahead, pending)
        high[pending[~over]] = ahead[~over]
        pending = pending[over]
        low[pending] = ahead[over]
    hit = np.flatnonzero(np.isfinite(high))
    low, high = low[hit], high[hit]
    for _ in range(refinements):
        middle = (low + high) / 2
        over = above(middle, hit)
        low, high = np.where(over, middle, low), np.where(over, high, middle)
    result.ravel()[active[hit]] = (low + high) / 2
    return result


_INTERSECTIONS: dict[str, Callable[[Primitive, Scalars, Scalars, float], Array]] = {
    "box": _hit_box,
    "ellipsoid": _hit_ellipsoid,
    "bowl": _hit_ellipsoid,
    "frustum": _hit_frustum,
    "quad": _hit_quad,
    "heightfield": _hit_heightfield,
}


def intersect(primitive: Primitive, origin: Scalars, direction: Scalars, near: float = NEAR) -> Array:
    """Smallest ray parameter > `near` at which a ray in local coordinates meets the primitive; infinity if none."""
    return _INTERSECTIONS[primitive.shape](primitive, origin, direction, near)
