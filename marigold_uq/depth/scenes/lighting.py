"""Shading: lamps with soft shadows, light from all around, occlusion in corners, highlights, haze."""

from __future__ import annotations

from collections.abc import Sequence

import cv2
import numpy as np

from marigold_uq.depth.scenes.materials import Material
from marigold_uq.depth.scenes.primitives import Primitive
from marigold_uq.depth.scenes.raycast import Hits, light_visibility
from marigold_uq.depth.scenes.scene import Atmosphere, Light, Scene
from marigold_uq.depth.scenes.surface import SurfacePoints
from marigold_uq.depth.scenes.texture_bank import TextureBank
from marigold_uq.depth.scenes.vectors import Array, dot, norm

_SHADOW_STRIDE = 3  # shadow rays start at every third pixel of both axes; soft shadows hide it


def _per_point(materials: Sequence[Material], points: SurfacePoints, name: str) -> Array:
    """A material parameter gathered for every point: (N,) or (N, 3)."""
    return np.array([getattr(m, name) for m in materials], dtype=np.float32)[points.owner]


def albedo(points: SurfacePoints, primitives: Sequence[Primitive], bank: TextureBank, pixel_width: Array) -> Array:
    """Diffuse reflectance (N, 3); `pixel_width` (N,) is the width of a pixel at the point in metres."""
    materials = [p.material for p in primitives]
    extents = np.array(
        [
            m.tile if m.tile > 0 else 2 * float(np.sort(p.half_size)[1])
            for m, p in zip(materials, primitives, strict=True)
        ],
        dtype=np.float32,
    )
    texture = np.array([m.texture for m in materials], dtype=np.int64)[points.owner]
    shade = bank.lookup(texture, points.uv[:, 0], points.uv[:, 1], pixel_width / extents[points.owner])
    dark, light = _per_point(materials, points, "dark"), _per_point(materials, points, "light")
    return dark + (light - dark) * shade


def corner_occlusion(depth: Array, strength: float) -> Array:
    """Ambient light that reaches each pixel, (H, W) in (0, 1]: less where the surroundings stand nearer than it."""
    width = depth.shape[1]
    inverse = 1 / depth  # planes stay planes in inverse depth, so that slanted floors are not darkened
    closed = np.zeros_like(depth)
    for share in (0.03, 0.12):
        side = max(3, int(share * width) | 1)
        around = cv2.blur(inverse, (side, side), borderType=cv2.BORDER_REFLECT)
        closed += np.clip((around - inverse) / inverse / (share * 8), 0, 1)
    return 1 - strength * np.clip(closed / 2, 0, 1)


def _shadow(
    light: Light, hits: Hits, points: SurfacePoints, primitives: Sequence[Primitive], rng: np.random.Generator
) -> Array:
    """Share of a lamp seen from each pixel, (H, W).

    Each coarse pixel looks at a random point of the lamp, then neighbours are averaged.
    """
    height, width = hits.depth.shape
    seen = hits.index >= 0
    row = np.cumsum(seen).reshape(seen.shape)[::_SHADOW_STRIDE, ::_SHADOW_STRIDE] - 1  # of the point a pixel sees
    coarse = seen[::_SHADOW_STRIDE, ::_SHADOW_STRIDE]
    row = row[coarse]
    distance = hits.depth[::_SHADOW_STRIDE, ::_SHADOW_STRIDE][coarse]
    start = points.position[row] + points.normal[row] * (0.004 * distance[:, None] + 0.002)  # off the surface itself
    target = light.position + light.radius * 0.6 * rng.standard_normal((len(row), 3), dtype=np.float32)
    visible = np.ones(coarse.shape, dtype=np.float32)
    visible[coarse] = light_visibility(start, target, primitives)
    side = 3 if light.radius < 0.15 else 5
    visible = cv2.blur(visible, (side, side), borderType=cv2.BORDER_REFLECT)
    return cv2.resize(visible, (width, height), interpolation=cv2.INTER_LINEAR)


def _lamp_terms(
    light: Light, points: SurfacePoints, viewing: Array, gloss: Array, shininess: Array
) -> tuple[Array, Array]:
    """Diffuse (N,) and specular (N,) response to one unshadowed lamp."""
    towards = light.position - points.position
    distance = norm(towards)
    towards /= distance[:, None]
    strength = 1 / (1 + (distance / light.reach) ** 2)
    diffuse = np.maximum(dot(points.normal, towards), 0) * strength
    half = towards - viewing
    half /= norm(half)[:, None] + np.float32(1e-9)
    specular = np.exp(shininess * np.log(np.maximum(dot(points.normal, half), np.float32(1e-4)))) * gloss * strength
    return diffuse, specular


def _ambient(atmosphere: Atmosphere, normal: Array) -> Array:
    """Light from the upper and the lower half space; (N, 3)."""
    up = (normal[:, 2:] + 1) / 2
    return np.asarray(atmosphere.above, np.float32) * up + np.asarray(atmosphere.below, np.float32) * (1 - up)


def sky(atmosphere: Atmosphere, directions: Array, clouds: Array) -> Array:
    """Colour of the sky along directions (N, 3) with `clouds` (N,) in [0, 1]."""
    elevation = directions[:, 2:] / norm(directions)[:, None]
    mix = np.clip(elevation * 2, 0, 1) ** 0.6
    blue = np.asarray(atmosphere.horizon, np.float32) * (1 - mix) + np.asarray(atmosphere.zenith, np.float32) * mix
    return blue + (1 - blue) * clouds[:, None]


def shade(
    scene: Scene, hits: Hits, points: SurfacePoints, colour: Array, viewing: Array, rng: np.random.Generator
) -> Array:
    """Radiance (N, 3) of the hit pixels, whose reflectance is `colour` and viewing directions are `viewing` (unit)."""
    seen = hits.index >= 0
    materials = [p.material for p in scene.primitives]
    gloss, shininess, glow = (_per_point(materials, points, name) for name in ("gloss", "shininess", "glow"))
    filled = np.where(seen, hits.depth, hits.depth[seen].max() if seen.any() else 1)
    occlusion = corner_occlusion(filled, float(rng.uniform(0.3, 0.9)))[seen][:, None]
    bounce = colour.mean(axis=0) / max(float(colour.mean()), 1e-3)  # light between surfaces takes on their mean colour
    light_sum = _ambient(scene.atmosphere, points.normal) * occlusion * (0.6 + 0.4 * bounce)
    highlight = np.zeros_like(colour)
    for lamp in scene.lights:
        diffuse, specular = _lamp_terms(lamp, points, viewing, gloss, shininess)
        if lamp.shadows:
            shadow = _shadow(lamp, hits, points, scene.primitives, rng)[seen]
            diffuse, specular = diffuse * shadow, specular * shadow
        light_sum += diffuse[:, None] * np.asarray(lamp.colour, np.float32)
        highlight += specular[:, None] * np.asarray(lamp.colour, np.float32)
    radiance = colour * light_sum + highlight + colour * glow[:, None]
    if np.isfinite(scene.atmosphere.visibility):
        clear = np.exp(-hits.depth[seen] / scene.atmosphere.visibility)[:, None]
        radiance = radiance * clear + np.asarray(scene.atmosphere.horizon, np.float32) * (1 - clear)
    return radiance
