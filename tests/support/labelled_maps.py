"""Maps made by others with a known error, and the true depth behind them."""

from pathlib import Path

import numpy as np
import torch

from marigold_uq.depth.data import DepthDataset, DepthSample

SIZE = (12, 16)
OVERCONFIDENCE = 0.3
"""The stated deviation is so many times the true one."""
SCALE, SHIFT = 1 / 7, -2 / 7
"""From metres to the units of a relative map."""
MEMBERS = 8


class LabelledMaps(DepthDataset):
    """Ramps with noise; every picture of a group has the same factor on its errors."""

    def __init__(self, count: int, per_group: int = 1) -> None:
        super().__init__(count)
        self.groups = {self.name_of(i): f"group{i // per_group}" for i in range(count)} if per_group > 1 else {}

    def name_of(self, index: int) -> str:
        return f"folder/{index:03d}"

    def read(self, index: int) -> DepthSample:
        depth = torch.from_numpy(true_depth(index))[None].float()
        valid = torch.from_numpy(np.random.default_rng(index).random(SIZE) > 0.2)[None]
        return DepthSample(image=torch.full((3, *SIZE), 0.5), depth=depth, valid=valid, name=self.name_of(index))


def true_depth(index: int) -> np.ndarray:
    """Metres, (H, W)."""
    return np.linspace(1, 5, SIZE[0])[:, None] + np.random.default_rng(1000 + index).random(SIZE)


def true_std(index: int) -> np.ndarray:
    """Of the error in metres, (H, W): from .05 to .6."""
    return np.exp(np.random.default_rng(2000 + index).uniform(np.log(0.05), np.log(0.6), SIZE))


def arrays_of(index: int, kind: str, *, metric: bool = False) -> dict[str, np.ndarray]:
    """What an npz of this kind holds: samples, mean, mean+std or mean+confidence."""
    rng = np.random.default_rng(3000 + index)
    std = true_std(index)
    scale, shift = (1.0, 0.0) if metric else (SCALE, SHIFT)
    mean = scale * (true_depth(index) + std * rng.normal(size=SIZE)) + shift
    stated = OVERCONFIDENCE * scale * std
    return {
        "samples": {"samples": mean + stated * rng.normal(size=(MEMBERS, *SIZE))},
        "mean": {"mean": mean},
        "mean+std": {"mean": mean, "std": stated},
        "mean+confidence": {"mean": mean, "confidence": 1 + 0.1 / std},
    }[kind]


def write_maps(folder: Path, count: int, kind: str, *, metric: bool = False) -> Path:
    """An npz for each picture of `LabelledMaps(count)`."""
    for index in range(count):
        path = folder / f"folder/{index:03d}.npz"
        path.parent.mkdir(parents=True, exist_ok=True)
        np.savez(path, **arrays_of(index, kind, metric=metric))
    return folder
