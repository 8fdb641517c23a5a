"""Describe the layout of the UCI regression sets, or check a copy of them.

    python scripts/prepare_uci.py                                        # layout, sizes and sources
    python scripts/prepare_uci.py --root data/uci                        # check all eight sets
    python scripts/prepare_uci.py --root data/uci --sets yacht

The exit code is 0 if everything needed is there, 1 otherwise. Nothing is written.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from marigold_uq.commands.runner import Invocation, run_command
from marigold_uq.tabular import uci


@dataclass(frozen=True)
class PrepareUCI:
    """Describe the layout of the UCI regression sets, or check a copy of them.

    Args:
        root: The folder that holds one folder per set, to be checked; without it the layout is described.
        sets: Names of sets to check.
    """

    root: Path | None = None
    sets: list[str] = field(default_factory=lambda: list(uci.UCI_SETS))

    def __post_init__(self) -> None:
        unknown = set(self.sets) - set(uci.UCI_SETS)
        if unknown:
            raise ValueError(f"unknown set {', '.join(sorted(unknown))}; expected {', '.join(uci.UCI_SETS)}")


def _describe() -> str:
    """Layout and sources."""
    lines = [str(uci.__doc__).strip(), "", f"Splits and tables: {uci.SPLITS_SOURCE}", "Original data:"]
    for name, facts in uci.UCI_SETS.items():
        size = f"{facts.num_rows} rows, {facts.num_features} features, {facts.num_splits} splits"
        lines.append(f"  {name:9} {facts.title}: {size}; {facts.url}")
    return "\n".join(lines)


def _check(root: Path, name: str) -> str | None:
    """What is wrong with one set; None if nothing is."""
    try:
        dataset = uci.UCIDataset.load(root, name)
    except uci.UCIDataError as error:
        return str(error)
    facts = uci.UCI_SETS[name]
    found = (*dataset.features.shape, dataset.num_splits)
    expected = (facts.num_rows, facts.num_features, facts.num_splits)
    return None if found == expected else f"rows, features, splits are {found}; expected {expected}"


def _run(options: PrepareUCI, invocation: Invocation) -> int:
    """Describe or check; the exit code."""
    if options.root is None:
        print(_describe())
        return 0
    problems = {name: _check(options.root, name) for name in options.sets}
    for name, problem in problems.items():
        print(f"{name:9} {'ok' if problem is None else problem}")
    return 0 if all(problem is None for problem in problems.values()) else 1


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    return run_command("scripts/prepare_uci.py", PrepareUCI, _run, arguments)


if __name__ == "__main__":
    sys.exit(main())
