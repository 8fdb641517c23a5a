"""AUROC: exact cases, ties, sklearn, and a standard error that is the spread over repeated samples."""

import math

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score

from marigold_uq.metrics import auroc


@pytest.mark.parametrize(
    ("negative", "positive", "expected"),
    [([1, 2, 3], [4, 5], 1.0), ([4, 5], [1, 2, 3], 0.0), ([7, 7, 7], [7, 7], 0.5), ([1, 3], [2, 3], 0.625)],
)
def test_auroc_is_the_share_of_pairs_in_order_with_ties_counted_half(
    negative: list[float], positive: list[float], expected: float
) -> None:
    scores = torch.tensor([*negative, *positive], dtype=torch.float32)
    found = auroc(scores, torch.tensor([False] * len(negative) + [True] * len(positive)))
    assert found.value.item() == expected
    assert found.num_samples == len(scores)


def test_auroc_with_many_ties_is_that_of_sklearn_and_infinity_is_a_score() -> None:
    rng = np.random.default_rng(0)
    scores, labels = rng.integers(0, 8, 300).astype(np.float64), rng.random(300) < 0.3
    expected = roc_auc_score(labels, scores)
    assert auroc(torch.from_numpy(scores), torch.from_numpy(labels)).value.item() == pytest.approx(expected, abs=1e-12)
    scores[np.flatnonzero(labels)[:5]] = math.inf
    ranked = np.unique(scores, return_inverse=True)[1]
    found = auroc(torch.from_numpy(scores), torch.from_numpy(labels)).value.item()
    assert found == pytest.approx(roc_auc_score(labels, ranked), abs=1e-12)


def test_the_standard_error_is_the_spread_over_samples() -> None:
    """400 repetitions know a standard deviation to 3.5 %; the bound is four such errors."""
    g = torch.Generator().manual_seed(0)
    is_positive = torch.arange(150) < 60
    found = [auroc(torch.randn(150, generator=g) + is_positive, is_positive) for _ in range(400)]
    spread = torch.stack([one.value for one in found]).std().item()
    stated = torch.stack([one.standard_error for one in found]).square().mean().sqrt().item()
    assert stated == pytest.approx(spread, rel=0.15)


@pytest.mark.parametrize(
    ("scores", "labels", "message"),
    [
        ([1.0, 2.0], [True, True], "samples of both kinds"),
        ([1.0, math.nan], [True, False], "without NaN"),
        ([1.0, 2.0, 3.0], [True, False], r"got \(3,\) and torch.bool \(2,\)"),
    ],
)
def test_bad_input_is_named(scores: list[float], labels: list[bool], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        auroc(torch.tensor(scores), torch.tensor(labels))
