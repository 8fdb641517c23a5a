"""Shapes and kinds of output, odd images, and what happens to wrong arguments."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from diffusers.utils import logging
from PIL import Image
from support.tiny_depth import generator, picture, tiny_pipeline

INVARIANCES = {
    "affine": {"scale_invariant": True, "shift_invariant": True},
    "scale": {"scale_invariant": True, "shift_invariant": False},
    "metric": {"scale_invariant": False, "shift_invariant": False},
}


@contextmanager
def log_of_the_pipeline(caplog) -> Iterator[None]:
    """diffusers' loggers do not pass records on to pytest's handler."""
    logger = logging.get_logger("marigold_uq.pipelines.depth")
    logger.addHandler(caplog.handler)
    try:
        yield
    finally:
        logger.removeHandler(caplog.handler)


@pytest.fixture(scope="module")
def gaussian():
    return tiny_pipeline("gaussian")


@pytest.mark.parametrize("mode", ["ensemble", "trajectory"])
@pytest.mark.parametrize("kind", INVARIANCES)
def test_affine_invariant_scale_invariant_and_metric_models_all_have_uncertainty(kind, mode):
    output = tiny_pipeline("gaussian", **INVARIANCES[kind])(
        picture(), uncertainty=mode, ensemble_size=4, output_samples=True, output_type="pt", processing_resolution=0
    )
    prediction, samples = output.prediction[0, 0], output.samples[0]
    assert torch.allclose(output.uncertainty[0, 0], samples.std(0), atol=1e-5)
    if mode == "trajectory":  # the members are in the units of a prediction that they took no part in
        assert (samples.mean(0) - prediction).mean().abs() < 0.1 * samples.std(0).mean()
        return
    assert torch.allclose(prediction, samples.quantile(0.5, dim=0), atol=1e-5)
    low, high = prediction.min().item(), prediction.max().item()
    if kind == "affine":
        assert (low, high) == (pytest.approx(0, abs=1e-6), pytest.approx(1, abs=1e-6))
    elif kind == "scale":
        assert low >= 0
        assert high == pytest.approx(1, abs=1e-6)
    else:  # untouched: every member lies in [0, 1]
        assert (samples.min() >= 0) & (samples.max() <= 1)
        assert high - low < 1 - 1e-3


@pytest.mark.parametrize("mode", ["ensemble", "trajectory"])
def test_arrays_are_channels_last_and_tensors_channels_first(gaussian, mode):
    options = {"uncertainty": mode, "ensemble_size": 3, "quantiles": [0.2], "coverage": 0.5, "output_samples": True}
    images = [picture(24, 32), picture(24, 32, seed=1)]
    as_numpy = gaussian(images, output_type="np", output_latent=True, generator=generator(), **options)
    as_torch = gaussian(images, output_type="pt", generator=generator(), **options)
    for name, width in (("prediction", 1), ("uncertainty", 1), ("quantiles", 1), ("interval", 2), ("samples", 3)):
        array, tensor = getattr(as_numpy, name), getattr(as_torch, name)
        assert isinstance(array, np.ndarray)
        assert array.shape == (2, 24, 32, width)
        assert tensor.shape == (2, width, 24, 32)
        assert array.dtype == np.float32
        assert np.array_equal(array, tensor.permute(0, 2, 3, 1).numpy())
    assert as_numpy.latent.shape == (2 if mode == "trajectory" else 6, 4, 12, 16)
    assert as_torch.latent is None


def test_maps_keep_the_networks_size_where_matching_is_off(gaussian):
    options = {"uncertainty": "ensemble", "ensemble_size": 2, "output_epistemic": True, "coverage": 0.3}
    output = gaussian(picture(50, 75), match_input_resolution=False, output_samples=True, **options)
    for name in ("prediction", "uncertainty", "epistemic", "interval", "samples"):
        assert getattr(output, name).shape[1:3] == (21, 32), name  # 75 -> 32, 50 -> 21; padding taken off again


def test_without_uncertainty_there_is_one_member_and_no_spread(gaussian):
    output = gaussian(picture(), generator=generator(), output_samples=True)
    assert output.samples.shape[-1] == 1
    assert output.uncertainty is output.epistemic is output.quantiles is output.interval is None
    ensembled = gaussian(picture(), ensemble_size=3, generator=generator())
    assert ensembled.uncertainty is None  # as in diffusers: only if asked for


def test_diffusers_flag_and_quantiles_mean_ten_members():
    pipeline = tiny_pipeline()
    expected = pipeline(picture(), uncertainty="ensemble", output_samples=True, generator=generator())
    assert expected.samples.shape[-1] == 10
    flagged = pipeline(picture(), output_uncertainty=True, generator=generator())
    assert np.array_equal(flagged.uncertainty, expected.uncertainty)
    assert np.array_equal(pipeline(picture(), coverage=0.5, generator=generator()).uncertainty, expected.uncertainty)


def test_two_members_have_a_median_between_them_and_a_spread_that_is_not_zero():
    """diffusers' lower median of two is one of them, and its spread is 0 everywhere (measured with 0.42)."""
    output = tiny_pipeline()(picture(), ensemble_size=2, output_uncertainty=True, output_samples=True)
    assert np.allclose(output.prediction, output.samples.mean(-1, keepdims=True), atol=1e-6)
    assert output.uncertainty.mean() > 1e-3


