"""What a training step costs with and without cached latents, and reading with one worker and with several.

python scripts/benchmarks/training_path.py --scenes runs/baseline/scenes/train --baseline embedded

Steps are measured in processor seconds, which other work on the machine hardly changes; reading in seconds.
"""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from marigold_uq.commands.runner import Invocation, run_command
from marigold_uq.depth.cache import cache_latents
from marigold_uq.depth.config import StartConfig
from marigold_uq.depth.data import DepthTransform, RenderedScenes
from marigold_uq.depth.data.shards import LatentShards
from marigold_uq.depth.run import start_pipeline
from marigold_uq.depth.task import DepthTask
from marigold_uq.results import markdown_table
from marigold_uq.training.objective import ObjectiveConfig
from marigold_uq.training.order import BatchPlan, Ordered, steps_of_run


@dataclass(frozen=True)
class TrainingPath:
    """Measure the parts of a training step.

    Args:
        scenes: Folder of rendered scenes.
        baseline: As in training; none by default.
        batch: Samples per step.
        steps: Measured steps.
        workers: Numbers of reading processes.
    """

    scenes: Path
    baseline: str | None = None
    batch: int = 8
    steps: int = 5
    workers: list[int] = field(default_factory=lambda: [0, 1, 2])


def step_seconds(task: DepthTask, dataset: Ordered, options: TrainingPath) -> tuple[float, float]:
    """Processor seconds of a step: encoding, and the network forth and back."""
    encoding, network = [], []
    generators = [torch.Generator().manual_seed(i) for i in range(options.batch)]
    for step in range(options.steps + 1):
        batch = task.collate([dataset[step * options.batch + i] for i in range(options.batch)])
        started = time.process_time()
        for _, part in batch:
            task.encoder.encode(part)
        encoded = time.process_time()
        task.losses(task.network, batch, generators).mean().backward()
        encoding.append(encoded - started)
        network.append(time.process_time() - encoded - encoding[-1])  # losses encode once more
    return sum(encoding[1:]) / options.steps, sum(network[1:]) / options.steps


def reading_seconds(dataset: Ordered, workers: int, options: TrainingPath) -> float:
    """Seconds per step of reading alone; workers need the first steps to start."""
    plan = BatchPlan(options.batch, 1, 0, 1)
    steps = steps_of_run(dataset, plan, start_step=0, max_steps=3 + options.steps, num_workers=workers)
    started = 0.0
    for step, _ in steps:
        if step == 2:
            started = time.perf_counter()
    return (time.perf_counter() - started) / options.steps


def run(options: TrainingPath, invocation: Invocation) -> int:
    """Measure and print."""
    torch.set_num_threads(1)
    start = StartConfig(name="embedded", kind="pipeline", noise_family="gaussian")
    task = DepthTask(start_pipeline(start, baseline=options.baseline), [], ObjectiveConfig())
    scenes = RenderedScenes(options.scenes, length=options.batch * (options.steps + 1))
    rows = [("as it reads", *step_seconds(task, scenes, options))]
    with TemporaryDirectory() as folder:
        cache_latents(task.encoder, scenes, Path(folder), transform=DepthTransform(flip=0.0), data={})
        latents = LatentShards(folder)
        rows.append(("cached", *step_seconds(task, latents, options)))
        reading = [
            (
                f"{workers} workers",
                reading_seconds(scenes, workers, options),
                reading_seconds(latents, workers, options),
            )
            for workers in options.workers
        ]
    table = [
        [name, f"{encoding:.3f}", f"{network:.3f}", f"{encoding + network:.3f}"] for name, encoding, network in rows
    ]
    print(markdown_table(["processor seconds per step", "encoding", "network", "together"], table))
    print()
    cells = [[name, f"{one:.3f}", f"{two:.3f}"] for name, one, two in reading]
    print(markdown_table(["seconds per step of reading", "scenes", "latents"], cells))
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """0, or 2 for an error that names what to mend."""
    return run_command("scripts/benchmarks/training_path.py", TrainingPath, run, arguments)


if __name__ == "__main__":
    sys.exit(main())
