"""How fast tables are, as ratios within one run.

    python scripts/benchmarks/tabular.py --data data/uci --output runs/benchmark_tabular.json

1. training 20 splits as one stack, against one after another with the identical step function;
2. 100 draws for a test set in one pass, against one by one;
3. seconds per fit of `default`, beside CatBoost (RMSEWithUncertainty) and NGBoost (500 trees), with CRPS and coverage
   on the same splits. Packages that are not installed are named and left out;
4. with `--rows 1000000`, intervals for so many rows: seconds, and how much the peak of memory grows.

Times are processor seconds (all threads) and wall seconds.
"""

import resource
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from marigold_uq.commands.runner import Invocation, run_command
from marigold_uq.models.mlp import StackedMLP
from marigold_uq.pipelines.tabular import TabularRegressionPipeline
from marigold_uq.results import versions, write_json
from marigold_uq.tabular import DiffusionRegressor
from marigold_uq.tabular.recipe import Recipe, paper_recipe
from marigold_uq.tabular.scores import Factory, score_all_splits, summarize_splits
from marigold_uq.tabular.stack import build_denoiser
from marigold_uq.tabular.trainer import StackedTrainer
from marigold_uq.tabular.uci import UCIDataset
from scripts.studies.uci.peer_models import catboost, ngboost
from scripts.studies.uci.stacked import NO_END, StackedTask

_Seconds = dict[str, float]
_PEERS: dict[str, Factory] = {"catboost": catboost, "ngboost": ngboost}


@dataclass(frozen=True)
class TabularBenchmark:
    """Measure how fast tables are trained, sampled and fitted, as ratios within one run.

    Args:
        data: Folder with one folder per UCI set.
        output: JSON file; must not exist.
        set: Name of the set.
        family: Noise family of the stacked training and the draws.
        steps: Training steps that are timed.
        repeats: Runs whose median is taken.
        splits: Splits that are fitted in part 3; 0 leaves it out.
        ensemble_size: Draws of part 2.
        threads: Of torch.
        rows: Rows of part 4, drawn around the training rows; 0 leaves it out.
    """

    data: Path
    output: Path
    set: str = "concrete"
    family: str = "gaussian"
    steps: int = 200
    repeats: int = 3
    splits: int = 5
    ensemble_size: int = 100
    threads: int = 1
    rows: int = 0


def _timed(work: Callable[[], object], repeats: int) -> _Seconds:
    """Median processor and wall seconds of `repeats` runs, after one that does not count."""
    work()
    runs = [_timed_once(work) for _ in range(repeats)]
    return {name: statistics.median(run[name] for run in runs) for name in runs[0]}


def _timed_once(work: Callable[[], object]) -> _Seconds:
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return {"cpu_seconds": time.process_time() - cpu, "wall_seconds": time.perf_counter() - wall}


def _ratio(slow: _Seconds, fast: _Seconds) -> _Seconds:
    """How many times faster."""
    return {name: slow[name] / fast[name] for name in slow}


def _recipe_of(dataset: UCIDataset, options: TabularBenchmark) -> Recipe:
    """The published recipe of the set, with the family asked for."""
    return replace(paper_recipe(len(dataset.indices[0][0]), dataset.name), noise_family=options.family)


def _build_denoisers(dataset: UCIDataset, recipe: Recipe, together: bool) -> list[tuple[StackedMLP, StackedTrainer]]:
    """Denoisers of all splits around a baseline of 0, with their trainers: one for all models, or one each."""
    models = StackedTask(dataset, recipe).models()
    groups = [models] if together else [[model] for model in models]
    endless, scheduler = replace(recipe, max_epochs=NO_END), recipe.scheduler()
    zeros = [[torch.zeros_like(model.targets) for model in group] for group in groups]
    return [build_denoiser(g, z, endless, scheduler) for g, z in zip(groups, zeros, strict=True)]


def _benchmark_training(dataset: UCIDataset, options: TabularBenchmark) -> dict[str, Any]:
    """The same number of steps of every split: all at once, and split by split."""
    recipe = _recipe_of(dataset, options)
    ((_, together),), alone = _build_denoisers(dataset, recipe, True), _build_denoisers(dataset, recipe, False)

    def train_stack() -> None:
        for _ in range(options.steps):
            together.step()

    def train_each() -> None:
        for _, trainer in alone:
            for _ in range(options.steps):
                trainer.step()

    stacked, single = _timed(train_stack, options.repeats), _timed(train_each, options.repeats)
    return {
        "num_splits": dataset.num_splits,
        "steps_per_split": options.steps,
        "batch_size": recipe.batch_size,
        "stacked": stacked,
        "one_by_one": single,
        "times_faster": _ratio(single, stacked),
    }


