"""What a stored calibration does: kappa, nested intervals, conditions, and what older checkpoints hold."""

import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers.utils import logging
from support.hub_server import HubServer, run_client
from support.tiny_depth import generator, picture, tiny_pipeline

from marigold_uq import MarigoldUQDepthPipeline
from marigold_uq.alignment import EnsembledDepth
from marigold_uq.calibration import Calibration, IntervalGrid
from marigold_uq.pipelines.depth.call import DepthCall
from marigold_uq.pipelines.depth.images import RESAMPLE_METHODS
from marigold_uq.pipelines.depth.output import member_statistics, resize_maps
from marigold_uq.randomness import base_seed, member_generators

MODES = ("ensemble", "trajectory")
GRID = IntervalGrid((0.5, 0.8, 0.95), ((1.0,), (2.5,), (4.0,)))
CONDITIONS = {"num_inference_steps": 2, "ensemble_size": 4}
COVERAGES = (0.5, 0.6, 0.7, 0.8, 0.89, 0.9, 0.91, 0.95, 0.97, 0.99)
FROZEN = Path(__file__).parents[2] / "checkpoints" / "depth"


def calibrated(*modes: str) -> MarigoldUQDepthPipeline:
    pipeline = tiny_pipeline("gaussian")
    for mode in modes:
        pipeline.calibrate(Calibration(kappa=1.5, interval=GRID, uncertainty=mode, **CONDITIONS))
    return pipeline


@pytest.mark.parametrize("mode", MODES)
def test_kappa_stretches_members_around_their_mean_and_leaves_the_prediction(mode):
    options = {"uncertainty": mode, "ensemble_size": 4, "output_samples": True}
    before = tiny_pipeline("gaussian")(picture(), generator=generator(), **options)
    after = calibrated(mode)(picture(), generator=generator(), **options)
    assert np.array_equal(after.prediction, before.prediction)
    assert np.allclose(after.uncertainty, 1.5 * before.uncertainty, atol=1e-6)
    mean = before.samples.mean(-1, keepdims=True)
    assert np.allclose(after.samples, mean + 1.5 * (before.samples - mean), atol=1e-5)
    assert np.allclose(after.samples.std(-1, ddof=1, keepdims=True), after.uncertainty, atol=1e-5)


def test_a_calibrated_interval_has_the_grids_half_width_in_its_own_mode_only():
    pipeline = calibrated("ensemble")
    output = pipeline(picture(), coverage=0.8, uncertainty="ensemble", ensemble_size=4, quantiles=[0.5])
    assert output.quantiles.shape[-1] == 1
    half_width = 2.5 * output.uncertainty
    assert np.allclose(output.interval, output.prediction + half_width * np.array([-1, 1]), atol=1e-6)
    other = pipeline(picture(), coverage=0.8, uncertainty="trajectory", ensemble_size=4)
    assert np.abs(np.diff(other.interval)[..., 0] / 2 / other.uncertainty[..., 0] - 2.5).min() > 1e-3


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("modes", [(), MODES], ids=["uncalibrated", "calibrated"])
@pytest.mark.filterwarnings("ignore:intervals were calibrated for coverages")
def test_intervals_are_nested_at_every_coverage(mode, modes):
    pipeline = calibrated(*modes)
    options = {"uncertainty": mode, "ensemble_size": 4}
    found = [pipeline(picture(), coverage=c, generator=generator(), **options).interval for c in COVERAGES]
    for narrow, wide in pairwise(found):
        assert (wide[..., 0] <= narrow[..., 0] + 1e-6).all()
        assert (wide[..., 1] >= narrow[..., 1] - 1e-6).all()
        assert np.diff(wide).mean() > np.diff(narrow).mean()


def resized_interval(pipeline: MarigoldUQDepthPipeline, coverage: float, method: str) -> torch.Tensor:
    """The interval around a map whose spread is a few spikes, at five times its size."""
    noise = torch.Generator().manual_seed(0)
    spread = torch.where(torch.rand(8, 8, generator=noise) > 0.8, 5.0, 0.01)
    members = torch.rand(8, 8, generator=noise) + spread * torch.randn(4, 8, 8, generator=noise)
    ensemble = EnsembledDepth(members.mean(0), members.std(0), members, torch.ones(4), torch.zeros(4))
    call = DepthCall(pipeline, coverage=coverage, ensemble_size=4, resample_method_output=method)
    found = resize_maps(member_statistics(ensemble, None, torch.zeros(4, 4, 1, 1), call), (40, 40), call).interval
    assert found is not None
    assert found.shape == (2, 40, 40)
    return found


