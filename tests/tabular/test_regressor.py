"""`DiffusionRegressor` as users meet it."""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.tiny_sets import quick_model

from marigold_uq.metrics import crps
from marigold_uq.pipelines.tabular import TabularRegressionPipeline
from marigold_uq.tabular import DiffusionRegressor


def data(rows: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Heteroscedastic: y = sin(2 x_0) + N(0, (0.1 + 0.5 |x_1|)^2)."""
    rng = np.random.default_rng(seed)
    x = rng.uniform(-1, 1, (rows, 2))
    return x, np.sin(2 * x[:, 0]) + (0.1 + 0.5 * np.abs(x[:, 1])) * rng.normal(size=rows)


@pytest.fixture(scope="module")
def fitted() -> DiffusionRegressor:
    return quick_model(calibration_fraction=0.1).fit(*data(300))


def test_what_a_row_gets_depends_on_no_other_row(fitted: DiffusionRegressor) -> None:
    x = data(12, 1)[0]
    order = np.random.default_rng(0).permutation(12)
    np.testing.assert_allclose(fitted.sample(x, 6)[:, order], fitted.sample(x[order], 6), atol=1e-10)
    np.testing.assert_allclose(fitted.sample(x, 6)[:, 3:4], fitted.sample(x[3:4], 6), atol=1e-10)


def test_shapes_follow_the_documentation(fitted: DiffusionRegressor) -> None:
    x = data(5, 1)[0]
    mean, std = fitted.predict(x, return_std=True)
    assert mean.shape == std.shape == (5,)
    assert fitted.sample(x, 7).shape == (7, 5)
    quantiles = fitted.predict_quantiles(x, [0.1, 0.5, 0.9])
    assert quantiles.shape == (5, 3)
    assert (np.diff(quantiles, axis=1) >= 0).all()
    interval = fitted.predict_interval(x)
    assert interval.shape == (5, 2)
    assert (interval[:, 0] < interval[:, 1]).all()
    uncertainty = fitted.predict_uncertainty(x)
    for part in (uncertainty.total, uncertainty.between_models, uncertainty.within_models, uncertainty.epistemic):
        assert part is not None
        assert part.shape == (5,)
        assert (part >= 0).all()


def test_pickling_and_a_second_fit_with_the_same_seed_change_nothing(fitted: DiffusionRegressor) -> None:
    x = data(5, 1)[0]
    again = quick_model(calibration_fraction=0.1).fit(*data(300))
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(fitted)).predict(x), fitted.predict(x))
    np.testing.assert_array_equal(again.predict(x), fitted.predict(x))


def test_conformal_intervals_cover_new_rows(fitted: DiffusionRegressor) -> None:
    """With 30 calibration rows coverage at 90 % is Beta(28, 3): above .72 in 99.6 % of fits; sd of 400 rows .015."""
    x, y = data(400, 2)
    lower, upper = fitted.predict_interval(x, 0.9).T
    record = fitted.pipeline_.calibration_for()
    assert record.interval is not None
    assert (record.num_calibration, record.ensemble_size, record.num_inference_steps) == (30, 20, 4)
    assert record.interval.coverages[-1] == 0.96  # 30 rows reach 30/31
    assert ((lower <= y) & (y <= upper)).mean() > 0.72


@pytest.mark.parametrize("fraction", [0.4, 0.0])
def test_intervals_are_nested_for_every_coverage(fraction: float) -> None:
    """Calibrated on 120 rows, which reach .99, and between quantiles of 20 draws, which reach .905."""
    model = quick_model(calibration_fraction=fraction, baseline="none").fit(*data(300))
    assert (model.pipeline_.calibration_for().interval is not None) == bool(fraction)
    x = data(50, 1)[0]
    ends = np.stack([model.predict_interval(x, c) for c in np.linspace(0.5, 0.99, 50)])
    steps = np.diff(ends, axis=0)  # (levels, rows, 2)
    assert (steps[..., 0] <= 1e-12).all()
    assert (steps[..., 1] >= -1e-12).all()
    assert (ends[-1, :, 1] > ends[0, :, 1]).all()


def test_an_interval_beyond_the_calibrated_ones_is_extrapolated_with_a_warning(fitted: DiffusionRegressor) -> None:
    x = data(5, 1)[0]
    with pytest.warns(UserWarning, match=r"from 0\.1 to 0\.96; the one for 0\.99 is extrapolated"):
        wide = fitted.predict_interval(x, 0.99)
    assert (np.diff(wide) > np.diff(fitted.predict_interval(x, 0.96))).all()


def test_draws_in_float32_are_those_in_float64_to_a_few_digits(fitted: DiffusionRegressor) -> None:
    """The same random numbers cannot be drawn in both; two sets of 400 draws agree within 5 standard errors."""
    x = data(5, 1)[0]
    quick = quick_model(calibration_fraction=0.1, inference_dtype="float32")
    draws, other = quick.fit(*data(300)).sample(x, 400), fitted.sample(x, 400)
    assert quick.pipeline_.network.feature_mean.dtype == torch.float64
    error = np.sqrt((draws.var(0) + other.var(0)) / 400)
    assert (np.abs(draws.mean(0) - other.mean(0)) < 5 * error).all()
    with pytest.raises(ValueError, match="inference_dtype must be"):
        DiffusionRegressor(inference_dtype="float16").fit(*data(20))


def test_with_few_steps_a_gaussian_head_beats_a_point_head_where_noise_varies() -> None:
    """At 4 steps a point head is under-dispersed (docs/method.md). At 20 of 20 steps, so briefly trained, they tie."""
    (x, y), (x_new, y_new) = data(600), data(300, 1)
    options: dict[str, Any] = {"preset": "paper", "max_epochs": 60, "baseline_epochs": 30, "batch_size": 32}
    options |= {"prediction_type": "v_prediction", "num_models": None, "ensemble_size": 50}
    scores = {}
    for family in ("point", "gaussian"):
        model = quick_model(noise_family=family, **options)
        samples = model.fit(x, y).sample(x_new)
        scores[family] = float(crps(torch.from_numpy(samples), torch.from_numpy(y_new)).mean())
    ideal = np.mean(0.1 + 0.5 * np.abs(x_new[:, 1])) / np.sqrt(np.pi)  # CRPS of the true distribution: E s / sqrt(pi)
    assert scores["gaussian"] < scores["point"]
    assert scores["gaussian"] < 1.25 * ideal


def test_draws_of_a_target_that_takes_few_values_are_such_values() -> None:
    x, y = data(120)
    marks = np.stack([np.clip(np.round(2 * y), -1, 1), y], 1)  # three values, and as many as rows
    with pytest.warns(UserWarning, match="takes few values: no rows are set aside"):
        model = quick_model(calibration_fraction=0.1).fit(x, marks)
    draws = model.sample(x, 10)
    assert np.isfinite(model.predict_interval(x)).all()
    assert not model.pipeline_.calibrations
    assert model.recipe_.calibration_fraction == 0
    assert set(np.unique(draws[..., 0])) <= {-1.0, 0.0, 1.0}
    assert len(np.unique(draws[..., 1])) > 500
    free = quick_model(calibration_fraction=0.1, snap=False).fit(x, marks)
    assert free.pipeline_.calibration_for().interval is not None
    assert len(np.unique(free.sample(x, 10)[..., 0])) > 500


def test_several_targets_and_weights() -> None:
    x, y = data(60)
    model = quick_model().fit(x, np.stack([y, 100 - y], 1), np.linspace(0, 1, 60))
    assert model.predict(x).shape == (60, 2)
    assert model.sample(x, 3).shape == (3, 60, 2)
    assert model.predict_interval(x).shape == (60, 2, 2)
    assert abs(model.predict(x)[:, 1].mean() - 100) < 10


def test_the_unit_of_weights_does_not_matter() -> None:
    """Steps of Adam let rounding grow, to far less than the 1e-2 by which a process with other noise differs."""
    (x, y), weights = data(60), np.random.default_rng(0).uniform(0.2, 3, 60)
    one, other = (quick_model().fit(x, y, unit * weights) for unit in (1.0, 1000.0))
    np.testing.assert_allclose(other.predict(x), one.predict(x), rtol=0, atol=1e-5)


@pytest.mark.parametrize(("rows", "options"), [(45, {"num_models": 50}), (4, {"early_stopping": True})])
def test_more_models_than_rows_stop_early_on_random_shares(rows: int, options: dict[str, Any]) -> None:
    quick = {"num_models": 5, "max_epochs": 2, "baseline_epochs": 2, "num_inference_steps": 2}
    model = quick_model(**{**quick, **options}).fit(*data(rows))
    assert model.recipe_.patience is not None
    assert model.recipe_.validation_folds
    assert np.isfinite(model.predict(data(3, 1)[0])).all()


def test_dataframes_with_text_keep_their_names(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    x, y = data(60)
    frame = pandas.DataFrame({"size": x[:, 0], "colour": np.where(x[:, 1] > 0, "red", "blue")})
    model = quick_model().fit(frame, y)
    assert list(model.feature_names_in_) == ["size", "colour"]
    assert model.n_features_in_ == 2
    model.pipeline_.save_pretrained(tmp_path)
    loaded = TabularRegressionPipeline.from_pretrained(tmp_path)
    generator = torch.Generator().manual_seed(model.seed_)
    np.testing.assert_allclose(loaded(frame, 20, generator=generator).prediction[:, 0], model.predict(frame), rtol=1e-9)
    with pytest.raises(ValueError, match="'size' is numeric, but holds 'big'"):
        model.predict(frame.assign(size="big"))
    with pytest.raises(ValueError, match="fitted on a DataFrame with categories or dates; got an array"):
        model.predict(x)


def test_gaps_and_unseen_categories_are_predicted_also_where_training_had_none(tmp_path: Path) -> None:
    """A missing number counts as the training median, and a missing category as an unseen one."""
    pandas = pytest.importorskip("pandas")
    x, y = data(60)
    frame = pandas.DataFrame({"size": x[:, 0], "colour": np.where(x[:, 1] > 0, "red", "blue")})
    model = quick_model().fit(frame, y)
    want = model.predict(frame.assign(size=np.median(x[:, 0]), colour="green"))
    np.testing.assert_array_equal(model.predict(frame.assign(size=np.nan, colour=None)), want)
    x[::7, 1] = np.nan
    array = quick_model().fit(x, y)
    array.pipeline_.save_pretrained(tmp_path)
    loaded = TabularRegressionPipeline.from_pretrained(tmp_path)
    assert loaded.network.config.num_features == 3
    generator = torch.Generator().manual_seed(array.seed_)
    drawn = loaded(pandas.DataFrame(x), 20, generator=generator).prediction[:, 0]
    np.testing.assert_allclose(drawn, array.predict(x), rtol=1e-9)


def test_what_is_no_number_and_no_category_is_refused_by_name() -> None:
    pandas = pytest.importorskip("pandas")
    x, y = data(20)
    frame = pandas.DataFrame({"size": x[:, 0], "width": x[:, 1]})
    model = quick_model()
    mixed = frame.assign(width=[*x[:-1, 1], "n/a"])
    with pytest.raises(ValueError, match=r"'width' mixes numbers and text \(.* and 'n/a'\)"):
        model.fit(mixed, y)
    days = pandas.date_range("2020-01-01", periods=20)
    for column in (days.to_period("D"), pandas.Series(days).dt.date):
        with pytest.raises(ValueError, match=r"'width' holds .*, a (Period|date): turn it into numbers"):
            model.fit(frame.assign(width=column), y)


def test_numbers_in_a_column_of_objects_are_numbers() -> None:
    pandas = pytest.importorskip("pandas")
    x, y = data(40)
    frame = pandas.DataFrame(x, columns=["size", "width"])
    model, other = (quick_model() for _ in range(2))
    want = model.fit(frame, y).predict(frame)
    np.testing.assert_array_equal(other.fit(frame.astype(object), y).predict(frame), want)
    assert other.pipeline_.network.config.num_features == 2


@pytest.mark.parametrize("preset", ["default", "paper"])
def test_a_feature_that_was_constant_in_training_says_nothing_later(preset: str) -> None:
    """The draws are seeded with the row's features, so they differ, within 5 standard errors of 20 draws."""
    x, y = data(40)
    model = quick_model(preset).fit(np.c_[x, np.full(40, 2020.0)], y)
    same, std = model.predict(np.c_[x, np.full(40, 2020.0)], return_std=True)
    other = model.predict(np.c_[x, np.full(40, 2025.0)])
    assert (np.abs(same - other) < 5 * std * np.sqrt(2 / 20)).all()


def test_weights_that_vanish_beside_others_leave_their_rows_out() -> None:
    x, y = data(40)
    weights = np.ones(40)
    weights[3] = 1e-60
    model = quick_model().fit(x, y, weights)
    rest = np.arange(40) != 3
    alone = quick_model().fit(x[rest], y[rest])
    np.testing.assert_allclose(model.predict(x), alone.predict(x))


def test_few_rows_set_aside_serve_intervals_alone_and_none_is_an_error() -> None:
    model = quick_model(calibration_fraction=0.1).fit(*data(60))
    record = model.pipeline_.calibration_for()
    assert record.interval is not None
    assert (record.num_calibration, record.kappa) == (6, 1.0)
    with pytest.raises(ValueError, match=r"calibration_fraction=0\.1 sets none of 4 rows aside"):
        quick_model(calibration_fraction=0.1).fit(*data(4))


@pytest.mark.parametrize("early_stopping", [True, False])
def test_training_that_diverges_is_an_error(early_stopping: bool) -> None:
    model = quick_model(learning_rate=1e30, early_stopping=early_stopping)
    with pytest.raises(FloatingPointError, match="diverged: scores or weights are not finite"):
        model.fit(*data(60))


def test_counts_may_be_numpys_and_fewer_timesteps_than_steps_are_all_taken(tmp_path: Path) -> None:
    counts = {"num_timesteps": np.int64(5), "max_epochs": np.int64(3), "num_inference_steps": None}
    model = quick_model(noise_family="point", **counts).fit(*data(20))
    assert model.recipe_.num_inference_steps == 5
    model.pipeline_.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="from 1 to num_timesteps=5; got 6"):
        quick_model(num_timesteps=5, num_inference_steps=6).fit(*data(20))
    with pytest.raises(ValueError, match="patience=3 needs early stopping"):
        quick_model(early_stopping=False, patience=3).fit(*data(20))