def test_without_a_generator_two_calls_differ_and_the_global_stream_decides():
    pipeline = tiny_pipeline()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        first, second = pipeline(picture()).prediction, pipeline(picture()).prediction
        torch.manual_seed(0)
        assert np.array_equal(pipeline(picture()).prediction, first)
    assert not np.array_equal(first, second)


@pytest.mark.parametrize("mode", ["ensemble", "trajectory"])
@pytest.mark.parametrize(
    ("name", "image"),
    [
        ("1 x 1", np.full((1, 1, 3), 0.5, np.float32)),
        ("20000 x 10", np.full((10, 20000, 3), 0.5, np.float32)),
        ("10 x 20000", np.full((20000, 10, 3), 0.5, np.float32)),
        ("all black", np.zeros((24, 32, 3), np.float32)),
        ("all white 8-bit", np.full((24, 32, 3), 255, np.uint8)),
        ("grey 16-bit", np.full((24, 32), 40000, np.uint16)),
        ("RGBA", Image.new("RGBA", (32, 24), (200, 30, 10, 128))),
        ("palette", Image.new("P", (32, 24), 3)),
    ],
)
def test_odd_images_give_finite_maps_of_their_size(gaussian, name, image, mode):
    height, width = image.shape[:2] if isinstance(image, np.ndarray) else image.size[::-1]
    output = gaussian(image, uncertainty=mode, ensemble_size=3, num_inference_steps=1, coverage=0.4)
    for maps in (output.prediction, output.uncertainty, output.interval):
        assert maps.shape[:3] == (1, height, width)
        assert np.isfinite(maps).all()
    assert (output.uncertainty >= 0).all()


def not_finite():
    image = torch.full((3, 8, 8), 0.5)
    image[0, 0, 0] = float("nan")
    return image


@pytest.mark.parametrize(
    ("image", "error", "message"),
    [
        ("missing.png", FileNotFoundError, "no such image file: missing.png"),
        (lambda folder: folder, IsADirectoryError, "is a folder"),
        (lambda folder: write(folder / "notes.png", b"no picture"), ValueError, "is not an image"),
        (lambda folder: write(folder / "empty.png", b""), ValueError, "is empty"),
        (not_finite(), ValueError, "1 values that are NaN"),
        (np.full((8, 8, 3), 3.0), ValueError, r"floats must be in \[0, 1\]"),
        (np.full((8, 8, 3), -0.5), ValueError, r"\(image \+ 1\) / 2"),
        (np.zeros((8, 8, 5), np.float32), ValueError, "5 channels"),
        (np.zeros((3, 8, 8), np.float32), ValueError, "channels first"),
        (np.zeros((0, 8, 3), np.float32), ValueError, "no pixels"),
        (np.zeros((8, 8, 3), np.int64), ValueError, "int64"),
        ([], ValueError, "no image given"),
        (None, TypeError, "NoneType"),
        (7, TypeError, "give a path"),
        ("https://example.org/cat.png", ValueError, "web address"),
    ],
)
def test_what_is_not_an_image_is_refused_with_the_reason(gaussian, image, error, message, tmp_path):
    if callable(image):
        image = image(tmp_path)
    with pytest.raises(error, match=message):
        gaussian(image)


