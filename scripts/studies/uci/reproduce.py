"""Make the table of the UCI regression sets: presets and families x sets x metrics, over all splits; resumable.

    python -m scripts.studies.uci.reproduce --data data/uci --output runs/uci
    python -m scripts.studies.uci.reproduce --data data/uci --output runs/uci --sets wine --columns default
    python -m scripts.studies.uci.reproduce --data data/uci --output runs/uci --epochs_scale 0.1 1
    python -m scripts.studies.uci.reproduce --data data/uci --output runs/uci --max_epochs.naval 500

Run the same command again to resume: finished cells are kept, training continues from its last saved state (also after
`kill -9`), and a larger share of the epochs continues the smaller one. Several processes may fill one folder if they
have different sets or columns. Each finished cell renews results.json, table.md and figure.png; every cell says how
many of the published epochs it had. `--render_only` only renews those files.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from marigold_uq.commands.runner import Invocation, run_command
from marigold_uq.files import atomic_path, make_folder
from marigold_uq.plotting import save_figure
from marigold_uq.results import write_json
from scripts.studies.uci import tables
from scripts.studies.uci.cells import CellStore
from scripts.studies.uci.figures import scores_figure
from scripts.studies.uci.reproduction import Reproduction, reproduce

SETS = ("concrete", "energy", "kin8nm", "naval", "power", "protein", "wine", "yacht")
_PUBLISHED = "published runs of the paper's code, CRPS and RMSE over all splits"
_PEERS = "peers at their defaults on the same splits: CatBoost RMSEWithUncertainty, NGBoost 500 trees, TreeFFuser"
_FEW = dict.fromkeys(("kin8nm", "naval", "power", "protein"), "*")


def _pairs(*numbers: float | None) -> dict[str, tuple[float, float]]:
    """CRPS, RMSE for each of `SETS`; None where there is no number."""
    pairs = zip(SETS, numbers[::2], numbers[1::2], strict=True)
    return {name: (score, error) for name, score, error in pairs if score is not None and error is not None}


REFERENCES = (
    tables.Reference("published point", _PUBLISHED, _pairs(
        2.59, 4.82, .290, .453, 3.93, 6.91, .79, 1.35, 2.04, 3.86, 1.714, 3.76, .331, .662, .409, .940), {}),
    tables.Reference("published gaussian", _PUBLISHED, _pairs(
        2.47, 4.79, .244, .453, 3.81, 6.88, .56, 1.24, 1.84, 3.64, 1.660, 3.71, .329, .654, .347, .906), {}),
    tables.Reference("published mixture", _PUBLISHED, _pairs(
        2.43, 4.74, .241, .445, 3.82, 6.89, .54, 1.23, 1.81, 3.59, 1.654, 3.72, .353, .678, .359, .945), {}),
    tables.Reference("published sample", _PUBLISHED, _pairs(
        2.48, 4.81, .247, .456, 3.83, 6.90, .53, 1.23, 1.93, 3.78, 1.694, 3.76, .331, .660, .370, .992), {}),
    tables.Reference("CatBoost", _PEERS, _pairs(
        2.10, 4.08, .216, .404, 6.81, 12.4, 12.6, 27.4, 1.77, 3.39, 2.18, 4.13, .337, .592, .415, 1.13), _FEW),
    tables.Reference("NGBoost", _PEERS, _pairs(
        2.91, 5.46, .259, .512, 9.97, 18.1, None, None, 2.09, 3.90, None, None, .339, .616, .260, .610), _FEW),
    tables.Reference("TreeFFuser", _PEERS, _pairs(
        2.12, 4.30, .230, .503, None, None, None, None, None, None, None, None, .257, .580, .307, 1.72), _FEW),
)  # fmt: skip
"""What others reach, in the units of the table (kin8nm x100, naval x1e4)."""

BEAT = dict(zip(SETS, (2.10, 0.216, 3.81, 0.53, 1.77, 1.654, 0.257, 0.260), strict=True))
"""The best CRPS of all of them."""


def _write_results(output: Path, command: str) -> None:
    """results.json, table.md and figure.png of all finished cells of a folder."""
    store = CellStore(output)
    cells = store.furthest()
    content = {"command": command, "cells": tables.results_json(store)}
    write_json(output / "results.json", content, overwrite=True)
    if cells:
        with atomic_path(output / "table.md", overwrite=True) as temporary:
            temporary.write_text(markdown(cells, command), encoding="utf-8")
        save_figure(scores_figure(cells, _sets_of(cells), REFERENCES), output / "figure.png", overwrite=True)


def markdown(cells: dict[tables.Place, tables.Cell], command: str) -> str:
    """All tables."""
    sets = _sets_of(cells)
    parts = [
        "# UCI regression",
        f"Last command: `{command}`",
        "Mean ± standard deviation over splits, original units (kin8nm x100, naval x1e4). In brackets the epochs of "
        "our cell: used/published; a cell with fewer epochs than published is what it is, nothing is extrapolated.",
        f'Others: "published" = {_PUBLISHED}; {_PEERS}; * on 2 to 5 splits; the peers of `peer_models`, with their '
        'splits. "beat" is the best of them.',
        "## CRPS (RMSE) [epochs, splits]",
        tables.score_table(cells, sets, REFERENCES, BEAT),
        "## Coverage (mean width) of 95 % intervals",
        'Between Weibull quantiles of the draws; "own" is the model\'s calibrated interval where it has one.',
        tables.metric_table(cells, sets, tables.coverage_entry),
        "## Coverage of 50 / 80 / 90 % intervals of the draws",
        tables.metric_table(cells, sets, tables.inner_coverage_entry),
        "## Gaussian negative log likelihood",
        "In original units of every set.",
        tables.metric_table(cells, sets, tables.nll_entry),
    ]
    return "\n\n".join(parts) + "\n"


def _sets_of(cells: dict[tables.Place, tables.Cell]) -> list[str]:
    return [name for name in SETS if any(dataset == name for _, _, dataset in cells)]


def _run(plan: Reproduction, invocation: Invocation) -> int:
    """Make what is missing and write the results."""
    torch.set_num_threads(plan.threads)
    make_folder(plan.output)
    for key, cell in [] if plan.render_only else reproduce(plan):
        score, error = cell.summary["crps"], cell.summary["rmse"]
        epochs = tables.epochs_text(cell)
        print(f"{key.name}: CRPS {score.mean:.4g}, RMSE {error.mean:.4g}, {epochs} epochs", flush=True)
        _write_results(plan.output, invocation.command)
    _write_results(plan.output, invocation.command)
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    return run_command("scripts.studies.uci.reproduce", Reproduction, _run, arguments)


if __name__ == "__main__":
    sys.exit(main())
