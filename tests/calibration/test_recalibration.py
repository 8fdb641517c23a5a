"""Quantile maps and Mondrian calibration: exact cases, known distortions, groups where the average hides a failure."""

import json
import warnings

import pytest
import torch
from scipy import stats

from marigold_uq.calibration import ByGroup, IntervalGrid, QuantileMap, fit_by_group, interval_grid_rows
from marigold_uq.distributions import GaussianDistribution
from marigold_uq.metrics import crps


def normal_cdf(x: torch.Tensor) -> torch.Tensor:
    return torch.special.ndtr(x)


def held_out(count: int, seed: int, spread: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Targets N(0, 1), and what a model that states N(0, spread^2) says of them: PIT values."""
    y = torch.randn(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return y, normal_cdf(y / spread)


def test_the_map_is_the_empirical_distribution_at_its_knots() -> None:
    pit = torch.tensor([0.8, 0.1, 0.4])
    found = QuantileMap.fit(pit)
    assert found.stated == pytest.approx((0, 0.1, 0.4, 0.8, 1))
    assert found.observed == (0, 0.25, 0.5, 0.75, 1)
    torch.testing.assert_close(found.probabilities(torch.tensor([0.25, 0.9])), torch.tensor([0.375, 0.875]))
    torch.testing.assert_close(found.levels(torch.tensor([0.375, 0.875])), torch.tensor([0.25, 0.9]))


@pytest.mark.parametrize("spread", [0.5, 2.0])
def test_a_wrong_spread_becomes_a_uniform_pit_and_the_right_quantiles(spread: float) -> None:
    """On fresh targets: Kolmogorov and Smirnov refuse the PIT before, and not after (a test that errs once in 1000)."""
    recalibration = QuantileMap.fit(held_out(4000, 0, spread)[1])
    fresh = held_out(500, 1, spread)[1]
    assert stats.kstest(fresh.numpy(), "uniform").pvalue < 1e-8
    assert stats.kstest(recalibration.probabilities(fresh).numpy(), "uniform").pvalue > 0.001
    law = GaussianDistribution(torch.zeros(1, 1), torch.full((1, 1), spread))
    wanted = torch.tensor([0.1, 0.25, 0.5, 0.9])
    found = recalibration.quantiles(law.quantile, wanted).flatten()
    error = torch.sqrt(wanted * (1 - wanted) / 4000) / torch.exp(-(torch.special.ndtri(wanted) ** 2) / 2) * 2.507
    assert ((found - torch.special.ndtri(wanted)).abs() < 4 * error + 0.02).all()  # .02: linear between knots


def test_draws_of_a_wide_model_score_better_and_keep_their_ranks() -> None:
    g = torch.Generator().manual_seed(0)
    samples = 2.5 * torch.randn(50, 300, generator=g)
    target = torch.randn(300, generator=g)
    recalibration = QuantileMap.fit(held_out(2000, 3, 2.5)[1])
    moved = recalibration.draws(samples)
    assert torch.equal(moved.argsort(0), samples.argsort(0))
    assert moved.std() == pytest.approx(1.0, abs=0.1)
    difference = crps(samples, target) - crps(moved, target)
    assert difference.mean() > 4 * difference.std() / 300**0.5


def test_the_identity_leaves_draws_as_they_are() -> None:
    samples = torch.randn(9, 4, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(QuantileMap().draws(samples), samples)


def test_crossing_quantiles_become_a_monotone_map() -> None:
    """Shares .5 and .25 at levels .3 and .6 cross: pooling adjacent violators gives both their mean."""
    predicted = torch.tensor([[2.5] * 4, [1.5] * 4, [9.0] * 4])
    found = QuantileMap.fit_quantiles([0.3, 0.6, 0.9], predicted, torch.tensor([1.0, 2.0, 3.0, 4.0]))
    assert found.observed == (0, 0.375, 0.375, 1, 1)
    grid = torch.linspace(0, 1, 101)
    assert (found.probabilities(grid).diff() >= 0).all()
    assert (found.levels(grid).diff() >= 0).all()


def test_isotonic_and_pit_agree_where_quantiles_do_not_cross() -> None:
    y, pit = held_out(3000, 0, 0.5)
    levels = [i / 20 for i in range(1, 20)]
    predicted = 0.5 * torch.special.ndtri(torch.tensor(levels, dtype=torch.float64))[:, None].expand(-1, len(y))
    by_levels, by_pit = QuantileMap.fit_quantiles(levels, predicted, y), QuantileMap.fit(pit)
    stated = torch.tensor(levels, dtype=torch.float64)
    torch.testing.assert_close(by_levels.probabilities(stated), by_pit.probabilities(stated), rtol=0, atol=0.01)


def test_a_map_survives_json() -> None:
    found = QuantileMap.fit(held_out(50, 0, 2.0)[1])
    assert QuantileMap.from_dict(json.loads(json.dumps(found.to_dict()))) == found


def test_groups_are_covered_where_the_average_hides_that_one_is_not() -> None:
    """Two groups with the scores |N(0, 1)| and |N(0, 9)|: pooled 90 % covers them by .99 and .77."""
    g = torch.Generator().manual_seed(0)
    noisy = torch.arange(4000) % 2 == 1
    groups = ["noisy" if one else "quiet" for one in noisy]

    def scores() -> torch.Tensor:
        return torch.randn(4000, generator=g).abs() * torch.where(noisy, 3.0, 1.0)

    found, fresh = fit_by_group(interval_grid_rows, scores(), groups), scores()
    assert isinstance(found.pooled, IntervalGrid)
    pooled = fresh <= found.pooled.scale(0.9)[0]
    assert pooled.float().mean() == pytest.approx(0.9, abs=0.02)
    assert pooled[noisy].float().mean() < 0.85
    for name, rows in (("noisy", noisy), ("quiet", ~noisy)):
        covered = fresh[rows] <= found.of(name).scale(0.9)[0]  # type: ignore[union-attr]
        assert covered.float().mean() == pytest.approx(0.9, abs=4 * (0.09 * 2 / 2000) ** 0.5)


def test_quantile_maps_are_fitted_by_group_too() -> None:
    pit = torch.cat([held_out(1000, 0, 0.5)[1], held_out(1000, 1, 2.0)[1]])
    found = fit_by_group(QuantileMap.fit, pit, [0] * 1000 + [1] * 1000)
    assert found.of(0) == QuantileMap.fit(pit[:1000])
    assert found.of(1) == QuantileMap.fit(pit[1000:])


def test_small_and_unknown_groups_take_what_holds_for_all_and_are_named() -> None:
    scores = torch.rand(60, generator=torch.Generator().manual_seed(0))
    with pytest.warns(UserWarning, match=r"fewer than 20\) in rare: they take what is fitted to all"):
        found: ByGroup[IntervalGrid | None] = fit_by_group(interval_grid_rows, scores, ["usual"] * 50 + ["rare"] * 10)
    with pytest.warns(UserWarning, match="group 'rare' was not calibrated by itself"):
        assert found.of("rare") == found.pooled
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert found.of("usual") == interval_grid_rows(scores[:50])


def test_bad_input_is_named() -> None:
    with pytest.raises(ValueError, match=r"PIT values must be \(n,\) within \[0, 1\]"):
        QuantileMap.fit(torch.tensor([0.5, 1.5]))
    with pytest.raises(ValueError, match="must rise from 0 to 1"):
        QuantileMap((0.0, 0.7, 0.6, 1.0), (0.0, 0.1, 0.2, 1.0))
    with pytest.raises(ValueError, match=r"must lie within \[0, 1\]"):
        QuantileMap().levels(torch.tensor([1.2]))
    with pytest.raises(ValueError, match="got 1 for 2 rows"):
        fit_by_group(QuantileMap.fit, torch.rand(2), ["a"])
    with pytest.raises(ValueError, match=r"for 2 levels and target \(n,\); got \(1, 3\) and \(3,\)"):
        QuantileMap.fit_quantiles([0.1, 0.9], torch.zeros(1, 3), torch.zeros(3))
