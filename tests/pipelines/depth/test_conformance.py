"""What diffusers asks of its own pipelines, asked of ours, on random weights."""

import inspect
import subprocess
import sys

import numpy as np
import pytest
import torch
import torch._dynamo.testing
from diffusers import MarigoldDepthPipeline
from diffusers.utils import logging
from support.tiny_depth import (
    FAMILIES,
    TEXT_DIM,
    generator,
    picture,
    tiny_autoencoder_tiny,
    tiny_pipeline,
    tiny_text_encoder,
)

from marigold_uq import MarigoldUQDepthPipeline

ROUNDING = 1e-5  # batches of other sizes sum in another order: 1.5e-6 per network call (measured), a few calls
FAMILY_NAMES = list(FAMILIES)


def members(pipeline, image, *, seed=0, **options):
    """Aligned members (N, E, H, W) of three chains."""
    options = {"ensemble_size": 3, "output_type": "pt", "output_samples": True, **options}
    return pipeline(image, generator=generator(seed), **options).samples


def test_every_argument_of_diffusers_call_is_here_with_the_same_default():
    ours = inspect.signature(MarigoldUQDepthPipeline.__call__).parameters
    for name, theirs in inspect.signature(MarigoldDepthPipeline.__call__).parameters.items():
        assert name in ours
        # None lets `uncertainty` choose: 10 members with it, and diffusers' 1 without.
        expected = None if name == "ensemble_size" else theirs.default
        assert ours[name].default == expected, name
    positional = [name for name, one in ours.items() if one.kind is one.POSITIONAL_OR_KEYWORD]
    assert positional == list(inspect.signature(MarigoldDepthPipeline.__call__).parameters)


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_a_saved_pipeline_loads_with_the_same_weights_and_predicts_the_same(family, tmp_path):
    pipeline = tiny_pipeline(family, eta=1.0)
    before = members(pipeline, picture())
    pipeline.save_pretrained(tmp_path)
    loaded = MarigoldUQDepthPipeline.from_pretrained(tmp_path)
    loaded.set_progress_bar_config(disable=True)
    assert loaded.scheduler.config.noise_family == family
    for name in ("unet", "vae", "prompt_embedding"):
        weights = getattr(pipeline, name).state_dict()
        for key, value in getattr(loaded, name).state_dict().items():
            assert torch.equal(value, weights[key])
    # Not to the bit: memory-mapped weights lie at other addresses, and the vector code rounds by alignment.
    assert (members(loaded, picture()) - before).abs().max() < ROUNDING


def test_a_saved_pipeline_loads_in_a_process_that_imports_nothing_but_the_package(tmp_path):
    pipeline = tiny_pipeline("mixture", eta=1.0)
    pipeline.save_pretrained(tmp_path / "model")
    np.save(tmp_path / "image.npy", picture())
    script = (
        "import marigold_uq, numpy, torch; torch.set_num_threads(1); "
        "p = marigold_uq.MarigoldUQDepthPipeline.from_pretrained('model'); "
        "o = p(numpy.load('image.npy'), ensemble_size=3, generator=torch.Generator().manual_seed(0)); "
        "numpy.save('depth.npy', o.prediction)"
    )
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, check=True, capture_output=True, timeout=120)
    expected = pipeline(picture(), ensemble_size=3, generator=generator()).prediction
    assert np.abs(np.load(tmp_path / "depth.npy") - expected).max() < ROUNDING


@pytest.mark.parametrize("mode", ["ensemble", "trajectory", None])
def test_the_tuple_holds_what_the_output_object_holds(mode):
    options = {"uncertainty": mode, "ensemble_size": 3, "output_latent": True, "output_samples": True}
    if mode:
        options |= {"quantiles": [0.25], "coverage": 0.5}
    pipeline = tiny_pipeline("gaussian")
    as_object = pipeline(picture(), generator=generator(), **options)
    as_tuple = pipeline(picture(), generator=generator(), return_dict=False, **options)
    asked = ("quantiles", "samples", "interval") if mode else ("samples",)
    names = ("prediction", "uncertainty", "latent", *asked)
    for name, value in zip(names, as_tuple, strict=True):
        expected = getattr(as_object, name)
        assert (value is None) == (expected is None)
        if value is not None:
            assert np.array_equal(np.asarray(value), np.asarray(expected))
    assert (as_object.uncertainty is None) == (mode is None)
    assert len(pipeline(picture(), return_dict=False)) == 3


@pytest.mark.parametrize("mode", ["ensemble", "trajectory"])
def test_an_image_in_a_batch_gives_what_it_gives_alone(mode):
    pipeline = tiny_pipeline("gaussian", eta=1.0)
    images = [picture(seed=i) for i in range(3)]
    chains = 1 if mode == "trajectory" else 3
    streams = [[generator(10 * i + m) for m in range(chains)] for i in range(3)]
    options = {"uncertainty": mode, "ensemble_size": 3, "output_samples": True}
    alone = [pipeline(images[i], generator=streams[i], **options).samples[0] for i in range(3)]
    again = [generator(10 * i + m) for i in range(3) for m in range(chains)]
    together = pipeline(images, generator=again, batch_size=4, **options).samples
    assert np.abs(np.stack(alone) - together).max() < ROUNDING


