"""Adaptive conformal inference: its long-run guarantee on sequences made to break it, and its exact steps."""

import math

import pytest
import torch

from marigold_uq.calibration import AdaptiveConformal


def bound(coverage: float, step: float, count: int) -> float:
    """Of Gibbs and Candes (2021), Proposition 4.1."""
    alpha = 1 - coverage
    return (max(alpha, 1 - alpha) + step) / (step * count)


def share_of_misses(adaptive: AdaptiveConformal, scores: list[float]) -> float:
    return sum(bool(adaptive.update(torch.tensor(score))) for score in scores) / len(scores)


@pytest.mark.parametrize("coverage", [0.5, 0.9])
@pytest.mark.parametrize("step", [0.01, 0.3])
def test_an_adversary_cannot_break_the_long_run_bound(coverage: float, step: float) -> None:
    """Whatever finite scale is shown, the next score lies just outside; an empty or infinite one is answered by 0."""
    adaptive, missed, count = AdaptiveConformal(coverage, step=step, scores=torch.rand(50), window=50), 0, 1500
    for _ in range(count):
        scale = float(adaptive.scale())
        score = scale + 1 if 0 <= scale < math.inf else 0.0
        missed += int(adaptive.update(torch.tensor(score)))
        assert -step - 1e-9 <= float(adaptive.miscoverage) <= 1 + step + 1e-9
    assert abs(missed / count - (1 - coverage)) <= bound(coverage, step, count) + 1e-9


def test_a_shifting_sequence_keeps_its_coverage_where_fixed_intervals_lose_it() -> None:
    g = torch.Generator().manual_seed(0)
    start, count = torch.randn(300, generator=g).abs(), 1500
    scores = (torch.randn(count, generator=g) * torch.linspace(1, 4, count)).abs()
    adaptive = AdaptiveConformal(0.9, step=0.02, scores=start, window=300)
    fixed = (scores > float(adaptive.scale())).double().mean()
    assert fixed > 0.3
    assert abs(share_of_misses(adaptive, scores.tolist()) - 0.1) <= bound(0.9, 0.02, count)


def test_levels_move_by_the_stated_step_and_quantiles_are_conformal() -> None:
    adaptive = AdaptiveConformal(0.8, step=0.1, scores=torch.arange(1.0, 10.0))
    assert adaptive.scale() == 8  # the ceil(10 * .8)-th smallest of nine
    assert not adaptive.update(torch.tensor(8.0))  # at the end is inside
    assert float(adaptive.miscoverage) == pytest.approx(0.2 + 0.1 * 0.2)
    assert adaptive.update(torch.tensor(100.0))
    assert float(adaptive.miscoverage) == pytest.approx(0.22 + 0.1 * (0.2 - 1))


def test_without_scores_it_starts_with_an_infinite_interval() -> None:
    adaptive = AdaptiveConformal(0.9)
    assert adaptive.interval(torch.tensor(2.0), torch.tensor(0.0)).tolist() == [-math.inf, math.inf]
    assert not adaptive.update(torch.tensor(5.0))


def test_each_coordinate_is_a_sequence_of_its_own() -> None:
    g = torch.Generator().manual_seed(0)
    scores = torch.rand(60, 3, generator=g)
    together = AdaptiveConformal(0.7, step=0.05, scores=scores[:20])
    alone = [AdaptiveConformal(0.7, step=0.05, scores=scores[:20, i]) for i in range(3)]
    for row in scores[20:]:
        missed = together.update(row)
        assert missed.tolist() == [bool(one.update(row[i])) for i, one in enumerate(alone)]
    torch.testing.assert_close(together.scale(), torch.stack([one.scale() for one in alone]))


def test_an_interval_is_the_scaled_spread_and_an_empty_one_holds_nothing() -> None:
    adaptive = AdaptiveConformal(0.5, step=0.4, scores=torch.tensor([1.0, 2.0, 3.0]))
    assert adaptive.interval(torch.tensor([10.0]), torch.tensor([0.5])).flatten().tolist() == [9.0, 11.0]
    for _ in range(3):
        adaptive.update(torch.tensor(0.0))
    low, high = adaptive.interval(torch.tensor(10.0), torch.tensor(0.5))
    assert float(adaptive.miscoverage) >= 1
    assert low > high


def test_bad_input_is_named() -> None:
    with pytest.raises(ValueError, match="step must be positive"):
        AdaptiveConformal(0.9, step=0)
    with pytest.raises(ValueError, match="not negative and without NaN"):
        AdaptiveConformal(0.9).update(torch.tensor(math.nan))
    with pytest.raises(ValueError, match=r"expected a score \(2,\); got \(3,\)"):
        AdaptiveConformal(0.9, scores=torch.rand(5, 2)).update(torch.rand(3))
