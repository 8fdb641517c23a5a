"""Figures of tables of results."""

import math
from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from marigold_uq.plotting import COLORS
from scripts.studies.uci.cells import Cell
from scripts.studies.uci.tables import UNITS, Place, Reference, Unit, column_title, ordered_columns


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
        color = COLORS[0] if cell.key.preset == "paper" else COLORS[1]
        error = (score.standard_error or 0.0) * unit.factor
        alpha = 0.4 if cell.is_partial else 1.0
        axes.errorbar(score.mean * unit.factor, position, xerr=error, fmt="o", color=color, alpha=alpha, markersize=5)
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
