"""Encode a depth data set with a trained VAE, so that training the U-Net need not. Resumable: finished shards are kept.

python scripts/encode_latents.py --vae runs/vae/model --data.root scenes/train --output latents/train --processes 2
"""

import json
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import nn
from tqdm.auto import tqdm

from marigold_uq.commands.runner import Invocation, run_command
from marigold_uq.depth.data import DepthDataset, DepthSample, flip_sample, latent_mask
from marigold_uq.depth.data.normalization import network_pixels
from marigold_uq.depth.data.shards import write_shard
from marigold_uq.depth.evaluation import DataOptions
from marigold_uq.depth.evaluation.evaluate import check_dataset, open_dataset
from marigold_uq.depth.run import load_vae
from marigold_uq.files import atomic_path, fingerprint, make_folder, require_same
from marigold_uq.pipelines.depth.latents import encode_pixels

BATCH = 4


@dataclass(frozen=True)
class EncodeOptions:
    """Encode pictures and depth maps of one size to latents.

    Args:
        vae: Folder of the autoencoder, or of a pipeline with one.
        output: Folder for the shards; finished ones in it are kept.
        data: The data set; its samples must share one size.
        flip: Also the mirror images, as shards of their own.
        shard_size: Samples per shard.
        processes: Shards are shared out over so many.
    """

    vae: Path
    output: Path
    data: DataOptions = field(default_factory=lambda: DataOptions("scenes"))
    flip: bool = False
    shard_size: int = 250
    processes: int = 1


@torch.no_grad()
def encode(vae: nn.Module, samples: list[DepthSample], factor: int) -> dict[str, np.ndarray]:
    """Latents of pictures and depth maps, scaled as the pipeline scales them, and the cells with full ground truth."""
    images, maps, valid = ([sample[key] for sample in samples] for key in ("image", "depth", "valid"))
    sizes = {tuple(one.shape[-2:]) for one in images}
    if len(sizes) > 1:
        raise ValueError(f"the samples of a shard must share one size, got {sorted(sizes)}: give data.options a resize")
    picture, depth = (encode_pixels(vae, pixels).half().numpy() for pixels in network_pixels(images, maps, valid))
    mask = latent_mask(torch.stack(valid), factor).numpy()
    return {"image_latent": picture, "depth_latent": depth, "latent_valid": mask}


def mirrored(sample: DepthSample) -> DepthSample:
    """The scene seen in a mirror."""
    flipped = flip_sample(sample)
    flipped["name"] = sample["name"] + "-flipped"
    return flipped


def encode_shard(vae_folder: Path, data: DepthDataset, indices: range, folder: Path, flip: bool) -> None:
    """Encode one shard, each process with one thread."""
    torch.set_num_threads(1)
    vae = load_vae(vae_folder).eval().to(memory_format=torch.channels_last)
    factor = 2 ** (len(vae.config.block_out_channels) - 1)
    samples = [mirrored(data.read(i)) if flip else data.read(i) for i in indices]
    parts = [encode(vae, samples[i : i + BATCH], factor) for i in range(0, len(samples), BATCH)]
    arrays = {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}
    write_shard(folder, arrays, [sample["name"] for sample in samples])


def check_autoencoder(folder: Path, vae_folder: Path) -> None:
    """Refuse to add to latents that another encoder made: a decoder could not read the mixture."""
    weights = {name: value for name, value in load_vae(vae_folder).state_dict().items() if name.startswith("encoder.")}
    asked = {"encoder": fingerprint(*(value.numpy() for value in weights.values()))}
    record = folder / "autoencoder.json"
    if record.exists():
        require_same(folder, json.loads(record.read_text(encoding="utf-8")), asked)
        return
    with atomic_path(record) as temporary:
        temporary.write_text(json.dumps(asked), encoding="utf-8")


def run(options: EncodeOptions, invocation: Invocation) -> int:
    """Encode what is missing."""
    data = check_dataset(open_dataset(options.data))
    make_folder(options.output)
    check_autoencoder(options.output, options.vae)
    jobs = []
    for first in range(0, len(data), options.shard_size):
        indices = range(first, min(len(data), first + options.shard_size))
        for flip in (False, True) if options.flip else (False,):
            folder = options.output / f"{first:07d}{'-flipped' if flip else ''}"
            if not folder.exists():
                jobs.append((options.vae, data, indices, folder, flip))
    with ProcessPoolExecutor(options.processes) as pool:
        list(tqdm(pool.map(encode_shard, *zip(*jobs, strict=True)), total=len(jobs), unit="shard") if jobs else [])
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """0, or 2 for an error that names what to mend."""
    return run_command("scripts/encode_latents.py", EncodeOptions, run, arguments)


if __name__ == "__main__":
    sys.exit(main())
