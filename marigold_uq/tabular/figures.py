"""Figures of one fitted table: calibration, PIT and intervals."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from marigold_uq.metrics import expected_coverage
from marigold_uq.plotting import COLORS, REFERENCE
from marigold_uq.tabular.scores import RELIABILITY_LEVELS

Curves = tuple[Sequence[float], Sequence[float]]
"""Observed coverage at `RELIABILITY_LEVELS`, and PIT counts."""


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
