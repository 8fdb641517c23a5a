"""Appendix F at laptop size: one table over K, M, rank x bandwidth (and Cholesky) and beta_T, from one grid.

python -m scripts.studies.fields.sweep --output runs/field_sweeps --data runs/fields/data/burgers.h5
python -m scripts.studies.fields.sweep --output runs/field_sweeps --data burgers.h5 --sweeps rank
"""

import argparse
import itertools
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml

from marigold_uq.files import atomic_path
from scripts.studies.fields.report import collect, study_table
from scripts.studies.fields.study import ModelRun, StudyTask

CONFIGS = Path(__file__).parents[3] / "configs" / "field"
SCORES = {"num_one_step": 48, "figures": False}
REFERENCES = ("components: K = 1",)
"""The row that others are compared with, window by window: one component is the family `gaussian`."""
SHOWN = ("rmse", "crps", "energy_score", "gaussian_nll", "coverage", "spread_skill_ratio")


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


def build_parser() -> argparse.ArgumentParser:
    """Where, what, how much of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder of all results")
    parser.add_argument("--data", type=Path, required=True, help="trajectories, of scripts/generate_pde.py")
    parser.add_argument("--config", type=Path, default=CONFIGS / "burgers_small.yaml", help="of the task (%(default)s)")
    parser.add_argument("--grid", type=Path, default=CONFIGS / "sweeps_small.yaml", help="(%(default)s)")
    parser.add_argument("--sweeps", nargs="+", help="only these")
    parser.add_argument("--seeds", type=int, default=1, help="models per setting (%(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="of torch (%(default)s)")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Train and score what is missing, then write the table; 3 when interrupted."""
    args = build_parser().parse_args(arguments)
    torch.set_num_threads(args.threads)
    grid = yaml.safe_load(args.grid.read_text(encoding="utf-8"))
    task = StudyTask(args.config.stem, ["--config", str(args.config), "--data.pde.path", str(args.data)], SCORES)
    runs = plan(grid, task, args.output, args.sweeps or list(grid["sweeps"]), args.seeds)
    try:
        for number, run in enumerate(runs):
            run.train()
            run.score("model", "raw", num_rollouts=0)
            print(f"[{number + 1}/{len(runs)}] {run.name}, seed {run.seed}", flush=True)
    except KeyboardInterrupt:
        print("interrupted; run the same command again to go on where it stopped", file=sys.stderr)
        return 3
    table = study_table(collect(runs, "raw/metrics.json"), "one_step", 1, SHOWN, REFERENCES)
    with atomic_path(args.output / "sweeps.md", overwrite=True) as temporary:
        temporary.write_text(table + "\n", encoding="utf-8")
    print(table)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
