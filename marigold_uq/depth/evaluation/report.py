"""From results of images to those of a data set: means with standard errors, files, and a summary for the terminal."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState

from marigold_uq import plotting
from marigold_uq.depth.data import SPECS
from marigold_uq.depth.evaluation.options import DataOptions, DepthEvaluation, plain
from marigold_uq.depth.evaluation.panels import RELIABILITY_LEVELS
from marigold_uq.depth.evaluation.predictors import CALIBRATED_LEVELS, Predictor
from marigold_uq.depth.evaluation.protocol import DepthProtocol
from marigold_uq.depth.evaluation.records import TABLE_FILE, Failure, ImageRecord, ResultFolder
from marigold_uq.depth.metrics import FRACTIONS
from marigold_uq.metrics import Estimate, MeanAccumulator
from marigold_uq.results import METRICS_FILE, as_json, make_results, write_json

FORMAT = "marigold_uq evaluation 1"
_FIGURE_METRICS = ("abs_relative_difference", "delta1", "coverage", "ause_abs_rel", "spread_skill_ratio")


HEADLINE = (
    "abs_relative_difference", "delta1", "rmse", "crps", "relative_crps", "energy_score", "gaussian_nll", "coverage",
    "expected_coverage", "interval_width", "calibrated_coverage", "calibrated_width", "spread_skill_ratio",
    "ause_abs_rel", "spearman",
)  # fmt: skip

Estimates = dict[str, Estimate]


@dataclass(frozen=True)
class Summary:
    """Means over a data set.

    Attributes:
        overall: Name -> estimate: over images, or over groups where there are any (every group counts once, however
            many images it has; the standard error then takes groups as the independent units).
        groups: Group -> name -> estimate over its images; empty without groups.
        num_images: Group -> images scored.
    """

    overall: Estimates
    groups: dict[str, Estimates]
    num_images: dict[str, int]

    @property
    def average(self) -> str:
        """How `overall` was averaged."""
        return "mean over groups of the mean over images" if self.groups else "mean over images"


def summarize(records: Sequence[ImageRecord]) -> Summary:
    """Reduce the records of a whole data set. Collective: all processes call it with all records."""
    _check_one_kind(records)
    names = sorted({record.group for record in records})
    if names == [""]:
        return Summary(_accumulate(records).compute(), {}, {})
    groups: dict[str, Estimates] = {}
    overall = MeanAccumulator()
    for name in names:
        members = _accumulate([record for record in records if record.group == name])
        groups[name] = members.compute()
        for key, mean in members.compute({}).items():  # without RMSE and ratios: those are made of means over groups
            overall.update({key: mean.value[None]}, [name], keep=mean.value.ndim)
    counts = {name: sum(record.group == name for record in records) for name in names}
    return Summary(overall.compute(), groups, counts)


def _accumulate(records: Sequence[ImageRecord]) -> MeanAccumulator:
    """One value per image. All processes hold all records; the reducer drops the copies by their ids."""
    accumulator = MeanAccumulator()
    for record in records:
        for key, value in record.statistics.items():
            accumulator.update({key: torch.tensor([value], dtype=torch.float64)}, [record.name])
        for key, values in record.curves.items():
            accumulator.update({key: torch.tensor([values], dtype=torch.float64)}, [record.name], keep=1)
    return accumulator


def _check_one_kind(records: Sequence[ImageRecord]) -> None:
    """Means over images that were scored by different things would compare nothing."""
    examples = {record.kind: record.name for record in records}
    if len(examples) > 1:
        found = "; ".join(f"{kind} ({name})" for kind, name in examples.items())
        raise ValueError(f"the predictions are of different kinds: {found}; score each kind by itself")


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
    facts: dict[str, Any] = {
        "format": FORMAT,
        "predictor": {"name": options.predictor, "kind": records[0].kind, **predictor.describe()},
        "data": _describe_data(options.data),
        "alignment": protocol.describe(),
        "interval": {"level": options.score.level, "method": options.score.interval},
        "num_images": len(records),
        "num_failed": len(failures),
        "failed": [{"name": one.name, "reason": one.reason} for one in failures],
        "average": summary.average,
        "groups": {
            name: {"num_images": summary.num_images[name], "metrics": _numbers_as_json(estimates)}
            for name, estimates in summary.groups.items()
        },
        "curves": {
            "levels": list(RELIABILITY_LEVELS),
            "calibrated_levels": list(CALIBRATED_LEVELS),
            "removed": list(FRACTIONS),
            **as_json(curves),
        },
        "num_processes": PartialState().num_processes,
    }
    results = make_results("depth", as_json(numbers), command=command, config=plain(options), **facts)
    if folder is not None:
        folder.write_text(TABLE_FILE, table(records))
        if options.figures:
            draw_figures(folder, summary)
        write_json(folder.root / METRICS_FILE, results, overwrite=True)
    return results


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
        shown = [name for name in _FIGURE_METRICS if name in summary.overall]
        values = {name: {group: _pair(one[name]) for group, one in summary.groups.items()} for name in shown}
        overall = {name: float(summary.overall[name].value) for name in shown}
        figures["groups"] = plotting.group_bars(values, overall)
    for name, figure in figures.items():
        plotting.save_figure(figure, folder.figures / f"{name}.png", overwrite=True)


def _pair(estimate: Estimate) -> tuple[float, float]:
    return float(estimate.value), float(estimate.standard_error)


def report_text(metrics: Mapping[str, Any], output: Path) -> str:
    """The headline numbers of metrics.json, with what they mean, for a terminal."""
    lines = [f"{metrics['num_images']} images of {metrics['data']['title']}, {metrics['average']}"]
    lines.append(f"alignment: {metrics['alignment']['text']}")
    lines += [_line(name, metrics["metrics"][name]) for name in HEADLINE if name in metrics["metrics"]]
    calibrated = metrics["curves"].get("calibrated_reliability", {"value": []})["value"]
    pairs = zip(metrics["curves"]["calibrated_levels"], calibrated, strict=False)
    lines += [f"  calibrated {level:.0%} interval covers {share:.1%}" for level, share in pairs]
    lines += [f"failed: {one['name']}: {one['reason']}" for one in metrics["failed"]]
    return "\n".join([*lines, f"written to {output}"])


def _line(name: str, entry: Mapping[str, Any]) -> str:
    error = entry["standard_error"]
    return f"  {name:<26}{entry['value']:.4g}" + ("" if error is None else f" +- {error:.2g}")
