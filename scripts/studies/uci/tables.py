"""Results as Markdown and JSON: every cell says for how many of the published epochs it was trained."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from marigold_uq.results import markdown_table
from marigold_uq.tabular.scores import Spread
from scripts.studies.uci.cells import Cell
from scripts.studies.uci.peer_models import MODELS

Place = tuple[str, str, str]
"""Preset, family, data set."""

PEER = "peer"
"""The preset of other people's models, whose names stand for families."""


@dataclass(frozen=True)
class Unit:
    """Published tables multiply small numbers."""

    factor: float = 1.0
    text: str = ""


UNITS = {"kin8nm": Unit(100, " x100"), "naval": Unit(1e4, " x1e4")}


@dataclass(frozen=True)
class Reference:
    """Numbers of others: data set -> CRPS and RMSE, in the units of the table; and where they come from."""

    title: str
    source: str
    values: Mapping[str, tuple[float, float]]
    remarks: Mapping[str, str]  # data set -> mark behind the number


def column_title(preset: str, family: str) -> str:
    """How a column is called: preset and family, or the peer."""
    if preset == PEER:
        return family
    return preset if family == "own" else f"{preset} {family}"


def epochs_text(cell: Cell) -> str:
    """Epochs used of those published; for a preset that stops by itself, the mean of its models; peers as they come."""
    if cell.key.preset == PEER:
        return "defaults"
    if cell.published_epochs is not None:
        return f"{cell.key.epochs}/{cell.published_epochs}"
    used = [epoch for split in cell.splits for epoch in split.get("epochs", [])]
    return f"{fmean(used):.0f} on average" if used else "own rule"


def _format_number(value: float) -> str:
    """Three to four digits, as in published tables; two of a number that would be 0.000."""
    magnitude = abs(value)
    if 0 < magnitude < 0.0005:
        return f"{value:.1e}"
    digits = 3 if magnitude < 1 else 2 if magnitude < 100 else 1
    return f"{value:.{digits}f}"


def _format_spread(spread: Spread, factor: float = 1.0) -> str:
    """Mean and standard deviation over splits."""
    mean = _format_number(spread.mean * factor)
    return mean if spread.std is None else f"{mean} ± {_format_number(spread.std * factor)}"


def score_table(
    cells: Mapping[Place, Cell],
    datasets: Sequence[str],
    references: Sequence[Reference] = (),
    targets: Mapping[str, float] | None = None,
) -> str:
    """CRPS (RMSE) [epochs] of all columns, those of others beside them."""
    columns = ordered_columns(cells)
    own = [f"{'' if preset == PEER else 'ours: '}{column_title(preset, family)}" for preset, family in columns]
    titles = [*own, *(one.title for one in references)]
    rows = []
    for dataset in datasets:
        unit = UNITS.get(dataset, Unit())
        ours = [_score_entry(cells.get((*column, dataset)), unit) for column in columns]
        others = [_reference_entry(one, dataset) for one in references]
        goal = [_format_number(min([targets[dataset], *_peer_scores(cells, dataset)]))] if targets else []
        rows.append([dataset + unit.text, *ours, *others, *goal])
    return markdown_table(["set", *titles, *(["beat"] if targets else [])], rows)


def metric_table(cells: Mapping[Place, Cell], datasets: Sequence[str], entry: Callable[[Cell, Unit], str]) -> str:
    """One entry per set and column of ours."""
    columns = ordered_columns(cells)
    rows = []
    for dataset in datasets:
        unit = UNITS.get(dataset, Unit())
        found = [cells.get((*column, dataset)) for column in columns]
        rows.append([dataset + unit.text, *("" if cell is None else entry(cell, unit) for cell in found)])
    return markdown_table(["set", *(column_title(*column) for column in columns)], rows)


def ordered_columns(cells: Iterable[Place]) -> list[tuple[str, str]]:
    """Presets and families that have any cell: the paper's, ours, then the peers."""
    order = ["point", "gaussian", "mixture", "sample", "own", *MODELS]
    found = {(preset, family) for preset, family, _ in cells}
    return sorted(found, key=lambda column: (column[0] == PEER, column[0] != "paper", order.index(column[1])))


def _peer_scores(cells: Mapping[Place, Cell], dataset: str) -> list[float]:
    """CRPS of the peers, in the units of the table."""
    factor = UNITS.get(dataset, Unit()).factor
    found = (cell for (preset, _, name), cell in cells.items() if preset == PEER and name == dataset)
    return [factor * cell.summary["crps"].mean for cell in found]


def _score_entry(cell: Cell | None, unit: Unit) -> str:
    if cell is None:
        return ""
    score, error = cell.summary["crps"], cell.summary["rmse"]
    splits = f", {score.num_splits} splits"
    return f"{_format_spread(score, unit.factor)} ({_format_spread(error, unit.factor)}) [{epochs_text(cell)}{splits}]"


def _reference_entry(reference: Reference, dataset: str) -> str:
    if dataset not in reference.values:
        return ""
    score, error = reference.values[dataset]
    return f"{score:g} ({error:g}){reference.remarks.get(dataset, '')}"


def coverage_entry(cell: Cell, unit: Unit) -> str:
    """Coverage and mean width of the 95 % interval: of the draws; of the model's own interval where it has one."""
    summary = cell.summary
    text = f"{summary['coverage_95'].mean:.3f} ({_format_number(summary['width_95'].mean * unit.factor)})"
    own = summary["interval_width_95"].mean * unit.factor if "interval_width_95" in summary else None
    if own is not None and not math.isclose(own, summary["width_95"].mean * unit.factor, rel_tol=1e-9):
        text += f"; own {summary['interval_coverage_95'].mean:.3f} ({_format_number(own)})"
    return f"{text} [{epochs_text(cell)}]"


def inner_coverage_entry(cell: Cell, unit: Unit) -> str:
    """Coverage of the 50, 80 and 90 % intervals of the draws."""
    return " / ".join(f"{cell.summary[f'coverage_{level}'].mean:.3f}" for level in (50, 80, 90))


def nll_entry(cell: Cell, unit: Unit) -> str:
    """Gaussian negative log likelihood in original units (not those of the table), of distributions with a density."""
    return _format_spread(cell.summary["nll"]) if "nll" in cell.summary else "no density"


def results_json(cells: Iterable[Cell]) -> list[dict[str, Any]]:
    """Every cell without its curves: key, epochs, and mean, standard deviation and standard error of each metric."""
    return [
        {
            **asdict(cell.key),
            "published_epochs": cell.published_epochs,
            "epochs_used": epochs_text(cell),
            "num_splits": len(cell.splits),
            "metrics": {name: asdict(spread) for name, spread in cell.summary.items()},
        }
        for cell in cells
    ]