@pytest.mark.parametrize("method", RESAMPLE_METHODS)
@pytest.mark.parametrize("modes", [(), MODES], ids=["uncalibrated", "calibrated"])
def test_resized_intervals_do_not_cross(method, modes):
    lower, upper = resized_interval(calibrated(*modes), 0.8, method)
    assert (lower <= upper).all()


@pytest.mark.parametrize("method", RESAMPLE_METHODS)
def test_resized_calibrated_intervals_are_nested(method):
    pipeline = calibrated("ensemble")
    for narrow, wide in pairwise(resized_interval(pipeline, c, method) for c in (0.5, 0.6, 0.8, 0.95)):
        assert (wide[0] <= narrow[0]).all()
        assert (wide[1] >= narrow[1]).all()


def test_kappa_and_the_interval_have_a_single_entry():
    pipeline = tiny_pipeline("gaussian")
    with pytest.raises(ValueError, match="kappa needs 1 entries, one per output; got 2"):
        pipeline.calibrate(Calibration(kappa=(1.0, 2.0), uncertainty="ensemble"))
    with pytest.raises(ValueError, match="intervals need 1 half widths, one per output; got 2"):
        pipeline.calibrate(Calibration(interval=IntervalGrid((0.5,), ((1.0, 2.0),)), uncertainty="ensemble"))
    assert pipeline.calibrations == ()


def test_an_old_checkpoint_loads_without_a_complaint_about_types(caplog):
    logger = logging.get_logger("diffusers")
    logger.addHandler(caplog.handler)
    try:
        MarigoldUQDepthPipeline.from_pretrained(FROZEN)
    finally:
        logger.removeHandler(caplog.handler)
    assert "Expected types" not in caplog.text


def test_a_coverage_outside_the_grid_warns():
    with pytest.warns(UserWarning, match="calibrated for coverages from 0.5 to 0.95"):
        calibrated("ensemble")(picture(), coverage=0.99, ensemble_size=4)


def test_a_call_without_uncertainty_needs_no_calibration():
    plain, pipeline = tiny_pipeline("gaussian"), calibrated(*MODES)
    assert np.array_equal(
        pipeline(picture(), generator=generator()).prediction, plain(picture(), generator=generator()).prediction
    )


def test_wrong_calibrations_are_refused():
    pipeline = tiny_pipeline("gaussian")
    for mode in ("both", None):
        with pytest.raises(ValueError, match=r"must be one of \['ensemble', 'trajectory', 'marginal'\]"):
            pipeline.calibrate(Calibration(uncertainty=mode))
    pipeline.calibrate(Calibration(tau=0.5, uncertainty="ensemble"))
    with pytest.raises(ValueError, match="tau must be the same for all ways"):
        pipeline.calibrate(Calibration(tau=0.25, uncertainty="trajectory"))
    pipeline.scheduler.calibrate(1.0)
    with pytest.raises(ValueError, match=r"made with tau = 0.5.*has tau = 1"):
        pipeline(picture(), uncertainty="ensemble")
    with pytest.raises(ValueError, match="list of records"):
        tiny_pipeline("gaussian", calibration={"kappa": 2.0})
    with pytest.raises(ValueError, match=r"pipeline\.calibrate"):
        tiny_pipeline("gaussian", calibration=[{"kappa": 2.0}])


def test_a_call_unlike_the_calibration_is_warned(caplog):
    pipeline = calibrated("trajectory")
    logger = logging.get_logger("marigold_uq")
    logger.addHandler(caplog.handler)
    try:
        pipeline(picture(), uncertainty="trajectory", ensemble_size=4)
        assert not caplog.records
        pipeline(picture(), uncertainty="trajectory", ensemble_size=3)
    finally:
        logger.removeHandler(caplog.handler)
    assert "calibrated with ensemble_size=4, called with 3" in caplog.text


