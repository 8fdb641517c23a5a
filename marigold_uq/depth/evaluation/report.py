"""The files of a finished evaluation: metrics.json, per_image.csv and figures."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from accelerate import PartialState

from marigold_uq import plotting
from marigold_uq.depth.data import SPECS
from marigold_uq.depth.evaluation.options import DataOptions, DepthEvaluation, plain
from marigold_uq.depth.evaluation.panels import RELIABILITY_LEVELS
from marigold_uq.depth.evaluation.predictors import Predictor
from marigold_uq.depth.evaluation.protocol import DepthProtocol
from marigold_uq.depth.evaluation.records import METRICS_FILE, TABLE_FILE, Failure, ImageRecord, ResultFolder
from marigold_uq.depth.evaluation.summary import Summary, as_json
from marigold_uq.depth.metrics import FRACTIONS
from marigold_uq.metrics import Estimate
from marigold_uq.results import versions

FORMAT = "marigold_uq evaluation 1"
FIGURE_METRICS = ("abs_relative_difference", "delta1", "coverage", "ause_abs_rel", "spread_skill_ratio")


def write_report(
    folder: ResultFolder | None,
    options: DepthEvaluation,
    protocol: DepthProtocol,
    predictor: Predictor,
    summary: Summary,
    records: Sequence[ImageRecord],
    failures: Sequence[Failure],
    command: str | None,
) -> dict[str, Any]:
    """Write all files (only with a folder) and return what metrics.json holds; it comes last and marks the end."""
    numbers = {name: one for name, one in summary.overall.items() if one.value.ndim == 0}
    curves = {name: one for name, one in summary.overall.items() if one.value.ndim == 1}
    metrics: dict[str, Any] = {
        "format": FORMAT,
        "task": "depth",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command,
        "predictor": {"name": options.predictor, "kind": records[0].kind, **predictor.describe()},
        "data": _describe_data(options.data),
        "alignment": protocol.describe(),
        "interval": {"level": options.score.level, "method": options.score.interval},
        "num_images": len(records),
        "num_failed": len(failures),
        "failed": [{"name": one.name, "reason": one.reason} for one in failures],
        "average": summary.average,
        "metrics": as_json(numbers),
        "groups": {
            name: {"num_images": summary.num_images[name], "metrics": _numbers_as_json(estimates)}
            for name, estimates in summary.groups.items()
        },
        "curves": {"levels": list(RELIABILITY_LEVELS), "removed": list(FRACTIONS), **as_json(curves)},
        "config": plain(options),
        "versions": versions(),
        "num_processes": PartialState().num_processes,
    }
    if folder is not None:
        folder.write_text(TABLE_FILE, table(records))
        if options.figures:
            draw_figures(folder, summary)
        folder.write_text(METRICS_FILE, json.dumps(metrics, indent=2, allow_nan=False) + "\n")
    return metrics


def _numbers_as_json(estimates: dict[str, Estimate]) -> dict[str, Any]:
    return as_json({name: one for name, one in estimates.items() if one.value.ndim == 0})


def _describe_data(options: DataOptions) -> dict[str, Any]:
    """Name, title and where the data lie; `id` is what a model card calls the data set."""
    spec = SPECS.get(options.name)
    root = options.root or ""
    title = spec.title if spec else (root.rstrip("/").rsplit("/", 1)[-1] or options.name)
    hub_id = options.hub_id or (options.root if options.name == "huggingface" else None)
    return {"name": options.name, "title": title, "id": hub_id or (options.name if spec else title), "root": root}


def table(records: Sequence[ImageRecord]) -> str:
    """CSV with a row per image; a statistic that is undefined for an image is left empty."""
    columns = list(dict.fromkeys(name for record in records for name in record.statistics))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["name", "group", "num_valid", "scale", "shift", *columns])
    for one in records:
        values = [one.statistics.get(name, "") for name in columns]
        writer.writerow([one.name, one.group, one.num_valid, one.scale, one.shift, *values])
    return text.getvalue()


def draw_figures(folder: ResultFolder, summary: Summary) -> None:
    """The figures that the statistics allow."""
    folder.figures.mkdir(parents=True, exist_ok=True)
    curves = {name: one.value.tolist() for name, one in summary.overall.items() if one.value.ndim == 1}
    figures = {}
    if "reliability" in curves:
        figures["reliability"] = plotting.reliability_diagram(
            RELIABILITY_LEVELS, {"observed": curves["reliability"]}, expected=curves["expected_reliability"]
        )
    if "sparsification" in curves:
        figures["sparsification"] = plotting.sparsification_plot(
            FRACTIONS, {"by uncertainty": curves["sparsification"]}, oracle=curves["sparsification_oracle"]
        )
    if "pit" in curves:
        figures["pit"] = plotting.pit_histogram(curves["pit"])
    if summary.groups:
        shown = [name for name in FIGURE_METRICS if name in summary.overall]
        values = {name: {group: _pair(one[name]) for group, one in summary.groups.items()} for name in shown}
        overall = {name: float(summary.overall[name].value) for name in shown}
        figures["groups"] = plotting.group_bars(values, overall)
    for name, figure in figures.items():
        plotting.save_figure(figure, folder.figures / f"{name}.png", overwrite=True)


def _pair(estimate: Estimate) -> tuple[float, float]:
    return float(estimate.value), float(estimate.standard_error)
