"""How many test rows of the UCI sets have an identical row among the training rows of their split.

    python -m scripts.studies.uci.duplicates --data data/uci
    python -m scripts.studies.uci.duplicates --data data/uci --cells docs/results/uci --sets wine concrete protein

A model that remembers training rows predicts such a test row as well as its targets agree. The second command adds the
CRPS on new rows and on such duplicates apart, from cells that know it. Nothing is fitted here.
"""

import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from marigold_uq.commands.runner import Invocation, run_command
from marigold_uq.results import markdown_table
from marigold_uq.tabular.duplicates import duplicate_rows
from marigold_uq.tabular.uci import UCI_SETS, UCIDataset, UCISplit
from scripts.studies.uci.cells import CellStore


@dataclass(frozen=True)
class DuplicateStudy:
    """Count test rows whose features, or features and target, occur among the training rows of their split.

    Args:
        data: Folder with one folder per UCI set.
        cells: Folder of `scripts.studies.uci.reproduce` and `peers`.
        sets: Names of sets.
    """

    data: Path
    cells: Path | None = None
    sets: list[str] = field(default_factory=lambda: list(UCI_SETS))


@dataclass(frozen=True)
class Shares:
    """Shares of the test rows of one split."""

    features: float
    """With a training row of the same features."""
    target: float
    """Where all such training rows also have the same target."""


def duplicate_shares(split: UCISplit) -> Shares:
    """Rows are the same if all their numbers are."""
    targets: dict[bytes, set[float]] = defaultdict(set)
    for row, target in zip(split.train_features + 0.0, split.train_targets, strict=True):
        targets[row.tobytes()].add(float(target))
    found = zip(split.test_features + 0.0, split.test_targets, strict=True)
    has_target = [targets.get(row.tobytes()) == {float(y)} for row, y in found]
    return Shares(float(duplicate_rows(split).mean()), float(np.mean(has_target)))


def scores_apart(cells: Path, names: Sequence[str]) -> str:
    """CRPS of all test rows, of new ones and of duplicates, mean over those splits that have such rows."""
    rows = []
    for cell in CellStore(cells):
        if cell.key.dataset in names and "crps_new" in cell.splits[0]:
            parts = ([s[part] for s in cell.splits if part in s] for part in ("crps", "crps_new", "crps_duplicates"))
            means = [float(np.mean(values)) if values else None for values in parts]
            model = cell.key.family if cell.key.preset == "peer" else cell.key.preset
            rows.append([cell.key.dataset, model, len(cell.splits), *(_digits(mean) for mean in means)])
    return markdown_table(["set", "model", "splits", "CRPS", "on new rows", "on duplicates"], rows)


def _digits(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def _run(study: DuplicateStudy, invocation: Invocation) -> int:
    """Print a Markdown table: mean over splits, lowest and highest split."""
    rows = []
    for name in study.sets:
        shares = [duplicate_shares(split) for split in UCIDataset.load(study.data, name)]
        features = np.array([one.features for one in shares])
        agree = f"{sum(one.target for one in shares) / features.sum():.1%}" if features.any() else ""
        rows.append([name, f"{features.mean():.1%} ({features.min():.1%} to {features.max():.1%})", agree])
    print(markdown_table(["set", "same features as a training row", "of these, all with the same target"], rows))
    if study.cells is not None:
        print("\n" + scores_apart(study.cells, study.sets))
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    return run_command("scripts.studies.uci.duplicates", DuplicateStudy, _run, arguments)


if __name__ == "__main__":
    sys.exit(main())
