"""`marigold-uq cache`: latents of training data on disk, so that training need not make them."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from marigold_uq.commands.runner import Invocation
from marigold_uq.depth.config import DataPart, StartConfig
from marigold_uq.depth.data import DepthTransform

__all__ = ["CacheOptions", "run_cache"]


@dataclass(frozen=True)
class CacheOptions:
    """Keep the latents of data sets, of a model's image encoder and of its baseline, for training.

    Args:
        output: Folder for the caches, one per data set.
        start: As in training; its autoencoder and image encoder make the latents.
        baseline: As in training.
        baseline_options: As in training.
        data: As in training.
        transform: As in training; a cache keeps what it drew.
        variants: How often every sample is cropped, flipped and recoloured anew.
        seed: Of the transform.
        shard_size: Samples per shard.
        batch_size: Samples per call of the networks.
        num_workers: Processes that read samples.
        dtype: Of the autoencoder while it encodes; bfloat16 is for GPUs.
        device: "auto", "cpu", "cuda", "cuda:1", "mps".
        check: Read finished shards again and compare their hashes.
    """

    output: Path = Path("cache")
    start: StartConfig = field(default_factory=StartConfig)
    baseline: str | None = None
    baseline_options: dict[str, Any] = field(default_factory=dict)
    data: list[DataPart] = field(default_factory=list)
    transform: DepthTransform = field(default_factory=DepthTransform)
    variants: int = 1
    seed: int = 0
    shard_size: int = 256
    batch_size: int = 4
    num_workers: int = 2
    dtype: Literal["float32", "bfloat16"] = "float32"
    device: str = "auto"
    check: bool = True


def run_cache(options: CacheOptions, invocation: Invocation | None = None) -> int:
    """Encode what is missing; say what a training config then names."""
    if not options.data:
        raise ValueError("no data to cache: give at least one entry under `data`, for instance {name: hypersim, ...}")
    import torch

    from marigold_uq.depth.cache import cache_latents, folder_of_part, remove_leftovers
    from marigold_uq.depth.encoding import LatentEncoder
    from marigold_uq.depth.model import choose_device, process_state
    from marigold_uq.depth.run import open_part, start_pipeline

    state, device = process_state(), choose_device(options.device)
    pipeline = start_pipeline(
        options.start, seed=options.seed, baseline=options.baseline, baseline_options=options.baseline_options
    ).to(device)
    encoder = LatentEncoder(pipeline, device, torch.bfloat16 if options.dtype == "bfloat16" else None)
    lines = []
    for number, part in enumerate(options.data):
        folder = folder_of_part(options.output, number, part.name)
        if state.is_main_process:
            remove_leftovers(folder)
        state.wait_for_everyone()
        report = cache_latents(
            encoder,
            open_part(part),
            folder,
            transform=options.transform,
            data=asdict(part),
            variants=options.variants,
            seed=options.seed,
            shard_size=options.shard_size,
            batch_size=options.batch_size,
            num_workers=options.num_workers,
            check=options.check,
            process=state.process_index,
            processes=state.num_processes,
        )
        rate = f", {report.seconds_per_sample:.2f} s each" if report.num_made else ""
        print(f"{folder}: {report.num_made} samples made{rate}, {report.num_kept} were there")
        for name, reason in report.problems:
            print(f"  not usable: {name}: {reason}")
        lines.append(f"- {{name: latents, root: {folder}, probability: {part.probability}}}")
    if state.is_main_process:
        print("\n".join(["in the training config, with the same start and baseline:", "data:", *lines]))
    state.wait_for_everyone()
    return 0
