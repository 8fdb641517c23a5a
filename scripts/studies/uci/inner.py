"""Judge the default recipe without a split's test rows: fit on 90 % of its training rows, score the other 10 %.

    python -m scripts.studies.uci.inner --data data/uci --set concrete --splits 0 1 [--model max_epochs=100]

This is how the rule of the default preset was chosen, one for all sets; `scripts.studies.uci.reproduce` measures it on
the test rows. The splits overlap: training rows of split 0 are test rows of other splits (on concrete they are 91 % of
the test rows of splits 1 to 19), so the rule was chosen on rows that other splits are tested on. No split's own test
rows took part when it was judged on that split.
"""

import argparse
import json
import time
from typing import Any

import numpy as np

from marigold_uq.tabular import DiffusionRegressor
from marigold_uq.tabular.estimators import model_options
from marigold_uq.tabular.scores import score_rows
from marigold_uq.tabular.uci import UCIDataset

HELD_OUT = 0.1


def main() -> None:
    """One line of JSON per split."""
    arguments = parse_arguments()
    dataset = UCIDataset.load(arguments.data, arguments.set)
    for number in arguments.splits:
        split = dataset.split(number)
        scores = judge(split.train_features, split.train_targets, number, model_options(arguments.model))
        print(json.dumps({"set": arguments.set, "split": number, **scores}), flush=True)


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="folder with one folder per set")
    parser.add_argument("--set", required=True, help="name of a set")
    parser.add_argument("--splits", type=int, nargs="+", default=[0], help="splits whose training rows are used")
    parser.add_argument("--model", nargs="*", default=[], metavar="NAME=VALUE", help="of DiffusionRegressor")
    return parser.parse_args()


def judge(features: np.ndarray, targets: np.ndarray, seed: int, options: dict[str, Any]) -> dict[str, Any]:
    """Scores on held-out training rows, processor seconds, and the weights of the experts."""
    order = np.random.default_rng(100 + seed).permutation(len(features))
    held_out, train = np.split(order, [int(HELD_OUT * len(order))])
    start = time.process_time()
    model = DiffusionRegressor(random_state=seed, **options).fit(features[train], targets[train])
    fitted = time.process_time()
    samples = model.sample(features[held_out], 100)
    sampled = time.process_time()
    scores = score_rows(samples, targets[held_out], target_scale=float(targets[train].std()))
    kept = {name: scores[name] for name in ("num_rows", "crps", "rmse", "coverage_50", "coverage_95", "width_95")}
    weights = getattr(model.pipeline_.baseline, "weights", None)
    return {
        **{name: float(f"{value:.5g}") for name, value in kept.items()},
        "fit_cpu_seconds": round(fitted - start, 1),
        "sample_cpu_seconds": round(sampled - fitted, 1),
        "expert_weights": None if weights is None else weights[0, :, 0].numpy().round(2).tolist(),
        "epochs": model.n_epochs_,
    }


if __name__ == "__main__":
    main()
