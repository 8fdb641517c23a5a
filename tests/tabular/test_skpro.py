"""skpro's own contract for probabilistic regressors."""

import numpy as np
import pytest

pytest.importorskip("skpro", reason="skpro is not installed: pip install marigold_uq[skpro]")

import pandas as pd
from skpro.distributions.normal_mixture import NormalMixture
from skpro.metrics import CRPS
from skpro.utils import check_estimator
from support.tiny_sets import quick_model

from marigold_uq.tabular.skpro import SkproDiffusionRegressor


def test_the_adapter_passes_all_checks_of_skpro() -> None:
    results = check_estimator(SkproDiffusionRegressor, verbose=False)
    assert len(results) > 40
    assert {name: result for name, result in results.items() if result != "PASSED"} == {}


@pytest.fixture(scope="module")
def frames() -> tuple[pd.DataFrame, pd.DataFrame]:
    rng = np.random.default_rng(0)
    x = pd.DataFrame({"a": rng.normal(size=120), "b": rng.normal(size=120)}, index=range(100, 220))
    return x, pd.DataFrame({"u": x["a"] + 0.1 * rng.normal(size=120), "v": 5 * x["b"]})


def test_what_skpro_sees_is_what_the_estimator_says(frames: tuple[pd.DataFrame, pd.DataFrame]) -> None:
    x, y = frames
    inner = quick_model(calibration_fraction=0.5, num_models=1, max_epochs=3, baseline="none")
    model = SkproDiffusionRegressor(inner).fit(x, y)
    assert not hasattr(inner, "pipeline_")
    new = x[:4]
    np.testing.assert_allclose(model.predict(new), model.estimator_.predict(new))
    distribution = model.predict_proba(new)
    np.testing.assert_allclose(distribution.mean(), model.estimator_.predict(new))
    interval = model.predict_interval(new, coverage=[0.5, 0.9])
    np.testing.assert_allclose(interval["v"][0.9].to_numpy(), model.estimator_.predict_interval(new, 0.9)[:, :, 1])
    quantiles = model.predict_quantiles(new, alpha=[0.1, 0.6])
    np.testing.assert_allclose(quantiles["u"].to_numpy(), model.estimator_.predict_quantiles(new, [0.1, 0.6])[..., 0])
    np.testing.assert_allclose(model.predict_var(new), model.estimator_.predict(new, return_std=True)[1] ** 2)


def test_a_closed_form_is_skpros_mixture_and_gives_the_same_score(frames: tuple[pd.DataFrame, pd.DataFrame]) -> None:
    x, y = frames
    model = SkproDiffusionRegressor(quick_model(num_inference_steps=1, max_epochs=3)).fit(x, y[["u"]])
    found = model.predict_proba(x[:10])
    assert isinstance(found, NormalMixture)
    want = model.estimator_.predict_distribution(x[:10])
    truth = y[["u"]][:10]
    np.testing.assert_allclose(found.mean(), want.mean)
    np.testing.assert_allclose(found.cdf(truth), want.cdf(truth))
    assert CRPS()(truth, found) == pytest.approx(want.crps(truth).mean(), rel=1e-6)


def test_skpros_scores_work_on_its_predictions(frames: tuple[pd.DataFrame, pd.DataFrame]) -> None:
    x, y = frames
    model = SkproDiffusionRegressor(quick_model(num_models=1, max_epochs=3, baseline="none")).fit(x, y[["u"]])
    assert 0 < CRPS()(y[["u"]][:10], model.predict_proba(x[:10])) < 2
