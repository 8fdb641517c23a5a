"""Long use: many pictures through the command, mixed calls of all pipelines; memory must not grow.

PYTHONPATH=tests python -m scripts.fuzz.endurance --pictures 2000 --calls 1000 --output out/endurance
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from support.tiny_conditioned import conditioned_pipeline
from support.tiny_depth import picture
from support.tiny_depth import tiny_pipeline as tiny_depth_pipeline
from support.tiny_field import tiny_pipeline as tiny_field_pipeline
from support.tiny_field import tiny_trajectories
from support.tiny_sets import quick_model
from tqdm import tqdm

from marigold_uq.commands.depth import DepthOptions
from marigold_uq.commands.inputs import Input
from marigold_uq.commands.pictures import Failure, Plan, run_pictures
from marigold_uq.commands.runner import Invocation, run_command
from marigold_uq.files import make_folder
from marigold_uq.results import markdown_table
from scripts.fuzz.run import quiet

_SAMPLES = 10


@dataclass(frozen=True)
class Endurance:
    """Use the package for long and watch its memory.

    Args:
        output: Folder for pictures and results.
        pictures: Through `marigold-uq depth`'s loop, with a tiny model.
        calls: Of the pipelines of all three tasks in turn, with mixed options.
    """

    output: Path
    pictures: int = 2000
    calls: int = 1000


def resident() -> float:
    """Megabytes of memory that this process holds."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def watch(number: int, step: Callable[[int], Any], name: str) -> list[float]:
    """Memory after each tenth of the steps."""
    marks = {number * part // _SAMPLES for part in range(1, _SAMPLES + 1)}
    found = []
    for index in tqdm(range(number), desc=name, mininterval=10):
        with quiet():
            step(index)
        if index + 1 in marks:
            found.append(resident())
    return found


def picture_step(output: Path) -> Callable[[int], None]:
    """One picture through the command's loop, exported in its usual formats."""
    pipeline = tiny_depth_pipeline("gaussian")
    pipeline.set_progress_bar_config(disable=True)
    source = output / "picture.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (24, 32, 3), dtype=np.uint8)).save(source)
    options = DepthOptions([source], output / "results", uncertainty="trajectory", ensemble_size=2, overwrite=True)
    make_folder(options.output)
    plan = Plan.of(options, pipeline)

    def step(index: int) -> None:
        failures: list[Failure] = []
        run_pictures([Input(source, source.stem)], plan, pipeline, failures)
        assert not failures, failures

    return step


def call_step() -> Callable[[int], None]:
    """A call of one of the pipelines, each in its turn through sizes, steps and ways to uncertainty."""
    depth, conditioned, fields = (
        tiny_depth_pipeline("gaussian"),
        conditioned_pipeline("low_rank"),
        tiny_field_pipeline(),
    )
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(40, 2))
    table = quick_model(num_models=1, max_epochs=1, baseline_epochs=1).fit(rows, rows.sum(1)).pipeline_
    states = torch.stack([tiny_trajectories().read(0, 0, 2)])
    images = [picture(16 + 16 * number, 32) for number in range(3)]
    modes = (None, "ensemble", "trajectory", "marginal")

    def step(index: int) -> None:
        turn, steps = index // 4, 1 + index // 4 % 3
        if index % 4 == 0:
            depth(images[turn % 3], uncertainty=modes[turn % 3], num_inference_steps=steps)
        elif index % 4 == 1:
            size = {"processing_resolution": 32, "num_inference_steps": steps}
            conditioned(images[turn % 3], uncertainty=modes[turn % 4], **size)
        elif index % 4 == 2:
            fields(states, 1 + turn % 2, ensemble_size=2, num_inference_steps=steps, coverage=0.9)
        else:
            table(rows[: 1 + turn % 7], 4, num_inference_steps=steps, quantiles=[0.1, 0.9])

    return step


def run(options: Endurance, invocation: Invocation | None = None) -> int:
    """1 if the last half of the time took more than 5 % more memory than the first."""
    make_folder(options.output)
    torch.set_num_threads(1)
    rows, grown = list[list[Any]](), False
    plans: Sequence[tuple[str, int, Callable[[], Callable[[int], None]]]] = (
        ("pictures", options.pictures, lambda: picture_step(options.output)),
        ("calls", options.calls, call_step),
    )
    for name, number, make in plans:
        if not number:
            continue
        with quiet():
            step = make()
        memory = watch(number, step, name)
        grown |= memory[-1] > 1.05 * memory[len(memory) // 2]
        rows.append([name, number, *(round(memory[part]) for part in (0, len(memory) // 2, -1))])
    print(markdown_table(["what", "number", "MB after a tenth", "after half", "at the end"], rows))
    return 1 if grown else 0


if __name__ == "__main__":
    sys.exit(run_command("scripts.fuzz.endurance", Endurance, run))
