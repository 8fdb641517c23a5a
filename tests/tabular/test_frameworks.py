"""Tables under EDM and flow matching: the mean and the spread of each row are learned, and a model survives saving."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.tiny_sets import quick_model

from marigold_uq.pipelines.tabular import TabularRegressionPipeline
from marigold_uq.schedulers import FRAMEWORKS
from marigold_uq.tabular import DiffusionRegressor
from marigold_uq.tabular.recipe import Recipe, TrainingOptions, resolve_recipe

every_framework = pytest.mark.parametrize("framework", FRAMEWORKS)


def data(count: int) -> tuple[Any, Any]:
    """y = x_0 + s N(0, 1), s = .2 where x_1 < 0 and .8 elsewhere."""
    rng = np.random.default_rng(0)
    x = rng.uniform(-1, 1, (count, 2))
    return x, x[:, 0] + np.where(x[:, 1] < 0, 0.2, 0.8) * rng.normal(size=count)


def model(framework: str, **changes: Any) -> DiffusionRegressor:
    settings = {"baseline": "none", "num_models": 1, "max_epochs": 60, "framework": framework, "learning_rate": 1e-2}
    return quick_model(**{**settings, "batch_size": 64, "num_timesteps": 50, "ensemble_size": 400, **changes})


@every_framework
@pytest.mark.parametrize("family", ["gaussian", "mixture"])
def test_mean_and_spread_of_each_row_are_learned(framework: str, family: str) -> None:
    """At 1 and 4 steps: one step reads the gates where sampling starts, which flow matching hardly visits."""
    fitted = model(framework, noise_family=family).fit(*data(1500))
    assert type(fitted.pipeline_.scheduler) is FRAMEWORKS[framework]
    rows = np.array([[0.5, -0.5], [0.5, 0.5], [-0.5, -0.5], [-0.5, 0.5]])
    for steps in (1, 4):
        output = fitted.pipeline_(rows, 400, num_inference_steps=steps)
        np.testing.assert_allclose(output.prediction[:, 0], rows[:, 0], atol=0.25)
        narrow, wide = output.uncertainty[::2, 0], output.uncertainty[1::2, 0]
        assert narrow.max() < 0.45, steps
        assert wide.min() > 0.5, steps
        assert wide.max() < 1.1, steps


@every_framework
@pytest.mark.parametrize("family", ["gaussian", "sample"])
def test_a_saved_model_predicts_alike(family: str, framework: str, tmp_path: Path) -> None:
    fitted = model(framework, noise_family=family, max_epochs=2, num_inference_steps=3).fit(*data(100))
    fitted.pipeline_.save_pretrained(tmp_path)
    loaded = TabularRegressionPipeline.from_pretrained(tmp_path)
    x = data(5)[0]
    np.testing.assert_array_equal(loaded(x, 20).samples, fitted.pipeline_(x, 20).samples)
    np.testing.assert_allclose(loaded(x, 20, batch_size=2).samples, loaded(x, 20).samples, atol=1e-6)


def test_frameworks_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="framework must be one of ddim, edm, flow; got 'ddpm'"):
        Recipe(framework="ddpm")
    with pytest.raises(ValueError, match="prediction_type='sample' is ddim's; framework 'flow' has one of its own"):
        resolve_recipe("default", 100, options=TrainingOptions(framework="flow", prediction_type="sample"))
