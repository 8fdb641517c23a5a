"""Procedural RGB-D scenes: a ray caster, furnished by chance, photographed badly on purpose."""

from marigold_uq.depth.scenes.dataset import ProceduralScenes, SceneSample
from marigold_uq.depth.scenes.layouts import DEFAULT_KINDS, LAYOUTS

__all__ = ["DEFAULT_KINDS", "LAYOUTS", "ProceduralScenes", "SceneSample"]
