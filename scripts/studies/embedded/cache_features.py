r"""Keep features of augmented scenes, so that training need not run the backbone. Finished shards stay.

python -m scripts.studies.embedded.cache_features --encoder runs/embedded/encoder \
    --scenes runs/embedded/scenes/train --output runs/embedded/features/train --variants 2

Every shard of scenes becomes one shard of features per variant. Its scenes are cropped, mirrored and recoloured by
random numbers that follow from the variant and the scene's name. Some shards are wide or upright (SHAPES).
"""

import math
import sys
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm.auto import tqdm

from marigold_uq.commands.runner import Invocation, run_command
from marigold_uq.depth.data import RenderedScenes
from marigold_uq.depth.data.photometric import PhotometricTransform
from marigold_uq.depth.data.shards import write_shard
from marigold_uq.files import make_folder
from marigold_uq.models.condition_encoder import ConditionEncoder

SHAPES = ((384, 512),) * 4 + ((288, 384),) * 2 + ((192, 512), (512, 384))
"""(height, width) of the pictures of shard k is SHAPES[k % 8]."""
COLOURS = PhotometricTransform(
    brightness=0.3, contrast=0.3, gamma=0.3, saturation=0.4, hue=0.15, white_balance=0.15, grayscale=0.05,
    blur=1.5, noise=0.03,
)  # fmt: skip
WHOLE = 0.3
"""Share of the pictures that are not cropped more than their shape demands."""
SMALLEST = 0.5
"""Edge of the smallest crop, relative to the largest that fits."""
STRETCH = 0.12
"""The aspect of a crop differs from that of the picture by a factor of at most exp(STRETCH)."""
BATCH = 4


def crop_box(size: tuple[int, int], shape: tuple[int, int], generator: torch.Generator) -> tuple[slice, slice]:
    """Rows and columns of a random crop of about the aspect of `shape`."""
    draws = torch.rand(5, generator=generator).tolist()
    aspect = shape[0] / shape[1] * math.exp(STRETCH * (2 * draws[0] - 1))
    zoom = 1.0 if draws[1] < WHOLE else SMALLEST + (1 - SMALLEST) * draws[2]
    height = min(size[0], size[1] * aspect) * zoom
    edges = [min(round(height), size[0]), min(round(height / aspect), size[1])]
    first = [int(draw * (available - edge + 1)) for draw, available, edge in zip(draws[3:], size, edges, strict=True)]
    return slice(first[0], first[0] + edges[0]), slice(first[1], first[1] + edges[1])


