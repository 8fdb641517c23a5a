"""How many test rows of the UCI sets have an identical row among the training rows of their split.

    python -m scripts.studies.uci.duplicates --data data/uci

A model that remembers training rows predicts such a test row as well as its targets agree. Nothing is fitted here.
"""

import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from marigold_uq.commands.runner import Invocation, run_command
from marigold_uq.results import markdown_table
from marigold_uq.tabular.uci import UCI_SETS, UCIDataset, UCISplit


@dataclass(frozen=True)
class DuplicateStudy:
    """Count test rows whose features, or features and target, occur among the training rows of their split.

    Args:
        data: Folder with one folder per UCI set.
        sets: Names of sets.
    """

    data: Path
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
    for row, target in zip(split.train_features, split.train_targets, strict=True):
        targets[row.tobytes()].add(float(target))
    found = [(targets.get(row.tobytes()), y) for row, y in zip(split.test_features, split.test_targets, strict=True)]
    has_features = [seen is not None for seen, _ in found]
    has_target = [seen == {float(y)} for seen, y in found]
    return Shares(float(np.mean(has_features)), float(np.mean(has_target)))


def _run(study: DuplicateStudy, invocation: Invocation) -> int:
    """Print a Markdown table: mean over splits, lowest and highest split."""
    rows = []
    for name in study.sets:
        shares = [duplicate_shares(split) for split in UCIDataset.load(study.data, name)]
        features = np.array([one.features for one in shares])
        agree = f"{sum(one.target for one in shares) / features.sum():.1%}" if features.any() else ""
        rows.append([name, f"{features.mean():.1%} ({features.min():.1%} to {features.max():.1%})", agree])
    print(markdown_table(["set", "same features as a training row", "of these, all with the same target"], rows))
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    return run_command("-m scripts.studies.uci.duplicates", DuplicateStudy, _run, arguments)


if __name__ == "__main__":
    sys.exit(main())
