"""Does uncertainty recognise rows that are unlike the training rows?

    python -m scripts.studies.uci.shift --data data/uci --output runs/shift --sets concrete energy yacht

A part of feature space is held out: no row of it is trained on. Its rows are the shifted ones, test rows outside it
are those in distribution. The AUROC says how often a shifted row is given more uncertainty than one in distribution
(0.5 is chance). The part is defined by the features of training rows alone; targets play no role.

Finished splits are kept: run the same command again to resume. The table has mean ± standard error over splits.
"""

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.cluster import KMeans
from sklearn.metrics import roc_auc_score
from sklearn.neighbors import NearestNeighbors
from tqdm.auto import tqdm

from marigold_uq.commands.runner import Invocation, run_command
from marigold_uq.files import atomic_path
from marigold_uq.results import markdown_table, write_json
from marigold_uq.tabular import DiffusionRegressor
from marigold_uq.tabular.run import ModelOptions
from marigold_uq.tabular.scores import Spread, summarize_splits
from marigold_uq.tabular.uci import UCIDataset, UCISplit
from scripts.studies.uci.cells import CellKey, CellStore, dataset_digest

_Array = NDArray[np.float64]
ShiftKind = Literal["cluster", "range"]

_NUM_CLUSTERS = 5
_HELD_OUT_SHARE = 0.2
_MAX_SHIFTED_ROWS = 500
"""More rows of the held-out part would cost time and change the AUROC little (its standard error is below 0.02)."""
_ESTIMATES = ("epistemic", "between_models", "total", "distance")


@dataclass(frozen=True)
class ShiftStudy:
    """Score how well each uncertainty tells rows of a held-out part of feature space from ordinary test rows.

    Args:
        data: Folder with one folder per UCI set.
        output: Folder of the results.
        sets: Names of sets.
        kinds: Ways to hold a part out.
        splits: Number of splits of each set.
        model: How the models are trained.
        seed: Of fits and parts.
        threads: Of torch.
    """

    data: Path
    output: Path
    sets: list[str] = field(default_factory=lambda: ["concrete", "energy", "yacht", "wine"])
    kinds: list[ShiftKind] = field(default_factory=lambda: list(get_args(ShiftKind)))
    splits: int = 5
    model: ModelOptions = field(default_factory=ModelOptions)
    seed: int = 0
    threads: int = 1


@dataclass(frozen=True)
class ShiftedSplit:
    """Rows to train on, rows like them, and rows of the part of feature space that was held out."""

    train_features: _Array  # (n, F)
    train_targets: _Array  # (n,)
    familiar: _Array  # (m, F), test rows outside the part
    shifted: _Array  # (k, F), rows of training and test inside it


def hold_out(split: UCISplit, kind: ShiftKind, seed: int = 0) -> ShiftedSplit:
    """Take a part of feature space out of a split.

    `range`: the upper fifth along the first principal direction. `cluster`: of five k-means clusters the one whose
    centre is farthest from the mean of the others. Both by the training rows' standardised features.
    """
    if kind not in get_args(ShiftKind):
        raise ValueError(f"kind must be one of {', '.join(get_args(ShiftKind))}; got {kind!r}")
    scale = split.train_features.std(0)
    center, scale = split.train_features.mean(0), np.where(scale > 0, scale, 1.0)
    train, test = (split.train_features - center) / scale, (split.test_features - center) / scale
    inside_train, inside_test = _cluster(train, test, seed) if kind == "cluster" else _range(train, test)
    if not inside_test.size or inside_test.all():
        raise ValueError("no test row is left outside the held-out part")
    held_out = np.concatenate([split.train_features[inside_train], split.test_features[inside_test]])
    chosen = np.random.default_rng(seed).permutation(len(held_out))[:_MAX_SHIFTED_ROWS]
    return ShiftedSplit(
        split.train_features[~inside_train],
        split.train_targets[~inside_train],
        split.test_features[~inside_test],
        held_out[np.sort(chosen)],
    )


def _range(train: _Array, test: _Array) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    direction = np.linalg.svd(train, full_matrices=False)[2][0]
    direction = direction * np.sign(direction[np.abs(direction).argmax()])  # svd leaves the sign open
    threshold = np.quantile(train @ direction, 1 - _HELD_OUT_SHARE)
    return train @ direction > threshold, test @ direction > threshold


