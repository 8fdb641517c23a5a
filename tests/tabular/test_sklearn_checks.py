"""sklearn's own contract for estimators."""

from collections.abc import Callable

import pytest
from sklearn.base import clone
from sklearn.utils.estimator_checks import parametrize_with_checks
from support.tiny_sets import quick_model

from marigold_uq.tabular import DiffusionRegressor, TrainingOptions

TINY = quick_model(num_models=2, max_epochs=2, baseline_epochs=4, num_inference_steps=1, ensemble_size=8)

SGD = "training in random batches: a weight of 2 is not the same run as a repeated row"
EXPECTED_FAILURES = {
    "check_sample_weight_equivalence_on_dense_data": SGD,
}


@parametrize_with_checks([TINY], expected_failed_checks=lambda estimator: EXPECTED_FAILURES)
def test_estimator_keeps_sklearns_contract(estimator: DiffusionRegressor, check: Callable[..., None]) -> None:
    check(estimator)


def test_the_options_are_a_parameter_like_any_other() -> None:
    model = clone(clone(TINY).set_params(training_options=TrainingOptions(patience=3)))
    assert model.get_params()["training_options"] == TrainingOptions(patience=3)
    assert len(model.get_params()) == 12
    with pytest.raises(TypeError, match=r"training_options must be TrainingOptions"):
        DiffusionRegressor(training_options={"patience": 3}).fit([[0.0], [1.0]], [0.0, 1.0])  # type: ignore[arg-type]