def test_all_parts_of_a_long_fit_show_their_progress(capsys: pytest.CaptureFixture[str]) -> None:
    quick_model(verbose=1).fit(*data(30))
    shown = capsys.readouterr().err
    assert "baseline" in shown
    assert "denoiser" in shown


def test_infinite_numbers_are_refused(fitted: DiffusionRegressor) -> None:
    x, y = data(20)
    x[3, 1] = np.inf
    with pytest.raises(ValueError, match="infinity"):
        quick_model().fit(x, y)
    with pytest.raises(ValueError, match="infinity"):
        fitted.predict(x)
    with pytest.raises(ValueError, match="NaN"):
        quick_model().fit(data(20)[0], np.where(y > 0, y, np.nan))


def test_wrong_arguments_are_explained(fitted: DiffusionRegressor) -> None:
    x, y = data(20)
    with pytest.raises(ValueError, match="2 features"):
        fitted.predict(x[:, :1])
    with pytest.raises(ValueError, match="preset must be one of"):
        DiffusionRegressor("best").fit(x, y)
    with pytest.raises(ValueError, match="noise_family of a table must be one of"):
        DiffusionRegressor(noise_family="low_rank").fit(x, y)
    with pytest.raises(ValueError, match="coverage"):
        fitted.predict_interval(x, 1.5)


def test_tiny_tables_and_constant_columns_work() -> None:
    x, y = data(4)
    for preset in ("default", "paper"):
        model = quick_model(preset).fit(np.c_[x, np.full(4, 0.1)], y)
        assert np.isfinite(model.predict(np.c_[x, np.ones(4)])).all()
