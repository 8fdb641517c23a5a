"""Figures of the UCI sets: calibration and intervals of a fitted model, and comparisons of finished cells.

    python -m scripts.studies.uci.figures --data data/uci --set concrete --model.calibration_fraction 0.1 --output fig
    python -m scripts.studies.uci.figures --cells runs/uci --set concrete --output runs/figures

The first fits a model to the first splits: intervals.png shows the test rows of split 0; calibration.png pools the test
rows. There "before" are the draws as the networks make them, "after" those that kappa stretched; without a kappa there
are only "draws". The second draws comparison.png of the columns that `scripts.studies.uci.reproduce` has made. The
files must not exist.
"""

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter
from tqdm.auto import tqdm

from marigold_uq.commands.runner import Invocation, run_command
from marigold_uq.files import make_folder
from marigold_uq.plotting import COLORS, save_figure
from marigold_uq.tabular import DiffusionRegressor
from marigold_uq.tabular.figures import calibration_figure, interval_figure
from marigold_uq.tabular.run import ModelOptions
from marigold_uq.tabular.scores import pooled_curves, score_rows
from marigold_uq.tabular.uci import UCIDataset, UCISplit
from scripts.studies.uci.cells import Cell, CellStore
from scripts.studies.uci.tables import PEER, UNITS, Place, Reference, Unit, column_title, epochs_text, ordered_columns

_TARGETS = {
    "concrete": "compressive strength (MPa)",
    "energy": "heating load (kWh / m²)",
    "power": "electrical output (MW)",
    "wine": "quality",
    "yacht": "resistance",
}


@dataclass(frozen=True)
class FigureOptions:
    """Draw figures of a UCI set from fits (`data`) or from finished cells (`cells`).

    Args:
        output: Folder of the pictures.
        data: Folder with one folder per UCI set: fit a model.
        cells: Folder of `scripts.studies.uci.reproduce`: compare its columns.
        set: Name of the set.
        splits: Number of splits to fit.
        model: How the models are trained.
        seed: Of fits and draws.
        threads: Of torch.
    """

    output: Path
    data: Path | None = None
    cells: Path | None = None
    set: str = "concrete"
    splits: int = 5
    model: ModelOptions = field(default_factory=ModelOptions)
    seed: int = 0
    threads: int = 1

    def __post_init__(self) -> None:
        if (self.data is None) == (self.cells is None):
            raise ValueError("pass either data, to fit models, or cells, to compare finished columns")


def scores_figure(cells: Mapping[Place, Cell], datasets: Sequence[str], references: Sequence[Reference] = ()) -> Figure:
    """One panel per set: CRPS of every column with its standard error over splits, others' as hollow marks.

    A mark of ours that was trained for fewer epochs than published is drawn half transparent.
    """
    columns = ordered_columns(cells)
    names = [*(column_title(*column) for column in columns), *(one.title for one in references)]
    rows = (len(datasets) + 3) // 4
    figure = Figure(figsize=(13, 1.0 + rows * (0.8 + 0.24 * len(names))), layout="constrained")
    figure.suptitle("Test CRPS (lower is better): ours filled, others hollow; pale: fewer epochs than published")
    panels = figure.subplots(rows, 4, squeeze=False, sharey=True).flat
    for axes, dataset in zip(panels, datasets, strict=False):
        _draw_set(axes, dataset, [cells.get((*column, dataset)) for column in columns], references)
        axes.set_yticks(range(len(names)), names, fontsize=8)
    for axes in figure.axes[len(datasets) :]:
        axes.set_visible(False)
    figure.axes[0].invert_yaxis()
    return figure


