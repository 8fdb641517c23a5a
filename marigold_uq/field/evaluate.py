"""The evaluation of a forecast model, one step ahead and rolled out: metrics.json, report.md and figures."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from marigold_uq import plotting
from marigold_uq.commands.runner import Invocation
from marigold_uq.field import figures
from marigold_uq.field.config import FieldData, read_config
from marigold_uq.field.data import FieldSequences, Transitions, statistics_of
from marigold_uq.field.data.sequences import units_of
from marigold_uq.field.encoding import require_data
from marigold_uq.field.forecasters import (
    Climatology,
    Forecaster,
    Persistence,
    PipelineForecaster,
    Precision,
)
from marigold_uq.field.scorecard import write_scorecard
from marigold_uq.field.scores import Channels, accumulate_channels, independent_groups, spread_windows
from marigold_uq.field.splits import FieldSplit, open_split, target_hours
from marigold_uq.files import fingerprint, make_folder, require_same
from marigold_uq.metrics import MeanAccumulator, expected_coverage
from marigold_uq.pipelines.field import FieldForecastPipeline
from marigold_uq.results import METRICS_FILE, as_json, markdown_table, number, write_results

__all__ = [
    "CURVES",
    "GROUPS",
    "MIN_SCALE_SHARE",
    "PAIRED",
    "SHOWN",
    "VARIABLES",
    "FieldEvaluation",
    "evaluate_field",
    "report",
    "run_evaluation",
]


REPORT_FILE = "report.md"
SHOWN = ("rmse", "crps", "energy_score", "gaussian_nll", "coverage", "conformal_coverage", "spread_skill_ratio")
CURVES = ("rmse", "crps", "coverage", "spread_skill_ratio")
WIDTHS = ("conformal_width", "interval_width")
PAIRED, GROUPS, VARIABLES = "crps_of_windows", "groups_of_windows", "variables"
TOGETHER = "all variables"
MIN_SCALE_SHARE = 1e-3
"""The floor of the NLL's standard deviation, as a share of the deviation of the training increments."""


@dataclass(frozen=True)
class FieldEvaluation:
    """Score forecasts against what happened.

    Args:
        run: Folder that train_field.py wrote: its data, and its calibrated model (else its model), are taken where
            `data` and `model` are not given.
        data: The data the model was trained with; the part `split` is scored.
        model: Folder or Hub name of a pipeline; or "persistence" or "climatology".
        output: Folder of the results.
        targets: Variables that are scored; null takes those that the model predicts, or all for a baseline.
        num_history: States before the first future one of a window; null takes the model's, or 2 for a baseline.
        split: "test" or "validation".
        ensemble_size: Samples of each forecast; coverage of 95 % intervals needs at least 39.
        num_inference_steps: Denoising steps; null takes the model's own number.
        num_one_step: Windows for the one-step scores.
        num_rollouts: Windows for the rollouts; 0 leaves them out.
        num_leads: Lead times of a rollout.
        coverage: Of the intervals whose actual coverage is counted.
        seed: Of all samples.
        batch_size: Chains per network call; never changes a result beyond rounding.
        device: Where the network runs.
        mixed_precision: "no", "bf16" or "fp16", of the network.
        figures: Draw figures.
        reference: Folder of another evaluation of the same windows, for a scorecard of this one against it.
    """

    run: Path | None = None
    data: FieldData | None = None
    model: str | None = None
    output: Path = Path("runs/field/evaluation")
    targets: list[str] | None = None
    num_history: int | None = None
    split: Literal["test", "validation"] = "test"
    ensemble_size: int = 40
    num_inference_steps: int | None = None
    num_one_step: int = 64
    num_rollouts: int = 16
    num_leads: int = 10
    coverage: float = 0.95
    seed: int = 0
    batch_size: int = 128
    device: str = "cpu"
    mixed_precision: Precision = "no"
    figures: bool = True
    reference: Path | None = None

    def resolved(self) -> FieldEvaluation:
        """The same with data and model, which a run may have said."""
        data, model = self.data, self.model
        if self.run is not None:
            config = self.run / "config.yaml"
            if not config.exists():
                raise FileNotFoundError(f"{self.run} is not a training run: it has no config.yaml")
            data = data or read_config(["--config", str(config)])[0].data
            calibrated = self.run / "calibrated"
            model = model or str(calibrated if calibrated.exists() else self.run / "model")
        if data is None or model is None:
            raise ValueError("give `run`, or `data` and `model` (a folder, a Hub name, persistence or climatology)")
        return replace(self, run=None, data=data, model=model)


