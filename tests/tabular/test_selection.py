"""Family and number of steps of a table, chosen on rows that the compared models have not seen."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.scripts import load_script
from support.tiny_sets import quick_model

from marigold_uq.pipelines.tabular import TabularRegressionPipeline


def bimodal(count: int = 400) -> tuple[Any, Any]:
    """y = x, or x + 4 for three rows in ten: two modes for each x."""
    rng = np.random.default_rng(0)
    x = rng.uniform(-1, 1, (count, 2))
    return x, x[:, 0] + rng.choice([0.0, 4.0], count, p=[0.7, 0.3]) + 0.05 * rng.normal(size=count)


def noisy(count: int = 400) -> tuple[Any, Any]:
    """y = x + Gaussian noise of one size."""
    rng = np.random.default_rng(0)
    x = rng.uniform(-1, 1, (count, 2))
    return x, x[:, 0] + rng.normal(size=count)


def model(**changes: Any) -> Any:
    settings = {
        "noise_family": "auto",
        "baseline": "none",
        "num_models": 1,
        "max_epochs": 120,
        "num_inference_steps": 1,
    }
    settings |= {"learning_rate": 1e-2, "batch_size": 64}
    return quick_model(**{**settings, **changes})


@pytest.mark.parametrize(("rows", "possible"), [(bimodal, {"mixture"}), (noisy, {"gaussian", "mixture"})])
def test_a_family_that_has_the_noise_is_chosen_and_trained_on_all_rows(rows: Any, possible: set[str]) -> None:
    """By one standard error of 80 rows a mixture may beat the Gaussian that the noise is; a point cannot."""
    x, y = rows()
    chosen = model(early_stopping=False).fit(x, y)
    expected = chosen.selection_.chosen.noise_family
    assert expected in possible
    assert chosen.recipe_.noise_family == expected
    assert chosen.selection_.rounds[0].comparison.num_units == 80
    named = model(noise_family=expected, early_stopping=False).fit(x, y)
    assert named.selection_ is None
    np.testing.assert_array_equal(chosen.predict(x[:5]), named.predict(x[:5]))


def test_the_fewest_steps_that_are_as_good_are_chosen_and_stored(tmp_path: Path) -> None:
    x, y = noisy(200)
    options = {"noise_family": "gaussian", "num_inference_steps": "auto", "max_epochs": 20, "steps": [1, 3]}
    fitted = model(**options, num_models=2).fit(x, y)
    comparison, steps = fitted.steps_choice_.comparison, fitted.steps_choice_.steps
    assert steps == (1, 3, 10)
    assert comparison.num_units == 200  # each row is in one of the two folds
    chosen = fitted.steps_choice_.num_inference_steps
    near = [n for n, d, e in zip(steps, comparison.differences, comparison.standard_errors, strict=True) if d <= e]
    assert chosen == min(near)
    assert fitted.recipe_.num_inference_steps == chosen
    fitted.pipeline_.save_pretrained(tmp_path / "model")
    assert TabularRegressionPipeline.from_pretrained(tmp_path / "model").config.default_denoising_steps == chosen


def test_a_point_model_takes_more_steps_than_one() -> None:
    x, y = noisy(200)
    fitted = model(noise_family="point", num_inference_steps="auto", max_epochs=20).fit(x, y)
    assert fitted.steps_choice_.num_inference_steps > 1


def test_steps_are_chosen_on_half_of_the_rows_set_aside_where_training_has_none() -> None:
    x, y = noisy(200)
    options: dict[str, Any] = {"noise_family": "gaussian", "num_inference_steps": "auto", "max_epochs": 3}
    fitted = model(**options, early_stopping=False, calibration_fraction=0.4).fit(x, y)
    assert fitted.steps_choice_.comparison.num_units == 40
    record = fitted.pipeline_.calibration_for()
    assert record.num_calibration == 40
    assert record.num_inference_steps == fitted.steps_choice_.num_inference_steps
    with pytest.raises(ValueError, match="needs rows that the model has not seen: set calibration_fraction"):
        model(**options, early_stopping=False).fit(x, y)


def test_what_cannot_be_chosen_from_is_explained() -> None:
    x, y = noisy(40)
    with pytest.raises(ValueError, match="needs at least 50 rows; got 40"):
        model().fit(x, y)
    with pytest.raises(ValueError, match=r"candidates must name at least 2 families; got \['point'\]"):
        model(candidates=["point"]).fit(x, y)
    with pytest.raises(ValueError, match="must be one of point, gaussian, mixture, sample; got 'low_rank'"):
        model(candidates=["point", "low_rank"]).fit(x, y)
    with pytest.raises(ValueError, match=r"steps must be integers of at least 1; got \[0\]"):
        model(steps=[0]).fit(x, y)


def test_the_command_writes_the_table_of_what_it_saw(tmp_path: Path) -> None:
    x, y = noisy(60)
    np.savez(tmp_path / "rows.npz", X=x, y=y)
    train = load_script("train/train_tabular.py")
    flags = ["--model.noise_family", "auto", "--model.baseline", "none", "--model.num_models", "1"]
    flags += ["--model.max_epochs", "4", "--model.num_inference_steps", "auto", "--ensemble_size", "20"]
    flags += ["--model.training_options.candidates", "[point, gaussian]"]
    run = tmp_path / "run"
    assert train.main(["--data.path", str(tmp_path / "rows.npz"), *flags, "--output", str(run)]) == 0
    found = json.loads((run / "selection.json").read_text())
    assert {row["noise_family"] for row in found["rows"]} == {"point", "gaussian"}
    assert "| 1 | gaussian |" in (run / "selection.md").read_text()
    described = json.loads((run / "run.json").read_text())
    pipeline = TabularRegressionPipeline.from_pretrained(run / "model")
    assert pipeline.scheduler.config.noise_family == found["chosen"]["noise_family"]
    assert described["recipe"]["noise_family"] == found["chosen"]["noise_family"]
    assert described["steps_choice"]["num_inference_steps"] == pipeline.config.default_denoising_steps
