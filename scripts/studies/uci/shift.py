"""Does uncertainty know rows that are unlike the training rows?

A part of feature space is held out: no row of it is trained on. Its rows are the shifted ones, test rows outside it
are those in distribution, and the AUROC says how often a shifted row is given more uncertainty than one in distribution
(0.5 is chance). The part is defined by the features of training rows alone; targets play no role.
"""

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray
from sklearn.cluster import KMeans
from sklearn.metrics import roc_auc_score
from sklearn.neighbors import NearestNeighbors

from marigold_uq.tabular import DiffusionRegressor
from marigold_uq.tabular.uci import UCISplit

Array = NDArray[np.float64]
ShiftKind = Literal["cluster", "range"]

NUM_CLUSTERS = 5
HELD_OUT_SHARE = 0.2
MAX_SHIFTED_ROWS = 500
"""More rows of the held-out part would cost time and change the AUROC little (its standard error is below 0.02)."""


@dataclass(frozen=True)
class ShiftedSplit:
    """Rows to train on, rows like them, and rows of the part of feature space that was held out."""

    train_features: Array  # (n, F)
    train_targets: Array  # (n,)
    familiar: Array  # (m, F), test rows outside the part
    shifted: Array  # (k, F), rows of training and test inside it


def hold_out(split: UCISplit, kind: ShiftKind, seed: int = 0) -> ShiftedSplit:
    """Take a part of feature space out of a split.

    `range`: the upper fifth along the first principal direction. `cluster`: of five k-means clusters the one whose
    centre is farthest from the mean of the others. Both by the training rows' standardised features.
    """
    if kind not in get_args(ShiftKind):
        raise ValueError(f"kind is one of {', '.join(get_args(ShiftKind))}; got {kind!r}")
    scale = split.train_features.std(0)
    center, scale = split.train_features.mean(0), np.where(scale > 0, scale, 1.0)
    train, test = (split.train_features - center) / scale, (split.test_features - center) / scale
    inside_train, inside_test = _cluster(train, test, seed) if kind == "cluster" else _range(train, test)
    if not inside_test.size or inside_test.all():
        raise ValueError("no test row is left outside the held-out part")
    held_out = np.concatenate([split.train_features[inside_train], split.test_features[inside_test]])
    chosen = np.random.default_rng(seed).permutation(len(held_out))[:MAX_SHIFTED_ROWS]
    return ShiftedSplit(
        split.train_features[~inside_train],
        split.train_targets[~inside_train],
        split.test_features[~inside_test],
        held_out[np.sort(chosen)],
    )


def _range(train: Array, test: Array) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    direction = np.linalg.svd(train, full_matrices=False)[2][0]
    direction = direction * np.sign(direction[np.abs(direction).argmax()])  # svd leaves the sign open
    threshold = np.quantile(train @ direction, 1 - HELD_OUT_SHARE)
    return train @ direction > threshold, test @ direction > threshold


def _cluster(train: Array, test: Array, seed: int) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    clusters = KMeans(NUM_CLUSTERS, n_init=4, random_state=seed).fit(train)
    counts = np.bincount(clusters.labels_, minlength=NUM_CLUSTERS)
    total = counts @ clusters.cluster_centers_
    others = (total - counts[:, None] * clusters.cluster_centers_) / (len(train) - counts)[:, None]
    farthest = int(np.linalg.norm(clusters.cluster_centers_ - others, axis=1).argmax())
    return clusters.labels_ == farthest, clusters.predict(test) == farthest


def shift_scores(model: DiffusionRegressor, rows: ShiftedSplit) -> dict[str, float]:
    """Fit and compare: AUROC of each kind of uncertainty, and of the distance to the nearest training row.

    `head` is the paper's epistemic estimate, `ensemble` the spread between members, `total` the standard deviation of
    the draws; an estimate that the model does not have is left out.
    """
    model.fit(rows.train_features, rows.train_targets)
    both = np.concatenate([rows.familiar, rows.shifted])
    found = model.predict_uncertainty(both)
    estimates = {"head": found.head, "ensemble": found.epistemic, "total": found.total}
    estimates["distance"] = _nearest(rows.train_features, both)
    is_shifted = np.arange(len(both)) >= len(rows.familiar)
    scores = {name: float(roc_auc_score(is_shifted, value)) for name, value in estimates.items() if value is not None}
    return {**scores, "shifted_share": len(rows.shifted) / len(both)}


def _nearest(train: Array, rows: Array) -> Array:
    """Euclidean distance of standardised features to the nearest training row: what any detector should beat."""
    scale = train.std(0)
    scale = np.where(scale > 0, scale, 1.0)
    return NearestNeighbors(n_neighbors=1).fit(train / scale).kneighbors(rows / scale)[0][:, 0]
