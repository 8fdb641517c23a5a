"""kappa of small tables: chosen on rows that neither the model nor the baseline was fitted on."""

from typing import Any

import numpy as np
import pytest
import torch
from support.tiny_sets import quick_model

from marigold_uq.calibration import KappaChoice, choose_kappa
from marigold_uq.tabular import DiffusionRegressor, TrainingOptions, regressor, stack
from marigold_uq.tabular.recipe import resolve_recipe
from marigold_uq.tabular.stack import TrainingRows, fit_stack


def with_kappa(**changes: Any) -> DiffusionRegressor:
    """A quick model that chooses kappa on its validation rows."""
    return quick_model(**{"kappa_from_validation": True, **changes})


def noise(rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Targets that features know nothing about: whoever predicts them has seen them."""
    rng = np.random.default_rng(0)
    return rng.normal(size=(rows, 3)), rng.normal(size=rows)


def test_kappa_is_chosen_on_all_rows_by_models_that_have_not_seen_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The correlation with pure noise has a standard deviation of 1/sqrt(300); that of a memory is near 1."""
    asked: list[tuple[torch.Tensor, torch.Tensor]] = []

    def watched(samples: torch.Tensor, target: torch.Tensor, weights: torch.Tensor) -> KappaChoice:
        asked.append((samples, target))
        return choose_kappa(samples, target, weights=weights)

    monkeypatch.setattr(regressor, "choose_kappa", watched)
    x, y = noise(300)
    model = with_kappa().fit(x, y)
    ((samples, target),) = asked
    np.testing.assert_array_equal(np.sort(target.numpy()), np.sort(y))
    assert samples.shape == (40, 300)  # two models draw at least 20 each once there is a kappa
    assert abs(np.corrcoef(samples.mean(0), target)[0, 1]) < 4 / np.sqrt(300)
    assert np.corrcoef(model.pipeline_.baseline(_standardised(model, x))[0, :, 0], y)[0, 1] > 0.5
    assert model.pipeline_.calibration_for().kappa == (choose_kappa(samples, target).kappa,)
    assert model.pipeline_.calibration_for().interval is None


def _standardised(model: DiffusionRegressor, x: np.ndarray) -> torch.Tensor:
    network = model.pipeline_.network
    return ((torch.from_numpy(x) - network.feature_mean[0]) / network.feature_scale[0]).unsqueeze(0)


def test_kappa_stretches_the_same_draws() -> None:
    x, y = noise(80)
    model = with_kappa().fit(x, y)
    plain = quick_model().fit(x, y)
    assert not plain.pipeline_.calibrations
    ratio = model.sample(x[:5], 40).std(0) / plain.sample(x[:5], 40).std(0)
    np.testing.assert_allclose(ratio, model.pipeline_.calibration_for().kappa[0], rtol=1e-6)


def test_every_row_stops_one_model_and_brings_out_of_fold_predictions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trained: list[Any] = []
    original = stack._split_rows

    def watched(tables: Any, weights: Any, splits: Any, *others: Any) -> Any:
        trained.extend(splits)
        return original(tables, weights, splits, *others)

    monkeypatch.setattr(stack, "_split_rows", watched)
    x, y = noise(60)
    options = TrainingOptions(baseline_epochs=10)
    recipe = resolve_recipe("default", 60, options=options, num_models=2, max_epochs=8, num_inference_steps=4)
    fitted = fit_stack([TrainingRows(x, y[:, None], np.ones(60))], recipe, [0])
    assert fitted.validation is not None
    assert sorted(torch.cat(fitted.validation.rows).tolist()) == list(range(60))
    for (train, _), held_out in zip(trained, fitted.validation.rows, strict=True):
        assert sorted([*train.tolist(), *held_out.tolist()]) == list(range(60))
    predicted = torch.cat(fitted.validation.predictions)[torch.cat(fitted.validation.rows).argsort(), 0]
    assert abs(np.corrcoef(predicted, y)[0, 1]) < 4 / np.sqrt(60)
    assert fitted.validation.extras is not None
    assert [len(extras) for extras in fitted.validation.extras] == [30, 30]


def test_a_pipeline_takes_the_baselines_prediction_from_outside() -> None:
    x, y = noise(50)
    pipeline = quick_model().fit(x, y).pipeline_
    network = pipeline.network
    rows = (torch.from_numpy(x) - network.feature_mean[0]) / network.feature_scale[0]
    prediction, extras = (values[0] for values in pipeline.baseline.describe(rows.unsqueeze(0)))
    many = 300  # draws, so that the rows come in chunks
    given = pipeline(x, many, baseline_output=(prediction, extras)).samples
    np.testing.assert_allclose(given, pipeline(x, many).samples, atol=1e-9)
    moved = pipeline(x, many, baseline_output=(prediction + 1, extras)).samples
    assert np.median(moved - given) > 0.5 * y.std()
    with pytest.raises(ValueError, match=r"baseline_output of shapes \[\(50, 1\), .*got \[\(49, 1\)"):
        pipeline(x, baseline_output=(prediction[1:], extras[1:]))
    with pytest.raises(ValueError, match=r"got \[\(50, 1\)\]"):
        pipeline(x, baseline_output=(prediction, None))


def test_kappa_does_not_depend_on_how_many_draws_predictions_take() -> None:
    """Chosen on 5 draws it would be 1.6 times too large."""
    x, y = noise(200)
    few, many = (with_kappa(ensemble_size=count).fit(x, y).pipeline_.calibration_for().kappa[0] for count in (5, 100))
    assert few == pytest.approx(many, rel=0.1)


@pytest.mark.parametrize("baseline", ["trees", "none"])
def test_each_of_two_targets_has_its_own_kappa_with_any_baseline_out_of_fold(baseline: str) -> None:
    x, y = noise(120)
    both = np.stack([y, 1000 * np.sign(y) * y**2], 1)
    model = with_kappa(baseline=baseline).fit(x, both)
    kappa = model.pipeline_.calibration_for().kappa
    plain = quick_model(baseline=baseline).fit(x, both)
    ratio = model.sample(x[:4], 40).std(0) / plain.sample(x[:4], 40).std(0)
    np.testing.assert_allclose(ratio, np.tile(kappa, (4, 1)), rtol=1e-6)
    assert kappa[0] != kappa[1]


def test_kappa_takes_the_place_of_the_pool_and_no_preset_has_it() -> None:
    recipe = resolve_recipe("default", 100, options=TrainingOptions(kappa_from_validation=True))
    assert (recipe.kappa_from_validation, recipe.pool, recipe.one_step) == (True, False, True)
    for preset in ("default", "paper"):
        assert not resolve_recipe(preset, 100).kappa_from_validation


@pytest.mark.parametrize(
    ("options", "obstacle"),
    [
        ({"early_stopping": False}, "no validation rows"),
        ({"baseline": "mlp"}, "fitted on all rows"),
        ({"calibration_fraction": 0.5}, "calibration_fraction sets rows aside"),
    ],
)
def test_where_it_cannot_be_it_is_refused(options: dict[str, Any], obstacle: str) -> None:
    x, y = noise(50)
    with pytest.raises(ValueError, match=obstacle):
        with_kappa(**options).fit(x, y)


def test_targets_of_few_values_have_no_kappa_and_say_so_if_it_was_asked_for() -> None:
    x, y = noise(100)
    with pytest.warns(UserWarning, match="there is no kappa"):
        model = with_kappa().fit(x, np.sign(y))
    assert not model.pipeline_.calibrations


def test_too_few_rows_for_kappa_are_named() -> None:
    x, y = noise(50)
    with pytest.warns(UserWarning, match="needs 20 held-out rows, there are 8"):
        assert not with_kappa(num_models=1).fit(x, y).pipeline_.calibrations


def test_kappa_follows_the_weights_of_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = noise(100)
    weights = np.random.default_rng(1).uniform(0.5, 2.0, size=100)
    asked: list[tuple[torch.Tensor, torch.Tensor]] = []

    def watched(samples: torch.Tensor, target: torch.Tensor, weights: torch.Tensor) -> KappaChoice:
        asked.append((target, weights))
        return choose_kappa(samples, target, weights=weights)

    monkeypatch.setattr(regressor, "choose_kappa", watched)
    for options in ({"kappa_from_validation": True}, {"calibration_fraction": 0.3}):
        quick_model(**options).fit(x, y, sample_weight=weights)
    given = dict(zip(y, weights / weights.mean(), strict=True))
    assert [len(target) for target, _ in asked] == [100, 30]
    for target, used in asked:
        ratio = used.numpy() / np.array([given[value] for value in target.numpy()])
        np.testing.assert_allclose(ratio, ratio[0])