@pytest.mark.parametrize("kind", [np.asarray, torch.from_numpy])
@pytest.mark.parametrize("count", [1, 3])
def test_a_stacked_batch_a_list_and_single_images_count_the_same(count, kind):
    pipeline = tiny_pipeline()
    images = [picture(seed=i) for i in range(count)]
    arranged = [kind(image if kind is np.asarray else image.transpose(2, 0, 1).copy()) for image in images]
    batch = (np if kind is np.asarray else torch).stack(arranged)
    latents = torch.randn(count, 4, 12, 16, generator=generator())
    expected = pipeline(images, latents=latents).prediction
    assert expected.shape == (count, 24, 32, 1)
    for given in (arranged, batch):
        assert np.abs(pipeline(given, latents=latents).prediction - expected).max() < ROUNDING


@pytest.mark.parametrize("mode", ["ensemble", "trajectory"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_gives_finite_maps_near_those_of_full_precision(dtype, mode):
    full = tiny_pipeline("gaussian")
    latents = torch.randn(1 if mode == "trajectory" else 2, 4, 12, 16, generator=generator(3))
    options = {"uncertainty": mode, "ensemble_size": 2, "latents": latents, "output_type": "pt"}
    expected = full(picture(), generator=generator(), **options)
    half = full.to(dtype)
    assert {half.unet.dtype, half.vae.dtype, half.prompt_embedding.dtype} == {dtype}
    output = half(picture(), generator=generator(), **options)
    assert output.prediction.dtype == torch.float32
    assert torch.isfinite(output.prediction).all()
    assert torch.isfinite(output.uncertainty).all()
    # bfloat16 keeps 8 bits: 4e-3 per operation, some tens of them that average out, on maps in [0, 1]
    assert (output.prediction - expected.prediction).abs().mean() < 0.02


def test_moving_to_half_precision_prints_no_warning_on_account_of_the_prompt_embedding(caplog):
    pipeline = tiny_pipeline("gaussian")
    logger = logging.get_logger("diffusers")
    logger.addHandler(caplog.handler)
    try:
        pipeline.to(torch.float16)
    finally:
        logger.removeHandler(caplog.handler)
    assert not [record for record in caplog.records if "PromptEmbedding" in record.getMessage()]
    assert pipeline.prompt_embedding.embedding.dtype == torch.float16


def test_a_float16_checkpoint_stays_one(tmp_path):
    pipeline = tiny_pipeline("low_rank").to(torch.float16)
    before = members(pipeline, picture())
    pipeline.save_pretrained(tmp_path, variant="fp16")
    assert (tmp_path / "unet" / "diffusion_pytorch_model.fp16.safetensors").is_file()
    loaded = MarigoldUQDepthPipeline.from_pretrained(tmp_path, variant="fp16", dtype=torch.float16)
    loaded.set_progress_bar_config(disable=True)
    assert {loaded.unet.dtype, loaded.vae.dtype, loaded.prompt_embedding.dtype} == {torch.float16}
    assert (members(loaded, picture()) - before).abs().mean() < 1e-3  # 11 bits


def test_components_make_another_pipeline_that_shares_them():
    pipeline = tiny_pipeline("gaussian")
    config = {"default_denoising_steps": 2, "default_processing_resolution": 32}
    other = MarigoldUQDepthPipeline(**pipeline.components, **config)
    other.set_progress_bar_config(disable=True)
    assert other.unet is pipeline.unet
    assert other.scheduler is pipeline.scheduler
    assert torch.equal(members(other, picture()), members(pipeline, picture()))


def test_without_a_stored_embedding_the_text_encoder_runs_once_and_the_result_is_saved(tmp_path):
    pipeline = tiny_pipeline()
    encoder, tokenizer = tiny_text_encoder()
    pipeline.register_modules(text_encoder=encoder, tokenizer=tokenizer, prompt_embedding=None)
    calls = []
    encoder.register_forward_hook(lambda *_: calls.append(1))
    first = pipeline(picture(), generator=generator()).prediction
    pipeline([picture(), picture(seed=1)], generator=generator(), batch_size=2)
    assert len(calls) == 1
    assert pipeline.prompt_embedding.embedding.shape == (1, 2, TEXT_DIM)  # [BOS, EOS], not padded to 77
    pipeline.save_pretrained(tmp_path)
    slim = MarigoldUQDepthPipeline.from_pretrained(tmp_path, text_encoder=None, tokenizer=None)
    slim.set_progress_bar_config(disable=True)
    assert slim.text_encoder is None
    assert np.abs(slim(picture(), generator=generator()).prediction - first).max() < ROUNDING


def test_without_embedding_and_text_encoder_the_error_says_what_is_missing():
    pipeline = tiny_pipeline()
    pipeline.register_modules(prompt_embedding=None)
    with pytest.raises(ValueError, match=r"prompt_embedding.*text encoder"):
        pipeline(picture())


def test_the_callback_sees_every_step_of_every_batch_and_may_change_the_latents():
    pipeline = tiny_pipeline("gaussian")
    seen = []

    def note(pipe, step, timestep, tensors):
        assert pipe is pipeline
        assert list(tensors) == ["latents"]
        seen.append((step, timestep, len(tensors["latents"])))
        return tensors

    options = {"ensemble_size": 3, "batch_size": 2, "num_inference_steps": 2}
    pipeline(picture(), callback_on_step_end=note, **options)
    timesteps = pipeline.scheduler.for_chain(2).timesteps.tolist()
    assert seen == [(step, timesteps[step], size) for size in (2, 1) for step in (0, 1)]

    def zero_at_the_end(pipe, step, timestep, tensors):
        return {"latents": torch.zeros_like(tensors["latents"])} if step == 1 else {}

    output = pipeline(picture(), callback_on_step_end=zero_at_the_end, output_latent=True, **options)
    assert not output.latent.any()


def test_a_callback_may_ask_for_no_tensors_and_not_for_unknown_ones():
    pipeline, seen = tiny_pipeline(), []
    pipeline(
        picture(),
        callback_on_step_end=lambda *arguments: seen.append(arguments[3]),
        callback_on_step_end_tensor_inputs=[],
    )
    assert seen == [{}, {}]
    with pytest.raises(ValueError, match="callback_on_step_end_tensor_inputs"):
        pipeline(picture(), callback_on_step_end=print, callback_on_step_end_tensor_inputs=["prompt_embeds"])


def test_progress_bars_follow_their_config(capsys):
    pipeline = tiny_pipeline()
    pipeline(picture())
    assert capsys.readouterr().err == ""
    pipeline.set_progress_bar_config(disable=False)
    pipeline(picture())
    assert "100%" in capsys.readouterr().err


def test_model_offloading_changes_nothing():
    pipeline = tiny_pipeline("gaussian")
    expected = members(pipeline, picture(), output_epistemic=True)
    pipeline.enable_model_cpu_offload(device="cpu")  # the hooks run; there is no accelerator to move to
    for _ in range(2):
        assert (members(pipeline, picture(), output_epistemic=True) - expected).abs().max() < ROUNDING


def test_sequential_offloading_takes_hold_of_every_network():
    pipeline = tiny_pipeline("gaussian")
    pipeline.enable_sequential_cpu_offload(device="cpu")  # accelerate cannot run with the CPU as its accelerator
    for name in ("unet", "vae", "prompt_embedding"):
        assert all(weight.is_meta for weight in getattr(pipeline, name).parameters()), name
    assert pipeline._execution_device.type == "cpu"


def test_offloading_leaves_the_pipeline_usable_where_the_embedding_is_yet_to_be_made():
    pipeline = tiny_pipeline()
    encoder, tokenizer = tiny_text_encoder()
    pipeline.register_modules(text_encoder=encoder, tokenizer=tokenizer, prompt_embedding=None)
    pipeline.enable_model_cpu_offload(device="cpu")
    assert np.isfinite(pipeline(picture()).prediction).all()


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_compiled_unet_gives_the_same_and_is_compiled_once_for_all_steps(backend):
    pipeline = tiny_pipeline("gaussian", eta=1.0)
    expected = members(pipeline, picture(), num_inference_steps=4)
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend(backend)
    pipeline.unet = torch.compile(pipeline.unet, backend=counter)
    compiled = members(pipeline, picture(), num_inference_steps=4)
    assert (compiled - expected).abs().max() < ROUNDING
    assert counter.frame_count == 1


@pytest.mark.parametrize("mode", ["ensemble", "trajectory"])
def test_vae_slicing_changes_nothing(mode):
    pipeline = tiny_pipeline("gaussian")
    options = {"uncertainty": mode, "ensemble_size": 4, "batch_size": 4}
    expected = members(pipeline, picture(), **options)
    pipeline.vae.enable_slicing()
    assert (members(pipeline, picture(), **options) - expected).abs().max() < ROUNDING


def test_vae_tiling_runs_in_pieces_and_gives_maps_of_full_size():
    pipeline = tiny_pipeline("gaussian")
    pipeline.vae.enable_tiling()
    pipeline.vae.tile_sample_min_size, pipeline.vae.tile_latent_min_size = 16, 8
    sizes = []
    pipeline.vae.decoder.register_forward_pre_hook(lambda _, inputs: sizes.append(inputs[0].shape[-2:]))
    output = pipeline(picture(), uncertainty="trajectory", ensemble_size=2)
    assert output.prediction.shape == (1, 24, 32, 1)
    assert np.isfinite(output.uncertainty).all()
    assert max(max(size) for size in sizes) == 8
    assert len(sizes) > 2


@pytest.mark.parametrize("family", ["point", "gaussian"])
def test_autoencoder_tiny_can_be_the_vae(family):
    pipeline = tiny_pipeline(family, vae=tiny_autoencoder_tiny())
    assert pipeline.vae_scale_factor == 2
    output = pipeline(picture(25, 31), uncertainty="ensemble", ensemble_size=3)
    assert output.prediction.shape == (1, 25, 31, 1)
    assert np.isfinite(output.uncertainty).all()