def run_evaluation(options: FieldEvaluation, invocation: Invocation) -> int:
    """The command `eval/eval_field.py`: evaluate and print the tables."""
    metrics = evaluate_field(options, command=invocation.command)
    print(report({metrics["predictor"]["model"]: metrics}))
    if options.reference is not None:
        print(write_scorecard(options.output, metrics, options.reference, draw=options.figures))
    return 0


def evaluate_field(options: FieldEvaluation, *, command: str | None = None) -> dict[str, Any]:
    """Score, write the results to `options.output`, and return what metrics.json holds; finished ones are returned."""
    options = options.resolved()
    path = options.output / METRICS_FILE
    if path.exists():
        stored = json.loads(path.read_text(encoding="utf-8"))
        model = {"weights or calibration of the model": stored.get("fingerprint")}
        now = {"weights or calibration of the model": model_fingerprint(options.model)}
        require_same(path, {**stored["config"], **model}, {**as_plain(options), **now})
        return stored
    split = open_split(_data(options))
    forecaster = make_forecaster(options, split)
    results = score_split(forecaster, options, split)
    return _write(results, options, forecaster, split, command)


def _data(options: FieldEvaluation) -> FieldData:
    assert options.data is not None  # `resolved` checks it
    return options.data


def as_plain(options: Any) -> dict[str, Any]:
    """What decides the results, as JSON has it."""
    plain = json.loads(json.dumps(asdict(options), default=str))
    plain.pop("reference", None)  # the scorecard is made anew each time
    return plain


def model_fingerprint(model: str | Path | None) -> str | None:
    """A hash of a pipeline's folder; None for a baseline or a name on the Hub."""
    return fingerprint(Path(model)) if model is not None and Path(model).is_dir() else None


