"""Scores of a split and what they come to over splits."""

import math

import numpy as np
import pytest

from marigold_uq.tabular.scores import (
    PIT_BINS,
    RELIABILITY_LEVELS,
    Spread,
    pooled_curves,
    score_rows,
    summarize_splits,
)


def draws(rows: int = 400, count: int = 99, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Calibrated: draws and truth of each row come from the same distribution."""
    rng = np.random.default_rng(seed)
    mean, std = rng.normal(size=rows), rng.uniform(0.5, 2, rows)
    return mean + std * rng.normal(size=(count, rows)), mean + std * rng.normal(size=rows)


def test_a_row_whose_draws_all_agree_has_no_density_and_so_no_likelihood() -> None:
    samples, truth = draws(rows=5, count=7)
    assert "nll" in score_rows(samples, truth, target_scale=1.0)
    samples[:, 2] = truth[2] + 1
    assert "nll" not in score_rows(samples, truth, target_scale=1.0)


def test_scores_are_their_formulas() -> None:
    """Against the definitions, written out."""
    samples, truth = draws(rows=5, count=7)
    scores = score_rows(samples, truth, target_scale=1.0)
    mean, std = samples.mean(0), samples.std(0, ddof=1)
    assert math.isclose(scores["rmse"], math.sqrt(np.mean((mean - truth) ** 2)))
    pairs = np.abs(samples[:, None] - samples[None]).sum((0, 1)) / (2 * 7 * 6)
    assert math.isclose(scores["crps"], float((np.abs(samples - truth).mean(0) - pairs).mean()))
    nll = 0.5 * np.log(2 * np.pi * std**2) + (mean - truth) ** 2 / (2 * std**2)
    assert math.isclose(scores["nll"], float(nll.mean()))
    inside = (samples.min(0) <= truth) & (truth <= samples.max(0))  # 7 draws: the 95 % interval is all of them
    assert math.isclose(scores["coverage_95"], float(inside.mean()))
    assert math.isclose(scores["width_95"], float(np.ptp(samples, axis=0).mean()))


def test_calibrated_draws_are_covered_as_stated_and_have_a_flat_pit() -> None:
    """99 draws make these Weibull quantiles exact; four standard errors of 400 rows. Chi-square of 20 bins: sd 6.2."""
    samples, truth = draws()
    scores = score_rows(samples, truth, target_scale=1.0)
    for level in (50, 80, 90):
        share = level / 100
        assert abs(scores[f"coverage_{level}"] - share) < 4 * math.sqrt(share * (1 - share) / 400)
    assert len(scores["reliability"]) == len(RELIABILITY_LEVELS)
    assert sum(scores["pit"]) == 400
    chi_square = sum((count - 400 / PIT_BINS) ** 2 / (400 / PIT_BINS) for count in scores["pit"])
    assert chi_square < 19 + 4 * 6.2


def test_a_models_own_interval_is_scored_beside_that_of_the_draws() -> None:
    samples, truth = draws(rows=4)
    interval = np.stack([truth - 1, truth + 1], 1)
    interval[3] = truth[3] + 1, truth[3] + 3
    scores = score_rows(samples, truth, target_scale=1.0, interval=interval)
    assert scores["interval_coverage_95"] == 0.75
    assert math.isclose(scores["interval_width_95"], 2)
    assert math.isclose(scores["interval_score_own_95"], 2 + 2 / 0.05 * 1 / 4)
    with pytest.raises(ValueError, match=r"expected intervals \(4, 2\)"):
        score_rows(samples, truth, target_scale=1.0, interval=interval.T)


def test_splits_are_averaged_with_their_spread() -> None:
    assert Spread.of([1.0, 2.0, 3.0]) == Spread(2.0, 1.0, 1 / math.sqrt(3), 3)
    assert Spread.of([5.0]) == Spread(5.0, None, None, 1)
    splits = [{"num_rows": 1, "crps": 1.0, "pit": [1]}, {"num_rows": 1, "crps": 3.0, "pit": [2], "extra": 1.0}]
    assert list(summarize_splits(splits)) == ["crps"]
    with pytest.raises(ValueError, match="no splits"):
        Spread.of([])


def test_curves_are_pooled_by_rows() -> None:
    splits = [
        {"num_rows": 1, "reliability": [0.0], "pit": [1, 0]},
        {"num_rows": 3, "reliability": [1.0], "pit": [0, 3]},
    ]
    assert pooled_curves(splits) == ([0.75], [1, 3])