def _draw_set(axes: Axes, dataset: str, ours: Sequence[Cell | None], references: Sequence[Reference]) -> None:
    unit = UNITS.get(dataset, Unit())
    axes.set_title(dataset + unit.text, fontsize=10)
    for position, cell in enumerate(ours):
        if cell is None:
            continue
        score = cell.summary["crps"]
        color = {"paper": COLORS[0], PEER: COLORS[5]}.get(cell.key.preset, COLORS[1])
        face = "none" if cell.key.preset == PEER else color
        error = (score.standard_error or 0.0) * unit.factor
        alpha = 0.4 if cell.is_partial else 1.0
        style: dict[str, Any] = {"fmt": "o", "color": color, "markerfacecolor": face, "alpha": alpha, "markersize": 5}
        axes.errorbar(score.mean * unit.factor, position, xerr=error, **style)
    for position, one in enumerate(references, start=len(ours)):
        if dataset in one.values:
            axes.plot(one.values[dataset][0], position, "o", color=COLORS[5], markerfacecolor="none", markersize=5)
    shown = [one.values[dataset][0] for one in references if dataset in one.values]
    own = [cell.summary["crps"].mean * unit.factor for cell in ours if cell is not None]
    if shown and min(own, default=math.inf) < 0.1 * min(shown):  # next to nothing, which no logarithm shows well
        axes.set_xscale("symlog", linthresh=10 ** math.ceil(math.log10(min(shown))))
        axes.xaxis.set_major_formatter("{x:g}")
    elif shown and max(shown) > 2 * min(shown):  # one that is far off would squeeze the others together
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 4, 6)))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter(NullFormatter())
    axes.grid(axis="y", color="#eeeeee")
    axes.set_axisbelow(True)
    axes.tick_params(axis="x", labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)


def _score_both(model: DiffusionRegressor, split: UCISplit) -> dict[str, dict[str, Any]]:
    """Scores of the draws as the networks make them, and of the calibrated ones; of "draws" if they are the same."""
    generator = torch.Generator().manual_seed(model.seed_)
    output = model.pipeline_(split.test_features, model.ensemble_size, generator=generator)
    draws = {"draws": output.samples[..., 0]}
    if set(model.pipeline_.calibration_for().kappas) != {1.0}:
        raw = output.model_samples[..., 0].swapaxes(0, 1).reshape(-1, len(split.test_targets))
        draws = {"before": raw[: model.ensemble_size], "after": draws["draws"]}
    scale = float(split.train_targets.std())
    return {name: score_rows(values, split.test_targets, target_scale=scale) for name, values in draws.items()}


def _draw_fitted(options: FigureOptions) -> None:
    """Fit, score, draw."""
    assert options.data is not None
    dataset = UCIDataset.load(options.data, options.set)
    scores: dict[str, list[dict[str, Any]]] = {}
    num_splits = min(options.splits, dataset.num_splits)
    for number in tqdm(range(num_splits), options.set):
        split = dataset.split(number)
        model = options.model.estimator(seed=options.seed + number)
        model.fit(split.train_features, split.train_targets)
        for name, one in _score_both(model, split).items():
            scores.setdefault(name, []).append(one)
        if number == 0:
            interval, mean = model.predict_interval(split.test_features), model.sample(split.test_features).mean(0)
            title, unit = f"{options.set}: rows that the model has never seen", _TARGETS.get(options.set, "target")
            figure = interval_figure(split.test_targets, mean, interval, title=title, unit=unit)
            save_figure(figure, options.output / "intervals.png")
    curves = {name: pooled_curves(entries) for name, entries in scores.items()}
    text = f"{options.set}, {options.model.preset}, test rows of {num_splits} split(s)"
    figure = calibration_figure(curves, title=text, ensemble_size=model.ensemble_size)
    save_figure(figure, options.output / "calibration.png")


def _draw_cells(options: FigureOptions) -> None:
    """The columns of a reproduction."""
    assert options.cells is not None
    found = [cell for cell in CellStore(options.cells).furthest().values() if cell.key.dataset == options.set]
    if not found:
        raise ValueError(f"{options.cells} has no finished cell of {options.set}")
    labels = [f"{column_title(cell.key.preset, cell.key.family)}\n{epochs_text(cell)} epochs" for cell in found]
    curves = {label: pooled_curves(cell.splits) for label, cell in zip(labels, found, strict=True)}
    figure = calibration_figure(curves, title=options.set, ensemble_size=found[0].facts["ensemble_size"])
    save_figure(figure, options.output / "comparison.png")


def _run(options: FigureOptions, invocation: Invocation) -> int:
    """Draw what was asked for."""
    torch.set_num_threads(options.threads)
    make_folder(options.output)
    if options.cells is not None:
        _draw_cells(options)
    else:
        _draw_fitted(options)
    print(f"written to {options.output}")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    return run_command("scripts.studies.uci.figures", FigureOptions, _run, arguments)


if __name__ == "__main__":
    sys.exit(main())
