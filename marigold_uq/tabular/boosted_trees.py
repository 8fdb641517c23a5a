"""Gradient-boosted trees as a baseline: fitted by sklearn, kept as tensors, so that no pickle is needed to save them.

The module path is written into model_index.json of saved pipelines: it is a file format. `ModelMixin` must be
importable from here, or diffusers cannot load the component again.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from diffusers.configuration_utils import register_to_config
from diffusers.models.modeling_utils import ModelMixin
from numpy.typing import NDArray
from sklearn.ensemble import HistGradientBoostingRegressor
from sklearn.model_selection import KFold
from torch import Tensor

from marigold_uq.models.stacked_mlp import StackedModel

__all__ = ["BoostedTrees", "ModelMixin", "OutOfFold", "fit_out_of_fold"]

Array = NDArray[np.float64]


class BoostedTrees(StackedModel):
    """Sums of decision trees, S stacks of M trees with at most N nodes each: f(c) = base + sum of leaves.

    A row goes left at a node if its feature is <= the threshold; a leaf is its own child, so that all rows may take
    `depth` steps.
    """

    base: Tensor  # (S, C)
    value: Tensor  # (S, M, N)
    threshold: Tensor  # (S, M, N)
    feature: Tensor  # (S, M, N)
    left: Tensor  # (S, M, N)
    right: Tensor  # (S, M, N)
    output: Tensor  # (S, M), the target that a tree adds to

    @register_to_config
    def __init__(
        self, num_models: int = 1, num_targets: int = 1, num_trees: int = 1, num_nodes: int = 1, depth: int = 0
    ) -> None:
        super().__init__()
        shape = (num_models, num_trees, num_nodes)
        self.register_buffer("base", torch.zeros(num_models, num_targets, dtype=torch.float64))
        for name in ("value", "threshold"):
            self.register_buffer(name, torch.zeros(shape, dtype=torch.float64))
        for name in ("feature", "left", "right"):
            self.register_buffer(name, torch.zeros(shape, dtype=torch.int64))
        self.register_buffer("output", torch.zeros(num_models, num_trees, dtype=torch.int64))

    def forward(self, features: Tensor) -> Tensor:
        """Standardised features (S, R, F) -> standardised targets (S, R, C)."""
        return torch.stack([self._predict(s, rows) for s, rows in enumerate(features)])

    def _predict(self, s: int, rows: Tensor) -> Tensor:
        """(R, F) -> (R, C)."""
        tree = torch.arange(self.config.num_trees, device=rows.device)  # (M,)
        node = tree.new_zeros(len(rows), len(tree))  # (R, M)
        for _ in range(self.config.depth):
            value = rows.gather(1, self.feature[s][tree, node])
            goes_left = value <= self.threshold[s][tree, node]
            node = torch.where(goes_left, self.left[s][tree, node], self.right[s][tree, node])
        leaves = self.value[s][tree, node]  # (R, M)
        total = self.base[s].expand(len(rows), -1).clone()
        return total.index_add_(1, self.output[s], leaves)


@dataclass(frozen=True)
class OutOfFold:
    """Trees of one table, and what they say about rows that they were not fitted on."""

    trees: list["FittedTree"]
    base: Array  # (C,)
    predictions: Array  # (n, C)


@dataclass(frozen=True)
class FittedTree:
    """One tree of sklearn, its leaves already divided by the number of folds that are averaged."""

    nodes: Any  # sklearn's structured array
    output: int
    weight: float


def fit_out_of_fold(
    features: Array, targets: Array, weights: Array, *, num_rounds: int, seed: int, num_folds: int = 5
) -> OutOfFold:
    """Fit one boosted model per fold and target; new rows get the mean of the folds, training rows only their own."""
    num_rows, num_targets = targets.shape
    num_folds = min(num_folds, num_rows)
    predictions, base, trees = np.zeros_like(targets), np.zeros(num_targets), []
    for train, test in KFold(num_folds, shuffle=True, random_state=seed).split(features):
        for output in range(num_targets):
            model = _regressor(len(train), num_rounds, seed)
            model.fit(features[train], targets[train, output], sample_weight=weights[train])
            predictions[test, output] = model.predict(features[test])
            base[output] += float(np.ravel(model._baseline_prediction)[0]) / num_folds
            trees += [FittedTree(tree.nodes, output, 1 / num_folds) for (tree,) in model._predictors]
    return OutOfFold(trees, base, predictions)


def _regressor(num_rows: int, num_rounds: int, seed: int) -> HistGradientBoostingRegressor:
    """Small leaves for small tables; early stopping inside the training folds where there are rows to spare."""
    return HistGradientBoostingRegressor(
        learning_rate=0.05,
        max_iter=num_rounds,
        min_samples_leaf=int(np.clip(num_rows // 50, 1, 20)),
        early_stopping=num_rows >= 500,
        n_iter_no_change=20,
        random_state=seed % 2**32,
    )


def stack_trees(fitted: Sequence[OutOfFold]) -> BoostedTrees:
    """The trees of S tables as one module."""
    num_trees = max(1, *(len(one.trees) for one in fitted))
    every = [tree for one in fitted for tree in one.trees]
    num_nodes = max([1, *(len(tree.nodes) for tree in every)])
    depth = max([0, *(int(tree.nodes["depth"].max()) for tree in every)])
    module = BoostedTrees(len(fitted), len(fitted[0].base), num_trees, num_nodes, depth)
    for s, one in enumerate(fitted):
        module.base[s] = torch.from_numpy(one.base)
        for m, tree in enumerate(one.trees):
            _store(module, s, m, tree)
    return module


def _store(module: BoostedTrees, s: int, m: int, tree: FittedTree) -> None:
    nodes, count = tree.nodes, len(tree.nodes)
    leaf, own = nodes["is_leaf"].astype(bool), np.arange(count)
    module.output[s, m] = tree.output
    module.value[s, m, :count] = torch.from_numpy(nodes["value"] * tree.weight)
    module.threshold[s, m, :count] = torch.from_numpy(np.where(leaf, 0.0, nodes["num_threshold"]))
    module.feature[s, m, :count] = torch.from_numpy(np.where(leaf, 0, nodes["feature_idx"]).astype(np.int64))
    for name in ("left", "right"):
        getattr(module, name)[s, m, :count] = torch.from_numpy(np.where(leaf, own, nodes[name]).astype(np.int64))