def write(path, content):
    path.write_bytes(content)
    return path


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"uncertainty": "both"}, "uncertainty must be 'ensemble', 'trajectory', 'marginal' or None; got 'both'"),
        ({"uncertainty": "trajectory", "ensemble_size": 1}, "at least 2 members; got ensemble_size=1"),
        ({"output_uncertainty": True, "ensemble_size": 1}, "at least 2 members"),
        ({"ensemble_size": 0}, "ensemble_size must be at least 1; got 0"),
        ({"num_inference_steps": 0}, "num_inference_steps must be at least 1; got 0"),
        ({"batch_size": 0}, "batch_size must be at least 1; got 0"),
        ({"processing_resolution": 33}, "positive multiple of 2; got 33"),
        ({"processing_resolution": -2}, "processing_resolution"),
        ({"resample_method_input": "lanczos"}, "resample_method_input must be one of"),
        ({"resample_method_output": "cubic"}, "resample_method_output must be one of"),
        ({"output_type": "pil"}, "output_type must be 'np', 'pt' or 'latent'; got 'pil'"),
        ({"quantiles": [0.0, 0.5]}, "strictly between 0 and 1"),
        ({"coverage": 95}, "coverage must lie strictly between 0 and 1, 0.95 for 95 %; got 95"),
        ({"ensembling_kwargs": {"reduction": "mode"}}, "'median' or 'mean'"),
        ({"ensembling_kwargs": {"tolerance": 1}}, r"unknown keys \['tolerance'\]"),
        ({"output_type": "latent", "uncertainty": "trajectory"}, "ends before the decoder"),
        ({"quantiles": 0.5}, "levels between 0 and 1 in a row; got 0.5"),
        ({"generator": [generator()] * 3, "ensemble_size": 2}, "images x chains = 2; got 3"),
        ({"generator": 3}, "torch.Generator"),
        ({"latents": torch.zeros(1, 4, 3, 3)}, r"must have shape \(1, 4, 12, 16\); got \(1, 4, 3, 3\)"),
        ({"latents": torch.zeros(4, 12, 16)}, "images x chains = 1"),
        ({"latents": [torch.zeros(1, 4, 12, 16)] * 2}, "one tensor per image"),
    ],
)
def test_a_wrong_argument_is_a_value_error_that_says_what_was_expected(gaussian, arguments, message):
    with pytest.raises(ValueError, match=message):
        gaussian(picture(), **arguments)


def test_an_unknown_argument_is_refused(gaussian):
    with pytest.raises(TypeError, match="num_steps"):
        gaussian(picture(), num_steps=3)


@pytest.mark.parametrize("kind", [tuple, np.array, torch.tensor, iter])
def test_quantiles_may_come_in_any_kind_of_row(gaussian, kind):
    options = {"uncertainty": "trajectory", "ensemble_size": 4}
    found = gaussian(picture(), quantiles=kind([0.25, 0.5]), generator=generator(), **options).quantiles
    expected = gaussian(picture(), quantiles=[0.25, 0.5], generator=generator(), **options).quantiles
    assert np.array_equal(found, expected)
    assert found.shape[-1] == 2


@pytest.mark.parametrize("family", ["point", "sample"])
def test_a_family_without_a_distribution_refuses_what_needs_one(family):
    pipeline = tiny_pipeline(family)
    with pytest.raises(ValueError, match="use uncertainty='ensemble'"):
        pipeline(picture(), uncertainty="trajectory")
    with pytest.raises(ValueError, match="output_epistemic"):
        pipeline(picture(), output_epistemic=True)


def test_a_model_without_defaults_wants_to_be_told():
    pipeline = tiny_pipeline(default_denoising_steps=None)
    with pytest.raises(ValueError, match="num_inference_steps is not given"):
        pipeline(picture())


def test_a_decoder_that_gives_nan_is_reported_and_not_passed_on():
    pipeline = tiny_pipeline("gaussian")
    with torch.no_grad():
        pipeline.vae.decoder.conv_out.bias.fill_(float("nan"))
    with pytest.raises(ValueError, match="NaN"):
        pipeline(picture())


def test_standard_deviations_stay_positive_where_bicubic_overshoots():
    pipeline = tiny_pipeline("gaussian")
    options = {"uncertainty": "ensemble", "ensemble_size": 3, "resample_method_output": "bicubic"}
    output = pipeline(picture(80, 96), generator=generator(), processing_resolution=16, **options)
    assert output.uncertainty.min() >= 0


def test_quantiles_beyond_the_members_warn(caplog):
    with log_of_the_pipeline(caplog):
        tiny_pipeline("gaussian")(picture(), quantiles=[0.05, 0.5], ensemble_size=4)
    assert "smallest or largest member" in caplog.text


def test_a_schedule_that_starts_late_is_an_error():
    pipeline = tiny_pipeline("gaussian", schedule="v1-0")
    with pytest.raises(ValueError, match="starts from pure noise"):
        pipeline(picture(), num_inference_steps=1)
