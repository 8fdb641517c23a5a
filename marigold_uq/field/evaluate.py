"""The evaluation of a forecast model, one step ahead and rolled out: metrics.json, report.md and figures."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from marigold_uq import plotting
from marigold_uq.depth.evaluation.options import plain
from marigold_uq.depth.evaluation.summary import as_json
from marigold_uq.field import figures
from marigold_uq.field.config import FieldData
from marigold_uq.field.data import FieldSequences, Transitions, statistics_of
from marigold_uq.field.forecasters import (
    Climatology,
    Forecaster,
    Persistence,
    PipelineForecaster,
    Precision,
)
from marigold_uq.field.scores import accumulate_scores, independent_groups, spread_windows
from marigold_uq.field.splits import FieldSplit, open_split, target_hours
from marigold_uq.files import atomic_path, make_folder
from marigold_uq.metrics import expected_coverage
from marigold_uq.pipelines.field import FieldForecastPipeline
from marigold_uq.results import versions

METRICS_FILE, REPORT_FILE = "metrics.json", "report.md"
SHOWN = ("rmse", "crps", "energy_score", "gaussian_nll", "coverage", "conformal_coverage", "spread_skill_ratio")
CURVES = ("rmse", "crps", "coverage", "spread_skill_ratio")
PAIRED, GROUPS = "crps_of_windows", "groups_of_windows"
MIN_SCALE_SHARE = 1e-3
"""The floor of the NLL's standard deviation, as a share of the deviation of the training increments."""


@dataclass(frozen=True)
class FieldEvaluation:
    """Score forecasts against what happened.

    Args:
        data: The data the model was trained with; the part `split` is scored.
        model: Folder or Hub name of a pipeline; or "persistence" or "climatology".
        output: Folder of the results.
        targets: Variables that are scored; null takes those that the model predicts, or all for a baseline.
        num_history: States before the first future one of a window; null takes the model's, or 2 for a baseline.
        split: "test" or "validation".
        members: Members of each forecast; coverage wants at least 39.
        steps: Denoising steps; null takes the model's own number.
        num_one_step: Windows for the one-step scores.
        num_rollouts: Windows for the rollouts; 0 leaves them out.
        num_leads: Lead times of a rollout.
        level: Of the interval behind coverage.
        seed: Of all members.
        max_batch_size: Chains per network call; never changes a result beyond rounding.
        device: Where the network runs.
        mixed_precision: "no", "bf16" or "fp16", of the network.
        figures: Draw figures.
    """

    data: FieldData
    model: str = "persistence"
    output: Path = Path("runs/field/evaluation")
    targets: list[str] | None = None
    num_history: int | None = None
    split: Literal["test", "validation"] = "test"
    members: int = 40
    steps: int | None = None
    num_one_step: int = 64
    num_rollouts: int = 16
    num_leads: int = 10
    level: float = 0.95
    seed: int = 0
    max_batch_size: int = 128
    device: str = "cpu"
    mixed_precision: Precision = "no"
    figures: bool = True


def evaluate_field(options: FieldEvaluation, *, command: str | None = None) -> dict[str, Any]:
    """Score, write the results to `options.output`, and return what metrics.json holds; finished ones are returned."""
    path = options.output / METRICS_FILE
    if path.exists():
        stored = json.loads(path.read_text(encoding="utf-8"))
        if stored["config"] != json.loads(json.dumps(plain(options))):
            raise FileExistsError(f"{path} is of other options: remove it or choose another output")
        if stored.get("fingerprint") != fingerprint(options.model):
            raise FileExistsError(
                f"{path} is of other weights or another calibration than {options.model} has now: remove it or choose "
                "another output"
            )
        return stored
    split = open_split(options.data)
    forecaster = make_forecaster(options, split)
    results = score_split(forecaster, options, split)
    return write_results(results, options, forecaster, split, command)


