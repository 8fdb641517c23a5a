"""Does epistemic uncertainty separate rows like the training rows from rows of a held-out part of feature space?

    python -m scripts.studies.uci.shifted_rows --data data/uci --output runs/shift --sets concrete energy yacht

For every set, kind of shift (cluster, range) and split the model is fitted without the held-out part; the table gives
the AUROC of test rows against held-out rows: mean ± standard error over splits. Finished splits are kept: run the same
command again to go on. Options of the model: `--model num_members=8 baseline=mlp`.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm

from marigold_uq.files import atomic_path
from marigold_uq.tabular import DiffusionRegressor
from marigold_uq.tabular.estimators import model_options
from marigold_uq.tabular.scores import Spread, summarize_splits
from marigold_uq.tabular.uci import UCIDataset
from scripts.studies.uci.cells import CellKey, CellStore, dataset_digest
from scripts.studies.uci.shift import ShiftKind, hold_out, shift_scores

ESTIMATES = ("head", "ensemble", "total", "distance")


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with one folder per UCI set")
    parser.add_argument("--output", type=Path, required=True, help="folder of the results")
    parser.add_argument("--sets", nargs="+", default=["concrete", "energy", "yacht", "wine"])
    parser.add_argument("--kinds", nargs="+", choices=["cluster", "range"], default=["cluster", "range"])
    parser.add_argument("--splits", type=int, default=5, help="so many splits of each set")
    parser.add_argument("--preset", default="default")
    parser.add_argument("--model", nargs="*", default=[], metavar="NAME=VALUE", help="of DiffusionRegressor")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args(arguments)


def run_set(options: argparse.Namespace, name: str, kind: ShiftKind) -> dict[str, Any]:
    """All splits of one set and kind."""
    store, changes = CellStore(options.output), model_options(options.model)
    key = CellKey(options.preset, kind, name, 0)
    dataset = UCIDataset.load(options.data, name)
    identity = {"model": changes, "seed": options.seed, "data": dataset_digest(dataset)}
    scores = store.load_splits(key, identity)
    for number in tqdm(range(min(options.splits, dataset.num_splits)), f"{name} {kind}"):
        if number >= len(scores):
            model = DiffusionRegressor(options.preset, random_state=options.seed + number, **changes)
            scores.append(shift_scores(model, hold_out(dataset.split(number), kind, options.seed)))
            store.save_splits(key, identity, scores)
    summary = {metric: asdict(spread) for metric, spread in summarize_splits(scores[: options.splits]).items()}
    return {"set": name, "kind": kind, "preset": options.preset, "model": changes, "auroc": summary}


def table(results: list[dict[str, Any]]) -> Iterator[str]:
    """Markdown: AUROC, mean ± standard error over splits."""
    yield "| set | held out | splits | " + " | ".join(ESTIMATES) + " |"
    yield "| --- " * (3 + len(ESTIMATES)) + "|"
    for one in results:
        spreads = {name: Spread(**value) for name, value in one["auroc"].items()}
        numbers = [_entry(spreads.get(name)) for name in ESTIMATES]
        yield f"| {one['set']} | {one['kind']} | {spreads['total'].num_splits} | " + " | ".join(numbers) + " |"


def _entry(spread: Spread | None) -> str:
    if spread is None:
        return ""
    return f"{spread.mean:.3f}" if spread.standard_error is None else f"{spread.mean:.3f} ± {spread.standard_error:.3f}"


def main(arguments: list[str] | None = None) -> int:
    """Run what is missing and write results.json and table.md."""
    options = parse_arguments(arguments)
    torch.set_num_threads(options.threads)
    results = [run_set(options, name, kind) for name in options.sets for kind in options.kinds]
    text = "\n".join(table(results))
    print(text)
    for name, content in (("results.json", json.dumps(results, indent=1)), ("table.md", text)):
        with atomic_path(options.output / name, overwrite=True) as temporary:
            temporary.write_text(content + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
