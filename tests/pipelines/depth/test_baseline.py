"""A depth pipeline around a depth model of others: what it predicts untrained, in which unit, and how it is kept."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from support.tiny_baselines import KINDS, METRIC, SIZE, tiny_model, write_model
from support.tiny_conditioned import conditioned_pipeline
from support.tiny_depth import generator, picture, tiny_autoencoder_tiny, tiny_pipeline
from torch import Tensor

from marigold_uq import MarigoldUQDepthPipeline
from marigold_uq.calibration import Calibration, IntervalGrid
from marigold_uq.models.depth_baseline import BASELINES, DepthBaseline, InputOptions, register_baseline
from marigold_uq.pipelines.depth.baseline import ROOM, Frame, give_baseline

RESOLUTION = {"processing_resolution": 0}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("models")
    return {kind: write_model(kind, root / kind) for kind in KINDS}


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("start") / "model"
    tiny_pipeline("point", eta=1.0).save_pretrained(folder)
    return str(folder)


def around(
    models: dict[str, str], start: str, kind: str, family: str = "gaussian", **options
) -> MarigoldUQDepthPipeline:
    pipeline = MarigoldUQDepthPipeline.from_baseline(
        models[kind], start=start, noise_family=family, baseline_options=SIZE.get(kind, {}), **options
    )
    pipeline.register_to_config(default_denoising_steps=1)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def learned(pipeline: MarigoldUQDepthPipeline, seed: int = 0) -> MarigoldUQDepthPipeline:
    """With an output that depends on everything the U-Net sees."""
    noise = torch.Generator().manual_seed(seed)
    for module in (pipeline.unet.conv_in, pipeline.unet.conv_out):
        module.weight.data += 0.05 * torch.randn(module.weight.shape, generator=noise)
    return pipeline


def own_map(kind: str, folder: str, image: np.ndarray) -> Tensor:
    """The model's map of a picture of a size that it takes as it is, without any of our code."""
    mean, std = {
        "dpt": ((0.5,) * 3, (0.5,) * 3),
        "glpn": ((0.0,) * 3, (1.0,) * 3),
        "zoedepth": ((0.5,) * 3, (0.5,) * 3),
    }.get(kind, ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    pixels = (torch.from_numpy(image) - torch.tensor(mean)) / torch.tensor(std)
    with torch.no_grad():
        return tiny_model(kind)(pixel_values=pixels.permute(2, 0, 1)[None]).predicted_depth[0]


EDGE = {"depth_anything": 28, "depth_anything_metric": 28, "dpt": 32, "glpn": 32, "zoedepth": 32}
"""Pictures of this size need no resizing."""


@pytest.mark.parametrize("kind", KINDS)
def test_untrained_the_prediction_is_the_models_own_map(models, start, kind):
    image = picture(EDGE[kind], EDGE[kind])
    expected = own_map(kind, models[kind], image)
    pipeline = around(models, start, kind)
    output = pipeline(image, **RESOLUTION, generator=generator(), output_type="pt")
    found = output.prediction[0, 0]
    if expected.shape != found.shape:  # some give coarser maps
        expected = torch.nn.functional.interpolate(expected[None, None], found.shape, mode="bilinear")[0, 0]
    assert expected.std() > 1e-3 * expected.mean().abs()
    if kind in METRIC:
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        assert pipeline.config.prediction_type == "depth"
        assert not pipeline.config.scale_invariant
        assert not pipeline.config.shift_invariant
    else:
        low, span = expected.min(), expected.max() - expected.min()
        torch.testing.assert_close(found, (expected - low + ROOM * span) / ((1 + 2 * ROOM) * span), rtol=0, atol=2e-5)
        assert pipeline.config.prediction_type == "disparity"


def test_the_round_trip_is_exact_whatever_the_autoencoder_loses(models, start):
    """A random autoencoder keeps nothing of a map, and it does not matter."""
    pipeline = around(models, start, "glpn")
    image = picture(32, 64)
    found = pipeline(image, **RESOLUTION, generator=generator(), output_type="pt").prediction[0]
    pixels = 2 * torch.from_numpy(image).permute(2, 0, 1)[None] - 1
    with torch.no_grad():
        torch.testing.assert_close(found, pipeline.baseline(pixels)[0], rtol=1e-5, atol=0)


@pytest.mark.parametrize("mode", ["ensemble", "trajectory"])
def test_metric_baselines_give_deviations_and_intervals_in_metres(models, start, mode):
    """One and the same model whose last layer says twice the depth: everything doubles."""
    pipeline = learned(around(models, start, "depth_anything_metric"))
    pipeline.calibrate(Calibration(interval=IntervalGrid((0.9,), ((1.7,),)), uncertainty=mode, ensemble_size=6))
    call = {"uncertainty": mode, "ensemble_size": 6, "coverage": 0.9, "output_samples": True, **RESOLUTION}
    one = pipeline(picture(28, 42), generator=generator(), **call)
    pipeline.baseline.network.model.head.max_depth *= 2
    two = pipeline(picture(28, 42), generator=generator(), **call)
    for name in ("prediction", "uncertainty", "interval", "samples"):
        np.testing.assert_allclose(2 * getattr(one, name), getattr(two, name), rtol=2e-4, atol=1e-5)
    assert one.prediction.max() > 1.5  # metres, not a range from 0 to 1
    assert (one.uncertainty > 0).all()
    np.testing.assert_allclose(one.samples.std(-1, ddof=1), one.uncertainty[..., 0], rtol=1e-3, atol=1e-6)
    np.testing.assert_allclose(one.interval[..., 1] - one.interval[..., 0], 3.4 * one.uncertainty[..., 0], rtol=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_a_picture_does_not_depend_on_its_company(models, start, kind):
    pipeline = learned(around(models, start, kind))
    images = [picture(32, 48, seed=seed) for seed in range(3)]
    call = {"uncertainty": "ensemble", "ensemble_size": 2, "batch_size": 6, "output_type": "pt", **RESOLUTION}

    def starts(index: int) -> list[torch.Generator]:
        return [generator(10 * index + member) for member in range(2)]

    together = pipeline(images, generator=[one for i in range(3) for one in starts(i)], **call)
    for index, image in enumerate(images):
        alone = pipeline(image, generator=starts(index), **{**call, "batch_size": 1})
        torch.testing.assert_close(together.prediction[index], alone.prediction[0], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(together.uncertainty[index], alone.uncertainty[0], rtol=1e-3, atol=1e-4)


def test_zoedepth_by_itself_would_let_pictures_vote_on_each_other(models):
    """What `one_by_one` is for: without it the first picture's map changes with its company."""
    baseline = DepthBaseline.open(models["zoedepth"], **SIZE["zoedepth"])
    model = baseline.network.model
    pixels = torch.rand(6, 3, 32, 32, generator=generator())
    with torch.no_grad():
        logits = torch.cat([model(pixel_values=one[None]).domain_logits for one in pixels])
        model.metric_head.mlp_classifier.linear2.bias -= logits.median(0).values
        votes = [model(pixel_values=one[None]).domain_logits.argmax(1).item() for one in pixels]
        assert len(set(votes)) == 2, "the pictures must disagree for the test to say anything"
        together = baseline(pixels)
        alone = torch.cat([baseline(one[None]) for one in pixels])
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-5)


RELOAD = """
import sys
from pathlib import Path
import numpy as np, torch
from marigold_uq import MarigoldUQDepthPipeline
root = Path(sys.argv[1])
image = np.load(root / "image.npy")
for folder in sorted(root.glob("*/model")):
    pipeline = MarigoldUQDepthPipeline.from_pretrained(folder)
    output = pipeline(image, processing_resolution=0, uncertainty="trajectory", ensemble_size=4,
                      generator=torch.Generator().manual_seed(0))
    np.savez(folder.parent / "found.npz", prediction=output.prediction, uncertainty=output.uncertainty)
"""


def test_saved_it_gives_the_same_in_a_fresh_process(models, start, tmp_path):
    """Every kind, by reference and by value."""
    outputs = {}
    for kind in KINDS:
        for stored in ("reference", "value"):
            pipeline = learned(around(models, start, kind, stored=stored))
            folder = tmp_path / f"{kind}-{stored}" / "model"
            pipeline.save_pretrained(folder)
            assert bool(list((folder / "baseline").rglob("*.safetensors"))) == (stored == "value")
            if stored == "value":  # nothing else is needed
                config = json.loads((folder / "baseline" / "config.json").read_text())
                (folder / "baseline" / "config.json").write_text(json.dumps({**config, "name": "gone"}))
            outputs[folder.parent] = pipeline(
                picture(32, 48), **RESOLUTION, uncertainty="trajectory", ensemble_size=4, generator=generator()
            )
    np.save(tmp_path / "image.npy", picture(32, 48))
    subprocess.run([sys.executable, "-c", RELOAD, str(tmp_path)], check=True, capture_output=True, text=True)
    for folder, output in outputs.items():
        found = np.load(folder / "found.npz")
        np.testing.assert_allclose(found["prediction"], output.prediction, rtol=1e-5, atol=2e-6)
        np.testing.assert_allclose(found["uncertainty"], output.uncertainty, rtol=1e-4, atol=1e-6)


def test_a_reference_whose_weights_changed_is_refused(start, tmp_path):
    folder = write_model("dpt", tmp_path / "dpt")
    pipeline = MarigoldUQDepthPipeline.from_baseline(folder, start=start)
    pipeline.save_pretrained(tmp_path / "model")
    write_model("dpt", tmp_path / "dpt", seed=1)
    with pytest.raises(ValueError, match="does not hold the weights"):
        MarigoldUQDepthPipeline.from_pretrained(tmp_path / "model")


@pytest.mark.parametrize("family", ["point", "mixture", "low_rank"])
@pytest.mark.parametrize("vae", ["kl", "tiny"])
def test_every_family_starts_at_the_baseline(models, family, vae, tmp_path):
    tiny_pipeline("gaussian", vae=tiny_autoencoder_tiny() if vae == "tiny" else None).save_pretrained(
        tmp_path / "start"
    )
    sizes = {"mixture": {"num_components": 3}, "low_rank": {"rank": 2}}.get(family, {})
    pipeline = around(models, str(tmp_path / "start"), "dpt", family, **sizes)
    plain = around(models, str(tmp_path / "start"), "dpt", "point")
    one, two = (each(picture(32, 32), **RESOLUTION, generator=generator()).prediction for each in (pipeline, plain))
    np.testing.assert_allclose(one, two, atol=1e-5)
    channels = pipeline.vae.config.latent_channels
    assert pipeline.unet.config.in_channels == 3 * channels


def test_a_model_with_an_image_encoder_takes_a_baseline_too(models):
    """Its decoder keeps the order of depths, so quantiles of what is left over are quantiles of the depth."""
    pipeline = conditioned_pipeline("gaussian")
    give_baseline(pipeline, DepthBaseline.open(models["glpn"]))
    pipeline.with_family("gaussian")
    image = picture(32, 64)
    output = learned(pipeline)(
        image, **RESOLUTION, uncertainty="marginal", ensemble_size=5, output_samples=True, generator=generator()
    )
    assert (np.diff(output.samples, axis=-1) >= -1e-6).all()
    assert (output.samples > 0).all()


def test_our_own_point_model_is_a_baseline(start, tmp_path):
    """By the folder of its pipeline: a second stage around a first."""
    first = tiny_pipeline("point")
    first.register_to_config(default_processing_resolution=0, default_denoising_steps=1)
    first.save_pretrained(tmp_path / "first")
    pipeline = MarigoldUQDepthPipeline.from_baseline(tmp_path / "first", start=start, stored="value")
    pipeline.register_to_config(default_denoising_steps=1)
    image = picture(24, 32)
    expected = first(image, generator=torch.Generator().manual_seed(0)).prediction
    expected = (expected - expected.min()) / (expected.max() - expected.min())
    found = pipeline(image, **RESOLUTION, generator=generator(3)).prediction
    np.testing.assert_allclose(found, (expected + ROOM) / (1 + 2 * ROOM), atol=1e-5)
    pipeline.save_pretrained(tmp_path / "second")
    again = MarigoldUQDepthPipeline.from_pretrained(tmp_path / "second")
    np.testing.assert_array_equal(again(image, **RESOLUTION, generator=generator(3)).prediction, found)


def test_a_function_of_the_users_is_a_baseline(start, tmp_path):
    @register_baseline("half_the_green", space="depth", metric=True)
    def half_the_green(images: Tensor) -> Tensor:
        return images[:, 1, ::2, ::2] / 2 + 1

    try:
        pipeline = MarigoldUQDepthPipeline.from_baseline("half_the_green", start=start)
        pipeline.register_to_config(default_denoising_steps=1)
        image = np.full((16, 24, 3), 0.5, np.float32)
        output = pipeline(image, **RESOLUTION, generator=generator())
        np.testing.assert_allclose(output.prediction, 1.25, rtol=1e-5)
        pipeline.save_pretrained(tmp_path / "model")
        MarigoldUQDepthPipeline.from_pretrained(tmp_path / "model")
    finally:
        del BASELINES["half_the_green"]
    with pytest.raises(ValueError, match="not registered in this program"):
        MarigoldUQDepthPipeline.from_pretrained(tmp_path / "model")


def test_a_map_that_is_no_map_is_refused(start):
    for name, function, message in (
        ("nan", lambda images: images[:, 0] * torch.nan, "NaN or infinite"),
        ("four", lambda images: images, r"must return maps \(B, h, w\)"),
    ):
        register_baseline(name, space="depth")(function)
        try:
            pipeline = MarigoldUQDepthPipeline.from_baseline(name, start=start)
            with pytest.raises(ValueError, match=message):
                pipeline(picture(16, 16), **RESOLUTION)
        finally:
            del BASELINES[name]


def test_a_constant_map_has_a_frame():
    for metric, value in ((True, 3.0), (False, 3.0), (False, 0.0)):
        maps = torch.full((2, 1, 4, 4), value)
        frame = Frame.around(maps, metric)
        places = frame.place(maps)
        assert places.isfinite().all()
        assert (places > 0.1).all()
        assert (places < 0.9).all()


def test_a_metric_frame_holds_half_and_twice_of_the_map():
    maps = torch.tensor([0.5, 40.0]).view(1, 1, 1, 2)
    frame = Frame.around(maps, True)
    ends = frame.read(torch.tensor([0.0, 1.0]).view(1, 1, 1, 2))
    torch.testing.assert_close(ends.flatten(), torch.tensor([0.25, 80.0]))
    torch.testing.assert_close(frame.read(frame.place(maps)), maps)


def test_pictures_are_prepared_as_the_models_processor_prepares_them():
    """Sizes of transformers' DPTImageProcessor (Depth Anything's too), by its own function."""
    from transformers.models.dpt.image_processing_pil_dpt import get_resize_output_image_size

    for keep, multiple in ((True, 14), (True, 1), (False, 32)):
        options = InputOptions(518, 518, keep, multiple)
        for height, width in ((480, 640), (375, 1242), (900, 300), (518, 518)):
            image = np.zeros((3, height, width))
            found = get_resize_output_image_size(image, (518, 518), keep, multiple)
            found = (found.height, found.width) if hasattr(found, "height") else tuple(found)
            assert options.size(height, width) == found


@pytest.mark.parametrize("size", [(480, 640), (375, 1242), (32, 63), (100, 150)])
def test_pictures_of_glpn_are_rounded_down_as_its_processor_does(models, size):
    from transformers.models.glpn.image_processing_pil_glpn import GLPNImageProcessorPil

    theirs = GLPNImageProcessorPil()(np.zeros((*size, 3), np.uint8), return_tensors="np")["pixel_values"]
    assert DepthBaseline.open(models["glpn"]).network.inputs.size(*size) == theirs.shape[-2:]


def test_the_models_own_preprocessor_config_counts(tmp_path):
    folder = Path(write_model("dpt", tmp_path / "dpt"))
    settings = {"size": {"height": 24, "width": 40}, "keep_aspect_ratio": True, "ensure_multiple_of": 8}
    settings |= {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6]}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    inputs = DepthBaseline.open(folder).network.inputs
    assert inputs == InputOptions(24, 40, True, 8, (0.1, 0.2, 0.3), (0.4, 0.5, 0.6))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("no/such/folder/at/all", {}, "no baseline"),
        ("plain", {}, "no baseline 'plain'"),
    ],
)
def test_names_that_mean_nothing_are_refused(name, options, message):
    with pytest.raises(FileNotFoundError, match=message):
        DepthBaseline.open(name, **options)