def make_forecaster(options: FieldEvaluation, split: FieldSplit) -> Forecaster:
    """The model or baseline that the options name, checked against the data."""
    assert options.model is not None  # `resolved` options
    if options.model == "persistence":
        return Persistence()
    if options.model == "climatology":
        return Climatology(split.train, ensemble_size=options.ensemble_size, seed=options.seed)
    pipeline = FieldForecastPipeline.from_pretrained(options.model).to(options.device)
    require_data(pipeline.encoder, getattr(split, options.split))
    _check_model(options, pipeline)
    return PipelineForecaster(
        pipeline,
        ensemble_size=options.ensemble_size,
        num_inference_steps=options.num_inference_steps,
        seed=options.seed,
        batch_size=options.batch_size,
        mixed_precision=options.mixed_precision,
        name=options.model or "",
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

    With one variable a part is in its unit. With several it is in units of each variable's increments, in which they
    can be averaged; `variables` has each in its own unit. `crps_of_windows` of each part is the CRPS of every window,
    {window: (L,)}, for differences of paired forecasts; `groups_of_windows` says which of them are not independent.
    """
    sequences = getattr(split, options.split)
    pipeline = getattr(forecaster, "pipeline", None)
    targets = list(options.targets or split.train.variables) if pipeline is None else pipeline.encoder.config.targets
    history = (options.num_history or 2) if pipeline is None else pipeline.encoder.config.num_history
    select = _selector(split.train, targets)
    statistics = statistics_of(split.train) if pipeline is None else pipeline.encoder.statistics
    scoring = _Scoring(
        tuple(targets),
        score_groups({name: statistics[name].increment_std for name in targets}),
        select,
        select if pipeline is None else lambda samples: samples,
        options.coverage,
    )
    parts = {"one_step": (1, options.num_one_step), "rollout": (options.num_leads, options.num_rollouts)}
    hours = target_hours(_data(options))
    results: dict[str, dict[str, Any]] = {}
    for part, (num_leads, count) in parts.items():
        if count:
            windows = Transitions(sequences, num_history=history, num_leads=num_leads, target_hours=hours)
            results[part] = _score_part(forecaster, windows, count, scoring)
    return results


class _Scoring(NamedTuple):
    """What is scored: variables, what is scored together, how their channels are taken, coverage of the intervals."""

    targets: tuple[str, ...]
    groups: dict[str, Channels]
    select_targets: Callable[[Tensor], Tensor]
    select_samples: Callable[[Tensor], Tensor]
    coverage: float


def _score_part(forecaster: Forecaster, windows: Transitions, count: int, scoring: _Scoring) -> dict[str, Any]:
    """The scores of about `count` windows."""
    ids = spread_windows(count, len(windows))
    found = accumulate_channels(
        forecaster,
        windows,
        ids,
        scoring.groups,
        scoring.select_targets,
        scoring.select_samples,
        coverage=scoring.coverage,
    )
    table = found[TOGETHER].samples()["crps"]
    return {
        **as_json(found[TOGETHER].compute()),
        VARIABLES: _variable_scores(found, scoring.targets, units_of(windows.sequences)),
        PAIRED: {str(i): row for i, row in zip(table.ids, table.values.tolist(), strict=True)},
        GROUPS: dict(zip(map(str, ids), independent_groups(windows, ids), strict=True)),
    }


def score_groups(scales: Mapping[str, float]) -> dict[str, Channels]:
    """What is scored together: everything, in common units where there are several variables, and each variable.

    `scales` are the deviations of the variables' increments, in the order of the channels.
    """
    units = torch.tensor(list(scales.values()), dtype=torch.float64)
    together = Channels(slice(None), units, MIN_SCALE_SHARE)
    if len(scales) == 1:
        return {TOGETHER: Channels(slice(None), None, MIN_SCALE_SHARE * float(units[0]))}
    alone = {
        name: Channels(slice(number, number + 1), None, MIN_SCALE_SHARE * scale)
        for number, (name, scale) in enumerate(scales.items())
    }
    return {TOGETHER: together, **alone}


def _variable_scores(
    found: Mapping[str, MeanAccumulator], targets: Sequence[str], units: Mapping[str, str]
) -> dict[str, dict[str, Any]]:
    """Variable -> its unit, and its scores in it."""
    scores = {name: as_json(found.get(name, found[TOGETHER]).compute()) for name in targets}
    return {
        name: {"unit": units.get(name), **{metric: own[metric] for metric in (*SHOWN, *WIDTHS) if metric in own}}
        for name, own in scores.items()
    }


def _selector(train: FieldSequences, targets: Sequence[str]) -> Callable[[Tensor], Tensor]:
    """What takes the target channels of states (..., C, *space)."""
    unknown = [name for name in targets if name not in train.variables]
    if unknown:
        raise ValueError(f"targets are some of the variables {list(train.variables)}; got {list(targets)}")
    channels = torch.tensor([train.variables.index(name) for name in targets])
    return lambda states: states.index_select(states.ndim - 1 - len(train.coordinates), channels)


def _write(
    results: Mapping[str, Mapping[str, Any]],
    options: FieldEvaluation,
    forecaster: Forecaster,
    split: FieldSplit,
    command: str | None,
) -> dict[str, Any]:
    """Figures, report, and metrics.json last."""
    one_step = _headline(results.get("one_step", {}))
    size = options.ensemble_size
    facts: dict[str, Any] = {
        "predictor": {"name": forecaster.name, "model": options.model, "ensemble_size": size},
        "data": {"name": split.test.source, "title": Path(split.test.source).stem},
        "num_samples": next(iter(one_step.values()))["num_samples"] if one_step else 0,
        "expected_coverage": expected_coverage(size, options.coverage) if size > 1 else None,
        "lead_time_step": split.test.time_step,
        "fingerprint": model_fingerprint(options.model),
        **results,
    }
    make_folder(options.output)
    if options.figures:
        draw_figures({forecaster.name: facts}, options.output)
    reports = {REPORT_FILE: report({forecaster.name: facts})}
    return write_results(
        options.output, "field", one_step, command=command, config=as_plain(options), reports=reports, **facts
    )


def _headline(one_step: Mapping[str, Any]) -> dict[str, Any]:
    """Scores one step ahead for metrics.json and the card; those of several variables say which, and in what unit."""
    variables = one_step.get(VARIABLES, {})
    if len(variables) < 2:
        return {name: _at_first(entry) for name, entry in one_step.items() if name in SHOWN}
    return {
        f"{metric}, {_titled(name, own)}": _at_first(own[metric])
        for name, own in variables.items()
        for metric in SHOWN
        if metric in own
    }


def _at_first(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _first(value) for key, value in entry.items()}


def _titled(name: str, scores: Mapping[str, Any]) -> str:
    return f"{name} ({scores['unit']})" if scores.get("unit") else name


def report(models: Mapping[str, Mapping[str, Any]], leads: Sequence[int] | None = None) -> str:
    """Tables in Markdown, for each variable: one step ahead, and at some lead times of the rollout."""
    parts = []
    if any("one_step" in metrics for metrics in models.values()):
        parts += ["## One step ahead\n", *_tables(models, "one_step", 0)]
    for lead in leads or _some_leads(models):
        parts += [f"\n## Rollout, lead time {lead}\n", *_tables(models, "rollout", lead - 1)]
    return "\n".join(parts) + "\n"


def _tables(models: Mapping[str, Mapping[str, Any]], part: str, lead: int) -> list[str]:
    """One table, or one for each of several variables under its name and unit."""
    titles: dict[str, str] = {}
    for metrics in models.values():
        for name, scores in metrics.get(part, {}).get(VARIABLES, {}).items():
            titles[name] = _titled(name, scores)
    if len(titles) < 2:
        unit = [f"In {title.removeprefix(name)[2:-1]}.\n" for name, title in titles.items() if title != name]
        return [*unit, table(models, part, lead)]
    own = [text for name, title in titles.items() for text in (f"\n{title}\n", table(models, part, lead, name))]
    return [*own, "\nAll variables, in deviations of their increments\n", table(models, part, lead)]


def table(models: Mapping[str, Mapping[str, Any]], part: str, lead: int, variable: str | None = None) -> str:
    """A row per model, its standard error behind each number; of one variable, or of all together."""
    rows = []
    for name, metrics in models.items():
        scores = metrics.get(part, {})
        scores = scores if variable is None else scores.get(VARIABLES, {}).get(variable, {})
        rows.append([name, *(_cell(scores.get(metric), lead) for metric in SHOWN)])
    return markdown_table(["model", *SHOWN], rows)


def draw_figures(models: Mapping[str, Mapping[str, Any]], folder: Path) -> None:
    """Scores against lead time, a figure for each of several variables; spectra and ranks of the last model."""
    rolled = {name: metrics["rollout"] for name, metrics in models.items() if "rollout" in metrics}
    if not rolled:
        return
    any_model = next(iter(models.values()))
    num_leads = len(next(iter(rolled.values()))["rmse"]["value"])
    variables: dict[str, Any] = next(iter(rolled.values())).get(VARIABLES, {})
    units = [scores.get("unit") or "" for scores in variables.values()]
    _draw_lead_times(rolled, any_model, folder / "lead_times.png", units[0] if len(units) == 1 else "")
    for name, unit in zip(variables, units, strict=True) if len(units) > 1 else ():
        own = {model: one.get(VARIABLES, {}).get(name, {}) for model, one in rolled.items()}
        _draw_lead_times(own, any_model, folder / f"lead_times_{name}.png", unit)
    name, last = list(rolled.items())[-1]
    chosen = sorted({0, num_leads // 2, num_leads - 1})
    labels = {"spectrum_target": "truth", "spectrum_members": "members", "spectrum_mean": "ensemble mean"}
    if set(labels) <= set(last):
        spectra = {
            f"{name}, lead time {lead + 1}": {label: last[key]["value"][lead] for key, label in labels.items()}
            for lead in chosen
        }
        plotting.save_figure(figures.spectrum_plot(spectra), folder / "spectra.png", overwrite=True)
    if "rank_histogram" in last:
        ranks = plotting.pit_histogram(last["rank_histogram"]["value"][0], label="rank")
        plotting.save_figure(ranks, folder / "ranks.png", overwrite=True)


def _draw_lead_times(
    rolled: Mapping[str, Mapping[str, Any]], any_model: Mapping[str, Any], path: Path, unit: str
) -> None:
    """Model -> scores, one panel per metric."""
    values = {
        metric: {name: one[metric]["value"] for name, one in rolled.items() if metric in one} for metric in CURVES
    }
    shown = {metric: curves for metric, curves in values.items() if curves}
    step, calendar = any_model["lead_time_step"], any_model["lead_time_step"] >= 3600
    num_leads = len(next(iter(shown["rmse"].values())))
    times = [step * lead / (86_400 if calendar else 1) for lead in range(1, num_leads + 1)]
    figure = figures.lead_time_curves(
        shown,
        times,
        unit="(days)" if calendar else "",
        expected_coverage=any_model["expected_coverage"],
        value_unit=unit,
    )
    plotting.save_figure(figure, path, overwrite=True)


def _first(value: Any) -> Any:
    return value[0] if isinstance(value, list) else value


def _some_leads(models: Mapping[str, Mapping[str, Any]]) -> list[int]:
    lengths = [len(metrics["rollout"]["rmse"]["value"]) for metrics in models.values() if "rollout" in metrics]
    return sorted({1, (max(lengths) + 1) // 2, max(lengths)}) if lengths else []


def _cell(entry: Mapping[str, Any] | None, lead: int) -> str:
    return "" if entry is None else number(entry["value"][lead], entry["standard_error"][lead])
