"""A depth pipeline that sees its pictures through an image encoder."""

import json
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from support.hub_server import HubServer, run_client
from support.tiny_conditioned import conditioned_pipeline
from support.tiny_depth import LAWS, generator, picture, tiny_pipeline

from marigold_uq import MarigoldUQDepthPipeline
from marigold_uq.calibration import Calibration, IntervalGrid
from marigold_uq.pipelines.depth.call import available_modes, quickest_mode

GRID = IntervalGrid((0.5, 0.8, 0.95), ((1.0,), (2.5,), (4.0,)))
COVERAGES = (0.5, 0.7, 0.8, 0.9, 0.95, 0.99)


def calibrated() -> MarigoldUQDepthPipeline:
    conditions = {"num_inference_steps": 1, "ensemble_size": 4}
    record = Calibration(kappa=1.5, interval=GRID, uncertainty="marginal", **conditions)
    return conditioned_pipeline().calibrate(record)


@pytest.mark.parametrize("size", [(48, 64), (24, 64), (50, 30)])
def test_maps_have_the_size_of_the_picture(size: tuple[int, int]) -> None:
    output = conditioned_pipeline()(picture(*size), uncertainty="marginal", coverage=0.9, generator=generator())
    assert output.prediction.shape == (1, *size, 1)
    assert output.uncertainty.shape == (1, *size, 1)
    lower, upper = np.moveaxis(output.interval[0], -1, 0)
    assert (lower < upper).all()


@pytest.mark.parametrize("mode", ["marginal", "trajectory", "ensemble"])
@pytest.mark.parametrize("family", LAWS)
def test_every_mode_runs_with_every_distribution(family: str, mode: str) -> None:
    output = conditioned_pipeline(family)(
        picture(48, 64),
        uncertainty=mode,
        ensemble_size=3,
        output_samples=True,
        output_latent=True,
        generator=generator(),
    )
    assert output.samples.shape == (1, 48, 64, 3)
    assert output.latent.shape == (3 if mode == "ensemble" else 1, 4, 3, 4)
    assert (output.uncertainty > 0).all()


def test_asking_for_marginal_uncertainty_leaves_the_prediction_alone() -> None:
    pipeline = conditioned_pipeline("mixture")
    plain = pipeline(picture(48, 64), generator=generator()).prediction
    asked = pipeline(picture(48, 64), uncertainty="marginal", generator=generator()).prediction
    np.testing.assert_array_equal(plain, asked)


def test_marginal_members_are_sorted_and_their_middle_is_the_median_of_a_symmetric_distribution() -> None:
    pipeline = conditioned_pipeline("gaussian")
    members = pipeline(
        picture(48, 64), uncertainty="marginal", ensemble_size=5, output_samples=True, generator=generator()
    )
    assert (np.diff(members.samples[0], axis=-1) >= 0).all()
    # Gaussian on the scale of the latents, and the decoder is monotone: the mean decodes to the median
    np.testing.assert_allclose(members.samples[0, ..., 2:3], members.prediction[0], atol=1e-6)


def test_marginal_uncertainty_draws_nothing_beyond_the_start() -> None:
    pipeline, given = conditioned_pipeline(), torch.randn(1, 4, 3, 4, generator=generator(3))
    first, second = (
        pipeline(picture(48, 64), uncertainty="marginal", latents=given, generator=generator(seed)) for seed in (0, 1)
    )
    np.testing.assert_array_equal(first.uncertainty, second.uncertainty)


