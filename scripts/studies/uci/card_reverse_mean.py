"""Sample the same trained models with CARD's published reverse mean and with the right one.

    python -m scripts.studies.uci.card_reverse_mean --data data --states runs/uci/states/paper --output runs/card.json

`--states` is what `scripts.studies.uci.reproduce` keeps (OUTPUT/states/paper); the models are taken as they stand.
With `--epochs N` models with fewer epochs are trained on to N, and saved there; the folder must exist.
"""

import argparse
import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm

from marigold_uq.files import atomic_path
from marigold_uq.tabular.recipe import FAMILIES, paper_recipe
from marigold_uq.tabular.scores import score_rows, summarize_splits
from marigold_uq.tabular.uci import UCIDataset
from scripts.studies.uci.card import sample_as_card
from scripts.studies.uci.stacked import StackedRun, StackedTask, state_path

METRICS = ("crps", "rmse", "coverage_95", "width_95")


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with one folder per UCI set")
    parser.add_argument("--states", type=Path, required=True, help="folder of training states")
    parser.add_argument("--output", type=Path, required=True, help="JSON file, must not exist")
    parser.add_argument("--sets", nargs="+", default=["concrete", "energy"])
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=["gaussian"])
    parser.add_argument("--epochs", type=int, help="train on to so many epochs")
    parser.add_argument("--num-samples", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args(arguments)


def check_files(options: argparse.Namespace) -> None:
    """A mistyped folder must be found out before anything is trained."""
    if options.output.exists():
        raise FileExistsError(f"{options.output} exists; choose another output, nothing is overwritten")
    if not options.states.is_dir():
        raise FileNotFoundError(f"no folder {options.states}; --states is OUTPUT/states/paper of reproduce_uci.py")
    paths = [state_path(options.states, name, family) for name in options.sets for family in options.families]
    missing = [str(path) for path in paths if not path.exists()]
    if missing and options.epochs is None:
        raise FileNotFoundError(
            f"no trained models in {', '.join(missing)}; run scripts/studies/uci/reproduce.py, or pass --epochs"
        )


def load_run(options: argparse.Namespace, dataset: UCIDataset, family: str) -> StackedRun:
    """The trained models of a set."""
    recipe = replace(paper_recipe(len(dataset.indices[0][0]), dataset.name), noise_family=family)
    run = StackedRun(StackedTask(dataset, recipe, options.seed), options.states, verbose=True)
    if options.epochs is not None:
        run.advance(options.epochs)
    elif run.epoch == 0:
        raise ValueError(
            f"{run.state_path} has not finished an epoch; run scripts/studies/uci/reproduce.py, or pass --epochs"
        )
    return run


def compare(options: argparse.Namespace, name: str, family: str) -> dict[str, Any]:
    """Both steps on every split of a set, with the same random numbers."""
    dataset = UCIDataset.load(options.data, name)
    run = load_run(options, dataset, family)
    pipeline = run.pipeline()
    scores: dict[str, list[dict[str, Any]]] = {"published": [], "right": []}
    for number, split in enumerate(tqdm(dataset, f"{name} {family}", dataset.num_splits)):
        alone = pipeline.select(number)
        for step, entries in scores.items():
            is_published = step == "published"
            draws = sample_as_card(
                alone, split.test_features, options.num_samples, seed=options.seed, published=is_published
            )
            entries.append(score_rows(draws, split.test_targets, target_scale=float(split.train_targets.std())))
    summaries = {
        step: {metric: asdict(spread) for metric, spread in summarize_splits(entries).items()}
        for step, entries in scores.items()
    }
    return {"set": name, "family": family, "epochs": run.epoch, "num_splits": dataset.num_splits, **summaries}


def table(results: list[dict[str, Any]]) -> str:
    """Markdown: mean and standard error over splits."""
    lines = [
        "| set | family | epochs | reverse mean | " + " | ".join(METRICS) + " |",
        "| --- " * (4 + len(METRICS)) + "|",
    ]
    for one in results:
        for step in ("published", "right"):
            numbers = [f"{one[step][m]['mean']:.4g} ± {one[step][m]['standard_error'] or 0:.2g}" for m in METRICS]
            lines.append(f"| {one['set']} | {one['family']} | {one['epochs']} | {step} | " + " | ".join(numbers) + " |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Compare and write."""
    options = parse_arguments(arguments)
    check_files(options)
    torch.set_num_threads(options.threads)
    results = [compare(options, name, family) for name in options.sets for family in options.families]
    print(table(results))
    with atomic_path(options.output) as temporary:
        temporary.write_text(json.dumps(results, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
