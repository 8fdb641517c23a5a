r"""Compare the families of the embedded model on held-out scenes: one evaluation per (family, mode, steps), one table.

python -m scripts.studies.embedded.evaluate --runs runs/embedded --scenes runs/embedded/scenes/test --steps 1 4 10
python -m scripts.studies.embedded.evaluate --runs runs/embedded --scenes runs/embedded/scenes/test --steps 50

Resumable: finished evaluations are kept, an unfinished one goes on. Members are ten in both modes; intervals are the
members' mean -+ Student's t, which covers 90 % if ten members are honest. A second table has the differences between
families scene by scene, whose standard errors are far smaller: scenes differ more than families.
"""

import argparse
import csv
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from marigold_uq.depth.evaluation import DepthEvaluation, evaluate_depth
from marigold_uq.depth.evaluation.options import DataOptions, PipelineOptions, ScoreOptions, plain

FAMILIES = ("point", "gaussian", "mixture", "low_rank", "low_rank_kernel")
METRICS = {
    "abs_relative_difference": "AbsRel",
    "delta1": "delta1",
    "crps": "CRPS (m)",
    "relative_crps": "CRPS / depth",
    "energy_score": "energy score",
    "coverage": "coverage of 90 %",
    "ause_abs_rel": "AUSE",
    "spearman": "Spearman",
}
PAIRED = ("abs_relative_difference", "relative_crps", "energy_score")
"""Metrics of the second table; differences are relative to the reference's mean."""
PANELS = ("depth", "probabilistic", "calibrated", "energy_score", "ranking")


def cells(args: argparse.Namespace) -> Iterator[tuple[str, str, int]]:
    """Every (family, mode, steps); a point model has no law to draw a trajectory's members from."""
    for steps in args.steps:
        for family in args.families:
            for mode in args.modes:
                if not (family == "point" and mode == "trajectory"):
                    yield family, mode, steps


def evaluation_of(args: argparse.Namespace, family: str, mode: str, steps: int) -> DepthEvaluation:
    """The options of one cell."""
    return DepthEvaluation(
        pipeline=PipelineOptions(
            str(args.runs / family / "model"),
            mode,
            args.members,
            steps=steps,
            batch_size=args.members,  # type: ignore[arg-type]
        ),
        data=DataOptions("scenes", root=str(args.scenes), limit=args.limit),
        score=ScoreOptions(metrics=PANELS, level=0.9, interval="student_t"),
        output=args.output / f"{family}-{mode}-{steps}",
        figures=False,
    )


def measured(args: argparse.Namespace, family: str, mode: str, steps: int) -> dict[str, Any]:
    """The cell's metrics.json, made if it is not there."""
    options = evaluation_of(args, family, mode, steps)
    path = options.output / "metrics.json"
    if not path.is_file():
        print(f"{family}, {mode}, {steps} steps", flush=True)
        evaluate_depth(options)
    found = json.loads(path.read_text(encoding="utf-8"))
    if found["config"] != plain(options):
        raise SystemExit(f"{path} was made with other options; remove its folder or choose another --output")
    return found


def table(rows: dict[tuple[str, str, int], dict[str, Any]]) -> str:
    """Markdown: value with its standard error over scenes."""
    lines = ["| steps | mode | family | scenes | " + " | ".join(METRICS.values()) + " |"]
    lines.append("|" + "---|" * (4 + len(METRICS)))
    for (family, mode, steps), found in rows.items():
        entries = [_entry(found["metrics"].get(name)) for name in METRICS]
        lines.append(f"| {steps} | {mode} | {family} | {found['num_images']} | " + " | ".join(entries) + " |")
    return "\n".join(lines) + "\n"


def _entry(entry: dict[str, Any] | None) -> str:
    return "" if entry is None else f"{entry['value']:.4f} +- {entry['standard_error']:.4f}"


def per_scene(folder: Path) -> dict[str, list[float]]:
    """Every metric of the second table, scene by scene."""
    with (folder / "per_image.csv").open(encoding="utf-8", newline="") as file:
        rows = sorted(csv.DictReader(file), key=lambda row: row["name"])
    return {name: [float(row[name]) for row in rows] for name in PAIRED}


def paired_table(args: argparse.Namespace) -> str:
    """Markdown: each (family, mode) against the first of the same number of steps, in percent.

    The last column has a trajectory's CRPS against the same family's ensemble.
    """
    titles = [*(f"{METRICS[name]}, % of reference" for name in PAIRED), "CRPS / depth, % of its own ensemble"]
    lines = ["| steps | mode | family | " + " | ".join(titles) + " |"]
    lines.append("|" + "---|" * (3 + len(titles)))
    references = {steps: (family, mode) for family, mode, steps in reversed(list(cells(args)))}
    for family, mode, steps in cells(args):
        reference = per_scene(evaluation_of(args, *references[steps], steps).output)
        own = per_scene(evaluation_of(args, family, mode, steps).output)
        entries = [_difference(own[name], reference[name]) for name in PAIRED]
        if mode == "trajectory" and "ensemble" in args.modes:
            ensemble = per_scene(evaluation_of(args, family, "ensemble", steps).output)
            entries.append(_difference(own["relative_crps"], ensemble["relative_crps"]))
        else:
            entries.append("")
        lines.append(f"| {steps} | {mode} | {family} | " + " | ".join(entries) + " |")
    return "\n".join(lines) + "\n"


def _difference(own: Sequence[float], reference: Sequence[float]) -> str:
    """Mean over scenes and its standard error, in percent of the reference's mean."""
    share = 100 * (np.array(own) - np.array(reference)) / np.mean(reference)
    error = share.std(ddof=1) / np.sqrt(len(share)) if len(share) > 1 else np.nan
    return f"{share.mean():+.1f} +- {error:.1f}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Evaluate what is missing and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, required=True, help="folder with FAMILY/model")
    parser.add_argument("--scenes", type=Path, required=True)
    parser.add_argument("--output", type=Path, default=None, help="default: RUNS/evaluation")
    parser.add_argument("--families", nargs="+", default=FAMILIES)
    parser.add_argument("--modes", nargs="+", default=("ensemble", "trajectory"), choices=("ensemble", "trajectory"))
    parser.add_argument("--steps", nargs="+", type=int, default=[1, 4, 10])
    parser.add_argument("--members", type=int, default=10)
    parser.add_argument("--limit", type=int, default=None)
    parser.add_argument("--threads", type=int, default=None, help="threads of torch; default: torch's own choice")
    args = parser.parse_args(arguments)
    args.output = args.output or args.runs / "evaluation"
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    text = table({cell: measured(args, *cell) for cell in cells(args)}) + "\n" + paired_table(args)
    print(text)
    temporary = args.output / ".table.md"
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(args.output / f"table-{'-'.join(map(str, args.steps))}.md")


if __name__ == "__main__":
    main()
