"""Figures of tables of results."""

import math
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter
from numpy.typing import NDArray

from marigold_uq.evaluation.tabular.cells import Cell
from marigold_uq.evaluation.tabular.scores import RELIABILITY_LEVELS
from marigold_uq.evaluation.tabular.tables import UNITS, Place, Reference, Unit, column_title, ordered_columns
from marigold_uq.metrics import expected_coverage
from marigold_uq.plotting import COLORS, REFERENCE

Curves = tuple[Sequence[float], Sequence[float]]
"""Observed coverage at `RELIABILITY_LEVELS`, and PIT counts."""


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


def calibration_figure(curves: Mapping[str, Curves], *, title: str, num_samples: int) -> Figure:
    """Observed against nominal coverage, and a PIT histogram for each label ("before" and "after", say).

    Below the line and a U: over-confident; above it and a hump: under-confident. The dashed line is what honest
    intervals between Weibull quantiles of `num_samples` draws cover.
    """
    figure = Figure(figsize=(4.2 + 3.0 * len(curves), 3.9), layout="constrained")
    figure.suptitle(title, fontsize=11)
    panels = figure.subplots(1, 1 + len(curves))
    expected = [expected_coverage(num_samples, level) for level in RELIABILITY_LEVELS]
    panels[0].plot(RELIABILITY_LEVELS, expected, linestyle="--", label="honest", **REFERENCE)
    top = max(len(counts) * max(counts) / sum(counts) for _, counts in curves.values())
    for color, axes, (label, (observed, counts)) in zip(COLORS, panels[1:], curves.items(), strict=False):
        panels[0].plot(RELIABILITY_LEVELS, observed, marker="o", markersize=3, color=color, label=label or "observed")
        heights = [len(counts) * count / sum(counts) for count in counts]
        axes.bar([(i + 0.5) / len(counts) for i in range(len(counts))], heights, width=0.92 / len(counts), color=color)
        axes.axhline(1.0, linestyle="--", **REFERENCE)
        axes.set(xlim=(0, 1), ylim=(0, 1.08 * top), xlabel="share of draws below the truth", ylabel="density")
        axes.set_title(f"PIT {label}".strip(), fontsize=10)
    panels[0].set(xlim=(0, 1), ylim=(0, 1), aspect="equal", xlabel="interval asked for", ylabel="truth inside")
    panels[0].set_title("coverage of central intervals", fontsize=10)
    panels[0].legend(frameon=False, fontsize=8)
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=8)
    return figure


def interval_figure(
    targets: NDArray[np.float64], mean: NDArray[np.float64], interval: NDArray[np.float64], *, title: str, unit: str
) -> Figure:
    """Every test row from the lowest to the highest prediction: its 95 % interval as a bar, the truth as a dot."""
    order = np.argsort(mean)
    lower, upper = interval[order].T
    truth, place = targets[order], np.arange(len(order))
    inside = (lower <= truth) & (truth <= upper)
    figure = Figure(figsize=(9, 4), layout="constrained")
    axes = figure.subplots()
    axes.vlines(place, lower, upper, color=COLORS[0], alpha=0.35, linewidth=4, label="predicted 95 % interval")
    axes.plot(place, mean[order], color=COLORS[0], linewidth=1, label="predicted mean")
    count = f"{inside.sum()} of {len(inside)}"
    axes.plot(place[inside], truth[inside], "o", color="#333333", markersize=3.5, label=f"truth, inside ({count})")
    missed = f"truth, outside ({(~inside).sum()})"
    axes.plot(place[~inside], truth[~inside], "X", color="#c0261c", markersize=8, label=missed)
    axes.set_title(title, fontsize=11)
    axes.set(xlabel="test rows, from the lowest to the highest prediction", ylabel=unit, xlim=(-1, len(order)))
    axes.legend(frameon=False, fontsize=9, loc="upper left")
    axes.spines[["top", "right"]].set_visible(False)
    return figure
