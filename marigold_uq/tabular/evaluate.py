"""The command of `eval/eval_tabular.py`: score a saved pipeline, or fit and score all splits of a UCI set."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.base import clone
from tqdm.auto import tqdm

from marigold_uq.calibration import conformal_rows
from marigold_uq.files import atomic_path, make_folder
from marigold_uq.pipelines.tabular import TabularRegressionPipeline
from marigold_uq.plotting import save_figure
from marigold_uq.results import versions
from marigold_uq.tabular import DiffusionRegressor
from marigold_uq.tabular.data import LoadedTable, TableError, TableSource, read_table
from marigold_uq.tabular.estimators import score_estimator
from marigold_uq.tabular.figures import calibration_figure
from marigold_uq.tabular.run import CONFORMAL_FILE
from marigold_uq.tabular.scores import SplitScores, Spread, pooled_curves, score_rows, summarize_splits
from marigold_uq.tabular.uci import UCIDataset

METRICS_FILE = "metrics.json"
SHOWN = (
    "rmse", "crps", "nll", "coverage_50", "coverage_80", "coverage_90", "coverage_95", "width_95",
    "interval_coverage_95", "interval_width_95", "fit_seconds", "fit_cpu_seconds",
)  # fmt: skip


@dataclass(frozen=True)
class UCISource:
    """A UCI set whose splits are fitted and scored.

    Args:
        root: Folder with one folder per set.
        name: The set.
        splits: Only the first so many splits.
    """

    root: Path
    name: str
    splits: int | None = None


def evaluate_uci(source: UCISource, model: DiffusionRegressor, *, num_samples: int, seed: int) -> list[SplitScores]:
    """Fit a clone of `model` on each split, seeded with seed + split, and score its test rows."""
    dataset = UCIDataset.load(source.root, source.name)
    count = dataset.num_splits if source.splits is None else min(source.splits, dataset.num_splits)
    return [
        score_estimator(
            clone(model).set_params(random_state=seed + number),
            dataset.split(number),
            num_samples=num_samples,
            seed=seed,
        )
        for number in tqdm(range(count), source.name, unit="split")
    ]


def evaluate_run(folder: Path, source: TableSource, *, num_samples: int, seed: int) -> list[SplitScores]:
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
    pipeline = TabularRegressionPipeline.from_pretrained(folder / "model")
    output = pipeline(features, num_samples, seed=run["seed"] + seed)
    targets = table.targets.reshape(len(table.targets), -1)
    if (folder / CONFORMAL_FILE).exists() and num_samples != run["n_samples"]:
        # conformal scores were made from so many draws, and hold for as many
        output_of_fit = pipeline(features, run["n_samples"], seed=run["seed"] + seed)
        intervals = _intervals(folder, output_of_fit.mean, output_of_fit.std)
    else:
        intervals = _intervals(folder, output.mean, output.std)
    scores = [
        score_rows(
            output.samples[..., c],
            targets[:, c],
            target_scale=scale,
            interval=None if intervals is None else intervals[c],
            seed=seed,
        )
        for c, scale in enumerate(run["target_scale"])
    ]
    if len(scores) == 1:
        return scores
    return [{**one, "target": name} for one, name in zip(scores, run["target_names"], strict=True)]


def _check_targets(folder: Path, run: Mapping[str, Any], source: TableSource, table: LoadedTable) -> None:
    """The same targets in the same order; arrays without names of columns are only counted."""
    expected, found = run["target_names"], table.target_names
    is_named = run["feature_names"] is not None and table.feature_names is not None
    if len(found) != len(expected) or (is_named and found != expected):
        raise TableError(f"{folder} predicts {', '.join(expected)}; the target of {source.path} is {', '.join(found)}")


def _intervals(folder: Path, mean: NDArray[np.float64], std: NDArray[np.float64]) -> list[NDArray[np.float64]] | None:
    """Conformal 95 % intervals (rows, 2) of each target; None if the run was not calibrated or has too few rows."""
    if not (folder / CONFORMAL_FILE).exists():
        return None
    with np.load(folder / CONFORMAL_FILE) as stored:
        factor = conformal_rows(torch.from_numpy(stored["scores"]), 0.05, too_few="inf").numpy()  # (C,)
    if not np.isfinite(factor).all():
        return None
    reach = factor * std
    return [np.stack([mean[:, c] - reach[:, c], mean[:, c] + reach[:, c]], 1) for c in range(mean.shape[1])]


def write_evaluation(output: Path, title: str, splits: Sequence[SplitScores], facts: Mapping[str, Any]) -> str:
    """metrics.json, metrics.md and calibration.png in a folder that holds no evaluation yet; the table as text.

    Targets have units of their own and are no splits: each gets its own table, and metrics called TARGET/METRIC.
    """
    if (Path(output) / METRICS_FILE).exists():
        raise FileExistsError(f"{output} holds an evaluation; choose another output")
    make_folder(output)
    groups: dict[str, list[SplitScores]] = {}
    for one in splits:
        groups.setdefault(one.get("target", ""), []).append(one)
    summaries = {target: summarize_splits(group) for target, group in groups.items()}
    text = "\n".join([f"# {title}", *(line for block in summaries.items() for line in _block(*block))]) + "\n"
    metrics = {
        f"{target}/{name}" if target else name: {"value": spread.mean, **asdict(spread)}
        for target, summary in summaries.items()
        for name, spread in summary.items()
    }
    content = {
        "task": "tabular",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        **facts,
        "average": "mean over splits",
        "num_splits": len(splits) // len(groups),
        "metrics": metrics,
        "splits": list(splits),
        "versions": versions(),
    }
    curves = {target: pooled_curves(group) for target, group in groups.items()}
    figure = calibration_figure(curves, title=title, num_samples=facts["num_samples"])
    save_figure(figure, Path(output) / "calibration.png", overwrite=True)
    for name, written in (("metrics.md", text), (METRICS_FILE, json.dumps(content, indent=1, allow_nan=False) + "\n")):
        with atomic_path(Path(output) / name, overwrite=True) as temporary:
            temporary.write_text(written, encoding="utf-8")
    return text


def _block(target: str, summary: Mapping[str, Spread]) -> Iterator[str]:
    """The table of one target, below its name if it has one."""
    yield from ["", f"## {target}", ""] if target else [""]
    yield from ["| metric | mean | std over splits | standard error |", "| --- | --- | --- | --- |"]
    for name in (name for name in SHOWN if name in summary):
        spread = summary[name]
        rest = ["" if value is None else f"{value:.3g}" for value in (spread.std, spread.standard_error)]
        yield f"| {name} | {spread.mean:.5g} | {rest[0]} | {rest[1]} |"
