"""Seconds, U-Net calls and peak memory per picture of a small depth model, by mode and number of steps.

python scripts/benchmarks/embedded.py --model embedded --members 10 --steps 1 4

Each row runs in a process of its own on the sample pictures of the package: peak memory is that of the whole process,
interpreter and libraries included; seconds are the median per picture after a first one that warms up. Prints Markdown.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch

from marigold_uq.commands.depth import sample_pictures
from marigold_uq.commands.model import load_pipeline

MODES = ("none", "trajectory", "ensemble")


def measure(model: str, mode: str, steps: int, members: int, turns: int) -> dict[str, Any]:
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


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure every mode in a process of its own and print the table; `--only` measures one in this process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--members", type=int, default=10)
    parser.add_argument("--steps", nargs="+", type=int, default=[1, 4])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--only", choices=MODES, help="measure one mode, at the first of the steps, and print JSON")
    args = parser.parse_args(arguments)
    if args.only:
        print(json.dumps(measure(args.model, args.only, args.steps[0], args.members, args.turns)))
        return
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {args.members} members\n")
    print("| steps | mode | U-Net rows per picture | seconds per picture | peak MB |\n|---|---|---|---|---|")
    for steps in args.steps:
        for mode in MODES:
            command = [sys.executable, __file__, "--model", args.model, "--members", str(args.members)]
            command += ["--steps", str(steps), "--turns", str(args.turns), "--only", mode]
            output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            found = json.loads(output.splitlines()[-1])
            print(
                f"| {steps} | {mode} | {found['calls']} | {found['seconds']:.2f} | {found['megabytes']:.0f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
