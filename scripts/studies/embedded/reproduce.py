"""The embedded model from nothing: scenes, autoencoder, latents, base, turned latents, one family, calibration, files.

python -m scripts.studies.embedded.reproduce --family gaussian

Every stage resumes where it stopped; a finished one is skipped. Days on two cores.
"""

import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from marigold_uq.commands.runner import Invocation, run_command

RUNS = "runs/embedded"
"""Where the configs expect everything."""
SCENES = (("train", 30_000, "train", 0), ("validation", 200, "validation", 0), ("calibration", 300, "validation", 1))
STUDY = "scripts.studies.embedded"


@dataclass(frozen=True)
class ReproduceOptions:
    """Make the embedded model from nothing, in runs/embedded.

    Args:
        family: The family that is calibrated and assembled.
        configs: Folder of the configs.
        processes: For rendering and encoding.
        dry_run: Only print the commands.
    """

    family: Literal["point", "gaussian", "mixture", "low_rank", "low_rank_kernel"] = "gaussian"
    configs: Path = Path("configs/depth/embedded")
    processes: int = 2
    dry_run: bool = False


@dataclass(frozen=True)
class Stage:
    """Words after `python`, and what is there once it is done; None for a stage that knows by itself."""

    words: list[str]
    result: Path | None = None


def stages(options: ReproduceOptions) -> Iterator[Stage]:
    """All stages in order."""

    def configs(*names: str) -> list[str]:
        return [word for name in names for word in ("--config", str(options.configs / f"{name}.yaml"))]

    def study(name: str, *words: str) -> list[str]:
        return ["-m", f"{STUDY}.{name}", *words]

    processes = ["--processes", str(options.processes)]
    train, base = ["train/train_depth.py"], ["--model", f"{RUNS}/base_more/model", "--latents", f"{RUNS}/latents/train"]
    for name, length, split, seed in SCENES:
        settings = ["--length", str(length), "--split", split, "--seed", str(seed), *processes]
        yield Stage(["scripts/render_scenes.py", "--output", f"{RUNS}/scenes/{name}", *settings])
    yield Stage(study("train_vae", *configs("vae")))
    yield Stage(study("train_vae", *configs("vae", "decoder")))
    data = ["--data.root", f"{RUNS}/scenes/train", "--flip", *processes]
    yield Stage(["scripts/encode_latents.py", "--vae", f"{RUNS}/vae/model", "--output", f"{RUNS}/latents/train", *data])
    yield Stage([*train, *configs("base")])
    yield Stage([*train, *configs("base", "base_more")])
    turned = Path(f"{RUNS}/rotated_vae")
    yield Stage(study("rotate_latents", "--stage", "basis", *base, "--output", str(turned)), turned)
    yield Stage(study("train_vae", *configs("vae", "decoder", "rotated_decoder")))
    given = ["--vae", f"{RUNS}/rotated_decoder/model", "--basis", str(turned / "basis.npy")]
    output = Path(f"{RUNS}/rotated/model")
    latents = ["--latents_output", f"{RUNS}/rotated_latents/train", "--output", str(output)]
    yield Stage(study("rotate_latents", "--stage", "apply", *base, *given, *latents), output)
    yield Stage([*train, *configs("base", "family", options.family)])
    calibrated, assets = (Path(f"{RUNS}/{name}_{options.family}") for name in ("calibrated", "assets"))
    held_out = ["--data.name", "scenes", "--data.root", f"{RUNS}/scenes/calibration", "--shuffle", "false"]
    model = ["--model", f"{RUNS}/{options.family}/model", "--batch_size", "10"]
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
