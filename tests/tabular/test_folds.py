"""Inner splits with groups and weights."""

import numpy as np
import pytest
from sklearn.model_selection import KFold

from marigold_uq.tabular.folds import inner_folds

X, Y = np.zeros((103, 2)), np.zeros(103)


def test_without_groups_and_weights_they_are_sklearns_shuffled_folds() -> None:
    want = KFold(5, shuffle=True, random_state=3).split(X)
    for found in (inner_folds(X, Y, seed=3), inner_folds(X, Y, sample_weight=np.full(103, 2.0), seed=3)):
        assert all((a == b).all() for pair in zip(found, want, strict=False) for a, b in zip(*pair, strict=True))


@pytest.mark.parametrize("weights", [None, np.random.default_rng(1).uniform(0, 3, 103)])
def test_every_row_is_held_out_once_and_groups_stay_together(weights: np.ndarray | None) -> None:
    groups = np.random.default_rng(0).integers(12, size=103).astype(str)
    folds = inner_folds(X, Y, groups, weights)
    assert len(folds) == 5
    assert sorted(np.concatenate([test for _, test in folds])) == list(range(103))
    for train, test in folds:
        assert len(np.union1d(train, test)) == 103
        assert not set(groups[train]) & set(groups[test])


def test_folds_weigh_about_the_same() -> None:
    """One row in ten weighs as much as a hundred others; ten such rows are two for each of five folds."""
    weights = np.ones(100)
    weights[::10] = 100.0
    totals = [weights[test].sum() for _, test in inner_folds(X[:100], Y[:100], sample_weight=weights)]
    assert max(totals) - min(totals) <= 1


def test_the_seed_decides_and_there_are_no_more_folds_than_groups() -> None:
    groups = np.arange(103) % 40
    one, same, other = (inner_folds(X, Y, groups, seed=seed)[0][1].tolist() for seed in (0, 0, 1))
    assert one == same != other
    assert len(inner_folds(X, Y, np.arange(103) % 3)) == 3


def test_wrong_arguments_are_explained() -> None:
    with pytest.raises(ValueError, match=r"groups must have one entry per row, \(103,\); got shape \(2,\)"):
        inner_folds(X, Y, [0, 1])
    with pytest.raises(ValueError, match="at least 2 groups that weigh anything; got 1"):
        inner_folds(X, Y, np.zeros(103))
    with pytest.raises(ValueError, match="num_folds must be at least 2; got 1"):
        inner_folds(X, Y, num_folds=1)
    with pytest.raises(ValueError, match="same number of rows; got 3 and 103"):
        inner_folds(X[:3], Y)
