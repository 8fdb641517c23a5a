"""Figures of predictions for tables: coverage and PIT, intervals of rows, importance of columns."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from marigold_uq.metrics import expected_coverage
from marigold_uq.plotting import COLORS, REFERENCE
from marigold_uq.tabular.scores import RELIABILITY_LEVELS

_Curves = tuple[Sequence[float], Sequence[float]]
"""Observed coverage at `RELIABILITY_LEVELS`, and PIT counts."""

_MISSED = "#c0261c"
_MOST_ROWS = 150
"""More bars than that run into each other."""
_MOST_COLUMNS = 20


def calibration_figure(curves: Mapping[str, _Curves], *, title: str, ensemble_size: int) -> Figure:
    """Observed against nominal coverage, and a PIT histogram for each label ("before" and "after", say).

    Below the line and a U: over-confident; above it and a hump: under-confident. The dashed line is the
    coverage of calibrated intervals between Weibull quantiles of `ensemble_size` draws.
    """
    figure = Figure(figsize=(4.2 + 3.0 * len(curves), 3.9), layout="constrained")
    figure.suptitle(title, fontsize=11)
    panels = figure.subplots(1, 1 + len(curves))
    expected = [expected_coverage(ensemble_size, level) for level in RELIABILITY_LEVELS]
    panels[0].plot(RELIABILITY_LEVELS, expected, linestyle="--", label="calibrated", **REFERENCE)
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
    """Rows from the lowest to the highest prediction: the 95 % interval as a bar, the truth as a dot.

    Of more than 150 rows as many are shown, evenly over that order; all are counted.
    """
    order = np.argsort(mean, kind="stable")
    inside = (interval[:, 0] <= targets) & (targets <= interval[:, 1])
    shown = order[np.unique(np.linspace(0, len(order) - 1, min(len(order), _MOST_ROWS)).round().astype(int))]
    figure = Figure(figsize=(9, 4), layout="constrained")
    axes = figure.subplots()
    counts = f"truth, inside ({inside.sum()} of {len(inside)})", f"truth, outside ({(~inside).sum()})"
    _draw_intervals(axes, targets[shown], mean[shown], interval[shown], inside[shown], counts)
    axes.set_title(title, fontsize=11)
    rows = "rows" if len(shown) == len(order) else f"{len(shown)} of {len(order)} rows"
    axes.set(xlabel=f"{rows}, from the lowest to the highest prediction", ylabel=unit, xlim=(-1, len(shown)))
    axes.legend(frameon=False, fontsize=9, loc="upper left")
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def _draw_intervals(
    axes: Axes,
    truth: NDArray[np.float64],
    mean: NDArray[np.float64],
    interval: NDArray[np.float64],
    inside: NDArray[np.bool_],
    counts: tuple[str, str],
) -> None:
    """Bars, a line for the mean, and marks for the truth."""
    place = np.arange(len(truth))
    axes.vlines(place, *interval.T, color=COLORS[0], alpha=0.35, linewidth=4, label="predicted 95 % interval")
    axes.plot(place, mean, color=COLORS[0], linewidth=1, label="predicted mean")
    axes.plot(place[inside], truth[inside], "o", color="#333333", markersize=3.5, label=counts[0])
    axes.plot(place[~inside], truth[~inside], "X", color=_MISSED, markersize=8, label=counts[1])


def importance_figure(importance: Mapping[str, tuple[float, float]], *, crps: float) -> Figure:
    """How much the CRPS rises when a column is shuffled: mean and standard deviation over shuffles, highest first.

    Args:
        importance: Column -> mean and standard deviation.
        crps: With all columns as they are.
    """
    order = sorted(importance, key=lambda name: -importance[name][0])[:_MOST_COLUMNS]
    figure = Figure(figsize=(7, 1.3 + 0.3 * len(order)), layout="constrained")
    axes = figure.subplots()
    means, errors = (np.array([importance[name][part] for name in order]) for part in (0, 1))
    axes.barh(range(len(order)), means, xerr=errors, height=0.7, color=COLORS[0], error_kw={"elinewidth": 1})
    axes.set_yticks(range(len(order)), order, fontsize=8)
    axes.invert_yaxis()
    axes.axvline(0.0, **REFERENCE)
    axes.set_xlabel(f"rise of the CRPS when the column is shuffled (as it is: {crps:.3g})", fontsize=9)
    more = len(importance) - len(order)
    axes.set_title("Importance of columns" + (f", {more} more are not shown" if more else ""), fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8)
    return figure
