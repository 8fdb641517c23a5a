"""Describe the layout of the UCI regression sets, and check a copy of them.

    python scripts/prepare_uci.py describe
    python scripts/prepare_uci.py check --root data/uci              # every set in the folder
    python scripts/prepare_uci.py check --root data/uci --name yacht

The exit code is 0 if everything needed is there, 1 otherwise. Nothing is written.
"""

import argparse
import sys

from marigold_uq.tabular import uci


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("describe", help="print the layout, the sizes and the sources")
    checking = commands.add_parser("check", help="read every file of a copy")
    checking.add_argument("--root", required=True, help="the folder that holds one folder per set")
    checking.add_argument("--name", action="append", choices=list(uci.SOURCES), help="one set; all eight by default")
    return parser.parse_args(arguments)


def describe() -> str:
    """Layout and sources."""
    lines = [str(uci.__doc__).strip(), "", f"Splits and tables: {uci.SPLITS_SOURCE}", "Original data:"]
    for name, source in uci.SOURCES.items():
        size = f"{source.num_rows} rows, {source.num_features} features, {source.num_splits} splits"
        lines.append(f"  {name:9} {source.title}: {size}; {source.url}")
    return "\n".join(lines)


def check(root: str, name: str) -> str | None:
    """What is wrong with one set; None if nothing is."""
    try:
        dataset = uci.UCIDataset.load(root, name)
    except uci.UCIDataError as error:
        return str(error)
    source = uci.SOURCES[name]
    found = (*dataset.features.shape, dataset.num_splits)
    expected = (source.num_rows, source.num_features, source.num_splits)
    return None if found == expected else f"rows, features, splits are {found}; expected {expected}"


def main(arguments: list[str] | None = None) -> int:
    """Describe or check; the exit code."""
    options = parse_arguments(arguments)
    if options.command == "describe":
        print(describe())
        return 0
    problems = {name: check(options.root, name) for name in options.name or uci.SOURCES}
    for name, problem in problems.items():
        print(f"{name:9} {'ok' if problem is None else problem}")
    return 0 if all(problem is None for problem in problems.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
