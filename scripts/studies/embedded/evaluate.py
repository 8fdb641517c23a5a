r"""Compare the families of the embedded model on held-out scenes: one evaluation per (family, mode, steps), one table.

python -m scripts.studies.embedded.evaluate --runs runs/embedded --scenes runs/embedded/scenes/validation

Resumable: finished evaluations are kept, an unfinished one resumes. Members are ten in all modes; intervals are the
members' mean -+ Student's t, which covers 90 % if ten members are calibrated. A second table has the differences
between families scene by scene. Its standard errors are far smaller, because scenes differ more than families.
"""

import csv
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from marigold_uq.commands.runner import Invocation, run_command
from marigold_uq.depth.evaluation import DepthEvaluation, evaluate_depth
from marigold_uq.depth.evaluation.options import DataOptions, PipelineOptions, ScoreOptions, plain
from marigold_uq.files import atomic_path, require_same
from scripts.studies.embedded.reproduce import FAMILIES

Mode = Literal["ensemble", "trajectory", "marginal"]
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


@dataclass(frozen=True)
class CompareOptions:
    """Compare the families of the embedded model on held-out scenes.

    Args:
        runs: Folder with FAMILY/model.
        scenes: Folder of rendered scenes.
        output: Folder for evaluations and tables; default: RUNS/evaluation.
        families: Those to compare; the first is the reference.
        modes: Ways to uncertainty.
        steps: Numbers of denoising steps.
        ensemble_size: Members of every mode.
        limit: Only so many scenes, evenly spaced.
        threads: Of torch; default: its own choice.
    """

    runs: Path
    scenes: Path
    output: Path | None = None
    families: list[str] = field(default_factory=lambda: list(FAMILIES))
    modes: list[Mode] = field(default_factory=lambda: ["ensemble", "trajectory", "marginal"])
    steps: list[int] = field(default_factory=lambda: [1])
    ensemble_size: int = 10
    limit: int | None = None
    threads: int | None = None

    @property
    def folder(self) -> Path:
        """Where everything is written."""
        return self.output or self.runs / "evaluation"


def cells(options: CompareOptions) -> Iterator[tuple[str, Mode, int]]:
    """Every (family, mode, steps); a point model has no distribution to take members from."""
    for steps in options.steps:
        for family in options.families:
            for mode in options.modes:
                if family != "point" or mode == "ensemble":
                    yield family, mode, steps


def evaluation_of(options: CompareOptions, family: str, mode: Mode, steps: int) -> DepthEvaluation:
    """The options of one cell."""
    return DepthEvaluation(
        pipeline=PipelineOptions(
            str(options.runs / family / "model"),
            mode,
            options.ensemble_size,
            num_inference_steps=steps,
            batch_size=options.ensemble_size,
        ),
        data=DataOptions("scenes", root=str(options.scenes), limit=options.limit),
        score=ScoreOptions(metrics=PANELS, level=0.9, interval="student_t"),
        output=options.folder / f"{family}-{mode}-{steps}",
        figures=False,
    )


def measured(options: CompareOptions, family: str, mode: Mode, steps: int) -> dict[str, Any]:
    """The cell's metrics.json, made if it is not there."""
    cell = evaluation_of(options, family, mode, steps)
    path = cell.output / "metrics.json"
    if not path.is_file():
        print(f"{family}, {mode}, {steps} steps", flush=True)
        evaluate_depth(cell)
    found = json.loads(path.read_text(encoding="utf-8"))
    require_same(cell.output, found["config"], plain(cell))
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


def paired_table(options: CompareOptions) -> str:
    """Markdown: each (family, mode) against the first of the same number of steps, in percent.

    The last column has the CRPS of a single call's members against the same family's ensemble.
    """
    titles = [*(f"{METRICS[name]}, % of reference" for name in PAIRED), "CRPS / depth, % of its own ensemble"]
    lines = ["| steps | mode | family | " + " | ".join(titles) + " |"]
    lines.append("|" + "---|" * (3 + len(titles)))
    references = {steps: (family, mode) for family, mode, steps in reversed(list(cells(options)))}
    for family, mode, steps in cells(options):
        reference = per_scene(evaluation_of(options, *references[steps], steps).output)
        own = per_scene(evaluation_of(options, family, mode, steps).output)
        entries = [_difference(own[name], reference[name]) for name in PAIRED]
        if mode != "ensemble" and "ensemble" in options.modes:
            ensemble = per_scene(evaluation_of(options, family, "ensemble", steps).output)
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


def compare(options: CompareOptions, invocation: Invocation) -> int:
    """Evaluate what is missing and write the tables."""
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    text = table({cell: measured(options, *cell) for cell in cells(options)}) + "\n" + paired_table(options)
    print(text)
    name = f"table-{'-'.join(map(str, options.steps))}.md"
    with atomic_path(options.folder / name, overwrite=True) as temporary:
        temporary.write_text(text, encoding="utf-8")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """0, or 2 for an error that names what to mend."""
    return run_command("scripts.studies.embedded.evaluate", CompareOptions, compare, arguments)


if __name__ == "__main__":
    sys.exit(main())
