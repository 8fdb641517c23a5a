"""Running `marigold-uq depth` in a test: models of random weights, pictures, and what was written."""

from pathlib import Path

import numpy as np
from PIL import Image

from marigold_uq.cli import main
from support.tiny_depth import picture, tiny_pipeline


def save_models(folder: Path) -> Path:
    """Folders "gaussian" and "point" with a model each."""
    for family in ("gaussian", "point"):
        tiny_pipeline(family, default_processing_resolution=16).save_pretrained(folder / family)
    return folder


def save_picture(path: Path, *, height: int = 12, width: int = 16, seed: int = 0) -> Path:
    Image.fromarray((picture(height, width, seed) * 255).astype(np.uint8)).save(path)
    return path


def run(*words: object) -> int:
    return main([str(word) for word in words])


def depth(models: Path, *words: object, family: str = "gaussian") -> int:
    """`marigold-uq depth` with 3 members; the exit code."""
    return run("depth", *words, "--model", models / family, "--ensemble_size", 3, "--device", "cpu")


def read_npz(path: Path) -> dict[str, np.ndarray]:
    with np.load(path) as file:
        return {name: file[name] for name in file.files}


def noisy_scene(count: int, height: int = 12, width: int = 16) -> list[np.ndarray]:
    """The same scene in every frame, with a little camera noise."""
    random = np.random.default_rng(0)
    scene = picture(height, width)
    frames = [scene + 0.01 * random.standard_normal(scene.shape) for _ in range(count)]
    return [(np.clip(frame, 0, 1) * 255).astype(np.uint8) for frame in frames]
