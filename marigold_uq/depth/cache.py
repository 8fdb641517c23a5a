"""Latents of any depth data set on disk, so that training runs neither autoencoder nor image encoder nor baseline.

A cache is a folder of shards and a record of what made them. A shard appears under its name when it is complete, so a
process that is killed loses at most the shard it was at, and the same call goes on from there.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Subset, default_collate
from tqdm.auto import tqdm

from marigold_uq.depth.data import AugmentedDataset, DepthSample, DepthTransform
from marigold_uq.depth.data.shards import damage_of, write_shard
from marigold_uq.depth.encoding import LatentEncoder
from marigold_uq.files import TEMPORARY, atomic_path, make_folder, remove, require_same

__all__ = ["CacheReport", "cache_latents", "check_cache"]

RECORD = "cache.json"


@dataclass(frozen=True)
class CacheReport:
    """What a call of `cache_latents` did."""

    folder: Path
    num_kept: int  # samples in shards that were there
    num_made: int
    seconds: float
    problems: list[tuple[str, str]]  # samples that could not be read, and why

    @property
    def seconds_per_sample(self) -> float:
        """NaN where nothing was made."""
        return self.seconds / self.num_made if self.num_made else float("nan")


def cache_latents(
    encoder: LatentEncoder,
    dataset: Any,
    folder: Path,
    *,
    transform: DepthTransform,
    data: dict[str, Any],
    variants: int = 1,
    seed: int = 0,
    shard_size: int = 256,
    batch_size: int = 4,
    num_workers: int = 0,
    check: bool = True,
    process: int = 0,
    processes: int = 1,
) -> CacheReport:
    """Encode what is missing of a data set.

    Args:
        encoder: Makes the latents; its hashes are recorded, and a folder that another made is refused.
        dataset: Any depth data set.
        folder: Of the cache; it is created.
        transform: Crop, flip and colours, drawn anew for each variant from (seed, variant, index).
        data: What names the data set, for the record.
        variants: How often every sample is encoded.
        seed: Of the transform.
        shard_size: Samples per shard.
        batch_size: Samples per call of the networks.
        num_workers: Processes that read samples.
        check: Read finished shards again, and make those anew whose hashes differ.
        process: Number of this process among those that share the work.
        processes: How many there are; every n-th shard is this one's.
    """
    make_folder(folder)
    augmented = AugmentedDataset(dataset, transform, seed)
    facts = {"data": data, "transform": asdict(transform), "length": len(dataset), "seed": seed}
    facts["dtype"] = str(encoder.vae.dtype).removeprefix("torch.")
    _write_record(folder, {"encoder": encoder.identity(), "shard_size": shard_size, **facts})
    jobs = _jobs(folder, len(dataset), shard_size, variants)[process::processes]
    missing = [job for job in jobs if not _is_done(job.folder, check)]
    started, made = time.perf_counter(), 0
    with tqdm(total=sum(len(job.indices) for job in missing), desc=folder.name, unit="sample") as bar:
        for job in missing:
            augmented.set_epoch(job.variant)
            batches = _read(augmented, job.indices, batch_size, num_workers)
            _write(encoder, batches, job, bar)
            made += len(job.indices)
    kept = sum(len(job.indices) for job in jobs) - made
    return CacheReport(folder, kept, made, time.perf_counter() - started, list(augmented.problems))


def check_cache(folder: Path, encoder: LatentEncoder) -> None:
    """Refuse latents that another autoencoder, image encoder or baseline made; those without a record are trusted."""
    record = folder / RECORD
    if record.exists():
        found = json.loads(record.read_text(encoding="utf-8"))["encoder"]
        require_same(folder, found, encoder.identity())


@dataclass(frozen=True)
class _Job:
    """One shard to make."""

    folder: Path
    variant: int
    indices: range


def _jobs(folder: Path, length: int, shard_size: int, variants: int) -> list[_Job]:
    if min(length, shard_size, variants) < 1:
        raise ValueError(f"samples, shard_size and variants must be at least 1; got {length}, {shard_size}, {variants}")
    return [
        _Job(folder / f"{variant:02d}-{first:07d}", variant, range(first, min(length, first + shard_size)))
        for variant in range(variants)
        for first in range(0, length, shard_size)
    ]


def _write_record(folder: Path, asked: dict[str, Any]) -> None:
    """The record of a new cache; an old one must agree."""
    path = folder / RECORD
    if path.exists():
        require_same(folder, json.loads(path.read_text(encoding="utf-8")), asked)
        return
    if any(folder.glob("*/shard.json")):
        raise ValueError(f"{folder} holds shards but no {RECORD}: what made them is not known; choose another folder")
    with atomic_path(path, overwrite=True) as temporary:  # of several processes each writes the same
        temporary.write_text(json.dumps(asked, indent=1, default=str), encoding="utf-8")


def _is_done(folder: Path, check: bool) -> bool:
    if not folder.exists():
        return False
    damage = damage_of(folder) if check else None
    if damage is not None:
        tqdm.write(f"{folder}: {damage}; made anew")
        remove(folder)
    return damage is None


def remove_leftovers(folder: Path) -> None:
    """Delete what killed processes left half written; not while others write."""
    for leftover in folder.glob(f"{TEMPORARY}*"):
        remove(leftover)


def _read(dataset: Any, indices: range, batch_size: int, num_workers: int) -> Iterator[list[DepthSample]]:
    loader: DataLoader[Any] = DataLoader(
        Subset(dataset, list(indices)),
        batch_size=batch_size,
        num_workers=min(num_workers, len(indices)),
        collate_fn=list,
    )
    yield from loader


def _write(encoder: LatentEncoder, batches: Iterator[Sequence[DepthSample]], job: _Job, bar: Any) -> None:
    parts: list[dict[str, np.ndarray]] = []
    names: list[str] = []
    for samples in batches:
        sizes = sorted({tuple(sample["image"].shape[-2:]) for sample in samples})
        if len(sizes) > 1:
            raise ValueError(f"the samples of a shard must share one size, got {sizes}: give transform.size")
        arrays = encoder.arrays(default_collate(list(samples)))
        parts.append({key: _stored(value) for key, value in arrays.items()})
        names += [sample["name"] if not job.variant else f"{sample['name']}#{job.variant}" for sample in samples]
        bar.update(len(samples))
    shapes = sorted({part["depth_latent"].shape[1:] for part in parts})
    if len(shapes) > 1:
        raise ValueError(f"the samples of a shard must share one size, got latents {shapes}: give transform.size")
    write_shard(job.folder, {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}, names)


def _stored(values: torch.Tensor) -> np.ndarray:
    """Half precision for numbers, booleans as they are."""
    return (values.half() if values.is_floating_point() else values).cpu().numpy()


def folder_of_part(output: Path, number: int, name: str) -> Path:
    """Where the cache of a data set lies that is the `number`-th of several."""
    return output / f"{number:02d}-{name.replace(os.sep, '-')}"
