"""From a scene to a picture with exact depth."""

from __future__ import annotations

from dataclasses import dataclass

import cv2
import numpy as np
from numpy.typing import NDArray

from marigold_uq.depth.scenes.effects import photograph
from marigold_uq.depth.scenes.lighting import albedo, shade, sky
from marigold_uq.depth.scenes.raycast import Hits, cast_camera_rays
from marigold_uq.depth.scenes.scene import Scene
from marigold_uq.depth.scenes.surface import surface_points
from marigold_uq.depth.scenes.texture_bank import TextureBank
from marigold_uq.depth.scenes.textures import spectral_noise
from marigold_uq.depth.scenes.vectors import Array, dot, norm


@dataclass(frozen=True)
class Rendering:
    """`image` (H, W, 3) in [0, 1]; `depth` (H, W) in metres; `valid` (H, W), False where only the sky is seen."""

    image: Array
    depth: Array
    valid: NDArray[np.bool_]


def radiance(scene: Scene, hits: Hits, bank: TextureBank, rng: np.random.Generator) -> Array:
    """Linear light that arrives at the camera; (H, W, 3)."""
    camera, seen = scene.camera, hits.index >= 0
    directions = camera.directions()
    picture = np.zeros((camera.height, camera.width, 3), dtype=np.float32)
    if not seen.all():
        cover = rng.uniform(0, 1)
        clouds = cv2.resize(spectral_noise(rng, 1.6, size=64), (camera.width, camera.height))[~seen]
        picture[~seen] = sky(scene.atmosphere, directions[~seen], np.clip(clouds - 1 + cover, 0, 1) * 1.5)
    rays = directions[seen]
    position = camera.position + rays * hits.depth[seen][:, None]
    viewing = rays / norm(rays)[:, None]
    points = surface_points(scene.primitives, position, viewing, hits.index[seen])
    facing = np.maximum(-dot(points.normal, viewing), np.float32(0.12))
    pixel_width = hits.depth[seen] / camera.fx / np.sqrt(facing)
    colour = albedo(points, scene.primitives, bank, pixel_width)
    picture[seen] = shade(scene, hits, points, colour, viewing, rng)
    return picture


def render(scene: Scene, bank: TextureBank, rng: np.random.Generator) -> Rendering:
    """Picture, planar depth at the pixel centres, and validity.

    Pixels of the sky are invalid and carry the largest valid depth, so that a dense depth map stays usable.
    """
    hits = cast_camera_rays(scene.camera, scene.primitives)
    valid = hits.index >= 0
    if not valid.any():
        raise ValueError("The camera sees nothing but sky; a layout must put some surface in front of its camera.")
    depth = np.where(valid, hits.depth, hits.depth[valid].max()).astype(np.float32)
    light = radiance(scene, hits, bank, rng)
    return Rendering(photograph(light, depth, rng), depth, valid)
