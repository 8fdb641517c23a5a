"""Encode rendered scenes with a trained VAE, so that training the U-Net need not. Resumable: finished shards are kept.

python scripts/encode_latents.py --vae runs/vae/model --scenes scenes/train --output latents/train
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from tqdm.auto import tqdm

from marigold_uq.data.depth.normalization import latent_mask
from marigold_uq.data.shards import SceneShards, write_shard
from marigold_uq.training.depth_run import load_vae
from marigold_uq.training.vae_task import Reconstruction, pixels_of


@torch.no_grad()
def encode(vae: torch.nn.Module, samples: list[dict], factor: int) -> dict[str, np.ndarray]:
    """Latents of pictures and depth maps, scaled as the pipeline scales them, and the cells with full ground truth."""
    batch = {key: [sample[key] for sample in samples] for key in ("image", "depth", "valid")}
    network = Reconstruction(vae)
    scale = vae.config.scaling_factor
    picture, depth = ((scale * network.encode(pixels)).half().numpy() for pixels in pixels_of(batch))
    valid = latent_mask(torch.stack(batch["valid"]), factor).numpy()
    return {"image_latent": picture, "depth_latent": depth, "latent_valid": valid}


def main() -> None:
    """Encode what is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vae", type=Path, required=True)
    parser.add_argument("--scenes", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--shard-size", type=int, default=250)
    parser.add_argument("--flip", action="store_true", help="also the mirrored scenes, as shards of their own")
    args = parser.parse_args()
    vae = load_vae(args.vae).eval()
    factor = 2 ** (len(vae.config.block_out_channels) - 1)
    scenes = SceneShards(args.scenes)
    args.output.mkdir(parents=True, exist_ok=True)
    for first in tqdm(range(0, len(scenes), args.shard_size), unit="shard"):
        indices = range(first, min(len(scenes), first + args.shard_size))
        for suffix in ("", "-flipped") if args.flip else ("",):
            folder = args.output / f"{first:07d}{suffix}"
            if folder.exists():
                continue
            samples = [scenes[i] for i in indices]
            if suffix:
                for sample in samples:
                    sample.update({key: sample[key].flip(-1) for key in ("image", "depth", "valid")})
            parts = [encode(vae, samples[i : i + 16], factor) for i in range(0, len(samples), 16)]
            arrays = {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}
            write_shard(folder, arrays, [sample["name"] + suffix for sample in samples])


if __name__ == "__main__":
    main()
