"""Render procedural scenes to disk, so that training does not wait for them. Resumable: finished shards are kept.

python scripts/render_scenes.py --output scenes/train --length 20000 --split train --processes 2
"""

import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from tqdm.auto import tqdm

from marigold_uq.commands.runner import Invocation, run_command
from marigold_uq.depth.data.shards import write_shard
from marigold_uq.depth.scenes import ProceduralScenes
from marigold_uq.files import make_folder


@dataclass(frozen=True)
class RenderOptions:
    """Render procedural scenes with exact depth to shards on disk.

    Args:
        output: Folder for the shards; finished ones in it are kept.
        length: Number of scenes.
        split: Splits draw from disjoint random streams.
        seed: Other scenes.
        height: Of the pictures, in pixels.
        width: Of the pictures, in pixels.
        shard_size: Scenes per shard.
        processes: Shards are shared out over so many.
    """

    output: Path
    length: int = 20_000
    split: Literal["train", "validation", "test"] = "train"
    seed: int = 0
    height: int = 192
    width: int = 256
    shard_size: int = 250
    processes: int = 1

    def __post_init__(self) -> None:
        if min(self.length, self.shard_size, self.processes) < 1:
            raise ValueError(
                "length, shard_size and processes must be at least 1; got "
                f"{self.length}, {self.shard_size} and {self.processes}"
            )


def render_shard(folder: Path, settings: dict[str, Any], indices: range) -> None:
    """Render the scenes of one shard."""
    torch.set_num_threads(1)
    scenes = ProceduralScenes(**settings)
    samples = [scenes.read(i) for i in indices]
    arrays = {
        "image": np.stack([(255 * s["image"]).round().to(torch.uint8).numpy() for s in samples]),
        "depth": np.stack([s["depth"].to(torch.float16).numpy() for s in samples]),
        "valid": np.stack([s["valid"].numpy() for s in samples]),
    }
    write_shard(folder, arrays, [s["name"] for s in samples])


def render(options: RenderOptions, invocation: Invocation) -> int:
    """Render what is missing."""
    make_folder(options.output)
    settings = {name: getattr(options, name) for name in ("length", "seed", "height", "width", "split")}
    settings["photographs"] = True
    jobs = []
    for first in range(0, options.length, options.shard_size):
        folder = options.output / f"{first:07d}"
        if not folder.exists():
            jobs.append((folder, settings, range(first, min(options.length, first + options.shard_size))))
    with ProcessPoolExecutor(options.processes) as pool:
        list(tqdm(pool.map(render_shard, *zip(*jobs, strict=True)), total=len(jobs), unit="shard") if jobs else [])
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """0, or 2 for an error that names what to mend."""
    return run_command("scripts/render_scenes.py", RenderOptions, render, arguments)


if __name__ == "__main__":
    sys.exit(main())