def test_the_batch_size_changes_nothing_and_pictures_may_differ_in_size() -> None:
    pipeline, images = conditioned_pipeline(), [picture(48, 64, 0), picture(32, 64, 1), picture(48, 64, 2)]
    alone, together = (
        pipeline(images, batch_size=size, uncertainty="marginal", generator=generator()) for size in (1, 3)
    )
    for one, other in zip(alone.prediction, together.prediction, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


def test_it_survives_its_folder_which_names_the_encoder(tmp_path: Path) -> None:
    pipeline = conditioned_pipeline()
    pipeline.save_pretrained(tmp_path)
    index = json.loads((tmp_path / "model_index.json").read_text())
    assert index["image_encoder"] == ["marigold_uq.models.condition_encoder", "ConditionEncoder"]
    again = MarigoldUQDepthPipeline.from_pretrained(tmp_path)
    again.set_progress_bar_config(disable=True)
    outputs = [one(picture(48, 64), generator=generator()).prediction for one in (pipeline, again)]
    np.testing.assert_allclose(*outputs, atol=1e-6)


def test_without_an_encoder_no_folder_mentions_one(tmp_path: Path) -> None:
    tiny_pipeline().save_pretrained(tmp_path)
    assert json.loads((tmp_path / "model_index.json").read_text()).get("image_encoder", [None, None]) == [None, None]


def test_the_quickest_mode_follows_from_decoder_and_family() -> None:
    assert quickest_mode(conditioned_pipeline("gaussian")) == "marginal"
    assert quickest_mode(conditioned_pipeline("point")) is None
    assert quickest_mode(tiny_pipeline("gaussian")) == "trajectory"
    assert available_modes(conditioned_pipeline("gaussian")) == ["marginal", "trajectory", "ensemble"]
    assert available_modes(tiny_pipeline("point")) == ["ensemble"]


def test_a_reduction_says_how_several_chains_become_one_and_marginal_has_one_chain() -> None:
    pipeline, options = conditioned_pipeline(), {"uncertainty": "marginal", "ensembling_kwargs": {"reduction": "mean"}}
    plain = pipeline(picture(48, 64), generator=generator()).prediction
    np.testing.assert_array_equal(pipeline(picture(48, 64), generator=generator(), **options).prediction, plain)


def test_a_decoder_that_does_not_keep_the_order_is_refused() -> None:
    with pytest.raises(ValueError, match="maps quantiles to quantiles"):
        tiny_pipeline("gaussian")(picture(), uncertainty="marginal")


@pytest.mark.parametrize("make", [conditioned_pipeline, calibrated], ids=["uncalibrated", "calibrated"])
@pytest.mark.filterwarnings("ignore:intervals were calibrated for coverages")
def test_intervals_are_nested_at_every_coverage(make: Callable[[], MarigoldUQDepthPipeline]) -> None:
    pipeline, options = make(), {"uncertainty": "marginal", "ensemble_size": 4}
    found = [pipeline(picture(48, 64), coverage=c, generator=generator(), **options).interval for c in COVERAGES]
    for narrow, wide in pairwise(found):
        assert (wide[..., 0] <= narrow[..., 0] + 1e-6).all()
        assert (wide[..., 1] >= narrow[..., 1] - 1e-6).all()
        assert np.diff(wide).mean() > np.diff(narrow).mean()


def test_kappa_stretches_the_members_and_leaves_the_prediction() -> None:
    options = {"uncertainty": "marginal", "ensemble_size": 4, "coverage": 0.8}
    plain, output = (
        pipeline(picture(48, 64), generator=generator(), **options)
        for pipeline in (conditioned_pipeline(), calibrated())
    )
    np.testing.assert_array_equal(output.prediction, plain.prediction)
    np.testing.assert_allclose(output.uncertainty, 1.5 * plain.uncertainty, atol=1e-6)
    half_width = 2.5 * output.uncertainty
    np.testing.assert_allclose(output.interval, output.prediction + half_width * np.array([-1, 1]), atol=1e-6)


PRINT_INTERVAL = """
import json, sys
import numpy as np, torch
from marigold_uq import MarigoldUQDepthPipeline

name, picture, target = sys.argv[1:]
source = MarigoldUQDepthPipeline.from_pretrained(name)
if target:
    source.push_to_hub(target)
    source = MarigoldUQDepthPipeline.from_pretrained(target)
generator = torch.Generator().manual_seed(0)
output = source(np.load(picture), uncertainty="marginal", ensemble_size=4, coverage=0.9, generator=generator)
print(json.dumps(output.interval.tolist()))
"""


@pytest.mark.parametrize("through_the_hub", [False, True], ids=["folder", "hub"])
def test_calibrated_intervals_are_the_same_in_a_fresh_process(through_the_hub: bool, tmp_path: Path) -> None:
    pipeline = calibrated()
    pipeline.save_pretrained(tmp_path / "model")
    np.save(tmp_path / "picture.npy", picture(48, 64))
    words = (str(tmp_path / "model"), str(tmp_path / "picture.npy"))
    if through_the_hub:
        with HubServer() as hub:
            printed = run_client(hub, PRINT_INTERVAL, *words, "someone/depth", cache=tmp_path / "cache")
    else:
        command = [sys.executable, "-c", PRINT_INTERVAL, *words, ""]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = json.loads(printed.strip().splitlines()[-1])
    options = {"uncertainty": "marginal", "ensemble_size": 4, "coverage": 0.9}
    expected = pipeline(picture(48, 64), generator=generator(), **options).interval
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_decode_prediction_needs_the_guide_of_the_picture_and_gives_the_prediction() -> None:
    pipeline, image = conditioned_pipeline(), torch.from_numpy(picture(48, 64)).permute(2, 0, 1)[None]
    output = pipeline(image, output_latent=True, output_type="pt", generator=generator())
    (condition,) = pipeline.conditions(image * 2 - 1, 1)
    decoded = pipeline.decode_prediction(output.latent, guide=condition.guide)
    assert torch.allclose(decoded, output.prediction, atol=1e-6)
    with pytest.raises(ValueError, match="guide must be given"):
        pipeline.decode_prediction(output.latent)
    with pytest.raises(ValueError, match=r"guide must be given where, and only where.*AutoencoderKL"):
        tiny_pipeline().decode_prediction(torch.zeros(1, 4, 3, 4), guide=condition.guide)
