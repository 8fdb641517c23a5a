"""The figure of an evaluation: coverage and PIT."""

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from marigold_uq.metrics import expected_coverage
from marigold_uq.plotting import COLORS, REFERENCE
from marigold_uq.tabular.scores import RELIABILITY_LEVELS

_Curves = tuple[Sequence[float], Sequence[float]]
"""Observed coverage at `RELIABILITY_LEVELS`, and PIT counts."""


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
