"""Samples kept on disk in shards of plain numpy arrays: rendered once, read many times, by many processes."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from marigold_uq.depth.data.base import DepthDataset
from marigold_uq.depth.data.sample import DepthSample
from marigold_uq.files import atomic_folder, fingerprint

_INDEX = "shard.json"


def write_shard(folder: Path, arrays: Mapping[str, np.ndarray], names: Iterable[str]) -> None:
    """One array per key, all of one length, and the samples' names; the folder appears when it is complete."""
    names = list(names)
    lengths = {key: len(array) for key, array in arrays.items()}
    if set(lengths.values()) != {len(names)}:
        raise ValueError(f"a shard needs arrays of one length; got {lengths} and {len(names)} names")
    with atomic_folder(folder) as temporary:
        for key, array in arrays.items():
            np.save(temporary / f"{key}.npy", array)
        index = {"keys": sorted(arrays), "names": names, "hashes": {k: fingerprint(v) for k, v in arrays.items()}}
        (temporary / _INDEX).write_text(json.dumps(index), encoding="utf-8")


def damage_of(folder: Path) -> str | None:
    """What is wrong with a shard; None for a whole one. One that older versions wrote has no hashes to compare."""
    try:
        index = json.loads((folder / _INDEX).read_text(encoding="utf-8"))
        for key in index["keys"]:
            array = np.load(folder / f"{key}.npy", mmap_mode="r")
            if len(array) != len(index["names"]):
                return f"{key}.npy has {len(array)} rows for {len(index['names'])} names"
            if "hashes" in index and fingerprint(np.asarray(array)) != index["hashes"][key]:
                return f"{key}.npy is not what was written"
    except (OSError, ValueError, KeyError) as error:
        return f"{type(error).__name__}: {error}"
    return None


class Shards(Dataset[dict[str, Any]]):
    """All samples of the shards below a folder, in the order of the shards' names; arrays are mapped, not loaded."""

    def __init__(self, root: Path | str, *, start: int = 0, length: int | None = None) -> None:
        self.root = Path(root)
        self.folders = sorted(path.parent for path in self.root.glob(f"*/{_INDEX}"))
        if not self.folders:
            raise FileNotFoundError(f"no shards below {self.root}: expected folders that hold {_INDEX}")
        self._indices = [json.loads((folder / _INDEX).read_text(encoding="utf-8")) for folder in self.folders]
        self._ends = np.cumsum([len(index["names"]) for index in self._indices]).tolist()
        self._arrays: dict[int, dict[str, np.ndarray]] = {}
        available = self._ends[-1] - start
        if start < 0 or available < 1 or (length is not None and length > available):
            raise ValueError(f"{self.root} has {self._ends[-1]} samples; cannot take {length} from {start} on")
        self.start, self.length = start, available if length is None else length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < self.length:
            raise IndexError(f"index {index} of {self.length} samples")
        shard, row = self._place(index)
        sample: dict[str, Any] = {key: torch.from_numpy(array[row].copy()) for key, array in self._open(shard).items()}
        return {**sample, "name": self._indices[shard]["names"][row]}

    def name_of(self, index: int) -> str:
        """The name of sample `index`, without reading it."""
        shard, row = self._place(index)
        return str(self._indices[shard]["names"][row])

    def shards(self) -> Iterator[tuple[Path, dict[str, np.ndarray], list[str]]]:
        """Every shard whole: its folder, its arrays (mapped, not loaded) and the names of its samples."""
        for number, folder in enumerate(self.folders):
            yield folder, self._open(number), list(self._indices[number]["names"])

    def _place(self, index: int) -> tuple[int, int]:
        """The shard of sample `index` and its row there."""
        shard = bisect_right(self._ends, self.start + index)
        return shard, self.start + index - (self._ends[shard - 1] if shard else 0)

    def _open(self, shard: int) -> dict[str, np.ndarray]:
        if shard not in self._arrays:
            folder = self.folders[shard]
            self._arrays[shard] = {
                key: np.load(folder / f"{key}.npy", mmap_mode="r") for key in self._indices[shard]["keys"]
            }
        return self._arrays[shard]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_arrays": {}}  # workers map the files themselves


class _SceneShards(Shards):
    """Rendered scenes as depth samples: image uint8, depth float16 metres and valid on disk, floats on reading."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        sample = super().__getitem__(index)
        return {**sample, "image": sample["image"].float() / 255, "depth": sample["depth"].float()}


class LatentShards(Shards):
    """Encoded samples: image_latent, depth_latent and baseline_latent (C, h, w) float16, and latent_valid (1, h, w).

    There is a baseline_latent where there is a baseline.
    """


class RenderedScenes(DepthDataset):
    """`length` scenes from `start` on, of those in the shards below a folder."""

    def __init__(self, root: str | Path, *, start: int = 0, length: int | None = None, on_error: str = "raise") -> None:
        self.scenes = _SceneShards(root, start=start, length=length)
        super().__init__(len(self.scenes), on_error)

    def name_of(self, index: int) -> str:
        return self.scenes.name_of(index)

    def read(self, index: int) -> DepthSample:
        sample = self.scenes[index]
        return DepthSample(image=sample["image"], depth=sample["depth"], valid=sample["valid"], name=sample["name"])
