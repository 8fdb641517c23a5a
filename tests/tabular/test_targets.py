"""Changes of variables of the target: against scipy's distributions of the same y."""

import json
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import ArrayLike, NDArray
from scipy import stats
from scipy.special import expit

from marigold_uq.pipelines.tabular.targets import (
    Bounded,
    Identity,
    Positive,
    TargetTransform,
    TransformedDistribution,
    choose_transform,
    transform_from_config,
)

TRANSFORMS = [Identity(), Positive(), Positive(-3.0), Bounded(), Bounded(-1.0, 4.0)]
INSIDE = {"identity": (-5.0, 5.0), "positive": (0.1, 9.0), "bounded": (0.05, 0.95)}


class Normal:
    """N(loc, scale) in every row."""

    def __init__(self, loc: ArrayLike, scale: ArrayLike) -> None:
        self.base = stats.norm(np.asarray(loc, dtype=float), np.asarray(scale, dtype=float))

    def quantile(self, levels: ArrayLike) -> NDArray[np.float64]:
        return np.stack([self.base.ppf(level) for level in np.atleast_1d(levels)], 1)

    def cdf(self, y: ArrayLike) -> NDArray[np.float64]:
        return self.base.cdf(y)

    def log_prob(self, y: ArrayLike) -> NDArray[np.float64]:
        return self.base.logpdf(y)


@pytest.mark.parametrize("transform", TRANSFORMS, ids=repr)
class TestEveryTransform:
    @staticmethod
    def values(transform: TargetTransform) -> NDArray[np.float64]:
        return np.linspace(*INSIDE[transform.name], 41)

    def test_the_inverse_undoes_it_and_it_rises(self, transform: TargetTransform) -> None:
        y = self.values(transform)
        z = transform.forward(y)
        np.testing.assert_allclose(transform.inverse(z), y, rtol=1e-12, atol=1e-12)
        assert (np.diff(z) > 0).all()

    def test_the_derivative_is_that_of_differences(self, transform: TargetTransform) -> None:
        y, step = self.values(transform), 1e-6
        slope = (transform.forward(y + step) - transform.forward(y - step)) / (2 * step)
        np.testing.assert_allclose(np.exp(transform.log_derivative(y)), slope, rtol=1e-6)

    def test_it_is_saved_as_json(self, transform: TargetTransform) -> None:
        assert transform_from_config(json.loads(json.dumps(transform.to_config()))) == transform

    def test_extreme_values_stay_in_the_domain(self, transform: TargetTransform) -> None:
        ends = transform.inverse([-50.0, 50.0])
        assert np.isfinite(ends).all()
        if isinstance(transform, Bounded):
            assert transform.low <= ends[0] < ends[1] <= transform.high

    def test_the_density_is_the_slope_of_the_distribution_function(self, transform: TargetTransform) -> None:
        y, step = self.values(transform), 1e-5
        loc = transform.forward(y) - 0.3
        law = TransformedDistribution(Normal(loc, np.full(len(y), 0.7)), transform)
        slope = (law.cdf(y + step) - law.cdf(y - step)) / (2 * step)
        np.testing.assert_allclose(law.pdf(y), slope, rtol=1e-5)

    def test_quantiles_are_where_the_distribution_function_has_their_level(self, transform: TargetTransform) -> None:
        law = TransformedDistribution(Normal([0.2, -1.0], [0.5, 1.5]), transform)
        for level in (0.01, 0.5, 0.975):
            np.testing.assert_allclose(law.cdf(law.quantile([level])[:, 0]), level, rtol=1e-9)


def test_a_log_normal_distribution_is_scipys() -> None:
    """Mean and CRPS leave out the outermost thousandths; sigma .5 keeps that below .1 %."""
    law, want = TransformedDistribution(Normal([0.3], [0.5]), Positive()), stats.lognorm(0.5, scale=np.exp(0.3))
    y = np.array([1.7])
    np.testing.assert_allclose(law.log_prob(y), want.logpdf(y), rtol=1e-12)
    np.testing.assert_allclose(law.interval(0.9)[0], want.ppf([0.05, 0.95]), rtol=1e-12)
    np.testing.assert_allclose(law.mean, want.mean(), rtol=1e-3)
    np.testing.assert_allclose(law.std, want.std(), rtol=1e-2)
    np.testing.assert_allclose(law.crps(y), crps_by_integration(want.cdf, 1.7, 0.0, 60.0), rtol=1e-3)


def test_the_stated_errors_of_the_moments_hold() -> None:
    law, want = TransformedDistribution(Normal([0.0], [1.0]), Positive()), stats.lognorm(1.0)
    assert 0.996 < law.mean[0] / want.mean() < 1
    assert 0.95 < law.std[0] / want.std() < 1


def test_a_bounded_distribution_scores_as_its_integral() -> None:
    law = TransformedDistribution(Normal([0.4], [1.2]), Bounded())
    want = crps_by_integration(lambda y: stats.norm.cdf(np.log(y / (1 - y)), 0.4, 1.2), 0.3, 0.0, 1.0)
    np.testing.assert_allclose(law.crps(np.array([0.3])), want, rtol=1e-3)
    grid = stats.norm.ppf((np.arange(100_000) + 0.5) / 100_000, 0.4, 1.2)
    np.testing.assert_allclose(law.mean, expit(grid).mean(), rtol=1e-4)


def crps_by_integration(cdf: Callable, truth: float, low: float, high: float) -> float:
    """Integral of (F(y) - 1{y >= truth})^2, midpoint rule."""
    y = low + (np.arange(400_000) + 0.5) * (high - low) / 400_000
    return float(((cdf(y) - (y >= truth)) ** 2).sum() * (high - low) / 400_000)


def test_the_logarithm_is_chosen_for_positive_heavy_tails_alone() -> None:
    rng = np.random.default_rng(0)
    normal = rng.normal(size=500)
    assert choose_transform(np.exp(normal)) == Positive()
    assert choose_transform(normal) == Identity()
    assert choose_transform(100 + normal) == Identity()
    assert choose_transform(np.r_[0.0, np.exp(normal)]) == Identity()
    assert choose_transform(np.full(10, 3.0)) == Identity()


def test_a_target_outside_its_domain_is_refused() -> None:
    with pytest.raises(ValueError, match="must be above 0; got -1"):
        Positive().forward([1.0, -1.0])
    with pytest.raises(ValueError, match=r"strictly between 0 and 1; it reaches from 0 to 0.5. Widen the bounds"):
        Bounded().forward([0.0, 0.5])
    with pytest.raises(ValueError, match="low must be below high; got 1 and 1"):
        Bounded(1, 1)
    with pytest.raises(ValueError, match="must be one of identity, positive, bounded; got 'sqrt'"):
        transform_from_config({"name": "sqrt"})
