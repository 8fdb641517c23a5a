"""`ProceduralScenes`: an endless supply of photographs with exact depth, as a torch data set."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import numpy as np
import torch

from marigold_uq.depth.data.base import DepthDataset
from marigold_uq.depth.data.sample import DepthSample
from marigold_uq.depth.scenes.layouts import DEFAULT_KINDS, LAYOUTS
from marigold_uq.depth.scenes.materials import Palette
from marigold_uq.depth.scenes.renderer import Rendering, render
from marigold_uq.depth.scenes.scene import Stage
from marigold_uq.depth.scenes.texture_bank import texture_bank

SPLITS = ("train", "validation", "test")
_MIN_RELATIVE_RANGE = 0.03  # a picture whose depth varies by less teaches nothing and is drawn again


class SceneSample(DepthSample):
    """One item of `ProceduralScenes`: depth in metres along the optical axis, not valid in the sky."""

    kind: str


class ProceduralScenes(DepthDataset):
    """Rendered indoor and outdoor scenes with exact planar depth.

    Sample i is a function of (seed, split, i) alone: it does not depend on the length, on workers, on order or on
    batches. Splits draw from disjoint random streams. Sky is invalid; there `depth` holds the largest valid depth.

    Args:
        length: number of samples.
        seed: any non-negative integer.
        height, width: size of the pictures in pixels.
        split: "train", "validation" or "test".

    Other Arguments:
        kinds: relative frequency of the kinds of scene, name -> weight; None for `DEFAULT_KINDS`.
        photographs: also use crops of the freely licensed pictures inside scikit-learn and scikit-image (must be
            installed) as prints on surfaces.
    """

    def __init__(
        self,
        length: int,
        seed: int = 0,
        height: int = 192,
        width: int = 256,
        kinds: Mapping[str, float] | None = None,
        split: Literal["train", "validation", "test"] = "train",
        photographs: bool = False,
    ) -> None:
        if length < 1 or seed < 0 or min(height, width) < 16:
            raise ValueError(
                f"length={length}, seed={seed}, height={height}, width={width}: "
                "expected length >= 1, seed >= 0 and at least 16 x 16 pixels."
            )
        if split not in SPLITS:
            raise ValueError(f"split={split!r} is unknown; choose one of {', '.join(SPLITS)}.")
        super().__init__(length)
        self.length, self.seed, self.split = length, seed, split
        self.height, self.width, self.photographs = height, width, photographs
        self.kinds = _checked_kinds(DEFAULT_KINDS if kinds is None else kinds)

    def name_of(self, index: int) -> str:
        return f"{self.split}_{self.seed}_{index:07d}"

    def read(self, index: int) -> SceneSample:
        kind, rendering = self._render(index)
        return SceneSample(
            image=torch.from_numpy(np.ascontiguousarray(rendering.image.transpose(2, 0, 1))),
            depth=torch.from_numpy(rendering.depth[None]),
            valid=torch.from_numpy(rendering.valid[None]),
            name=self.name_of(index),
            kind=kind,
        )

    def _render(self, index: int, attempts: int = 8) -> tuple[str, Rendering]:
        """Draw until the picture shows enough valid depth; each attempt has its own random stream."""
        for attempt in range(attempts):
            key = (SPLITS.index(self.split), index, attempt)
            rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence(self.seed, spawn_key=key)))
            names = list(self.kinds)
            kind = names[int(rng.choice(len(names), p=list(self.kinds.values())))]
            bank = texture_bank(self.photographs)
            scene = LAYOUTS[kind](Stage(rng, Palette(rng, bank), bank, self.height, self.width))
            rendering = render(scene, bank, rng)
            if _is_useful(rendering):
                break
        return kind, rendering


def _is_useful(rendering: Rendering) -> bool:
    """At least a third valid, and depth that varies."""
    if rendering.valid.mean() < 1 / 3:
        return False
    low, high = np.percentile(rendering.depth[rendering.valid], [2, 98])
    return bool(high - low > _MIN_RELATIVE_RANGE * low)


def _checked_kinds(kinds: Mapping[str, float]) -> dict[str, float]:
    """Frequencies that sum to one, in the order of LAYOUTS."""
    unknown = sorted(set(kinds) - set(LAYOUTS))
    if unknown:
        raise ValueError(f"kinds has unknown names {unknown}; known kinds are {', '.join(LAYOUTS)}.")
    total = float(sum(kinds.values()))
    if total <= 0 or min(kinds.values()) < 0:
        raise ValueError(f"kinds={dict(kinds)} must be non-negative weights with a positive sum.")
    return {name: float(kinds[name]) / total for name in LAYOUTS if kinds.get(name, 0) > 0}
