"""The cells of a comparison as Markdown: CRPS, coverage, width and seconds of every model on every table."""

import math
from collections.abc import Callable, Mapping, Sequence

from marigold_uq.results import markdown_table
from marigold_uq.tabular.public_tables import PUBLIC_TABLES
from scripts.studies.uci.cells import Cell, CellStore
from scripts.studies.uci.peer_models import MODELS

_Cells = Mapping[tuple[str, str], Cell]
"""(table, model) -> its cell."""


def model_name(cell: Cell) -> str:
    """`default`, or the name of the peer."""
    return cell.key.family if cell.key.preset == "peer" else cell.key.preset


def render(store: CellStore) -> str:
    """All tables: CRPS with the ratio to the best peer, then one table per further metric."""
    cells = {(cell.key.dataset, model_name(cell)): cell for cell in store}
    tables = [name for name in PUBLIC_TABLES if any(table == name for table, _ in cells)]
    models = [name for name in (*MODELS, "default") if any(model == name for _, model in cells)]
    parts = {
        "CRPS": crps_table(cells, tables, models),
        "CRPS of test rows unlike all training rows": _new_rows_table(cells, tables, models),
        "RMSE": _metric_table(cells, tables, models, lambda cell: f"{cell.summary['rmse'].mean:.4g}"),
        "Coverage of the 95 % interval (width)": _metric_table(cells, tables, models, _coverage),
        "Coverage of the 50 / 90 % intervals": _metric_table(cells, tables, models, _inner_coverage),
        "Processor seconds of a fit / of 100 draws per test row": _metric_table(cells, tables, models, _seconds),
    }
    return "\n\n".join(f"### {title}\n\n{text}" for title, text in parts.items()) + "\n"


def crps_table(cells: _Cells, tables: Sequence[str], models: Sequence[str]) -> str:
    """Mean over splits, the best peer in bold; ratios of `default` to it, and below their geometric mean.

    What was not run is left empty.
    """
    rows, ratios = [], []
    for table in tables:
        scores = {model: cells[table, model].summary["crps"].mean for model in models if (table, model) in cells}
        best = min((score for model, score in scores.items() if model != "default"), default=math.nan)
        entries = [_bold(scores[model], best) if model in scores else "" for model in models]
        if "default" in scores:
            ratios.append(scores["default"] / best)
        rows.append([table, *entries, f"{scores['default'] / best:.3f}" if "default" in scores else ""])
    if ratios:
        mean = math.exp(math.fsum(map(math.log, ratios)) / len(ratios))
        rows.append(["geometric mean", *[""] * len(models), f"{mean:.3f}"])
    return markdown_table(["table", *models, "`default` / best peer"], rows)


def _bold(score: float, best: float) -> str:
    text = f"{score:.4g}"
    return f"**{text}**" if score == best else text


def _metric_table(cells: _Cells, tables: Sequence[str], models: Sequence[str], entry: Callable[[Cell], str]) -> str:
    rows = [[table, *(entry(cells[table, m]) if (table, m) in cells else "" for m in models)] for table in tables]
    return markdown_table(["table", *models], rows)


def _new_rows_table(cells: _Cells, tables: Sequence[str], models: Sequence[str]) -> str:
    """The share of test rows with the features of a training row, and the CRPS on the others."""
    rows = []
    for table in tables:
        found = {model: cells[table, model].summary for model in models if (table, model) in cells}
        share = next(iter(found.values()))["duplicates"].mean
        scores = [f"{found[m]['crps_new'].mean:.4g}" if m in found and "crps_new" in found[m] else "" for m in models]
        rows.append([table, f"{share:.1%}", *scores])
    return markdown_table(["table", "duplicates", *models], rows)


def _coverage(cell: Cell) -> str:
    """Of the model's own interval."""
    summary = cell.summary
    return f"{summary['interval_coverage_95'].mean:.3f} ({summary['interval_width_95'].mean:.3g})"


def _inner_coverage(cell: Cell) -> str:
    return " / ".join(f"{cell.summary[f'coverage_{level}'].mean:.2f}" for level in (50, 90))


def _seconds(cell: Cell) -> str:
    return " / ".join(f"{cell.summary[f'{part}_cpu_seconds'].mean:.2g}" for part in ("fit", "sample"))
