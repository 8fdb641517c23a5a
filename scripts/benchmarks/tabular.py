"""How fast tables are, as ratios within one run.

    python scripts/benchmarks/tabular.py --data data/uci --output runs/benchmark_tabular.json

1. training 20 splits as one stack, against one after another with the identical step function;
2. 100 draws for a test set in one pass, against one by one;
3. seconds per fit of `default`, beside CatBoost (RMSEWithUncertainty) and NGBoost (500 trees), with CRPS and coverage
   on the same splits. Packages that are not installed are named and left out.

Times are processor seconds (all threads) and wall seconds.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from marigold_uq.files import atomic_path
from marigold_uq.pipelines.tabular import TabularRegressionPipeline
from marigold_uq.results import versions
from marigold_uq.tabular import DiffusionRegressor
from marigold_uq.tabular.estimators import Factory, score_all_splits
from marigold_uq.tabular.recipe import paper_recipe
from marigold_uq.tabular.scores import summarize_splits
from marigold_uq.tabular.uci import UCIDataset
from scripts.studies.uci.peers import PEERS, is_installed
from scripts.studies.uci.stacked import StackedTask, build_trainers

Seconds = dict[str, float]


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with one folder per UCI set")
    parser.add_argument("--output", type=Path, required=True, help="JSON file, must not exist")
    parser.add_argument("--set", default="concrete", dest="name")
    parser.add_argument("--family", default="gaussian", help="of the stacked training and the draws")
    parser.add_argument("--steps", type=int, default=200, help="training steps that are timed")
    parser.add_argument("--repeats", type=int, default=3, help="the median is taken")
    parser.add_argument("--splits", type=int, default=5, help="splits that are fitted in part 3; 0 leaves it out")
    parser.add_argument("--num-samples", type=int, default=100, help="draws of part 2")
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args(arguments)


def timed(work: Callable[[], object], repeats: int) -> Seconds:
    """Median processor and wall seconds of `repeats` runs, after one that does not count."""
    work()
    runs = []
    for _ in range(repeats):
        wall, cpu = time.perf_counter(), time.process_time()
        work()
        runs.append((time.process_time() - cpu, time.perf_counter() - wall))
    return {"cpu_seconds": statistics.median(c for c, _ in runs), "wall_seconds": statistics.median(w for _, w in runs)}


def ratio(slow: Seconds, fast: Seconds) -> Seconds:
    """How many times faster."""
    return {name: slow[name] / fast[name] for name in slow}


def benchmark_training(dataset: UCIDataset, options: argparse.Namespace) -> dict[str, Any]:
    """The same number of steps of every split: all at once, and split by split."""
    recipe = replace(paper_recipe(len(dataset.indices[0][0]), dataset.name), noise_family=options.family)
    task = StackedTask(dataset, recipe)
    (together,), alone = build_trainers(task, together=True), build_trainers(task, together=False)

    def train_stack() -> None:
        for _ in range(options.steps):
            together.step()

    def train_each() -> None:
        for trainer in alone:
            for _ in range(options.steps):
                trainer.step()

    stacked, single = timed(train_stack, options.repeats), timed(train_each, options.repeats)
    return {
        "num_splits": dataset.num_splits,
        "steps_per_split": options.steps,
        "batch_size": recipe.batch_size,
        "stacked": stacked,
        "one_by_one": single,
        "times_faster": ratio(single, stacked),
    }


def benchmark_sampling(dataset: UCIDataset, options: argparse.Namespace) -> dict[str, Any]:
    """Draws for one test set with an untrained network of the paper's size: weights do not change the time."""
    recipe = replace(paper_recipe(len(dataset.indices[0][0]), dataset.name), noise_family=options.family)
    (trainer,) = build_trainers(StackedTask(dataset, recipe), together=True)
    pipeline = TabularRegressionPipeline(trainer.model, recipe.scheduler()).select(0)
    pipeline.set_progress_bar_config(disable=True)
    rows, num_samples = dataset.split(0).test_features, options.num_samples
    at_once = timed(lambda: pipeline(rows, num_samples), options.repeats)
    one_by_one = timed(lambda: [pipeline(rows, 1, seed=seed) for seed in range(num_samples)], 1)
    return {
        "rows": len(rows),
        "num_samples": num_samples,
        "steps": recipe.num_timesteps,
        "one_pass": at_once,
        "one_by_one": one_by_one,
        "times_faster": ratio(one_by_one, at_once),
    }


def benchmark_fits(dataset: UCIDataset, options: argparse.Namespace) -> dict[str, Any]:
    """Time and quality of `default` and of those peers that are installed, on the same splits."""
    factories: dict[str, Factory] = {"default": lambda seed: DiffusionRegressor(random_state=seed), **PEERS}
    splits = [dataset.split(number) for number in range(min(options.splits, dataset.num_splits))]
    results: dict[str, Any] = {}
    for name, factory in factories.items():
        if name in PEERS and not is_installed(name):
            print(f"{name} is not installed and left out (`pip install {name}`)", file=sys.stderr)
            continue
        scores = score_all_splits(factory, splits, num_samples=100, seed=0)
        results[name] = {metric: asdict(spread) for metric, spread in summarize_splits(scores).items()}
    return {"num_splits": len(splits), "models": results}


def report(results: dict[str, Any]) -> str:
    """A summary for the terminal."""
    lines = [f"{results['set']}, {results['threads']} thread(s)"]
    for part in ("training", "sampling"):
        times = results[part]["times_faster"]
        lines.append(f"{part}: {times['cpu_seconds']:.1f} times faster (processor), {times['wall_seconds']:.1f} (wall)")
    for name, metrics in results.get("fits", {}).get("models", {}).items():
        wanted = ("fit_seconds", "fit_cpu_seconds", "sample_seconds", "crps", "rmse", "coverage_95")
        own = ["interval_coverage_95"] if "interval_coverage_95" in metrics else []
        lines.append(f"{name:10}" + ", ".join(f"{m} {metrics[m]['mean']:.3g}" for m in [*wanted, *own]))
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Run all parts and write the numbers."""
    options = parse_arguments(arguments)
    torch.set_num_threads(options.threads)
    dataset = UCIDataset.load(options.data, options.name)
    results: dict[str, Any] = {"set": options.name, "threads": options.threads, "versions": versions()}
    results["training"] = benchmark_training(dataset, options)
    results["sampling"] = benchmark_sampling(dataset, options)
    if options.splits:
        results["fits"] = benchmark_fits(dataset, options)
    print(report(results))
    with atomic_path(options.output) as temporary:
        temporary.write_text(json.dumps(results, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
