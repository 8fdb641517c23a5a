"""`point` is diffusers' Marigold; the other families start from the same prediction; members keep to themselves."""

import json

import numpy as np
import pytest
import torch
from diffusers import (
    DDIMScheduler,
    DDPMScheduler,
    HeunDiscreteScheduler,
    MarigoldDepthPipeline,
    PNDMScheduler,
    StableDiffusionPipeline,
)
from PIL import Image
from support.tiny_depth import (
    FAMILIES,
    LAWS,
    SCHEDULES,
    SD_SCHEDULE,
    generator,
    picture,
    stock_pipeline,
    tiny_autoencoder_tiny,
    tiny_pipeline,
    tiny_text_encoder,
    tiny_unet,
    tiny_vae,
)

from marigold_uq import MarigoldUQDepthPipeline
from marigold_uq.sampling import reverse_diffusion

ROUNDING = 1e-5  # another batch size sums in another order: 1.5e-6 per network call (measured), a few calls


def as_pil(image: np.ndarray) -> Image.Image:
    return Image.fromarray((image * 255).round().astype(np.uint8))


def as_torch(image: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(image.transpose(2, 0, 1).copy())


# ------------------------------------------------------------------------------------------------ equal to diffusers


@pytest.mark.parametrize(("schedule", "steps"), [("v1-0", 4), ("v1-1", 1), ("v1-1", 4)])
def test_one_image_with_one_member_is_diffusers_prediction_to_the_bit(schedule, steps):
    ours, stock = tiny_pipeline(schedule=schedule), stock_pipeline(schedule=schedule)
    options = {"num_inference_steps": steps, "output_latent": True}
    got = ours(picture(), generator=generator(5), **options)
    expected = stock(picture(), generator=generator(5), **options)
    assert torch.equal(got.latent, expected.latent)
    assert np.array_equal(got.prediction, expected.prediction)


def test_one_step_of_the_first_marigolds_schedule_is_refused_because_it_returns_the_noise_it_started_from():
    with pytest.raises(ValueError, match="take more steps"):
        tiny_pipeline(schedule="v1-0")(picture(), num_inference_steps=1)


SIZES = ((24, 32), (17, 31))
CONVERSIONS = (as_pil, np.asarray, as_torch)


@pytest.mark.parametrize(
    ("convert", "size", "resolution"),
    [
        (convert, SIZES[(i + j) % 2], resolution)  # every pair of the three, half of the full product
        for i, convert in enumerate(CONVERSIONS)
        for j, resolution in enumerate((0, 16, 32, 48))
    ],
)
def test_any_input_at_any_size_and_resolution_is_diffusers_prediction(convert, size, resolution):
    ours, stock = tiny_pipeline(), stock_pipeline()
    image = convert(picture(*size))
    for match in (True, False):
        options = {"processing_resolution": resolution, "match_input_resolution": match, "num_inference_steps": 1}
        got = ours(image, generator=generator(5), **options).prediction
        expected = stock(image, generator=generator(5), **options).prediction
        assert got.shape == expected.shape
        assert np.array_equal(got, expected)


@pytest.mark.parametrize("methods", [("bicubic", "nearest"), ("area", "nearest-exact"), ("nearest", "bicubic")])
def test_resampling_methods_are_diffusers(methods):
    options = {"resample_method_input": methods[0], "resample_method_output": methods[1]}
    got = tiny_pipeline()(picture(50, 40), generator=generator(), **options).prediction
    expected = stock_pipeline()(picture(50, 40), generator=generator(), **options).prediction
    assert np.array_equal(got, expected)


@pytest.mark.parametrize("batch_size", [1, 4])
def test_a_list_of_generators_gives_every_member_of_every_image_diffusers_latent(batch_size):
    images = [picture(seed=0), picture(seed=1)]
    options = {"ensemble_size": 3, "batch_size": batch_size, "output_latent": True}
    got = tiny_pipeline()(images, generator=[generator(m) for m in range(6)], **options).latent
    expected = stock_pipeline()(images, generator=[generator(m) for m in range(6)], **options).latent
    assert got.shape == expected.shape == (6, 4, 12, 16)
    assert (got - expected).abs().max() < ROUNDING


def test_given_latents_are_the_start_as_in_diffusers():
    latents = torch.randn(2, 4, 12, 16, generator=generator(1))
    images = [as_pil(picture(seed=i)) for i in range(2)]  # diffusers refuses numpy images together with latents
    options = {"latents": latents, "output_latent": True, "output_type": "pt"}
    got, expected = tiny_pipeline()(images, **options), stock_pipeline()(images, **options)
    assert torch.equal(got.latent, expected.latent)
    assert torch.equal(got.prediction, expected.prediction)


def test_with_a_tiny_autoencoder_the_prediction_is_diffusers_up_to_rounding():
    """Its convolutions run with channels last, which sums in another order."""
    vae = tiny_autoencoder_tiny()
    got = tiny_pipeline(vae=vae)(picture(), generator=generator()).prediction
    expected = stock_pipeline(vae=vae)(picture(), generator=generator()).prediction
    assert got.shape == expected.shape
    assert np.abs(got - expected).max() < ROUNDING


# -------------------------------------------------------------------------------------------------- starting points


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("family", LAWS)
def test_another_family_has_the_same_mean_of_its_law_at_every_step_of_the_same_chain(family, schedule):
    ours, point = tiny_pipeline(family, schedule=schedule), tiny_pipeline(schedule=schedule)
    condition = torch.randn(2, 4, 6, 8, generator=generator(1))
    chain = []
    for pipeline in (ours, point):
        pipeline.scheduler.set_timesteps(4)
    reverse_diffusion(
        point.denoiser(condition),
        point.scheduler,
        torch.randn(2, 4, 6, 8, generator=generator(2)),
        observers=[lambda _, step: chain.append(step)],
    )
    assert len(chain) == 4
    for step in chain:
        raw = ours.denoiser(condition)(step.x_t, step.timestep)
        law = ours.scheduler.noise_distribution(raw, step.x_t.shape[1:])
        assert law.variance.min() > 1e-3
        assert (law.mean - step.law.mean).abs().max() < ROUNDING


def test_an_implicit_family_starts_as_the_point_prediction_whatever_its_noise():
    output = tiny_pipeline("sample")(picture(), generator=generator(), output_latent=True).latent
    expected = tiny_pipeline()(picture(), generator=generator(), output_latent=True).latent
    assert (output - expected).abs().max() < ROUNDING


def test_a_pipeline_with_a_law_refuses_a_second_one():
    with pytest.raises(ValueError, match="already"):
        tiny_pipeline("gaussian").with_family("mixture", num_components=2)
    with pytest.raises(ValueError, match="unknown noise family"):
        tiny_pipeline().with_family("laplace")


@pytest.fixture(scope="module")
def stable_diffusion(tmp_path_factory):
    """A folder with a Stable Diffusion of random weights."""
    encoder, tokenizer = tiny_text_encoder()
    pipeline = StableDiffusionPipeline(
        vae=tiny_vae(),
        text_encoder=encoder,
        tokenizer=tokenizer,
        unet=tiny_unet(in_channels=4),
        scheduler=PNDMScheduler(
            **{k: v for k, v in SD_SCHEDULE.items() if k != "clip_sample"},
            skip_prk_steps=True,
            timestep_spacing="leading",
        ),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    folder = tmp_path_factory.mktemp("sd")
    pipeline.save_pretrained(folder)
    return folder, pipeline


@pytest.mark.parametrize("family", ["point", "gaussian", "low_rank", "sample"])
def test_stable_diffusion_becomes_a_depth_pipeline_of_any_family(stable_diffusion, family):
    folder, base = stable_diffusion
    pipeline = MarigoldUQDepthPipeline.from_stable_diffusion(folder, noise_family=family, **FAMILIES[family])
    pipeline.set_progress_bar_config(disable=True)
    assert pipeline.text_encoder is None  # its one embedding is kept
    assert pipeline.prompt_embedding.embedding.shape == (1, 2, 16)
    assert pipeline.scheduler.config.rescale_betas_zero_snr
    assert pipeline.scheduler.config.timestep_spacing == "trailing"
    assert not pipeline.scheduler.config.clip_sample  # PNDM never clips
    assert pipeline.unet.config.in_channels == pipeline.unet.conv_in.in_channels == 8 + (family == "sample")
    # Marigold: with depth = image latent, the halved copies see what the pretrained network saw.
    latent = torch.randn(1, 4, 8, 8, generator=generator())
    text = pipeline.prompt_embedding(1)
    both = torch.cat([latent, latent, *[latent[:, :1]] * (family == "sample")], 1)
    got = pipeline.unet(both, 500, text).sample[:, :4]
    assert (got - base.unet(latent, 500, text).sample).abs().max() < ROUNDING
    output = pipeline(picture(), processing_resolution=16)
    assert np.isfinite(output.prediction).all()
    assert (pipeline.config.default_denoising_steps, pipeline.config.default_processing_resolution) == (4, 768)


def test_an_epsilon_checkpoint_cannot_start_at_zero_snr_and_the_error_says_so(stable_diffusion):
    folder, _ = stable_diffusion
    config = folder / "scheduler" / "scheduler_config.json"
    before = config.read_text()
    try:
        config.write_text(json.dumps({**json.loads(before), "prediction_type": "epsilon"}))
        with pytest.raises(ValueError, match="zero_terminal_snr=False"):
            MarigoldUQDepthPipeline.from_stable_diffusion(folder)
        pipeline = MarigoldUQDepthPipeline.from_stable_diffusion(folder, zero_terminal_snr=False)
    finally:
        config.write_text(before)
    assert pipeline.scheduler.config.prediction_type == "epsilon"
    assert not pipeline.scheduler.config.rescale_betas_zero_snr


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_published_marigold_folder_loads_as_point_with_the_same_prediction(schedule, tmp_path):
    encoder, tokenizer = tiny_text_encoder()
    stock = MarigoldDepthPipeline(
        tiny_unet(),
        tiny_vae(),
        DDIMScheduler(**SCHEDULES[schedule]),
        encoder,
        tokenizer,
        prediction_type="depth",
        scale_invariant=True,
        shift_invariant=True,
        default_denoising_steps=2,
        default_processing_resolution=32,
    )
    stock.set_progress_bar_config(disable=True)
    stock.save_pretrained(tmp_path)
    ours = MarigoldUQDepthPipeline.from_pretrained(tmp_path)
    ours.set_progress_bar_config(disable=True)
    assert ours.scheduler.config.noise_family == "point"
    got = ours(picture(), generator=generator()).prediction
    expected = stock(picture(), generator=generator()).prediction
    assert np.abs(got - expected).max() < ROUNDING
    widened = ours.with_family("gaussian")(picture(), uncertainty="trajectory", ensemble_size=4)
    assert widened.uncertainty.mean() > 0


def test_a_scheduler_of_another_diffusion_is_refused_with_the_reason():
    with pytest.raises(ValueError, match=r"cannot turn a HeunDiscreteScheduler.*LCMScheduler"):
        MarigoldUQDepthPipeline(unet=tiny_unet(), vae=tiny_vae(), scheduler=HeunDiscreteScheduler())


def test_schedulers_of_the_same_diffusion_are_converted_and_keep_their_clipping():
    parts = {"unet": tiny_unet(), "vae": tiny_vae()}
    for scheduler, clips in (
        (DDPMScheduler(clip_sample=False), False),
        (DDIMScheduler(clip_sample=True), True),
        (PNDMScheduler(), False),
    ):
        ours = MarigoldUQDepthPipeline(**parts, scheduler=scheduler).scheduler
        assert ours.config.noise_family == "point"
        assert ours.config.clip_sample == clips
        assert torch.equal(ours.alphas_cumprod, scheduler.alphas_cumprod)


# ------------------------------------------------------------------------------------------------ members by themselves


@pytest.mark.parametrize(
    ("family", "mode"), [*((family, "ensemble") for family in FAMILIES), *((family, "trajectory") for family in LAWS)]
)
def test_members_depend_neither_on_the_batch_size_nor_on_the_order(family, mode):
    pipeline = tiny_pipeline(family, eta=1.0, scale_invariant=False, shift_invariant=False)  # no alignment on top
    images = [picture(seed=i) for i in range(2)]
    chains = 1 if mode == "trajectory" else 4
    options = {"uncertainty": mode, "ensemble_size": 4, "output_samples": True, "output_type": "pt"}

    def run(order, batch_size):
        streams = [generator(10 * i + m) for i in order for m in range(chains)]
        samples = pipeline([images[i] for i in order], generator=streams, batch_size=batch_size, **options).samples
        return samples[torch.argsort(torch.tensor(order))]

    expected = run([0, 1], 1)
    assert expected.std(1).mean() > 1e-3  # members do differ
    for order, batch_size in (([0, 1], 3), ([0, 1], 8), ([1, 0], 2)):
        assert (run(order, batch_size) - expected).abs().max() < ROUNDING


@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_the_noise_of_a_member_is_the_same_to_the_bit_in_any_batch(batch_size):
    """A network that says nothing: what is left of a chain is its noise."""
    pipeline = tiny_pipeline("gaussian", eta=1.0)
    with torch.no_grad():
        pipeline.unet.conv_out.weight.zero_()
    options = {"ensemble_size": 4, "output_latent": True, "num_inference_steps": 4}
    images = [picture(seed=i) for i in range(2)]
    one_by_one = pipeline(images, generator=generator(), batch_size=1, **options).latent
    assert torch.equal(pipeline(images, generator=generator(), batch_size=batch_size, **options).latent, one_by_one)


def test_a_start_that_is_given_leaves_the_noise_of_the_steps_as_it_was():
    """With `latents` the streams must neither repeat the start's numbers nor run ahead."""
    pipeline = tiny_pipeline("gaussian", eta=1.0)
    streams = [generator(m) for m in range(3)]
    start = torch.stack([torch.randn(4, 12, 16, generator=one) for one in streams])
    options = {"ensemble_size": 3, "output_latent": True}
    drawn = pipeline(picture(), generator=[generator(m) for m in range(3)], **options).latent
    given = pipeline(picture(), generator=[generator(m) for m in range(3)], latents=start, **options).latent
    assert torch.equal(drawn, given)


@pytest.mark.parametrize("mode", ["ensemble", "trajectory", None])
def test_images_of_mixed_sizes_give_what_they_give_one_by_one(mode):
    pipeline = tiny_pipeline("mixture", eta=1.0)
    images = [picture(24, 32), as_pil(picture(40, 20)), as_torch(picture(24, 32, seed=2)), picture(9, 33)]
    chains = 1 if mode == "trajectory" else 3
    options = {"uncertainty": mode, "ensemble_size": 3, "output_samples": True, "output_latent": True}

    def streams(i):
        return [generator(10 * i + m) for m in range(chains)]

    together = pipeline(images, generator=[one for i in range(4) for one in streams(i)], batch_size=4, **options)
    assert isinstance(together.prediction, list)
    for i, image in enumerate(images):
        alone = pipeline(image, generator=streams(i), **options)
        for name in ("prediction", "uncertainty", "samples"):
            if getattr(alone, name) is not None:
                assert np.abs(getattr(together, name)[i] - getattr(alone, name)[0]).max() < ROUNDING
        assert (together.latent[i] - alone.latent).abs().max() < ROUNDING
    again = pipeline(images, latents=together.latent, ensemble_size=chains)  # a list per image goes back in
    assert [one.shape for one in again.prediction] == [one.shape for one in together.prediction]


@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("family", LAWS)
def test_a_plain_call_with_a_new_head_gives_the_prediction_of_the_checkpoint(family, steps):
    """Without uncertainty the chain follows the mean of the law, which is the pretrained output."""
    predictions = [
        tiny_pipeline(name)(picture(), num_inference_steps=steps, generator=generator()).prediction
        for name in ("point", family)
    ]
    assert np.abs(predictions[0] - predictions[1]).max() < ROUNDING