def test_wrong_options_are_named(models):
    with pytest.raises(ValueError, match="unknown options of a baseline: colour"):
        DepthBaseline.open(models["dpt"], colour="red")


def test_a_pipeline_must_promise_what_its_baseline_gives(models, start):
    pipeline = around(models, start, "glpn")
    with pytest.raises(ValueError, match="the config must have"):
        MarigoldUQDepthPipeline(**{**pipeline.components, "scale_invariant": True, "shift_invariant": True})
    with pytest.raises(ValueError, match="has the baseline"):
        give_baseline(pipeline, pipeline.baseline)


def test_half_precision_and_a_calibration_survive(models, start, tmp_path):
    pipeline = around(models, start, "depth_anything")
    pipeline.calibrate(Calibration(kappa=1.5, uncertainty="trajectory"))
    pipeline.save_pretrained(tmp_path / "model")
    again = MarigoldUQDepthPipeline.from_pretrained(tmp_path / "model", dtype=torch.bfloat16)
    assert again.baseline.dtype == torch.bfloat16
    assert again.calibration_for("trajectory").kappa == 1.5
    whole = pipeline(picture(28, 28), **RESOLUTION, generator=generator()).prediction
    half = again(picture(28, 28), **RESOLUTION, generator=generator()).prediction
    assert np.abs(half.astype(np.float32) - whole).mean() < 0.05


