"""Scorecards: variables x lead times, the change of a score against a reference in percent."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from marigold_uq import plotting
from marigold_uq.field import figures
from marigold_uq.files import atomic_path
from marigold_uq.results import markdown_table, read_results

__all__ = ["Scorecard", "make_scorecard", "write_scorecard"]


TABLE_FILE, FIGURE_FILE = "scorecard.md", "scorecard.png"


@dataclass(frozen=True)
class Scorecard:
    """Changes in percent, negative where the model is better; NaN where one of the two has no score.

    Args:
        metric: Of the scores.
        reference: Name of the other model.
        variables: Row names, with units.
        lead_times: Column names.
        changes: A row per variable.
    """

    metric: str
    reference: str
    variables: tuple[str, ...]
    lead_times: tuple[str, ...]
    changes: tuple[tuple[float, ...], ...]

    def table(self) -> str:
        """In Markdown."""
        rows = [
            [name, *("" if math.isnan(change) else f"{change:+.1f}" for change in row)]
            for name, row in zip(self.variables, self.changes, strict=True)
        ]
        return markdown_table([f"{self.metric} against {self.reference}, %", *self.lead_times], rows)


def make_scorecard(
    metrics: Mapping[str, Any], reference: Mapping[str, Any], metric: str = "crps", part: str = "rollout"
) -> Scorecard:
    """The contents of two metrics.json against each other, variable by variable, each in its own unit."""
    own, other = (one.get(part, {}).get("variables", {}) for one in (metrics, reference))
    shared = [name for name in own if name in other and metric in own[name] and metric in other[name]]
    if not shared:
        raise ValueError(
            f"the two evaluations share no variable with {metric!r} in {part!r}: score both on the same data"
        )
    for key in ("groups_of_windows", "crps_of_windows"):
        if set(metrics[part].get(key, {})) != set(reference[part].get(key, {})):
            raise ValueError("the two evaluations are of other windows: give both the same data and numbers of windows")
    changes = [_changes(own[name][metric]["value"], other[name][metric]["value"]) for name in shared]
    names = tuple(f"{name} ({own[name]['unit']})" if own[name].get("unit") else name for name in shared)
    leads = _lead_names(min(map(len, changes)), float(metrics["lead_time_step"]))
    name = str(reference["predictor"]["name"])
    return Scorecard(metric, name, names, leads, tuple(row[: len(leads)] for row in changes))


def _changes(own: Sequence[float | None], other: Sequence[float | None]) -> tuple[float, ...]:
    pairs = zip(own, other, strict=False)
    return tuple(100 * (a / b - 1) if a is not None and b else math.nan for a, b in pairs)


def _lead_names(count: int, step: float) -> tuple[str, ...]:
    """Hours where the step is one of a calendar, else times of the equation."""
    scale, unit = (3600, " h") if step >= 3600 else (1, "")
    return tuple(f"{step * lead / scale:g}{unit}" for lead in range(1, count + 1))


def write_scorecard(folder: Path, metrics: Mapping[str, Any], reference: Path, *, draw: bool = True) -> str:
    """Write scorecard.md and scorecard.png into a folder; returns the table."""
    other = read_results(reference)
    part = "rollout" if "rollout" in metrics and "rollout" in other else "one_step"
    card = make_scorecard(metrics, other, part=part)
    with atomic_path(folder / TABLE_FILE, overwrite=True) as temporary:
        temporary.write_text(card.table() + "\n", encoding="utf-8")
    if draw:
        figure = figures.scorecard_figure(
            card.changes, card.variables, card.lead_times, f"{card.metric} / {card.reference}"
        )
        plotting.save_figure(figure, folder / FIGURE_FILE, overwrite=True)
    return card.table()
