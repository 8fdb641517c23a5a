"""A small data set on disk, in the layout of `folder` with an index, and predictions of it made by others."""

import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

SIZE = (20, 28)
DEPTH_SCALE = 5000.0
GROUPS = {"desk/a": "desk", "desk/b": "desk", "desk/c": "desk", "street/a": "street", "street/b": "street"}
NUM_MEMBERS = 6

Map = NDArray[np.float64]


def write_scenes(root: Path, *, size: tuple[int, int] = SIZE) -> Path:
    """Five images in two groups of different size; a fifth of the pixels has no depth; one image holds disparities."""
    rows = []
    for number, (name, group) in enumerate(GROUPS.items()):
        rng = np.random.default_rng(number)
        depth = 1 + 4 * rng.random(size) + 3 * np.linspace(0, 1, size[0])[:, None]
        stored = np.rint(DEPTH_SCALE * depth)
        stored[rng.random(size) < 0.2] = 0
        kind = "disparity_px" if name == "street/b" else "depth_m"
        for folder, suffix, pixels in (
            ("rgb", "png", rng.integers(0, 256, (*size, 3), dtype=np.uint8)),
            ("depth", "png", stored.astype(np.uint16)),
        ):
            path = root / folder / f"{name}.{suffix}"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(path)
        rows.append({"name": name, "group": group, "kind": kind, "depth_scale": DEPTH_SCALE})
    (root / "index.json").write_text(json.dumps(rows))
    return root


def random_members(name: str, size: tuple[int, int] = SIZE, num_members: int = NUM_MEMBERS) -> NDArray[np.float32]:
    """Members (E, H, W) in units of their own that know a little of the row, with a spread that differs by pixel."""
    rng = np.random.default_rng(list(GROUPS).index(name) + 100)
    center = 0.3 * np.linspace(0, 1, size[0])[:, None] + 0.2 * rng.random(size)
    spread = 0.02 + 0.2 * rng.random(size)
    return (center + spread * rng.normal(size=(num_members, *size))).astype(np.float32)


def write_predictions(folder: Path, kind: str) -> Path:
    """An npz per image with the keys that `kind` names: samples, mean, mean+std or mean+confidence."""
    for name in GROUPS:
        members = random_members(name)
        mean, std = members.mean(axis=0), members.std(axis=0, ddof=1)
        arrays = {
            "samples": {"samples": members},
            "mean": {"mean": mean},
            "mean+std": {"mean": mean, "std": std},
            "mean+confidence": {"mean": mean, "confidence": 1 / std},
        }[kind]
        path = folder / f"{name}.npz"
        path.parent.mkdir(parents=True, exist_ok=True)
        np.savez(path, **arrays)
    return folder