def _benchmark_sampling(dataset: UCIDataset, options: TabularBenchmark) -> dict[str, Any]:
    """Draws for one test set with an untrained network of the paper's size: weights do not change the time."""
    recipe = _recipe_of(dataset, options)
    ((network, _),) = _build_denoisers(dataset, recipe, True)
    pipeline = TabularRegressionPipeline(network, recipe.scheduler()).select(0)
    pipeline.set_progress_bar_config(disable=True)
    rows, size = dataset.split(0).test_features, options.ensemble_size
    at_once = _timed(lambda: pipeline(rows, size), options.repeats)
    one_by_one = _timed(lambda: [pipeline(rows, 1) for _ in range(size)], 1)
    return {
        "rows": len(rows),
        "ensemble_size": size,
        "steps": recipe.num_timesteps,
        "one_pass": at_once,
        "one_by_one": one_by_one,
        "times_faster": _ratio(one_by_one, at_once),
    }


def _benchmark_fits(dataset: UCIDataset, options: TabularBenchmark) -> dict[str, Any]:
    """Time and quality of `default` and of those peers that are installed, on the same splits."""
    factories: dict[str, Factory] = {"default": lambda seed: DiffusionRegressor(random_state=seed), **_PEERS}
    splits = [dataset.split(number) for number in range(min(options.splits, dataset.num_splits))]
    results: dict[str, Any] = {}
    for name, factory in factories.items():
        if name in _PEERS and find_spec(name) is None:
            print(f"{name} is not installed and left out (`pip install {name}`)", file=sys.stderr)
            continue
        scores = score_all_splits(factory, splits, ensemble_size=100, seed=0)
        results[name] = {metric: asdict(spread) for metric, spread in summarize_splits(scores).items()}
    return {"num_splits": len(splits), "models": results}


def _benchmark_many_rows(dataset: UCIDataset, options: TabularBenchmark) -> dict[str, Any]:
    """95 % intervals of `default` for many rows: training rows with noise of a tenth of each column's spread."""
    split, random = dataset.split(0), np.random.default_rng(0)
    model = DiffusionRegressor(random_state=0).fit(split.train_features, split.train_targets)
    chosen = split.train_features[random.integers(len(split.train_features), size=options.rows)]
    rows = chosen + 0.1 * split.train_features.std(0) * random.normal(size=chosen.shape)
    before = _peak_gigabytes()
    seconds = _timed_once(lambda: model.predict_interval(rows))
    return {"rows": options.rows, **seconds, "peak_gigabytes": _peak_gigabytes(), "peak_gigabytes_before": before}


def _peak_gigabytes() -> float:
    """The largest memory that this process has held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6


def _report(results: dict[str, Any]) -> str:
    """A summary for the terminal."""
    lines = [f"{results['set']}, {results['threads']} thread(s)"]
    for part in ("training", "sampling"):
        times = results[part]["times_faster"]
        lines.append(f"{part}: {times['cpu_seconds']:.1f} times faster (processor), {times['wall_seconds']:.1f} (wall)")
    for name, metrics in results.get("fits", {}).get("models", {}).items():
        wanted = ("fit_seconds", "fit_cpu_seconds", "sample_seconds", "crps", "rmse", "coverage_95")
        own = ["interval_coverage_95"] if "interval_coverage_95" in metrics else []
        lines.append(f"{name:10}" + ", ".join(f"{m} {metrics[m]['mean']:.3g}" for m in [*wanted, *own]))
    if "many_rows" in results:
        lines.append("many rows: " + ", ".join(f"{name} {value:.4g}" for name, value in results["many_rows"].items()))
    return "\n".join(lines)


def _run(options: TabularBenchmark, invocation: Invocation) -> int:
    """Run all parts and write the numbers."""
    torch.set_num_threads(options.threads)
    dataset = UCIDataset.load(options.data, options.set)
    results: dict[str, Any] = {"set": options.set, "threads": options.threads, "versions": versions()}
    results["training"] = _benchmark_training(dataset, options)
    results["sampling"] = _benchmark_sampling(dataset, options)
    if options.splits:
        results["fits"] = _benchmark_fits(dataset, options)
    if options.rows:
        results["many_rows"] = _benchmark_many_rows(dataset, options)
    print(_report(results))
    write_json(options.output, results)
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    return run_command("scripts/benchmarks/tabular.py", TabularBenchmark, _run, arguments)


if __name__ == "__main__":
    sys.exit(main())
