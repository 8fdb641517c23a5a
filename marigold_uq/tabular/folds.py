"""Inner splits of the training rows: groups stay together, and folds weigh about the same."""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.model_selection import KFold

__all__ = ["inner_folds"]

Rows = NDArray[np.int64]


def inner_folds(
    X: Any,
    y: ArrayLike,
    groups: ArrayLike | None = None,
    sample_weight: ArrayLike | None = None,
    seed: int = 0,
    *,
    num_folds: int = 5,
) -> list[tuple[Rows, Rows]]:
    """Training and held-out rows of each fold, both ascending; every row is held out once.

    Without groups and with equal weights these are sklearn's shuffled `KFold`, as in models fitted before. Otherwise
    groups (or rows) go one by one, the heaviest first and equals in random order, to the fold that weighs least so
    far. There are fewer folds if there are fewer groups (or rows) of any weight.

    Args:
        X: Rows; only their number counts.
        y: Targets; only their number counts.
        groups: A label per row; rows that share one are held out together.
        sample_weight: Rows that weigh 0 balance nothing.
        seed: Of the order.
        num_folds: Held-out parts, at least 2.
    """
    num_rows = len(np.asarray(y))
    if num_folds < 2:
        raise ValueError(f"num_folds must be at least 2; got {num_folds}")
    if len(X) != num_rows:
        raise ValueError(f"X and y must have the same number of rows; got {len(X)} and {num_rows}")
    weights = _per_row(sample_weight, num_rows, "sample_weight", np.ones(num_rows)).astype(np.float64)
    if groups is None and np.ptp(weights) == 0:
        splitter = KFold(min(num_folds, num_rows), shuffle=True, random_state=seed % 2**32)
        return list(splitter.split(np.empty((num_rows, 0))))
    labels = _per_row(groups, num_rows, "groups", np.arange(num_rows))
    group = np.unique(labels, return_inverse=True)[1].reshape(-1)
    weight = np.bincount(group, weights=weights).astype(np.float64)
    fold = _balanced(weight, num_folds, np.random.default_rng(seed))[group]
    return [(np.flatnonzero(fold != number), np.flatnonzero(fold == number)) for number in range(fold.max() + 1)]


def _per_row(values: ArrayLike | None, num_rows: int, name: str, default: NDArray[Any]) -> NDArray[Any]:
    given = default if values is None else np.asarray(values)
    if given.shape != (num_rows,):
        raise ValueError(f"{name} must have one entry per row, ({num_rows},); got shape {given.shape}")
    return given


def _balanced(weight: NDArray[np.float64], num_folds: int, random: np.random.Generator) -> Rows:
    """The fold of each group: the heaviest first, always to the lightest fold."""
    count = min(num_folds, int((weight > 0).sum()))
    if count < 2:
        raise ValueError(f"folds need at least 2 groups that weigh anything; got {count}")
    order = random.permutation(len(weight))
    order = order[np.argsort(-weight[order], kind="stable")]
    fold, totals, sizes = np.empty(len(weight), dtype=np.int64), np.zeros(count), np.zeros(count)
    for group in order:
        fold[group] = np.lexsort((sizes, totals))[0]
        totals[fold[group]] += weight[group]
        sizes[fold[group]] += 1
    return fold