def _cluster(train: _Array, test: _Array, seed: int) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    clusters = KMeans(_NUM_CLUSTERS, n_init=4, random_state=seed).fit(train)
    counts = np.bincount(clusters.labels_, minlength=_NUM_CLUSTERS)
    total = counts @ clusters.cluster_centers_
    others = (total - counts[:, None] * clusters.cluster_centers_) / (len(train) - counts)[:, None]
    farthest = int(np.linalg.norm(clusters.cluster_centers_ - others, axis=1).argmax())
    return clusters.labels_ == farthest, clusters.predict(test) == farthest


def shift_scores(model: DiffusionRegressor, rows: ShiftedSplit) -> dict[str, float]:
    """Fit and compare: AUROC of each kind of uncertainty, and of the distance to the nearest training row.

    `epistemic` is the head's estimate, `between_models` the spread between models, `total` the standard deviation of
    the draws; an estimate that the model does not have is left out.
    """
    model.fit(rows.train_features, rows.train_targets)
    both = np.concatenate([rows.familiar, rows.shifted])
    found = model.predict_uncertainty(both)
    estimates = {name: getattr(found, name) for name in _ESTIMATES[:3]}
    estimates["distance"] = nearest_distance(rows.train_features, both)
    is_shifted = np.arange(len(both)) >= len(rows.familiar)
    scores = {name: float(roc_auc_score(is_shifted, value)) for name, value in estimates.items() if value is not None}
    return {**scores, "shifted_share": len(rows.shifted) / len(both)}


def nearest_distance(train: _Array, rows: _Array) -> _Array:
    """Euclidean distance of standardised features to the nearest training row: what any detector should beat."""
    scale = train.std(0)
    scale = np.where(scale > 0, scale, 1.0)
    return NearestNeighbors(n_neighbors=1).fit(train / scale).kneighbors(rows / scale)[0][:, 0]


def _run_set(study: ShiftStudy, name: str, kind: ShiftKind) -> dict[str, Any]:
    """All splits of one set and kind."""
    store, model = CellStore(study.output), study.model.changes()
    key = CellKey(study.model.preset, kind, name, 0)
    dataset = UCIDataset.load(study.data, name)
    identity = {"model": model, "seed": study.seed, "data": dataset_digest(dataset)}
    scores = store.load_splits(key, identity)
    for number in tqdm(range(min(study.splits, dataset.num_splits)), f"{name} {kind}"):
        if number >= len(scores):
            estimator = study.model.estimator(seed=study.seed + number)
            scores.append(shift_scores(estimator, hold_out(dataset.split(number), kind, study.seed)))
            store.save_splits(key, identity, scores)
    summary = {metric: asdict(spread) for metric, spread in summarize_splits(scores[: study.splits]).items()}
    return {"set": name, "kind": kind, "model": model, "auroc": summary}


def _table(results: list[dict[str, Any]]) -> str:
    """Markdown: AUROC, mean ± standard error over splits."""
    rows = []
    for one in results:
        spreads = {name: Spread(**value) for name, value in one["auroc"].items()}
        numbers = [_entry(spreads.get(name)) for name in _ESTIMATES]
        rows.append([one["set"], one["kind"], spreads["total"].num_splits, *numbers])
    return markdown_table(["set", "held out", "splits", *_ESTIMATES], rows)


def _entry(spread: Spread | None) -> str:
    if spread is None:
        return ""
    return f"{spread.mean:.3f}" if spread.standard_error is None else f"{spread.mean:.3f} ± {spread.standard_error:.3f}"


def _run(study: ShiftStudy, invocation: Invocation) -> int:
    """Make what is missing and write results.json and table.md."""
    torch.set_num_threads(study.threads)
    results = [_run_set(study, name, kind) for name in study.sets for kind in study.kinds]
    text = _table(results)
    print(text)
    write_json(study.output / "results.json", results, overwrite=True)
    with atomic_path(study.output / "table.md", overwrite=True) as temporary:
        temporary.write_text(text + "\n", encoding="utf-8")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    return run_command("scripts.studies.uci.shift", ShiftStudy, _run, arguments)


if __name__ == "__main__":
    sys.exit(main())
