"""The predictive distribution in closed form: against brute force and draws, and as the estimator uses it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.model_selection import GridSearchCV, cross_val_score
from support.tiny_sets import quick_model

from marigold_uq import randomness
from marigold_uq.distributions import GaussianDistribution, MixtureDistribution
from marigold_uq.metrics import crps as fair_crps
from marigold_uq.pipelines.tabular.distribution import MassesAndMixture, PredictiveDistribution
from marigold_uq.scores import crps
from marigold_uq.tabular import DiffusionRegressor, regressor
from marigold_uq.tabular.recipe import resolve_recipe
from marigold_uq.tabular.scores import coverage_scorer, crps_scorer

FROZEN = Path(__file__).parents[1] / "checkpoints" / "tabular" / "run" / "model"


def data(rows: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    x = rng.uniform(-1, 1, (rows, 2))
    return x, np.sin(2 * x[:, 0]) + (0.1 + 0.5 * np.abs(x[:, 1])) * rng.normal(size=rows)


def exact_model(**changes: Any) -> DiffusionRegressor:
    """As `default` fits it: one step, with a pool."""
    return quick_model(**{"num_inference_steps": None, **changes})


def mixture(rows: int = 3, components: int = 4) -> MixtureDistribution:
    g = torch.Generator().manual_seed(0)
    loc, scale, logits = (torch.randn(rows, components, generator=g, dtype=torch.float64) for _ in range(3))
    return MixtureDistribution(loc, scale.exp(), logits)


def continuous() -> MassesAndMixture:
    return MassesAndMixture.continuous(mixture())


def discrete() -> MassesAndMixture:
    return MassesAndMixture.nearest(mixture(), [-2.0, -0.5, 0.0, 3.0])


def both() -> MassesAndMixture:
    """Two masses, which hold .2, .5 and .9 of the probability of the three rows, and a mixture."""
    masses = torch.tensor([[0.1, 0.1], [0.4, 0.1], [0.0, 0.9]], dtype=torch.float64)
    return MassesAndMixture(torch.tensor([0.0, 1.5], dtype=torch.float64), masses, mixture())


KINDS = [continuous, discrete, both]


@pytest.fixture(scope="module")
def fitted() -> DiffusionRegressor:
    return exact_model().fit(*data(200))


@pytest.mark.parametrize("kind", KINDS)
def test_the_crps_is_the_integral_of_its_definition(kind: Any) -> None:
    """int (F(t) - 1[y <= t])^2 dt on a grid of step 1e-3; jumps fall between its points."""
    one, target = kind(), torch.tensor([-1.2003, 0.30001, 1.5], dtype=torch.float64)
    grid = torch.arange(-25, 25, 1e-3, dtype=torch.float64) + 5e-4
    f = one.cdf(grid.unsqueeze(1).expand(-1, 3))
    want = ((f - (target <= grid.unsqueeze(1)).double()).square()).sum(0) * 1e-3
    torch.testing.assert_close(one.crps(target), want, atol=2e-3, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_moments_and_cdf_are_those_of_draws(kind: Any) -> None:
    """Five standard errors of 20,000 draws."""
    one = kind()
    draws = one.sample(20_000, torch.Generator().manual_seed(1))
    std = one.variance.sqrt()
    assert ((draws.mean(0) - one.mean).abs() < 5 * std / 20_000**0.5).all()
    torch.testing.assert_close(draws.std(0), std, rtol=0.05, atol=0)
    for value in (-0.7, 0.0, 1.5):
        share = (draws <= value).double().mean(0)
        assert ((share - one.cdf(torch.full((3,), value, dtype=torch.float64))).abs() < 5 * 0.5 / 20_000**0.5).all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_quantile_is_the_least_value_that_the_cdf_reaches_it_at(kind: Any) -> None:
    one = kind()
    for level in (0.03, 0.3, 0.55, 0.97):
        (value,) = one.quantile(torch.tensor([level], dtype=torch.float64))
        assert (one.cdf(value) >= level - 1e-9).all()
        assert (one.cdf(value - 1e-6) <= level + 1e-9).all()


def test_one_gaussian_is_scored_by_its_own_formula() -> None:
    loc, scale = (torch.rand(5, dtype=torch.float64) + 0.1 for _ in range(2))
    one = MixtureDistribution(loc.unsqueeze(1), scale.unsqueeze(1), torch.zeros(5, 1, dtype=torch.float64))
    target = torch.linspace(-2, 2, 5, dtype=torch.float64)
    found = MassesAndMixture.continuous(one).crps(target)
    torch.testing.assert_close(found, crps(GaussianDistribution(loc, scale), target))


def test_the_density_integrates_to_what_the_masses_leave() -> None:
    law = PredictiveDistribution((both(),), is_flat=True)
    grid = np.arange(-25, 25, 1e-3) + 5e-4
    total = np.sum([law.pdf(value) for value in grid], axis=0) * 1e-3
    np.testing.assert_allclose(total, [0.8, 0.5, 0.1], atol=1e-4)
    np.testing.assert_allclose(law.pdf(1.5), [0.1, 0.1, 0.9])


def test_shapes_follow_the_documentation() -> None:
    flat, stacked = PredictiveDistribution((both(),), True), PredictiveDistribution((both(), discrete()))
    assert flat.mean.shape == flat.std.shape == flat.quantile(0.5).shape == flat.crps(1.0).shape == (3,)
    assert flat.ppf([0.1, 0.9]).shape == flat.interval(0.9).shape == (3, 2)
    assert stacked.quantile([0.1, 0.5, 0.9]).shape == (3, 3, 2)
    assert stacked.sample(7).shape == (7, 3, 2)
    assert stacked.log_prob(np.zeros((3, 2))).shape == (3, 2)
    with pytest.raises(ValueError, match=r"y must fit the shape \(3,\)"):
        flat.cdf(np.zeros(4))
    with pytest.raises(ValueError, match="strictly between 0 and 1"):
        flat.quantile([0.0, 0.5])


def test_default_takes_one_step_unless_something_speaks_against_it() -> None:
    one = resolve_recipe("default", 300)
    assert (one.num_inference_steps, one.one_step, one.pool) == (1, True, True)
    for change in ({"num_inference_steps": 10}, {"num_inference_steps": "auto"}, {"noise_family": "point"}):
        several = resolve_recipe("default", 300, **change)
        assert (several.num_inference_steps, several.one_step) == (10, False)
        assert several.max_epochs == 3 * one.max_epochs
    assert not resolve_recipe("paper", 300, num_inference_steps=1).one_step


def test_nothing_is_drawn_but_by_sample(fitted: DiffusionRegressor, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*arguments: Any) -> torch.Tensor:
        raise AssertionError("a number was drawn")

    x, y = data(20, 1)
    want = fitted.predict(x)
    monkeypatch.setattr(randomness, "_draw", forbidden)
    np.testing.assert_array_equal(fitted.predict(x), want)
    fitted.predict_quantiles(x, [0.1, 0.9])
    fitted.predict_interval(x)
    assert fitted.crps(x, y) > 0
    assert fitted.predict_distribution(x).interval(0.8).shape == (20, 2)
    with pytest.raises(AssertionError, match="was drawn"):
        fitted.sample(x)


def test_what_the_estimator_says_is_what_its_distribution_says(fitted: DiffusionRegressor) -> None:
    """Draws agree within five standard errors."""
    x, y = data(40, 1)
    law = fitted.predict_distribution(x)
    mean, std = fitted.predict(x, return_std=True)
    np.testing.assert_allclose(mean, law.mean)
    np.testing.assert_allclose(std, law.std)
    np.testing.assert_allclose(fitted.predict_quantiles(x, [0.2, 0.7]), law.quantile([0.2, 0.7]))
    np.testing.assert_allclose(fitted.predict_interval(x, 0.9), law.interval(0.9))
    draws = fitted.sample(x, 2000)
    assert (np.abs(draws.mean(0) - mean) < 5 * std / 2000**0.5).all()
    score = float(fair_crps(torch.from_numpy(draws), torch.from_numpy(y)).mean())
    assert fitted.crps(x, y) == pytest.approx(score, rel=0.01)


def test_rows_in_blocks_are_rows_at_once(fitted: DiffusionRegressor, monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = data(30, 1)
    want = fitted.predict_interval(x, 0.9), fitted.crps(x, y)
    monkeypatch.setattr(regressor, "_BLOCK", 7)
    np.testing.assert_allclose(fitted.predict_interval(x, 0.9), want[0], rtol=1e-9)
    assert fitted.crps(x, y) == pytest.approx(want[1], rel=1e-9)


def test_more_steps_than_were_trained_are_refused(fitted: DiffusionRegressor) -> None:
    with pytest.raises(ValueError, match="trained for one denoising step; got num_inference_steps=10"):
        fitted.pipeline_(data(3)[0], num_inference_steps=10)


def test_conformal_intervals_and_kappa_need_no_draws_either() -> None:
    """With 40 calibration rows coverage at 90 % is Beta(37, 4): above .74 in 99.8 % of fits; sd of 300 rows .02."""
    model = exact_model(calibration_fraction=0.2).fit(*data(200))
    record = model.pipeline_.calibration_for()
    assert record.interval is not None
    assert (record.ensemble_size, record.num_inference_steps, record.num_calibration) == (None, 1, 40)
    x, y = data(300, 2)
    lower, upper = model.predict_interval(x, 0.9).T
    assert ((lower <= y) & (y <= upper)).mean() > 0.7
    mean, std = model.predict(x, return_std=True)
    np.testing.assert_allclose((upper - mean) / std, record.interval.scale(0.9)[0], rtol=1e-6)


def test_targets_of_few_values_have_masses_there_and_nothing_between() -> None:
    x, y = data(200)
    marks = np.clip(np.round(2 * y), -1, 1)
    model = exact_model(num_models=2).fit(x, marks)
    law = model.predict_distribution(x[:20])
    assert law.outputs[0].mixture is None
    np.testing.assert_allclose(law.cdf(1.0), 1)
    np.testing.assert_allclose(law.cdf(0.5), law.cdf(0.0))
    assert set(np.unique(model.predict_interval(x, 0.9))) <= {-1.0, 0.0, 1.0}
    np.testing.assert_allclose(sum(law.pdf(value) for value in (-1.0, 0.0, 1.0)), 1)
    assert model.crps(x, marks) < 0.5 * np.abs(marks - np.median(marks)).mean()


def test_zeros_that_many_rows_share_have_a_probability_that_depends_on_the_row(tmp_path: Path) -> None:
    """y = 0 for nine rows in ten with x_0 < 0 and for none with x_0 > 0, else 3 or more: a mass beside a density."""
    rng = np.random.default_rng(0)
    x = rng.uniform(-1, 1, (800, 2))
    y = np.where((x[:, 0] < 0) & (rng.random(800) < 0.9), 0.0, 3 + rng.exponential(size=800))
    model = exact_model().fit(x[:400], y[:400])
    law = model.predict_distribution(np.array([[-0.5, 0.0], [0.5, 0.0]]))
    chance = law.pdf(0.0)
    assert chance[0] == pytest.approx(0.9, abs=0.1)
    assert chance[1] < 0.05
    assert law.cdf(1.5)[1] < 0.2  # little of the continuous part lies between the mass and the rest
    np.testing.assert_array_equal(law.quantile(0.3)[0], 0.0)
    without = exact_model(snap=False).fit(x[:400], y[:400])
    assert without.predict_distribution(x[:1]).pdf(0.0) != pytest.approx(chance[0])  # a density, no probability
    assert model.crps(x[400:], y[400:]) < without.crps(x[400:], y[400:])
    model.save_pretrained(tmp_path)
    loaded = DiffusionRegressor.from_pretrained(tmp_path)
    np.testing.assert_allclose(
        loaded.predict_quantiles(x, [0.3, 0.9]), model.predict_quantiles(x, [0.3, 0.9]), atol=1e-5
    )


def test_two_targets_each_have_their_own_distribution() -> None:
    x, y = data(120)
    model = exact_model().fit(x, np.stack([y, 100 - 5 * y], 1))
    assert model.pipeline_.residuals.weights.shape == (3, 2)
    law = model.predict_distribution(x[:5])
    assert law.mean.shape == (5, 2)
    assert abs(law.mean[:, 1].mean() - 100) < 10
    assert (law.std[:, 1] > law.std[:, 0]).all()
    assert model.crps(x, np.stack([y, 100 - 5 * y], 1)) > 0


def test_a_saved_estimator_is_the_estimator(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    (x, y), (new, y_new) = data(200), data(10, 1)
    frame, rows = pandas.DataFrame(x, columns=["a", "b"]), pandas.DataFrame(new, columns=["a", "b"])
    model = exact_model(calibration_fraction=0.2).fit(frame, y)
    model.save_pretrained(tmp_path / "model")
    loaded = DiffusionRegressor.from_pretrained(tmp_path / "model")
    np.testing.assert_allclose(loaded.predict(rows), model.predict(rows), rtol=1e-6)
    np.testing.assert_allclose(loaded.predict_interval(rows, 0.9), model.predict_interval(rows, 0.9), rtol=1e-6)
    np.testing.assert_allclose(loaded.sample(rows, 5), model.sample(rows, 5), rtol=1e-6)
    assert loaded.crps(rows, y_new) == pytest.approx(model.crps(rows, y_new), rel=1e-6)
    assert loaded.recipe_ == model.recipe_
    assert loaded.get_params() == model.get_params()
    assert list(loaded.feature_names_in_) == ["a", "b"]
    with pytest.raises(ValueError, match="feature names"):
        loaded.predict(rows[["b", "a"]])


def test_a_pipeline_of_the_code_before_the_first_release_loads_as_an_estimator() -> None:
    loaded = DiffusionRegressor.from_pretrained(FROZEN)
    assert loaded.predict(np.zeros((3, 2))).shape == (3, 2)
    assert loaded.sample(np.zeros((3, 2)), 4).shape == (4, 3, 2)


def test_sklearn_searches_by_the_crps_and_reports_coverage() -> None:
    x, y = data(90)
    model = exact_model(baseline="none", max_epochs=2)
    scores = cross_val_score(model, x, y, scoring=crps_scorer, cv=2)
    assert (scores < 0).all()
    scoring = {"crps": crps_scorer, "share": coverage_scorer(0.9)}
    search = GridSearchCV(model, {"max_epochs": [1, 3]}, scoring=scoring, refit="crps", cv=2).fit(x, y)
    best = search.best_estimator_
    assert search.best_score_ == search.cv_results_["mean_test_crps"].max()
    assert crps_scorer(best, x, y) == -best.crps(x, y)
    lower, upper = best.predict_interval(x, 0.9).T
    assert coverage_scorer(0.9)(best, x, y) == ((lower <= y) & (y <= upper)).mean()
    assert all(0 <= share <= 1 for share in search.cv_results_["mean_test_share"])