def test_the_command_takes_a_baseline(models, start, tmp_path, capsys):
    """Alone its map, without uncertainty; around a trained model another copy of its own, and no other."""
    from PIL import Image

    from marigold_uq.cli import main

    image = tmp_path / "photo.png"
    Image.fromarray((255 * picture(32, 64)).astype(np.uint8)).save(image)
    common = [str(image), "--device", "cpu", "--formats", "npz", "--processing_resolution", "0"]
    assert main(["depth", *common, "--baseline", models["glpn"], "-o", str(tmp_path / "alone")]) == 0
    found = np.load(next((tmp_path / "alone").glob("*.npz")))
    pixels = 2 * torch.from_numpy(np.asarray(Image.open(image)) / np.float32(255)).permute(2, 0, 1)[None] - 1
    with torch.no_grad():
        expected = DepthBaseline.open(models["glpn"])(pixels)[0, 0]
    np.testing.assert_allclose(found["depth"], expected, rtol=1e-4)
    assert "uncertainty" not in found

    around(models, start, "glpn").save_pretrained(tmp_path / "model")
    copy = write_model("glpn", tmp_path / "copy")
    trained = [*common, "--model", str(tmp_path / "model"), "--ensemble_size", "3", "-o", str(tmp_path / "around")]
    assert main(["depth", *trained, "--baseline", copy]) == 0
    assert np.load(next((tmp_path / "around").glob("*.npz")))["uncertainty"].min() > 0
    assert main(["depth", *trained, "--overwrite", "--baseline", models["dpt"]]) == 2
    assert "does not hold the weights" in capsys.readouterr().err
    plain = [*common, "--model", start, "-o", str(tmp_path / "plain"), "--baseline", copy]
    assert main(["depth", *plain]) == 2
    assert "has no baseline: train one" in capsys.readouterr().err


