"""Rendered scenes on disk (scripts/render_scenes.py) as a depth data set."""

from __future__ import annotations

from pathlib import Path

from marigold_uq.depth.data.base import DepthDataset
from marigold_uq.depth.data.sample import DepthSample
from marigold_uq.depth.data.shards import SceneShards


class RenderedScenes(DepthDataset):
    """`length` scenes from `start` on, of those in the shards below a folder."""

    def __init__(self, root: str | Path, *, start: int = 0, length: int | None = None, on_error: str = "raise") -> None:
        self.scenes = SceneShards(root, start=start, length=length)
        super().__init__(len(self.scenes), on_error)

    def name_of(self, index: int) -> str:
        return self.scenes.name_of(index)

    def read(self, index: int) -> DepthSample:
        sample = self.scenes[index]
        return DepthSample(image=sample["image"], depth=sample["depth"], valid=sample["valid"], name=sample["name"])
