"""Crops of the freely licensed pictures that scikit-learn and scikit-image carry, for use as prints and wall papers."""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np
from numpy.typing import NDArray
from PIL import Image

CROPS_PER_PICTURE = 12
SKIMAGE_PICTURES = (  # those inside the wheel: reading them needs no download
    "astronaut.png",
    "brick.png",
    "camera.png",
    "chelsea.png",
    "coffee.png",
    "coins.png",
    "grass.png",
    "gravel.png",
    "rocket.jpg",
    "page.png",
    "text.png",
)


def _sklearn_pictures() -> list[NDArray[np.uint8]]:
    from sklearn.datasets import load_sample_images

    return list(load_sample_images().images)


def _skimage_pictures() -> list[NDArray[np.uint8]]:
    """Those of SKIMAGE_PICTURES that the installed scikit-image carries."""
    from importlib.util import find_spec

    spec = find_spec("skimage")
    if spec is None or spec.origin is None:
        raise ImportError(
            "ProceduralScenes(photographs=True) takes crops of the pictures in scikit-image, which is not installed. "
            "Run `pip install scikit-image`, or leave photographs=False for purely procedural textures."
        )
    paths = [Path(spec.origin).parent / "data" / name for name in SKIMAGE_PICTURES]
    return [np.asarray(Image.open(path).convert("RGB")) for path in paths if path.is_file()]


def photograph_crops(rng: np.random.Generator, size: int) -> list[NDArray[np.uint8]]:
    """Square crops of random extent, mirrored at random, as size x size x 3 tiles."""
    crops = []
    for picture in [*_sklearn_pictures(), *_skimage_pictures()]:
        shortest = min(picture.shape[:2])
        for _ in range(CROPS_PER_PICTURE):
            extent = int(rng.uniform(0.25, 0.95) * shortest)
            top, left = (int(rng.integers(0, n - extent)) for n in picture.shape[:2])
            crop = picture[top : top + extent, left : left + extent]
            crop = crop[:, ::-1] if rng.random() < 0.5 else crop
            crops.append(cv2.resize(np.ascontiguousarray(crop), (size, size), interpolation=cv2.INTER_AREA))
    return crops
