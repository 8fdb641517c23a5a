"""Render procedural scenes to disk, so that training does not wait for them. Resumable: finished shards are kept.

python scripts/render_scenes.py --output scenes/train --length 20000 --split train --processes 2
"""

import argparse
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import torch
from tqdm.auto import tqdm

from marigold_uq.depth.data.shards import write_shard
from marigold_uq.depth.scenes import ProceduralScenes


def render_shard(folder: Path, options: dict[str, object], indices: range) -> None:
    """Render the scenes of one shard."""
    torch.set_num_threads(1)
    samples = [ProceduralScenes(**options)[i] for i in indices]
    arrays = {
        "image": np.stack([(255 * s["image"]).round().to(torch.uint8).numpy() for s in samples]),
        "depth": np.stack([s["depth"].to(torch.float16).numpy() for s in samples]),
        "valid": np.stack([s["valid"].numpy() for s in samples]),
    }
    write_shard(folder, arrays, [s["name"] for s in samples])


def main(arguments: Sequence[str] | None = None) -> None:
    """Render what is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder for the shards")
    parser.add_argument("--length", type=int, default=20_000, help="number of scenes")
    parser.add_argument("--split", default="train", choices=["train", "validation", "test"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--height", type=int, default=192)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--shard-size", type=int, default=250)
    parser.add_argument("--processes", type=int, default=1)
    args = parser.parse_args(arguments)
    args.output.mkdir(parents=True, exist_ok=True)
    options = {"length": args.length, "seed": args.seed, "height": args.height, "width": args.width}
    options = {**options, "split": args.split, "photographs": True}
    jobs = []
    for first in range(0, args.length, args.shard_size):
        folder = args.output / f"{first:07d}"
        if not folder.exists():
            jobs.append((folder, options, range(first, min(args.length, first + args.shard_size))))
    with ProcessPoolExecutor(args.processes) as pool:
        list(tqdm(pool.map(render_shard, *zip(*jobs, strict=True)), total=len(jobs), unit="shard") if jobs else [])


if __name__ == "__main__":
    main()
