"""Seconds, U-Net calls and peak memory per picture of a small depth model, by mode and number of steps.

python scripts/benchmarks/embedded.py --model embedded --ensemble_size 10 --steps 1 4

Each row runs in a process of its own on the sample pictures of the package: peak memory is that of the whole process,
interpreter and libraries included; seconds are the median per picture after a first one that warms up. Prints Markdown.
"""

import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch

from marigold_uq.commands.pictures import sample_pictures
from marigold_uq.commands.runner import Invocation, run_command
from marigold_uq.depth.model import load_pipeline

Mode = Literal["none", "marginal", "trajectory", "ensemble"]


def measure(model: str, mode: Mode, steps: int, members: int, turns: int) -> dict[str, Any]:
    """One mode in this process."""
    pipeline = load_pipeline(model, device="cpu")
    rows = []  # of each U-Net call, how many latents it was given
    pipeline.unet.register_forward_pre_hook(lambda module, arguments: rows.append(len(arguments[0])))
    pictures = sample_pictures()
    seconds = []
    for turn in range(turns + 1):
        for picture in pictures:
            rows.clear()
            start = time.perf_counter()
            pipeline(
                picture,
                num_inference_steps=steps,
                ensemble_size=None if mode == "none" else members,
                uncertainty=None if mode == "none" else mode,
                batch_size=members,
                generator=torch.Generator().manual_seed(turn),
            )
            if turn:
                seconds.append(time.perf_counter() - start)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024  # kilobytes on Linux
    return {"seconds": statistics.median(seconds), "calls": sum(rows), "megabytes": peak}


@dataclass(frozen=True)
class BenchmarkOptions:
    """Measure what a small depth model costs per picture, by mode and number of steps.

    Args:
        model: "embedded", a folder, or a Hub name.
        ensemble_size: Members of the modes with uncertainty.
        steps: Numbers of denoising steps.
        modes: Ways to uncertainty; a model without an image encoder has no "marginal".
        turns: Measurements of each picture after one that warms up.
        only: Measure one mode, at the first of the steps, in this process, and print JSON.
    """

    model: str = "embedded"
    ensemble_size: int = 10
    steps: list[int] = field(default_factory=lambda: [1, 4])
    modes: list[Mode] = field(default_factory=lambda: list(get_args(Mode)))
    turns: int = 5
    only: Mode | None = None


def run(options: BenchmarkOptions, invocation: Invocation) -> int:
    """Measure every mode in a process of its own and print the table; `only` measures one in this process."""
    members = options.ensemble_size
    if options.only:
        print(json.dumps(measure(options.model, options.only, options.steps[0], members, options.turns)))
        return 0
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {members} members\n")
    print("| steps | mode | U-Net rows per picture | seconds per picture | peak MB |\n|---|---|---|---|---|")
    for steps in options.steps:
        for mode in options.modes:
            command = [sys.executable, __file__, "--model", options.model, "--ensemble_size", str(members)]
            command += ["--steps", str(steps), "--turns", str(options.turns), "--only", mode]
            output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            found = json.loads(output.splitlines()[-1])
            print(
                f"| {steps} | {mode} | {found['calls']} | {found['seconds']:.2f} | {found['megabytes']:.0f} |",
                flush=True,
            )
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """0, or 2 for an error that names what to mend."""
    return run_command("scripts/benchmarks/embedded.py", BenchmarkOptions, run, arguments)


if __name__ == "__main__":
    sys.exit(main())
