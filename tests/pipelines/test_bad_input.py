"""Bad rows, empty batches, wrong types and extreme values: an error that says so, or the right thing, in all tasks."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import tiny_depth, tiny_field
from support.tiny_sets import quick_model

from marigold_uq.calibration import Calibration
from marigold_uq.pipelines.depth import MarigoldUQDepthPipeline
from marigold_uq.tabular import DiffusionRegressor

STATES = torch.stack([tiny_field.tiny_trajectories().read(0, 0, 2)])


@pytest.fixture(scope="module")
def table() -> DiffusionRegressor:
    rng = np.random.default_rng(0)
    features = rng.normal(size=(40, 2))
    return quick_model(num_models=1, max_epochs=2, baseline_epochs=2).fit(features, features.sum(1))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (np.array([[1.0, np.inf]]), "infinity"),
        (np.zeros((0, 2)), "0 sample"),
        (np.zeros((2, 3)), "3 features"),
        (np.array([["a", "b"]]), "could not convert|real numbers|numeric"),
        (np.array([[1 + 2j, 0]]), "[Cc]omplex|real numbers"),
        (np.array([[{}, 1]], dtype=object), "must be|float"),
    ],
)
def test_bad_rows_of_a_table_are_refused(table: DiffusionRegressor, rows: Any, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        table.predict(rows)
    if len(rows):
        with pytest.raises(ValueError, match=r"NaN or infinity|expected features|must be real numbers"):
            table.pipeline_(rows, 2)


def test_a_gap_at_predict_time_is_taken_for_what_training_rows_have_there(table: DiffusionRegressor) -> None:
    """A known value there gives other predictions; what fills the gap gives the same as the gap."""
    gap = np.array([[1.0, np.nan]])
    filled = table._features(gap)
    assert np.isfinite(filled).all()
    np.testing.assert_array_equal(table.predict(gap), table.predict(filled[:, :2]))
    assert not np.array_equal(table.predict(gap), table.predict(np.array([[1.0, filled[0, 1] + 3.0]])))


def test_no_rows_give_no_predictions_in_the_pipeline_of_a_table(table: DiffusionRegressor) -> None:
    assert table.pipeline_(np.zeros((0, 2)), 3).samples.shape == (3, 0, 1)


def test_rows_beyond_all_numbers_are_named(table: DiffusionRegressor) -> None:
    rows = np.zeros((4, 2))
    rows[2] = 1e300
    with pytest.raises(ValueError, match=r"predictions of 1 rows \(2\) are not finite: their features lie too far"):
        table.predict(rows)
    assert np.isfinite(table.predict(1e6 * np.ones((2, 2)))).all()


@pytest.mark.parametrize("unit", [1e154, 1e300, 1e-120, 1e-300])
@pytest.mark.parametrize("what", ["targets", "features"])
def test_numbers_whose_squares_are_lost_are_refused(unit: float, what: str) -> None:
    rng = np.random.default_rng(0)
    features, targets = rng.normal(size=(30, 2)), rng.normal(size=30)
    if what == "targets":
        targets = targets * unit
    else:
        features[:, 1] *= unit
    with pytest.raises(ValueError, match=r"column \d of [Xy] reaches .*choose another unit"):
        quick_model().fit(features, targets)


def test_a_constant_target_that_is_too_large_is_refused_and_another_predicted() -> None:
    features = np.random.default_rng(0).normal(size=(30, 2))
    model = quick_model(num_models=1, max_epochs=1, baseline_epochs=1)
    with pytest.raises(ValueError, match="reaches 1e\\+154 with a spread of 0"):
        model.fit(features, np.full(30, 1e154))
    np.testing.assert_allclose(model.fit(features, np.full(30, 3.0)).predict(features), 3.0, atol=1e-6)


@pytest.mark.parametrize(
    ("states", "message"),
    [
        (STATES[:0], "the batch is empty"),
        (torch.full_like(STATES, torch.nan), "NaN or infinity"),
        (STATES[..., :3], "wrong grid"),
        (STATES.to(torch.complex64), "real numbers; got torch.complex64"),
        (STATES.numpy().astype("U8"), "real numbers; got an array of <U"),
        (STATES.numpy().astype(object), "real numbers; got an array of object"),
        ([[1.0], [1.0, 2.0]], "one array of numbers"),
        (STATES * 1e30, "mismatched statistics"),
        (STATES.double().numpy() * 1e300, "NaN or infinity"),
    ],
)
def test_bad_states_of_a_field_are_refused(states: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiny_field.tiny_pipeline()(states, 1, ensemble_size=2)


def test_whole_numbers_are_states_too() -> None:
    found = tiny_field.tiny_pipeline()(STATES.round().long().numpy(), 1, ensemble_size=2)
    assert bool(found.samples.isfinite().all())


@pytest.mark.parametrize(
    ("image", "message"),
    [
        ([], "the list .* is empty"),
        (np.zeros((0, 8, 8, 3), np.float32), "empty"),
        (np.full((8, 8, 3), np.nan), "NaN"),
        (np.zeros((8, 8, 3), complex), "complex128; expected floats"),
        (np.zeros((8, 8, 3), np.int64), "int64; expected floats"),
        (np.zeros((0, 8, 3)), "no pixels|empty|at least"),
    ],
)
def test_bad_pictures_are_refused(image: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiny_depth.tiny_pipeline("gaussian")(image)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    tiny_depth.tiny_pipeline("gaussian").save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def change(path: Path, **values: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


@pytest.mark.parametrize(
    ("file", "values", "message"),
    [
        ("model_index.json", {"default_denoising_steps": "x"}, "default_denoising_steps is 'x'"),
        ("model_index.json", {"default_denoising_steps": 0}, "expected a whole number from 1"),
        ("model_index.json", {"default_processing_resolution": -3}, "expected a whole number from 0"),
        ("model_index.json", {"calibration": [3]}, ""),
        ("model_index.json", {"calibration": [{"kappa": "x"}]}, ""),
        ("model_index.json", {"unet": ["antigravity", "UNet"]}, "'antigravity', which is not imported"),
        ("model_index.json", {"unet": ["marigold_uq.hub", "push_to_hub"]}, "which is no component"),
        ("model_index.json", {"unet": ["marigold_uq.nothing", "X"]}, "which this version lacks"),
        ("scheduler/scheduler_config.json", {"num_train_timesteps": "x"}, ""),
        ("scheduler/scheduler_config.json", {"noise_family": "unknown"}, ""),
        ("unet/config.json", {"block_out_channels": "x"}, ""),
        ("unet/config.json", {"in_channels": -4}, ""),
    ],
)
def test_a_wrong_value_in_a_models_config_is_one_line(
    file: str, values: dict[str, Any], message: str, saved: Path
) -> None:
    change(saved / file, **values)
    with pytest.raises((ValueError, OSError), match=message):
        MarigoldUQDepthPipeline.from_pretrained(saved)


def test_two_calibrations_are_no_component(saved: Path) -> None:
    """A list of two entries in the index is not always [library, class]."""
    records = [Calibration(kappa=1.5, uncertainty=mode).to_dict() for mode in ("ensemble", "trajectory")]
    change(saved / "model_index.json", calibration=records)
    assert len(MarigoldUQDepthPipeline.from_pretrained(saved).calibrations) == 2


def test_weights_in_a_pickle_are_not_read(saved: Path) -> None:
    weights = saved / "unet" / "diffusion_pytorch_model.safetensors"
    torch.save({}, weights.with_suffix(".bin"))
    weights.unlink()
    with pytest.raises(OSError, match="safetensors"):
        MarigoldUQDepthPipeline.from_pretrained(saved)


def test_damaged_weights_name_the_model(saved: Path) -> None:
    path = saved / "unet" / "diffusion_pytorch_model.safetensors"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises((ValueError, OSError), match="model"):
        MarigoldUQDepthPipeline.from_pretrained(saved)
