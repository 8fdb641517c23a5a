"""Judge the default recipe without a split's test rows: fit on 90 % of its training rows, score the other 10 %.

    python -m scripts.studies.uci.inner --data data/uci --set concrete --splits 0 1 --model.max_epochs 100

The rule of the default preset was chosen this way, one for all sets; see docs/tabular.md.
"""

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from marigold_uq.commands.runner import Invocation, run_command
from marigold_uq.tabular.run import ModelOptions
from marigold_uq.tabular.scores import score_rows
from marigold_uq.tabular.uci import UCIDataset

_Array = NDArray[np.float64]
_HELD_OUT = 0.1


@dataclass(frozen=True)
class InnerStudy:
    """Fit on 90 % of the training rows of a split and score the other 10 %; prints one line of JSON per split.

    Args:
        data: Folder with one folder per UCI set.
        set: Name of a set.
        splits: Splits whose training rows are used.
        model: How the models are trained.
    """

    data: Path
    set: str
    splits: list[int] = field(default_factory=lambda: [0])
    model: ModelOptions = field(default_factory=ModelOptions)


def _judge(features: _Array, targets: _Array, seed: int, options: ModelOptions) -> dict[str, Any]:
    """Scores on held-out training rows, processor seconds, and the weights of the experts."""
    order = np.random.default_rng(100 + seed).permutation(len(features))
    held_out, train = np.split(order, [int(_HELD_OUT * len(order))])
    start = time.process_time()
    model = options.estimator(seed=seed).fit(features[train], targets[train])
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


def _run(study: InnerStudy, invocation: Invocation) -> int:
    """One line of JSON per split."""
    dataset = UCIDataset.load(study.data, study.set)
    for number in study.splits:
        split = dataset.split(number)
        scores = _judge(split.train_features, split.train_targets, number, study.model)
        print(json.dumps({"set": study.set, "split": number, **scores}), flush=True)
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    return run_command("-m scripts.studies.uci.inner", InnerStudy, _run, arguments)


if __name__ == "__main__":
    sys.exit(main())
