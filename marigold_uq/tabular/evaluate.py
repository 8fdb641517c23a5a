"""Score predictions for tables: those of a saved run, or of a model that is fitted to every split of a UCI set."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm

from marigold_uq.array_files import read_npz
from marigold_uq.calibration import interval_grid_rows
from marigold_uq.commands.runner import Invocation
from marigold_uq.pipelines.tabular import TabularRegressionPipeline
from marigold_uq.plotting import save_figure
from marigold_uq.results import markdown_table, write_results
from marigold_uq.tabular.data import LoadedTable, TableError, TableSource, read_table
from marigold_uq.tabular.figures import calibration_figure
from marigold_uq.tabular.run import ModelOptions
from marigold_uq.tabular.scores import (
    SplitScores,
    Spread,
    pooled_curves,
    score_all_splits,
    score_rows,
    summarize_splits,
)
from marigold_uq.tabular.uci import UCIDataset

_SHOWN = (
    "rmse", "crps", "nll", "coverage_50", "coverage_80", "coverage_90", "coverage_95", "width_95",
    "interval_coverage_95", "interval_width_95", "fit_seconds", "fit_cpu_seconds",
)  # fmt: skip
_COVERAGE = 0.95


@dataclass(frozen=True)
class EvaluateTabular:
    """Score predictions for tables: RMSE, fair CRPS, Gaussian NLL, coverage and width of intervals, PIT.

    Args:
        output: Folder for the results.
        run: A folder of train_tabular.py, to score on `data`.
        data: Rows to score the run on.
        uci: Or: the folder of a UCI set, to fit and score split by split.
        splits: Only the first splits of `uci`, this many.
        model: How the models of `uci` are trained.
        ensemble_size: Draws per row.
        seed: Of fits and draws.
    """

    output: Path
    run: Path | None = None
    data: TableSource | None = None
    uci: Path | None = None
    splits: int | None = None
    model: ModelOptions = field(default_factory=ModelOptions)
    ensemble_size: int = 100
    seed: int = 0


def run_evaluation(options: EvaluateTabular, invocation: Invocation) -> int:
    """The command of `eval/eval_tabular.py`."""
    settings = {"ensemble_size": options.ensemble_size, "seed": options.seed}
    model: str | dict[str, Any]
    if options.run is not None and options.data is not None and options.uci is None:
        splits = evaluate_run(options.run, options.data, **settings)
        title = f"{options.run} on {options.data.path}"
        model, data = str(options.run / "model"), options.data.path.name
    elif options.uci is not None and options.run is None and options.data is None:
        splits = evaluate_uci(options.uci, options.model, num_splits=options.splits, **settings)
        title = f"{options.uci.name}, {len(splits)} splits, preset {options.model.preset}"
        model, data = options.model.changes(), options.uci.name
    else:
        raise ValueError("give --run and --data.path to score a trained model, or --uci to fit one")
    text = write_evaluation(
        options.output,
        title,
        splits,
        command=invocation.command,
        config=invocation.config,
        predictor={"model": model},
        data={"name": data, "title": data},
        **settings,
    )
    print(f"{text}written to {options.output}")
    return 0


def evaluate_uci(
    folder: Path, model: ModelOptions, *, num_splits: int | None = None, ensemble_size: int, seed: int
) -> list[SplitScores]:
    """Fit a model to each split of a UCI set, seeded with seed + split, and score its test rows."""
    splits = list(UCIDataset.load(folder.parent, folder.name))[:num_splits]
    with tqdm(total=len(splits), desc=folder.name, unit="split") as bar:
        return score_all_splits(
            lambda number: model.estimator(seed=number, ensemble_size=ensemble_size),
            splits,
            ensemble_size=ensemble_size,
            seed=seed,
            keep=lambda scores: bar.update(),
        )


def evaluate_run(folder: Path, source: TableSource, *, ensemble_size: int, seed: int) -> list[SplitScores]:
    """Scores of a trained run (a folder of train_tabular.py) on a table, one entry per target (`target` names it)."""
    folder, table = Path(folder), read_table(source)
    run = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    _check_targets(folder, run, source, table)
    features = table.features
    if run["feature_names"] is not None and table.feature_names is not None:
        missing = [name for name in run["feature_names"] if name not in table.feature_names]
        if missing:
            raise TableError(f"{source.path} has no column {', '.join(missing)}, which {folder} was trained on")
        features = features[run["feature_names"]]
    pipeline = load_run(folder)
    record = pipeline.calibration_for()

    def draw(size: int, coverage: float | None) -> Any:
        generator = torch.Generator().manual_seed(run["seed"] + seed)
        return pipeline(features, size, coverage=coverage, generator=generator)

    samples, intervals = draw(ensemble_size, None).samples, None
    if record.interval is not None and record.interval.coverages[-1] >= _COVERAGE:
        # intervals hold for the number of draws that they were calibrated with
        intervals = draw(record.ensemble_size or ensemble_size, _COVERAGE).interval
    targets = table.targets.reshape(len(table.targets), -1)
    scores = [
        score_rows(
            samples[..., c],
            targets[:, c],
            target_scale=scale,
            interval=None if intervals is None else intervals[:, :, c].T,
            seed=seed,
        )
        for c, scale in enumerate(run["target_scale"])
    ]
    if len(scores) == 1:
        return scores
    return [{**one, "target": name} for one, name in zip(scores, run["target_names"], strict=True)]


def load_run(folder: Path) -> TabularRegressionPipeline:
    """The pipeline of a run. Those of versions before the first release kept their conformal scores in a file."""
    pipeline = TabularRegressionPipeline.from_pretrained(folder / "model")
    old = folder / "conformal.npz"
    if old.exists():
        size = json.loads((folder / "run.json").read_text(encoding="utf-8"))["n_samples"]
        scores = torch.from_numpy(read_npz(old, str(old), ["scores"])["scores"])
        record, grid = pipeline.calibration_for(), interval_grid_rows(scores)
        pipeline.calibrate(replace(record, interval=grid, ensemble_size=size, num_calibration=len(scores)))
    return pipeline


def _check_targets(folder: Path, run: Mapping[str, Any], source: TableSource, table: LoadedTable) -> None:
    """The same targets in the same order; arrays without names of columns are only counted."""
    expected, found = run["target_names"], table.target_names
    is_named = run["feature_names"] is not None and table.feature_names is not None
    if len(found) != len(expected) or (is_named and found != expected):
        raise TableError(f"{folder} predicts {', '.join(expected)}; the target of {source.path} is {', '.join(found)}")


def write_evaluation(
    output: Path, title: str, splits: Sequence[SplitScores], *, ensemble_size: int, **facts: Any
) -> str:
    """metrics.json, metrics.md and calibration.png in a folder that holds no evaluation yet; the table as text.

    Targets have units of their own and are no splits: each gets its own table, and metrics called TARGET/METRIC.
    `facts` are those of `write_results`.
    """
    groups: dict[str, list[SplitScores]] = {}
    for one in splits:
        groups.setdefault(one.get("target", ""), []).append(one)
    summaries = {target: summarize_splits(group) for target, group in groups.items()}
    text = "\n\n".join([f"# {title}", *(part for block in summaries.items() for part in _block(*block))]) + "\n"
    metrics = {
        f"{target}/{name}" if target else name: {"value": spread.mean, **asdict(spread)}
        for target, summary in summaries.items()
        for name, spread in summary.items()
    }
    write_results(
        output,
        "tabular",
        metrics,
        reports={"metrics.md": text},
        ensemble_size=ensemble_size,
        num_splits=len(splits) // len(groups),
        average="mean over splits",
        splits=list(splits),
        **facts,
    )
    curves = {target: pooled_curves(group) for target, group in groups.items()}
    figure = calibration_figure(curves, title=title, ensemble_size=ensemble_size)
    save_figure(figure, Path(output) / "calibration.png", overwrite=True)
    return text


def _block(target: str, summary: Mapping[str, Spread]) -> Iterator[str]:
    """The table of one target, below its name if it has one."""
    if target:
        yield f"## {target}"
    shown = {name: summary[name] for name in _SHOWN if name in summary}
    rows = [[name, spread.mean, spread.std, spread.standard_error] for name, spread in shown.items()]
    yield markdown_table(["metric", "mean", "std over splits", "standard error"], rows)