PRINT_INTERVALS = """
import json, sys
import numpy as np, torch
from marigold_uq import MarigoldUQDepthPipeline

name, picture, target = sys.argv[1:]
source = MarigoldUQDepthPipeline.from_pretrained(name)
if target:
    source.push_to_hub(target)
    source = MarigoldUQDepthPipeline.from_pretrained(target)
found = {}
for mode in ("ensemble", "trajectory"):
    generator = torch.Generator().manual_seed(0)
    output = source(np.load(picture), uncertainty=mode, ensemble_size=4, coverage=0.9, generator=generator)
    found[mode] = output.interval.tolist()
print(json.dumps(found))
"""


@pytest.mark.parametrize("through_the_hub", [False, True], ids=["folder", "hub"])
def test_calibrated_intervals_are_the_same_in_a_fresh_process(through_the_hub, tmp_path):
    pipeline = calibrated(*MODES)
    pipeline.save_pretrained(tmp_path / "model")
    np.save(tmp_path / "picture.npy", picture())
    words = (str(tmp_path / "model"), str(tmp_path / "picture.npy"))
    if through_the_hub:
        with HubServer() as hub:
            printed = run_client(hub, PRINT_INTERVALS, *words, "someone/depth", cache=tmp_path / "cache")
    else:
        command = [sys.executable, "-c", PRINT_INTERVALS, *words, ""]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = json.loads(printed.strip().splitlines()[-1])
    for mode in MODES:
        expected = pipeline(picture(), uncertainty=mode, ensemble_size=4, coverage=0.9, generator=generator()).interval
        assert np.allclose(found[mode], expected, atol=1e-5), mode


# How `FROZEN` was made, by the code before there was a grid of coverages (family "gaussian", 23,000 weights):
#     pipeline.calibrate("ensemble", Calibration(kappa=1.5, conformal_scale=2.25, coverage=0.9, num_steps=2,
#                                                num_members=4, num_calibration=40, note="frozen"))
#     pipeline.calibrate("trajectory", Calibration(kappa=2.0, conformal_scale=2.5, ...))
#     pipeline(np.linspace(0, 1, 16 * 24 * 3, dtype=np.float32).reshape(16, 24, 3), uncertainty=mode, ensemble_size=4,
#              coverage=0.9, generator=torch.Generator().manual_seed(0))
# and the numbers: pixel (3, 5), pixel (12, 20) and the mean of each map, printed by that code. A single generator then
# gave each chain a stream of its own, which also drew its start. (What "trajectory" drew was another estimate.)
RECORDED = {
    "ensemble": {
        "prediction": (0.415761, 0.364439, 0.237678),
        "uncertainty": (0.322074, 0.245258, 0.387323),
        "lower": (-0.308905, -0.187392, -0.633798),
        "upper": (1.140427, 0.91627, 1.109153),
    },
    None: {"prediction": (0.00181, 0.01012, 0.009681)},
}


@pytest.mark.parametrize("mode", RECORDED)
def test_a_checkpoint_of_an_older_version_gives_its_numbers(mode):
    pipeline = MarigoldUQDepthPipeline.from_pretrained(FROZEN)
    pipeline.set_progress_bar_config(disable=True)
    image = np.linspace(0, 1, 16 * 24 * 3, dtype=np.float32).reshape(16, 24, 3)
    options = {"uncertainty": mode, "ensemble_size": 4, "coverage": 0.9} if mode else {}
    streams = member_generators(base_seed(generator()), 4, prefix=(0,)) if mode else generator()
    output = pipeline(image, generator=streams, **options)
    maps = {"prediction": output.prediction[0, ..., 0]}
    if mode:
        maps["uncertainty"] = output.uncertainty[0, ..., 0]
        maps["lower"], maps["upper"] = np.moveaxis(output.interval[0], -1, 0)
    for name, numbers in RECORDED[mode].items():
        found = (maps[name][3, 5], maps[name][12, 20], maps[name].mean())
        assert np.allclose(found, numbers, atol=2e-5), name


def test_an_old_calibration_is_saved_again_as_a_list_of_records(tmp_path):
    pipeline = MarigoldUQDepthPipeline.from_pretrained(FROZEN)
    pipeline.save_pretrained(tmp_path)
    (first, second) = json.loads((tmp_path / "model_index.json").read_text())["calibration"]
    assert (first["uncertainty"], second["uncertainty"]) == MODES
    assert first["interval"] == {"coverages": [0.9], "scales": [[2.25]]}
    assert first["num_inference_steps"] == 2
    assert first["ensemble_size"] == 4
