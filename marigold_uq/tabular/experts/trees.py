"""Decision trees as tensors: fitted by sklearn, kept without pickles, and evaluated for many trees at once."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.ensemble import ExtraTreesRegressor, GradientBoostingRegressor
from sklearn.tree import DecisionTreeRegressor
from torch import Tensor

Array = NDArray[np.float64]

_ROWS_PER_LEAF = 50_000
"""Each so many rows of a table make the leaves of a forest one row larger: it grows no larger than about 1 GB."""
_ROWS_PER_TREE = 200_000
"""Of larger tables each tree sees so many rows, drawn with replacement."""


@dataclass(frozen=True)
class TreeNodes:
    """Nodes of all trees in one list.

    A row goes left at a node if its feature is <= the threshold; a leaf is its own child on both sides, so that all
    rows may take `depth` steps.
    """

    COLUMNS: ClassVar[tuple[str, ...]] = ("value", "threshold", "feature", "left", "right", "root")

    value: Tensor  # (N,)
    threshold: Tensor  # (N,)
    feature: Tensor  # (N,)
    left: Tensor  # (N,)
    right: Tensor  # (N,)
    root: Tensor  # (M,), the first node of each tree
    depth: int

    @classmethod
    def of(cls, trees: Sequence[DecisionTreeRegressor], scale: float = 1.0, shift: float = 0.0) -> "TreeNodes":
        """Trees of one output, their leaves times `scale` plus `shift`."""
        parts = [_nodes(tree, scale, shift) for tree in trees]
        sizes = [len(part[0]) for part in parts]
        root = np.concatenate([[0], np.cumsum(sizes)[:-1]]).astype(np.int64)
        value, threshold, feature, left, right = (np.concatenate(column) for column in zip(*parts, strict=True))
        offset = np.repeat(root, sizes)
        whole = [values.astype(np.int32) for values in (feature, left + offset, right + offset)]
        columns = [value.astype(np.float32), _round_down(threshold), *whole, root]
        depth = max(int(tree.get_depth()) for tree in trees)
        return cls(**dict(zip(cls.COLUMNS, map(torch.from_numpy, columns), strict=True)), depth=depth)

    @classmethod
    def zeros(cls, num_trees: int) -> "TreeNodes":
        """Trees of one leaf that predict 0."""
        numbers, indices = torch.zeros(num_trees), torch.zeros(num_trees, dtype=torch.int32)
        own = torch.arange(num_trees, dtype=torch.int32)
        return cls(numbers, numbers, indices, own, own, own.long(), 0)

    @classmethod
    def join(cls, tables: Sequence["TreeNodes"]) -> "TreeNodes":
        """All trees of several tables in turn."""
        start = np.concatenate([[0], np.cumsum([len(table.value) for table in tables])])[:-1].tolist()
        columns = [torch.cat([getattr(table, name) for table in tables]) for name in ("value", "threshold", "feature")]
        for name in ("left", "right", "root"):
            columns.append(torch.cat([getattr(table, name) + i for table, i in zip(tables, start, strict=True)]))
        return cls(**dict(zip(cls.COLUMNS, columns, strict=True)), depth=max(table.depth for table in tables))

    def leaves(self, rows: Tensor) -> Tensor:
        """Prediction of each tree for rows (R, F): (R, M). Rows are rounded to float32 first, as sklearn does."""
        rows = rows.float()
        node = self.root.expand(len(rows), -1)  # (R, M)
        for _ in range(self.depth):
            goes_left = rows.gather(1, self.feature[node].long()) <= self.threshold[node]
            node = torch.where(goes_left, self.left[node], self.right[node]).long()
        return self.value[node]


def _round_down(threshold: Array) -> NDArray[np.float32]:
    """The largest float32 that is not above: for rows in float32 it divides as the float64 does."""
    nearest = threshold.astype(np.float32)
    return np.where(nearest > threshold, np.nextafter(nearest, np.float32(-np.inf)), nearest).astype(np.float32)


def _nodes(tree: DecisionTreeRegressor, scale: float, shift: float) -> tuple[NDArray[np.generic], ...]:
    """value, threshold, feature, left, right of one tree; children count from the tree's first node."""
    nodes, own = tree.tree_, np.arange(tree.tree_.node_count)
    leaf = nodes.children_left < 0
    value = nodes.value[:, 0, 0] * scale + shift
    threshold, feature = np.where(leaf, 0.0, nodes.threshold), np.where(leaf, 0, nodes.feature)
    return value, threshold, feature, *(np.where(leaf, own, c) for c in (nodes.children_left, nodes.children_right))


@dataclass(frozen=True)
class ForestOptions:
    """Extremely randomised trees with leaves of one row: each predicts a target from the neighbourhood of a row."""

    num_trees: int = 100

    def fit(self, features: Array, target: Array, weights: Array, seed: int) -> TreeNodes:
        """The prediction is the mean of the trees."""
        leaf = 1 + len(target) // _ROWS_PER_LEAF
        share = {"bootstrap": True, "max_samples": _ROWS_PER_TREE} if len(target) > _ROWS_PER_TREE else {}
        model = ExtraTreesRegressor(self.num_trees, min_samples_leaf=leaf, random_state=seed, **share)
        model.fit(features, target, sample_weight=weights)
        return TreeNodes.of(model.estimators_)


@dataclass(frozen=True)
class BoostingOptions:
    """Stochastic gradient boosting with squared error."""

    num_trees: int = 500
    max_depth: int = 4
    subsample: float = 0.7
    max_features: float = 0.7
    min_samples_leaf: int = 1
    learning_rate: float = 0.05

    def fit(self, features: Array, target: Array, weights: Array, seed: int) -> TreeNodes:
        """The prediction is the sum of the trees."""
        mean = float(np.average(target, weights=weights))
        model = GradientBoostingRegressor(
            n_estimators=self.num_trees,
            learning_rate=self.learning_rate,
            max_depth=self.max_depth,
            subsample=self.subsample if self.subsample * len(target) >= 1 else 1.0,
            max_features=self.max_features,
            min_samples_leaf=self.min_samples_leaf,
            init="zero",
            random_state=seed,
        ).fit(features, target - mean, sample_weight=weights)
        trees = list(model.estimators_[:, 0])
        return TreeNodes.of(trees, self.learning_rate, mean / len(trees))
