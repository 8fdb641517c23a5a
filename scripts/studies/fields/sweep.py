"""Appendix F at laptop size: one table over K, M, rank x bandwidth (and Cholesky) and beta_T, from one grid.

python -m scripts.studies.fields.sweep --output runs/field_sweeps --data runs/fields/data/burgers.h5
python -m scripts.studies.fields.sweep --output runs/field_sweeps --data burgers.h5 --sweeps rank_projected
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml

from marigold_uq.commands.runner import Invocation, run_command
from marigold_uq.files import atomic_path
from scripts.studies.fields.report import collect, study_table
from scripts.studies.fields.study import ModelRun, StudyTask

__all__ = ["main", "plan"]


CONFIGS = Path(__file__).parents[3] / "configs" / "field"
SCORES = {"num_one_step": 48, "figures": False}
REFERENCES = ("components: K = 1",)
"""The row that others are compared with, window by window: one component is the family `gaussian`."""
SHOWN = ("rmse", "crps", "energy_score", "gaussian_nll", "coverage", "spread_skill_ratio")


@dataclass(frozen=True)
class Options:
    """Sweep the settings of Appendix F.

    Args:
        output: Folder of all results.
        data: Trajectories, of scripts/generate_pde.py.
        task: Config of the task.
        grid: The sweeps.
        sweeps: Only these; by default all.
        seeds: Models per setting.
        threads: Of torch.
    """

    output: Path
    data: Path
    task: Path = CONFIGS / "burgers_small.yaml"
    grid: Path = CONFIGS / "sweeps_small.yaml"
    sweeps: list[str] = field(default_factory=list)
    seeds: int = 1
    threads: int = 1


def settings_of(sweep: Mapping[str, Any]) -> dict[str, list[str]]:
    """Name -> arguments: the settings as listed, or all combinations of several lists."""
    if "settings" in sweep:
        return {name: list(arguments) for name, arguments in sweep["settings"].items()}
    combinations = itertools.product(*(part.items() for part in sweep["product"]))
    return {", ".join(name for name, _ in combination): _joined(combination) for combination in combinations}


def _joined(combination: Sequence[tuple[str, Sequence[str]]]) -> list[str]:
    return [argument for _, arguments in combination for argument in arguments]


def plan(grid: Mapping[str, Any], task: StudyTask, output: Path, chosen: Sequence[str], seeds: int) -> list[ModelRun]:
    """A model per setting and seed."""
    unknown = [name for name in chosen if name not in grid["sweeps"]]
    if unknown:
        raise ValueError(f"no sweep {', '.join(unknown)}; the grid has {', '.join(grid['sweeps'])}")
    return [
        ModelRun(task, sweep["variant"], seed, output, [*grid["arguments"], *arguments], f"{name}: {setting}")
        for seed in range(seeds)
        for name, sweep in grid["sweeps"].items()
        if name in chosen
        for setting, arguments in settings_of(sweep).items()
    ]


def run(args: Options, invocation: Invocation) -> int:
    """Train and score what is missing, then write the table."""
    torch.set_num_threads(args.threads)
    grid = yaml.safe_load(args.grid.read_text(encoding="utf-8"))
    task = StudyTask(args.task.stem, ["--config", str(args.task), "--data.pde.path", str(args.data)], SCORES)
    runs = plan(grid, task, args.output, args.sweeps or list(grid["sweeps"]), args.seeds)
    for number, one in enumerate(runs):
        one.train()
        one.score("model", "raw", num_rollouts=0)
        print(f"[{number + 1}/{len(runs)}] {one.name}, seed {one.seed}", flush=True)
    table = study_table(collect(runs, "raw/metrics.json"), "one_step", 1, SHOWN, REFERENCES)
    with atomic_path(args.output / "sweeps.md", overwrite=True) as temporary:
        temporary.write_text(table + "\n", encoding="utf-8")
    print(table)
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the options, run."""
    return run_command("scripts/studies/fields/sweep.py", Options, run, arguments)


if __name__ == "__main__":
    raise SystemExit(main())