def augment(sample: Mapping[str, Any], shape: tuple[int, int], generator: torch.Generator) -> dict[str, Tensor]:
    """Crop, resize, mirror, recolour; a crop with hardly any depth in it is drawn again."""
    for _ in range(10):
        rows, columns = crop_box(sample["image"].shape[-2:], shape, generator)
        if sample["valid"][..., rows, columns].float().mean() > 0.3:
            break
    image = _resized(sample["image"][..., rows, columns], shape, "bilinear", antialias=True).clamp(0, 1)
    half = (shape[0] // 2, shape[1] // 2)
    depth = _resized(sample["depth"][..., rows, columns], half, "nearest-exact")
    valid = _resized(sample["valid"][..., rows, columns].float(), half, "nearest-exact").bool()
    if float(torch.rand(1, generator=generator)) < 0.5:
        image, depth, valid = image.flip(-1), depth.flip(-1), valid.flip(-1)
    return {"image": COLOURS(image, generator), "depth": depth, "valid": valid}


def _resized(values: Tensor, shape: tuple[int, int], mode: str, **options: bool) -> Tensor:
    return F.interpolate(values[None], size=shape, mode=mode, **options)[0]


@torch.no_grad()
def encode(encoder: ConditionEncoder, images: Tensor) -> dict[str, np.ndarray]:
    """Features by level in half precision, and the small picture in 8 bits."""
    pixels = (2 * images - 1).contiguous(memory_format=torch.channels_last)
    with torch.autocast("cpu", torch.bfloat16):
        features = encoder.features(pixels)
    small = ((encoder.thumbnail(pixels) + 1) * 127.5).round().to(torch.uint8)
    arrays = {f"features_{level}": own.half().contiguous().numpy() for level, own in enumerate(features)}
    return {**arrays, "thumbnail": small.contiguous().numpy()}


def cache_shard(
    encoder: ConditionEncoder,
    scenes: RenderedScenes,
    indices: range,
    folder: Path,
    variant: int,
    shape: tuple[int, int],
) -> None:
    """Augment and encode the scenes of one shard."""
    parts, names = [], []
    for first in range(indices.start, indices.stop, BATCH):
        samples = []
        for index in range(first, min(first + BATCH, indices.stop)):
            sample = scenes.read(index)
            seed = zlib.crc32(f"{sample['name']} {variant}".encode())
            samples.append(augment(sample, shape, torch.Generator().manual_seed(seed)))
            names.append(f"{sample['name']}-{variant}")
        batch = {key: torch.stack([one[key] for one in samples]) for key in samples[0]}
        maps = {"depth": batch["depth"].half().numpy(), "valid": batch["valid"].numpy()}
        parts.append({**encode(encoder, batch["image"]), **maps})
    write_shard(folder, {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}, names)


@dataclass(frozen=True)
class CacheOptions:
    """Keep features of augmented scenes; shards that are there already stay.

    Args:
        encoder: Folder of the condition encoder.
        scenes: Folder of rendered scenes.
        output: Folder for the shards of features.
        variants: How often every scene is augmented.
        shard_size: Scenes per shard.
        processes: Shards are shared out over so many, of one thread each.
    """

    encoder: Path
    scenes: Path
    output: Path
    variants: int = 1
    shard_size: int = 100
    processes: int = 1

    def __post_init__(self) -> None:
        if min(self.variants, self.shard_size, self.processes) < 1:
            raise ValueError(
                "variants, shard_size and processes must be at least 1; got "
                f"{self.variants}, {self.shard_size} and {self.processes}"
            )


@dataclass(frozen=True)
class _Job:
    """One shard of features to make."""

    encoder: Path
    scenes: Path
    indices: range
    folder: Path
    variant: int
    shape: tuple[int, int]


@cache
def _opened(encoder: Path, scenes: Path) -> tuple[ConditionEncoder, RenderedScenes]:
    """Once per process."""
    network = ConditionEncoder.from_pretrained(encoder).eval().to(memory_format=torch.channels_last)
    return network, RenderedScenes(scenes)


def _prepare_process() -> None:
    torch.set_num_threads(1)


def _run(job: _Job) -> None:
    network, scenes = _opened(job.encoder, job.scenes)
    cache_shard(network, scenes, job.indices, job.folder, job.variant, job.shape)


def missing_shards(options: CacheOptions) -> list[_Job]:
    """All shards of features that are not there yet, first of the first variant."""
    length = len(RenderedScenes(options.scenes))
    jobs = []
    for variant in range(options.variants):
        for number, first in enumerate(range(0, length, options.shard_size)):
            folder = options.output / f"{variant:02d}-{first:07d}"
            indices = range(first, min(length, first + options.shard_size))
            shape = SHAPES[(number + variant) % len(SHAPES)]
            jobs.append(_Job(options.encoder, options.scenes, indices, folder, variant, shape))
    return [job for job in jobs if not job.folder.exists()]


def cache_features(options: CacheOptions, invocation: Invocation) -> int:
    """Keep what is missing."""
    make_folder(options.output)
    jobs = missing_shards(options)
    if options.processes == 1:
        for job in tqdm(jobs, unit="shard"):
            _run(job)
        return 0
    with ProcessPoolExecutor(options.processes, mp_context=get_context("spawn"), initializer=_prepare_process) as pool:
        for done in tqdm(as_completed([pool.submit(_run, job) for job in jobs]), total=len(jobs), unit="shard"):
            done.result()
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """0, or 2 for an error that names what to mend."""
    return run_command("scripts.studies.embedded.cache_features", CacheOptions, cache_features, arguments)


if __name__ == "__main__":
    sys.exit(main())
