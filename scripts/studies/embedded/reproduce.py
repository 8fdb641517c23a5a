"""The embedded model from nothing: encoder, scenes, features, training, families, calibration, files.

python -m scripts.studies.embedded.reproduce

Every stage resumes where it stopped; a finished one is skipped. The first needs the package index. About five hours on
two cores, the comparison of families (`--families`) one more.
"""

import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from marigold_uq.commands.runner import Invocation, run_command

RUNS = "runs/embedded"
"""Where the configs expect everything."""
SCENES = (
    ("train", 6000, "train", 0),
    ("validation", 200, "validation", 0),
    ("calibration", 300, "validation", 1),
    ("test", 500, "test", 0),
)
STUDY = "scripts.studies.embedded"
FAMILIES = {
    "point": {},
    "gaussian": {},
    "mixture": {"num_components": "3"},
    "low_rank": {"rank": "8"},
    "low_rank_mixture": {"num_components": "2", "rank": "8"},
}
"""What is compared, each with what it takes beside its name."""


@dataclass(frozen=True)
class ReproduceOptions:
    """Make the embedded model from nothing, in runs/embedded.

    Args:
        configs: Folder of the configs.
        processes: For rendering and for keeping features.
        families: Also train the families that are compared, from the same base and with the same budget.
        dry_run: Only print the commands.
    """

    configs: Path = Path("configs/depth/embedded")
    processes: int = 2
    families: bool = False
    dry_run: bool = False


@dataclass(frozen=True)
class Stage:
    """Words after `python`, and what is there once it is done; None for a stage that knows by itself."""

    words: list[str]
    result: Path | None = None


def stages(options: ReproduceOptions) -> Iterator[Stage]:
    """All stages in order."""

    def study(name: str, *words: str) -> list[str]:
        return ["-m", f"{STUDY}.{name}", *words]

    def train(*names: str) -> list[str]:
        return study("train", *(word for name in names for word in ("--config", str(options.configs / f"{name}.yaml"))))

    encoder, calibrated, assets = (Path(f"{RUNS}/{name}") for name in ("encoder", "calibrated", "assets"))
    yield Stage(study("fetch_backbone", "--output", str(encoder)), encoder)
    for name, length, split, seed in SCENES:
        settings = ["--length", str(length), "--split", split, "--seed", str(seed), "--height", "384", "--width", "512"]
        words = [*settings, "--shard_size", "100", "--processes", str(options.processes)]
        yield Stage(["scripts/render_scenes.py", "--output", f"{RUNS}/scenes/{name}", *words])
    given = ["--encoder", str(encoder), "--scenes", f"{RUNS}/scenes/train", "--output", f"{RUNS}/features/train"]
    yield Stage(study("cache_features", *given, "--processes", str(options.processes)))
    yield Stage(train("base"))
    if options.families:
        for family, size in FAMILIES.items():
            head = {"start.noise_family": family, **{f"start.{name}": value for name, value in size.items()}}
            own = {**head, "training.output": f"{RUNS}/{family}"}
            yield Stage(
                [*train("base", "family"), *(word for pair in own.items() for word in (f"--{pair[0]}", pair[1]))]
            )
    yield Stage(train("base", "more"))
    yield Stage(train("base", "more", "later"))
    yield Stage(train("base", "more", "later", "whole"))
    averaged = Path(f"{RUNS}/averaged")
    both = ["--first", f"{RUNS}/later/model", "--second", f"{RUNS}/whole/model"]
    yield Stage(study("average", *both, "--output", str(averaged)), averaged)
    held_out = ["--data.name", "scenes", "--data.root", f"{RUNS}/scenes/calibration", "--shuffle", "false"]
    model = ["--model", str(averaged), "--batch_size", "10"]
    yield Stage(["eval/calibrate_depth.py", *model, *held_out, "--output", str(calibrated)], calibrated)
    yield Stage(study("assemble", "--model", str(calibrated), "--output", str(assets)), assets)


def run_stages(stages: Iterable[Stage], *, dry_run: bool) -> int:
    """Run what is not done yet; the first failure ends it."""
    for stage in stages:
        done = stage.result is not None and stage.result.exists()
        print("done:" if done else "run:", "python", *stage.words, flush=True)
        if done or dry_run:
            continue
        code = subprocess.run([sys.executable, *stage.words], check=False).returncode
        if code:
            return code
    return 0


def reproduce(options: ReproduceOptions, invocation: Invocation) -> int:
    """Run what is not done yet; the first failure ends it."""
    return run_stages(stages(options), dry_run=options.dry_run)


def main(arguments: Sequence[str] | None = None) -> int:
    """0, or the exit code of the stage that failed."""
    return run_command("scripts.studies.embedded.reproduce", ReproduceOptions, reproduce, arguments)


if __name__ == "__main__":
    sys.exit(main())
