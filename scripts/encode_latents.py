"""Encode rendered scenes with a trained VAE, so that training the U-Net need not. Resumable: finished shards are kept.

python scripts/encode_latents.py --vae runs/vae/model --scenes scenes/train --output latents/train --processes 2
"""

import argparse
import hashlib
import json
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import torch
from tqdm.auto import tqdm

from marigold_uq.depth.data.normalization import latent_mask
from marigold_uq.depth.data.shards import SceneShards, write_shard
from marigold_uq.depth.run import load_vae
from marigold_uq.depth.vae_task import Reconstruction, pixels_of

BATCH = 4


@torch.no_grad()
def encode(vae: torch.nn.Module, samples: list[dict], factor: int) -> dict[str, np.ndarray]:
    """Latents of pictures and depth maps, scaled as the pipeline scales them, and the cells with full ground truth."""
    batch = {key: [sample[key] for sample in samples] for key in ("image", "depth", "valid")}
    network = Reconstruction(vae)
    scale = vae.config.scaling_factor
    picture, depth = ((scale * network.encode(pixels)).half().numpy() for pixels in pixels_of(batch))
    valid = latent_mask(torch.stack(batch["valid"]), factor).numpy()
    return {"image_latent": picture, "depth_latent": depth, "latent_valid": valid}


def mirrored(sample: dict) -> dict:
    """The scene seen in a mirror."""
    flipped = {key: sample[key].flip(-1) for key in ("image", "depth", "valid")}
    return {**flipped, "name": sample["name"] + "-flipped"}


def encode_shard(vae_folder: Path, scenes: SceneShards, indices: range, folder: Path, flip: bool) -> None:
    """Encode one shard, each process with one thread."""
    torch.set_num_threads(1)
    vae = load_vae(vae_folder).eval().to(memory_format=torch.channels_last)
    factor = 2 ** (len(vae.config.block_out_channels) - 1)
    samples = [mirrored(scenes[i]) if flip else scenes[i] for i in indices]
    parts = [encode(vae, samples[i : i + BATCH], factor) for i in range(0, len(samples), BATCH)]
    arrays = {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}
    write_shard(folder, arrays, [sample["name"] for sample in samples])


def check_autoencoder(record: Path, vae_folder: Path) -> None:
    """Refuse to add to latents that another autoencoder made: a decoder could not read the mixture."""
    encoder = {name: value for name, value in load_vae(vae_folder).state_dict().items() if name.startswith("encoder.")}
    digest = hashlib.sha256(b"".join(value.numpy().tobytes() for value in encoder.values())).hexdigest()
    if not record.exists():
        record.write_text(json.dumps({"encoder": digest}), encoding="utf-8")
    elif json.loads(record.read_text(encoding="utf-8"))["encoder"] != digest:
        raise SystemExit(f"{record.parent} holds latents of another encoder than {vae_folder}'s; remove it first")


def main(arguments: Sequence[str] | None = None) -> None:
    """Encode what is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vae", type=Path, required=True)
    parser.add_argument("--scenes", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--shard-size", type=int, default=250)
    parser.add_argument("--flip", action="store_true", help="also the mirrored scenes, as shards of their own")
    parser.add_argument("--processes", type=int, default=1)
    args = parser.parse_args(arguments)
    scenes = SceneShards(args.scenes)
    args.output.mkdir(parents=True, exist_ok=True)
    check_autoencoder(args.output / "autoencoder.json", args.vae)
    jobs = []
    for first in range(0, len(scenes), args.shard_size):
        indices = range(first, min(len(scenes), first + args.shard_size))
        for flip in (False, True) if args.flip else (False,):
            folder = args.output / f"{first:07d}{'-flipped' if flip else ''}"
            if not folder.exists():
                jobs.append((args.vae, scenes, indices, folder, flip))
    with ProcessPoolExecutor(args.processes) as pool:
        list(tqdm(pool.map(encode_shard, *zip(*jobs, strict=True)), total=len(jobs), unit="shard") if jobs else [])


if __name__ == "__main__":
    main()
