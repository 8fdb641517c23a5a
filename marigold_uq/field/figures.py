"""Figures of forecasts: scores against lead time, spectra, ranks, maps and space-time pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter
from numpy.typing import ArrayLike

from marigold_uq.plotting import COLORS, REFERENCE

__all__ = [
    "field_panels",
    "lead_time_curves",
    "matrix_panels",
    "parameter_curves",
    "rank_and_spectrum_panels",
    "scorecard_figure",
    "spectrum_plot",
]


Curves = Mapping[str, Sequence[float]]
COVERAGE, RATIO = "coverage", "spread_skill_ratio"
TITLES = {
    "rmse": "RMSE of the mean",
    "crps": "CRPS",
    "energy_score": "energy score",
    COVERAGE: "coverage of the members' 95 %",
    RATIO: "spread / skill",
    "gaussian_nll": "Gaussian NLL",
}
DIMENSIONAL = ("rmse", "crps", "energy_score")
LEAST_RANGE = {COVERAGE: (0.88, 1.0), RATIO: (0.8, 1.2)}
"""Shown at least, so that noise does not look like a trend."""


def lead_time_curves(
    values: Mapping[str, Curves],
    lead_times: Sequence[float],
    *,
    unit: str = "",
    expected_coverage: float | None = None,
    value_unit: str = "",
) -> Figure:
    """One panel per metric (metric -> model -> value per lead time), one line per model, the same in all panels.

    `unit` is that of the lead times, in brackets; `value_unit` that of the scores that have one.
    """
    places = {
        label: place for place, label in enumerate(dict.fromkeys(m for curves in values.values() for m in curves))
    }
    figure = Figure(figsize=(3.6 * len(values), 3.2), layout="constrained")
    for axes, (metric, curves) in zip(np.atleast_1d(figure.subplots(1, len(values))), values.items(), strict=True):
        _clean(axes)
        for label, line in curves.items():
            style, color = "-" if places[label] < len(COLORS) else "--", COLORS[places[label] % len(COLORS)]
            axes.plot(lead_times, line, style, marker="o", markersize=3, color=color, label=label)
        level = {COVERAGE: expected_coverage, RATIO: 1.0}.get(metric)
        if level is not None:
            axes.axhline(level, linestyle=":", label="perfect samples", **REFERENCE)
        own_unit = f" ({value_unit})" if value_unit and metric in DIMENSIONAL else ""
        axes.set_title(TITLES.get(metric, metric) + own_unit, fontsize=10)
        axes.set_xlabel(f"lead time {unit}".strip(), fontsize=9)
        axes.xaxis.set_major_locator(MaxNLocator(5))
        if metric in LEAST_RANGE:
            (low, high), (least, most) = axes.get_ylim(), LEAST_RANGE[metric]
            axes.set_ylim(min(low, least), max(high, most))
        elif metric != "gaussian_nll":
            axes.set_ylim(bottom=0)
    fullest = max(figure.axes, key=lambda axes: len(axes.get_lines()))
    handles = [line for line in fullest.get_lines() if line.get_label() in places]
    beside = {"loc": "upper left", "bbox_to_anchor": (1.01, 1.0)}
    figure.axes[-1].legend(handles=handles, frameon=False, fontsize=8, handlelength=3.2, **beside)
    return figure


def spectrum_plot(spectra: Mapping[str, Mapping[str, Sequence[float]]]) -> Figure:
    """One panel per lead time: label -> power per wave number."""
    figure = Figure(figsize=(3.8 * len(spectra), 3.2), layout="constrained")
    panels = np.atleast_1d(figure.subplots(1, len(spectra), sharey=True))
    for axes, (title, curves) in zip(panels, spectra.items(), strict=True):
        _clean(axes)
        for color, (label, power) in zip(COLORS, curves.items(), strict=False):
            axes.loglog(range(1, len(power)), power[1:], color=color, label=label)
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("wave number", fontsize=9)
        for axis in (axes.xaxis, axes.yaxis):
            _plain_numbers(axis)
    panels[0].set_ylabel("power", fontsize=9)
    panels[0].legend(frameon=False, fontsize=8)
    return figure


def rank_and_spectrum_panels(
    panels: Mapping[tuple[str, int], tuple[Sequence[float], Mapping[str, Sequence[float]]]],
) -> Figure:
    """(model, lead time) -> shares of the ranks of the truth, and label -> power per wave number; one column each."""
    figure = Figure(figsize=(2.3 * len(panels), 4.4), layout="constrained")
    grid = figure.subplots(2, len(panels), squeeze=False, sharey="row")
    for column, ((name, lead), (ranks, spectra)) in enumerate(panels.items()):
        above, below = grid[:, column]
        heights = [len(ranks) * share for share in ranks]
        above.bar([(i + 0.5) / len(ranks) for i in range(len(ranks))], heights, width=1 / len(ranks), color=COLORS[0])
        above.axhline(1.0, linestyle=":", **REFERENCE)
        above.set_title(f"{name}, lead {lead}", fontsize=8)
        above.set_xlabel("rank of the truth", fontsize=8)
        for color, (label, power) in zip(COLORS, spectra.items(), strict=False):
            below.loglog(range(1, len(power)), power[1:], color=color, label=label)
        below.set_xlabel("wave number", fontsize=8)
        for axis in (below.xaxis, below.yaxis):
            _plain_numbers(axis)
        for axes in (above, below):
            _clean(axes)
    grid[0, 0].set_ylabel("density", fontsize=8)
    grid[1, 0].set_ylabel("power", fontsize=8)
    grid[1, 0].legend(frameon=False, fontsize=7)
    return figure


def scorecard_figure(
    changes: Sequence[Sequence[float]], rows: Sequence[str], columns: Sequence[str], title: str
) -> Figure:
    """Changes in percent as a coloured table: blue is lower (better), red higher; the number stands in each cell."""
    values = np.asarray(changes, np.float64)
    known = np.abs(values[np.isfinite(values)])
    bound = max(5.0, float(known.max())) if known.size else 5.0
    figure = Figure(figsize=(2.4 + 0.62 * len(columns), 1.3 + 0.42 * len(rows)), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(values, cmap="RdBu_r", vmin=-bound, vmax=bound, aspect="auto")
    axes.set_xticks(range(len(columns)), columns, fontsize=8)
    axes.set_yticks(range(len(rows)), rows, fontsize=8)
    axes.set_xlabel("lead time", fontsize=9)
    axes.set_title(f"{title}, change in %", fontsize=10)
    for (row, column), value in np.ndenumerate(values):
        if np.isfinite(value):
            color = "white" if abs(value) > 0.6 * bound else "black"
            axes.text(
                column,
                row,
                f"{round(value):+d}" if round(value) else "0",
                ha="center",
                va="center",
                fontsize=8,
                color=color,
            )
    figure.colorbar(image, ax=axes, label="%")
    return figure


def field_panels(
    panels: Mapping[str, ArrayLike],
    *,
    extent: tuple[float, float, float, float],
    shared: Mapping[str, Sequence[str]] | None = None,
    columns: int = 2,
    labels: tuple[str, str] = ("", ""),
    unit: str = "",
    flip: bool = False,
) -> Figure:
    """Pictures (H, W) side by side, each with its colour bar; panels named in one group of `shared` share its limits.

    Args:
        panels: Title -> values.
        extent: Left, right, bottom, top of the axes.
        shared: Group -> titles with common limits; group "sequential" and others that are not signed start at 0.
        columns: Per row.
        labels: Of the horizontal and vertical axis.
        unit: Of the values.
        flip: The first row of the values is at the top (latitudes from north to south).
    """
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(4.6 * columns, 2.7 * rows), layout="constrained")
    grid = np.atleast_1d(figure.subplots(rows, columns, sharex=True, sharey=True)).ravel()
    limits = _limits(panels, shared or {})
    for axes, (title, values) in zip(grid, panels.items(), strict=False):
        low, high, colors = limits[title]
        origin = "upper" if flip else "lower"
        image: Any = axes.imshow(
            np.asarray(values), extent=extent, origin=origin, aspect="auto", vmin=low, vmax=high, cmap=colors
        )
        axes.set_title(title, fontsize=9)
        axes.tick_params(labelsize=7)
        figure.colorbar(image, ax=axes, label=unit)
    for axes in grid[len(panels) :]:
        axes.set_visible(False)
    for axes in grid[-columns:]:
        axes.set_xlabel(labels[0], fontsize=8)
    grid[0].set_ylabel(labels[1], fontsize=8)
    return figure


def _limits(
    panels: Mapping[str, ArrayLike], shared: Mapping[str, Sequence[str]]
) -> dict[str, tuple[float, float, str]]:
    """Lowest and highest value and colours of each panel; a spread (never negative, near 0) is sequential from 0."""
    groups = {title: [other for names in shared.values() if title in names for other in names] for title in panels}
    found = {}
    for title, values in panels.items():
        members = [np.asarray(panels[name]) for name in groups[title] if name in panels] or [np.asarray(values)]
        low, high = min(float(m.min()) for m in members), max(float(m.max()) for m in members)
        if low >= 0 and low < 0.5 * high:
            found[title] = (0.0, high, "magma")
        elif low < 0 < high and max(-low, high) < 4 * min(-low, high):
            bound = max(-low, high)
            found[title] = (-bound, bound, "RdBu_r")
        else:
            found[title] = (low, high, "viridis")
    return found


def matrix_panels(matrices: Mapping[str, ArrayLike], *, columns: int = 4) -> Figure:
    """Correlation matrices, all from -1 to 1."""
    rows = -(-len(matrices) // columns)
    figure = Figure(figsize=(2.6 * columns + 0.6, 2.6 * rows), layout="constrained")
    grid = np.atleast_1d(figure.subplots(rows, columns)).ravel()
    image: Any = None
    for axes, (title, values) in zip(grid, matrices.items(), strict=False):
        image = axes.imshow(np.asarray(values), vmin=-1, vmax=1, cmap="RdBu_r")
        axes.set_title(title, fontsize=8)
        axes.set_xticks([])
        axes.set_yticks([])
    for axes in grid[len(matrices) :]:
        axes.set_visible(False)
    figure.colorbar(image, ax=list(grid), label="correlation", shrink=0.8)
    return figure


def parameter_curves(
    curves: Mapping[str, tuple[Sequence[float], Sequence[float]]], *, xlabel: str, ylabel: str, logarithmic: bool = True
) -> Figure:
    """Label -> (parameter, score): tau curves, or CRPS against the number of steps."""
    figure = Figure(figsize=(6.8, 3.6), layout="constrained")
    axes = figure.subplots()
    _clean(axes)
    for place, (label, (x, y)) in enumerate(curves.items()):
        style = "-" if place < len(COLORS) else "--"
        axes.plot(x, y, style, marker="o", markersize=4, color=COLORS[place % len(COLORS)], label=label)
    if logarithmic:
        axes.set_xscale("log")
        _plain_numbers(axes.xaxis)
    axes.set(xlabel=xlabel, ylabel=ylabel)
    if curves:
        axes.legend(frameon=False, fontsize=8, handlelength=3.2, loc="center left", bbox_to_anchor=(1.01, 0.5))
    return figure


def _plain_numbers(axis: Any) -> None:
    """0.01, not a power in mathematical type, which needs fonts of its own."""
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def _clean(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8)
