"""DDPM, EDM and flow matching on Kuramoto-Sivashinsky: the same network, data and training, another framework.

python -m scripts.studies.fields.frameworks --output runs/field_frameworks --data runs/fields/data/ks.h5

Timesteps are drawn as each framework does. Interrupt it at any time: the same command resumes. At the end the
tables of 1, 5 and 50 denoising steps, forecasts one step ahead, are written to frameworks.md.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from marigold_uq.commands.runner import Invocation, run_command
from marigold_uq.files import atomic_path
from scripts.studies.fields.report import collect, study_table
from scripts.studies.fields.study import ModelRun, StudyTask

__all__ = ["main"]


CONFIG = Path(__file__).parents[3] / "configs" / "field" / "ks_small.yaml"
FRAMEWORKS = {"DDPM": "ddim", "EDM": "edm", "flow": "flow"}
STEP_COUNTS = (1, 5, 50)
SHOWN = ("crps", "rmse", "coverage", "spread_skill_ratio")


@dataclass(frozen=True)
class Options:
    """Train one family under three frameworks and compare the forecasts.

    Args:
        output: Folder of all results.
        data: Trajectories, of scripts/generate_pde.py.
        overlay: A config that changes ks_small.yaml, for instance configs/field/heads.yaml: a smaller network.
        variant: The model, a key of the study's VARIANTS.
        seeds: Models per framework.
        max_steps: Training steps of each.
        batch_size: Of training.
        point_stride: Takes every so many-th of the 128 points.
        windows: Forecasts that are scored.
        ensemble_size: Samples of each forecast.
        threads: Of torch.
    """

    output: Path
    data: Path
    overlay: Path | None = None
    variant: str = "gaussian_uniform"
    seeds: int = 2
    max_steps: int = 2000
    batch_size: int = 64
    point_stride: int = 1
    windows: int = 192
    ensemble_size: int = 20
    threads: int = 1


def plan(args: Options) -> list[ModelRun]:
    """A model per seed and framework."""
    scores = {"num_one_step": args.windows, "ensemble_size": args.ensemble_size, "num_rollouts": 0, "figures": False}
    steps = str(args.max_steps)
    length = ["--training.max_steps", steps, "--training.optimizer.decay_steps", steps]
    size = ["--training.batch_size", str(args.batch_size), "--data.pde.point_stride", str(args.point_stride)]
    configs = [CONFIG] if args.overlay is None else [CONFIG, args.overlay]
    base = [word for config in configs for word in ("--config", str(config))]
    task = StudyTask("ks", [*base, "--data.pde.path", str(args.data), *size], scores)
    return [
        ModelRun(task, args.variant, seed, args.output, [*length, "--model.framework", framework], name)
        for seed in range(args.seeds)
        for name, framework in FRAMEWORKS.items()
    ]


def tables(runs: Sequence[ModelRun]) -> str:
    """One table per number of denoising steps."""
    parts = []
    for steps in STEP_COUNTS:
        rows = collect(runs, f"steps_{steps}/metrics.json")
        title = f"## {steps} denoising step{'s' * (steps > 1)}"
        parts += [title, "", study_table(rows, "one_step", 1, SHOWN, ["DDPM"]), ""]
    return "\n".join(parts)


def run(args: Options, invocation: Invocation) -> int:
    """Train and score what is missing, and write the tables."""
    torch.set_num_threads(args.threads)
    runs = plan(args)
    for number, one in enumerate(runs):
        one.train()
        for steps in STEP_COUNTS:
            one.score("model", f"steps_{steps}", num_inference_steps=steps)
        print(f"[{number + 1}/{len(runs)}] {one.name}, seed {one.seed}", flush=True)
    text = tables(runs)
    with atomic_path(args.output / "frameworks.md", overwrite=True) as temporary:
        temporary.write_text(text, encoding="utf-8")
    print(text)
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the options, run."""
    return run_command("scripts.studies.fields.frameworks", Options, run, arguments)


if __name__ == "__main__":
    raise SystemExit(main())
