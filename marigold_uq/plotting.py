"""Figures of evaluations: reliability, sparsification, PIT or rank histograms, groups.

Every function returns a matplotlib `Figure` of its own: no global state, nothing is shown. `save_figure` writes it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from marigold_uq.files import atomic_path

__all__ = [
    "COLORS",
    "REFERENCE",
    "Series",
    "group_bars",
    "pit_histogram",
    "reliability_diagram",
    "save_figure",
    "sparsification_plot",
    "spread_plot",
]

COLORS = ("#2a6fbb", "#d1622b", "#3a8f5c", "#8a5aa8", "#b8992b", "#666666")
REFERENCE: dict[str, Any] = {"color": "#9a9a9a", "linewidth": 1.2}
Series = Mapping[str, Sequence[float]]  # label -> values


def save_figure(figure: Figure, path: str | Path, *, overwrite: bool = False, dpi: int = 150) -> Path:
    """Write a figure in the format of the suffix (png, svg, pdf)."""
    with atomic_path(path, overwrite=overwrite) as temporary:
        figure.savefig(temporary, dpi=dpi)
    return Path(path)


def reliability_diagram(
    levels: Sequence[float], observed: Series, *, expected: Sequence[float] | None = None, title: str = "Reliability"
) -> Figure:
    """Observed against nominal coverage of central intervals.

    Args:
        levels: Nominal coverages.
        observed: One curve per label.
        expected: What calibrated intervals of this kind reach: a finite ensemble covers less than its nominal level.
            Below this curve the model is over-confident, above it under-confident.
        title: Above the figure.
    """
    _check_lengths({**observed, "expected": expected or levels}, len(levels))
    figure, axes = _figure((4.6, 4.4), title)
    axes.plot([0, 1], [0, 1], linestyle=":", label="nominal", **REFERENCE)
    if expected is not None:
        axes.plot(levels, expected, linestyle="--", label="expected if calibrated", **REFERENCE)
    for color, (label, values) in zip(_colors(len(observed)), observed.items(), strict=True):
        axes.plot(levels, values, marker="o", markersize=4, color=color, label=label)
    axes.set(xlim=(0, 1), ylim=(0, 1), xlabel="nominal coverage", ylabel="observed coverage", aspect="equal")
    axes.legend(frameon=False, loc="upper left")
    return figure


def sparsification_plot(
    removed: Sequence[float],
    curves: Series,
    *,
    oracle: Sequence[float] | None = None,
    title: str = "Sparsification",
    error: str = "error of the rest / error of all",
) -> Figure:
    """Error of the pixels that remain when the most uncertain ones are removed; the oracle removes the worst first."""
    _check_lengths({**curves, "oracle": oracle or removed}, len(removed))
    figure, axes = _figure((5.2, 3.8), title)
    axes.axhline(1.0, linestyle=":", label="random order", **REFERENCE)
    if oracle is not None:
        axes.plot(removed, oracle, linestyle="--", label="oracle", **REFERENCE)
    colors = _colors(len(curves))
    for color, (label, values) in zip(colors, curves.items(), strict=True):
        axes.plot(removed, values, color=color, label=label)
    if oracle is not None and len(curves) == 1:
        (only,) = curves.values()
        axes.fill_between(removed, oracle, only, color=colors[0], alpha=0.12, linewidth=0, label="area between: AUSE")
    axes.set(xlim=(0, 1), xlabel="share of pixels removed", ylabel=error)
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)
    return figure


def spread_plot(
    stated: Sequence[float], found: Sequence[float], *, title: str = "Error against stated deviation"
) -> Figure:
    """Root mean square error of pixels of about the same stated standard deviation; on the line where it is right."""
    _check_lengths({"found": found}, len(stated))
    figure, axes = _figure((4.6, 4.4), title)
    top = 1.05 * max([*stated, *found, 1e-12])
    axes.plot([0, top], [0, top], linestyle=":", label="as stated", **REFERENCE)
    axes.plot(stated, found, marker="o", markersize=4, color=COLORS[0])
    axes.set(xlim=(0, top), ylim=(0, top), xlabel="stated standard deviation", ylabel="root mean square error")
    axes.legend(frameon=False, loc="upper left")
    return figure


def pit_histogram(shares: Sequence[float], *, title: str = "Where the truth falls", label: str = "PIT") -> Figure:
    """Shares of the PIT, or of ranks, per bin, against the flat line of a calibrated prediction.

    A U means over-confident, a hump under-confident, a slope biased.
    """
    figure, axes = _figure((5.2, 3.4), title)
    count, total = len(shares), math.fsum(shares)
    heights = [count * share / total for share in shares]
    centers = [(i + 0.5) / count for i in range(count)]
    axes.bar(centers, heights, width=0.92 / count, color=COLORS[0])
    axes.axhline(1.0, linestyle="--", label="calibrated", **REFERENCE)
    axes.set(xlim=(0, 1), xlabel=f"{label} (0: below all that was predicted, 1: above)", ylabel="density")
    axes.legend(frameon=False)
    return figure


def group_bars(
    values: Mapping[str, Mapping[str, tuple[float, float]]],
    overall: Mapping[str, float] | None = None,
    *,
    title: str = "By group",
) -> Figure:
    """One panel per metric, one bar per group with its standard error (none where it is NaN), a line for the whole.

    Args:
        values: Metric -> group -> (value, standard error).
        overall: Metric -> value of the whole data set.
        title: Above the figure.
    """
    groups = list(dict.fromkeys(group for one in values.values() for group in one))
    size = (1.6 + 2.4 * len(values), 1.2 + 0.3 * len(groups))
    figure = Figure(figsize=size, layout="constrained")
    figure.suptitle(title, fontsize=11)
    panels = figure.subplots(1, len(values), sharey=True, squeeze=False)[0]
    for axes, (metric, by_group) in zip(panels, values.items(), strict=True):
        _clean(axes)
        _draw_bars(axes, [by_group.get(group, (math.nan, math.nan)) for group in groups])
        if overall is not None and metric in overall:
            axes.axvline(overall[metric], linestyle="--", **REFERENCE)
            axes.set_title(f"{metric}\noverall {overall[metric]:.3g}", fontsize=8)
        else:
            axes.set_title(metric, fontsize=8)
    panels[0].set_yticks(range(len(groups)), groups)
    panels[0].invert_yaxis()
    return figure


def _draw_bars(axes: Axes, pairs: Sequence[tuple[float, float]]) -> None:
    """Horizontal bars with their standard errors."""
    heights = [value for value, _ in pairs]
    errors = [0.0 if math.isnan(error) else error for _, error in pairs]
    axes.barh(range(len(pairs)), heights, xerr=errors, height=0.7, color=COLORS[0], error_kw={"elinewidth": 1})


def _figure(size: tuple[float, float], title: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots()
    axes.set_title(title, fontsize=11)
    _clean(axes)
    return figure, axes


def _clean(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8)


def _colors(count: int) -> list[str]:
    return [COLORS[i % len(COLORS)] for i in range(count)]


def _check_lengths(series: Series, expected: int) -> None:
    for label, values in series.items():
        if len(values) != expected:
            raise ValueError(f"the curve {label!r} has {len(values)} points; expected {expected}, one per x value")
