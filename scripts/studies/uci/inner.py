"""Judge the default recipe without a split's test rows: fit on 90 % of its training rows, score the other 10 %.

    python -m scripts.studies.uci.inner --data data/uci --set concrete --splits 0 1 --model.max_epochs 100
    python -m scripts.studies.uci.inner --data data/uci --set concrete --splits 0 1 --ablation true

The rule of the default preset was chosen this way, one for all sets; see docs/tabular.md. The ablation also scores what
stands around the same fitted experts one by one: each distribution of the pool by itself, a normal distribution of one
width, and the same networks trained and sampled in ten denoising steps.
"""

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from marigold_uq.commands.runner import Invocation, run_command
from marigold_uq.distributions import GaussianDistribution
from marigold_uq.scores import crps as crps_of
from marigold_uq.tabular import DiffusionRegressor
from marigold_uq.tabular.experts.residuals import MEMBERS, ResidualPool
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
        ablation: Also score what is pooled one by one, and ten denoising steps (a second fit).
    """

    data: Path
    set: str
    splits: list[int] = field(default_factory=lambda: [0])
    model: ModelOptions = field(default_factory=ModelOptions)
    ablation: bool = False


@dataclass(frozen=True)
class _Halves:
    """Rows to fit and rows to score, all of them training rows of a split."""

    features: _Array
    targets: _Array
    new_features: _Array
    new_targets: _Array

    @classmethod
    def of(cls, features: _Array, targets: _Array, seed: int) -> "_Halves":
        order = np.random.default_rng(100 + seed).permutation(len(features))
        held_out, train = np.split(order, [int(_HELD_OUT * len(order))])
        return cls(features[train], targets[train], features[held_out], targets[held_out])


def _judge(rows: _Halves, seed: int, study: InnerStudy) -> dict[str, Any]:
    """Scores on held-out training rows, processor seconds, and what was chosen."""
    start = time.process_time()
    model = study.model.estimator(seed=seed).fit(rows.features, rows.targets)
    fitted = time.process_time()
    samples = model.sample(rows.new_features, 100)
    scores = score_rows(samples, rows.new_targets, target_scale=float(rows.targets.std()))
    crps = model.crps(rows.new_features, rows.new_targets)
    scored = time.process_time()
    kept = {name: scores[name] for name in ("num_rows", "rmse", "coverage_50", "coverage_95", "width_95")}
    weights = getattr(model.pipeline_.baseline, "weights", None)
    return {
        **{name: float(f"{value:.5g}") for name, value in {"crps": crps, **kept}.items()},
        "fit_cpu_seconds": round(fitted - start, 1),
        "score_cpu_seconds": round(scored - fitted, 1),
        "expert_weights": None if weights is None else weights[0, :, 0].numpy().round(2).tolist(),
        "epochs": model.n_epochs_,
        **(_ablation(model, rows, seed, study) if study.ablation else {}),
    }


def _ablation(model: DiffusionRegressor, rows: _Halves, seed: int, study: InnerStudy) -> dict[str, Any]:
    """CRPS of each distribution around the same experts."""
    pool = model.pipeline_.residuals
    if not isinstance(pool, ResidualPool):
        return {}
    chosen, scores = pool.weights.clone(), dict[str, float]()
    for number, name in enumerate(MEMBERS):
        pool.weights.zero_()[number] = 1.0
        law = model.predict_distribution(rows.new_features)
        scores[name] = float(law.crps(rows.new_targets).mean())
        if name == "kernel":
            normal = GaussianDistribution(torch.from_numpy(law.mean), torch.from_numpy(law.std))
            scores["normal"] = float(crps_of(normal, torch.from_numpy(rows.new_targets)).mean())
    pool.weights.copy_(chosen)
    ten = replace(study.model, num_inference_steps=10).estimator(seed=seed).fit(rows.features, rows.targets)
    scores["ten_steps"] = ten.crps(rows.new_features, rows.new_targets)
    shares = dict(zip(MEMBERS, chosen[:, 0].numpy().round(2).tolist(), strict=True))
    return {"weights": shares, "ablation": {name: float(f"{value:.5g}") for name, value in scores.items()}}


def _run(study: InnerStudy, invocation: Invocation) -> int:
    """One line of JSON per split."""
    dataset = UCIDataset.load(study.data, study.set)
    for number in study.splits:
        split = dataset.split(number)
        scores = _judge(_Halves.of(split.train_features, split.train_targets, number), number, study)
        print(json.dumps({"set": study.set, "split": number, **scores}), flush=True)
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    return run_command("scripts.studies.uci.inner", InnerStudy, _run, arguments)


if __name__ == "__main__":
    sys.exit(main())