def test_without_training_held_out_pictures_give_the_baselines_map_intervals(models, tmp_path):
    """`marigold-uq depth --baseline`, then `calibrate depth` on its maps: metres, half of the truth inside."""
    from PIL import Image

    from marigold_uq.cli import main

    baseline, data, maps = DepthBaseline.open(models["glpn"]), tmp_path / "data", tmp_path / "maps"
    (data / "rgb").mkdir(parents=True)
    (data / "depth").mkdir()
    for index in range(8):
        pixels = (255 * picture(32, 64, seed=index)).astype(np.uint8)
        Image.fromarray(pixels).save(data / "rgb" / f"{index}.png")
        with torch.no_grad():
            own = baseline(2 * torch.from_numpy(pixels / np.float32(255)).permute(2, 0, 1)[None] - 1)[0, 0].numpy()
        errors = np.random.default_rng(index).normal(size=own.shape)
        np.save(data / "depth" / f"{index}.npy", (own * np.exp(0.1 * errors)).astype(np.float32))
    predict = ["depth", str(data / "rgb"), "--baseline", models["glpn"], "-o", str(maps), "--formats", "npz"]
    assert main([*predict, "--device", "cpu", "--processing_resolution", "0"]) == 0
    calibrate = ["calibrate", "depth", "--files.folder", str(maps), "--files.metric", "true", "--report", "false"]
    assert main([*calibrate, f"--data.root={data}", "--data.name=folder", "-o", str(tmp_path / "calibrated")]) == 0
    shares = []
    for index in range(8):
        found = np.load(tmp_path / "calibrated" / "intervals" / f"{index}.npz")
        half = found["coverages"].tolist().index(0.5)
        truth = np.load(data / "depth" / f"{index}.npy")
        shares.append(((found["lower"][half] <= truth) & (truth <= found["upper"][half])).mean())
    assert 0.5 < np.mean(shares) < 0.75  # four pictures promise a half, and the rank is rounded up