def fingerprint(model: str | Path) -> str | None:
    """SHA-256 of the configs and weights in a pipeline's folder; None for a baseline or a name on the Hub."""
    if not Path(model).is_dir():
        return None
    digest = hashlib.sha256()
    for path in sorted(path for path in Path(model).rglob("*") if path.suffix in (".json", ".safetensors", ".bin")):
        digest.update(path.relative_to(model).as_posix().encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def make_forecaster(options: FieldEvaluation, split: FieldSplit) -> Forecaster:
    """The model or baseline that the options name, checked against the data."""
    if options.model == "persistence":
        return Persistence()
    if options.model == "climatology":
        return Climatology(split.train, num_members=options.members, seed=options.seed)
    pipeline = FieldForecastPipeline.from_pretrained(options.model).to(options.device)
    pipeline.encoder.require_data(getattr(split, options.split))
    _check_model(options, pipeline)
    return PipelineForecaster(
        pipeline,
        num_members=options.members,
        num_steps=options.steps,
        seed=options.seed,
        max_batch_size=options.max_batch_size,
        mixed_precision=options.mixed_precision,
        name=options.model,
    )


def _check_model(options: FieldEvaluation, pipeline: FieldForecastPipeline) -> None:
    """Refuse before anything is scored."""
    config = pipeline.encoder.config
    if options.targets is not None and list(options.targets) != list(config.targets):
        raise ValueError(f"{options.model} predicts {list(config.targets)}; got targets {list(options.targets)}")
    if options.num_history not in (None, config.num_history):
        raise ValueError(f"{options.model} sees {config.num_history} states; got num_history {options.num_history}")
    if options.num_rollouts and options.num_leads > 1 and list(config.targets) != list(config.variables):
        raise ValueError(
            f"{options.model} predicts {list(config.targets)} of {list(config.variables)} and cannot be rolled out: "
            "set num_rollouts to 0"
        )


def score_split(forecaster: Forecaster, options: FieldEvaluation, split: FieldSplit) -> dict[str, dict[str, Any]]:
    """One-step and rollout scores: part -> metric -> {value (L, ...), standard_error, num_samples}, plain numbers.

    `crps_of_windows` of each part is the CRPS of every window, {window: (L,)}, for differences of paired forecasts;
    `groups_of_windows` says which of them are not independent.
    """
    sequences = getattr(split, options.split)
    pipeline = getattr(forecaster, "pipeline", None)
    targets = list(options.targets or split.train.variables) if pipeline is None else pipeline.encoder.config.targets
    history = (options.num_history or 2) if pipeline is None else pipeline.encoder.config.num_history
    select = _selector(split.train, targets)
    statistics = statistics_of(split.train)
    spread = max(statistics[name].increment_std for name in targets)
    leads = {"one_step": (1, options.num_one_step), "rollout": (options.num_leads, options.num_rollouts)}
    results = {}
    for part, (num_leads, count) in leads.items():
        if count == 0:
            continue
        hours = target_hours(options.data)
        windows = Transitions(sequences, num_history=history, num_leads=num_leads, target_hours=hours)
        ids = spread_windows(count, len(windows))
        found = accumulate_scores(
            forecaster,
            windows,
            ids,
            select_targets=select,
            select_members=select if pipeline is None else lambda members: members,
            min_scale=MIN_SCALE_SHARE * spread,
            level=options.level,
        )
        table = found.samples()["crps"]
        results[part] = as_json(found.compute())
        results[part][PAIRED] = {str(i): row for i, row in zip(table.ids, table.values.tolist(), strict=True)}
        results[part][GROUPS] = dict(zip(map(str, ids), independent_groups(windows, ids), strict=True))
    return results


def _selector(train: FieldSequences, targets: Sequence[str]) -> Callable[[Tensor], Tensor]:
    """What takes the target channels of states (..., C, *space)."""
    unknown = [name for name in targets if name not in train.variables]
    if unknown:
        raise ValueError(f"targets are some of the variables {list(train.variables)}; got {list(targets)}")
    channels = torch.tensor([train.variables.index(name) for name in targets])
    return lambda states: states.index_select(states.ndim - 1 - len(train.coordinates), channels)


def write_results(
    results: Mapping[str, Mapping[str, Any]],
    options: FieldEvaluation,
    forecaster: Forecaster,
    split: FieldSplit,
    command: str | None,
) -> dict[str, Any]:
    """metrics.json comes last and marks the end."""
    one_step = {
        name: {key: _first(value) for key, value in entry.items()}
        for name, entry in results.get("one_step", {}).items()
        if name in SHOWN
    }
    honest = expected_coverage(options.members, options.level) if options.members > 1 else None
    metrics: dict[str, Any] = {
        "format": "marigold_uq evaluation 1",
        "task": "field",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command,
        "predictor": {"name": forecaster.name, "model": options.model, "members": options.members},
        "data": {"name": split.test.source, "title": Path(split.test.source).stem},
        "num_samples": one_step["rmse"]["num_samples"] if one_step else 0,
        "expected_coverage": honest,
        "lead_time_step": split.test.time_step,
        "metrics": one_step,
        **results,
        "config": json.loads(json.dumps(plain(options))),
        "fingerprint": fingerprint(options.model),
        "versions": versions(),
    }
    make_folder(options.output)
    if options.figures:
        draw_figures({forecaster.name: metrics}, options.output)
    _write(options.output / REPORT_FILE, report({forecaster.name: metrics}))
    _write(options.output / METRICS_FILE, json.dumps(metrics, indent=1, allow_nan=False) + "\n")
    return metrics


def report(models: Mapping[str, Mapping[str, Any]], leads: Sequence[int] | None = None) -> str:
    """Tables in Markdown: one step ahead, and at some lead times of the rollout."""
    parts = []
    if any("one_step" in metrics for metrics in models.values()):
        parts += ["## One step ahead\n", table(models, "one_step", 0)]
    for lead in leads or _some_leads(models):
        parts += [f"\n## Rollout, lead time {lead}\n", table(models, "rollout", lead - 1)]
    return "\n".join(parts) + "\n"


def table(models: Mapping[str, Mapping[str, Any]], part: str, lead: int) -> str:
    """A row per model, its standard error behind each number."""
    lines = ["| model | " + " | ".join(SHOWN) + " |", "|---" * (1 + len(SHOWN)) + "|"]
    for name, metrics in models.items():
        cells = [_cell(metrics.get(part, {}).get(metric), lead) for metric in SHOWN]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def draw_figures(models: Mapping[str, Mapping[str, Any]], folder: Path) -> None:
    """Scores against lead time for all models; spectra and ranks of the last one."""
    rolled = {name: metrics["rollout"] for name, metrics in models.items() if "rollout" in metrics}
    if not rolled:
        return
    any_model = next(iter(models.values()))
    num_leads = len(next(iter(rolled.values()))["rmse"]["value"])
    step = any_model["lead_time_step"]
    values = {
        metric: {name: one[metric]["value"] for name, one in rolled.items() if metric in one} for metric in CURVES
    }
    shown = {metric: curves for metric, curves in values.items() if curves}
    times = [step * lead for lead in range(1, num_leads + 1)]
    calendar = step >= 3600
    figure = figures.lead_time_curves(
        shown,
        [time / 86_400 for time in times] if calendar else times,
        unit="(days)" if calendar else "",
        expected_coverage=any_model["expected_coverage"],
    )
    plotting.save_figure(figure, folder / "lead_times.png", overwrite=True)
    name, last = list(rolled.items())[-1]
    chosen = sorted({0, num_leads // 2, num_leads - 1})
    labels = {"spectrum_target": "truth", "spectrum_members": "members", "spectrum_mean": "ensemble mean"}
    spectra = {
        f"{name}, lead time {lead + 1}": {label: last[key]["value"][lead] for key, label in labels.items()}
        for lead in chosen
    }
    plotting.save_figure(figures.spectrum_plot(spectra), folder / "spectra.png", overwrite=True)
    if "rank_histogram" in last:
        ranks = plotting.pit_histogram(last["rank_histogram"]["value"][0], label="rank")
        plotting.save_figure(ranks, folder / "ranks.png", overwrite=True)


def _first(value: Any) -> Any:
    return value[0] if isinstance(value, list) else value


def _some_leads(models: Mapping[str, Mapping[str, Any]]) -> list[int]:
    lengths = [len(metrics["rollout"]["rmse"]["value"]) for metrics in models.values() if "rollout" in metrics]
    return sorted({1, (max(lengths) + 1) // 2, max(lengths)}) if lengths else []


def _cell(entry: Mapping[str, Any] | None, lead: int) -> str:
    if entry is None or entry["value"][lead] is None:
        return ""
    error = entry["standard_error"][lead]
    return f"{entry['value'][lead]:.4g}" + ("" if error is None else f" ± {error:.1g}")


def _write(path: Path, text: str) -> None:
    with atomic_path(path, overwrite=True) as temporary:
        os.makedirs(temporary.parent, exist_ok=True)
        temporary.write_text(text, encoding="utf-8")
