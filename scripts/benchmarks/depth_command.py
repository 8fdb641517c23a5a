"""The command `marigold-uq depth`: pictures per second in batches and one by one, and the memory of a large picture.

Time is processor time of the whole command, start and model included, so that other work on the machine counts little.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import numpy as np
from PIL import Image

from marigold_uq.cli import main as marigold_uq
from marigold_uq.commands.runner import Invocation, run_command


@dataclass(frozen=True)
class CommandBenchmark:
    """Throughput and memory of the depth command.

    Args:
        parts: What is measured.
        count: Small pictures.
        width: Of a small picture.
        height: Of a small picture.
        batch_sizes: What is compared.
        formats: Written for the small pictures.
        large: Width and height of the large picture.
        large_formats: Written for it.
    """

    parts: list[Literal["throughput", "memory"]] = field(default_factory=lambda: ["throughput", "memory"])
    count: int = 200
    width: int = 128
    height: int = 96
    batch_sizes: list[int] = field(default_factory=lambda: [1, 8])
    formats: list[str] = field(default_factory=lambda: ["npz"])
    large: list[int] = field(default_factory=lambda: [8000, 4000])
    large_formats: list[str] = field(default_factory=lambda: ["npz", "sheet", "ply"])


def run(options: CommandBenchmark, invocation: Invocation | None = None) -> int:
    """Print both tables."""
    with TemporaryDirectory() as folder:
        if "throughput" in options.parts:
            throughput(options, Path(folder))
        if "memory" in options.parts:
            memory(options, Path(folder))
    return 0


def throughput(options: CommandBenchmark, folder: Path) -> None:
    """Pictures per second of processor time."""
    pictures = folder / "pictures"
    pictures.mkdir()
    for index in range(options.count):
        save_picture(pictures / f"p{index:03d}.jpg", options.width, options.height, index)
    print(f"{options.count} pictures of {options.width} x {options.height}, formats {' '.join(options.formats)}")
    print("| batch_size | processor seconds | pictures per second |\n|---|---|---|")
    for size in options.batch_sizes:
        words = [str(pictures), "-o", str(folder / f"out{size}"), "--formats", *options.formats]
        seconds, _ = measured([*words, "--batch_size", str(size)])
        print(f"| {size} | {seconds:.1f} | {options.count / seconds:.2f} |", flush=True)


def memory(options: CommandBenchmark, folder: Path) -> None:
    """Peak resident memory."""
    width, height = options.large
    save_picture(folder / "large.jpg", width, height, 0)
    words = [str(folder / "large.jpg"), "-o", str(folder / "large"), "--formats", *options.large_formats]
    seconds, peak = measured(words)
    formats = " ".join(options.large_formats)
    print(f"one picture of {width} x {height}, formats {formats}: {peak:.2f} GB, {seconds:.1f} processor seconds")


def save_picture(path: Path, width: int, height: int, seed: int) -> None:
    """A smooth picture with some noise."""
    noise = np.random.default_rng(seed).integers(0, 255, (8, 8, 3), dtype=np.uint8)
    Image.fromarray(noise).resize((width, height), Image.Resampling.BICUBIC).save(path, quality=90)


def measured(words: Sequence[str]) -> tuple[float, float]:
    """Processor seconds and peak memory in GB of the command in a new process."""
    parent, child = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_command, args=(list(words), child))
    process.start()
    usage: Any = parent.recv()
    process.join()
    if process.exitcode:
        raise RuntimeError(f"marigold-uq depth {' '.join(words)} ended with {process.exitcode}")
    return usage


def _command(words: list[str], result: Any) -> None:
    """In a process of its own: the command without its output."""
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        sys.stdout = sys.stderr = nowhere
        code = marigold_uq(["depth", *words])
    usage = resource.getrusage(resource.RUSAGE_SELF)
    result.send((usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1e6))  # ru_maxrss is in kB on Linux
    sys.exit(code)


if __name__ == "__main__":
    sys.exit(run_command("scripts/benchmarks/depth_command.py", CommandBenchmark, run))
