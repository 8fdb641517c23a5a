"""The `point` family is stock DDIM, bit for bit, wherever stock steps to the previous used timestep; else right."""

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from diffusers import DDIMScheduler, DDPMScheduler
from torch import Tensor

from marigold_uq.schedulers import DistributionalDDIMScheduler

SHAPE = (3, 2, 4, 4)
PREDICTION_TYPES = ("epsilon", "v_prediction", "sample")
STABLE_DIFFUSION = {"beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012}
AGREEING = [("leading", 1), ("leading", 7), ("leading", 50), ("leading", 1000), ("trailing", 4), ("trailing", 50)]


def normal(seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed)).to(dtype)


def seeded(seed: int, count: int | None) -> torch.Generator | list[torch.Generator]:
    if count is None:
        return torch.Generator().manual_seed(seed)
    return [torch.Generator().manual_seed(seed + b) for b in range(count)]


def pair(steps: int, **options: Any) -> tuple[DistributionalDDIMScheduler, DDIMScheduler]:
    ours, stock = DistributionalDDIMScheduler(**options), DDIMScheduler(**options)
    ours.set_timesteps(steps)
    stock.set_timesteps(steps)
    return ours, stock


def some(timesteps: Tensor) -> list[int]:
    """At most ten of them, both ends included."""
    stride = max(1, len(timesteps) // 8)
    return sorted({*timesteps[::stride].tolist(), int(timesteps[-1])}, reverse=True)


def assert_same_step(
    ours: DistributionalDDIMScheduler, stock: DDIMScheduler, t: int, *, dtype: torch.dtype = torch.float32, **step: Any
) -> None:
    count = step.pop("generators", 0)
    randomness = [{"generator": seeded(t, count)} if count != 0 else {} for _ in range(2)]
    output, x_t = normal(1, dtype), 2 * normal(2, dtype)
    got = ours.step(output, t, x_t, **step, **randomness[0])
    want = stock.step(output, t, x_t, **step, **randomness[1])
    assert got.prev_sample.dtype == want.prev_sample.dtype
    assert torch.equal(got.prev_sample, want.prev_sample)
    assert torch.equal(got.pred_original_sample, want.pred_original_sample)


@pytest.mark.parametrize("eta", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("prediction_type", PREDICTION_TYPES)
@pytest.mark.parametrize(("spacing", "steps"), AGREEING)
def test_a_point_step_is_stock_to_the_bit(spacing: str, steps: int, prediction_type: str, eta: float) -> None:
    ours, stock = pair(steps, prediction_type=prediction_type, timestep_spacing=spacing)
    assert torch.equal(ours.timesteps, stock.timesteps)
    for t in some(stock.timesteps):
        assert_same_step(ours, stock, t, eta=eta, generators=None)


@pytest.mark.parametrize(
    "step",
    [
        {"generators": 3},
        {"variance_noise": normal(9)},
        {"use_clipped_model_output": True, "generators": None},
        {"dtype": torch.float16, "generators": None},
        {"dtype": torch.bfloat16, "generators": 3},
        {"dtype": torch.float64, "generators": None},
    ],
    ids=["list-of-generators", "variance-noise", "clipped-output", "float16", "bfloat16", "float64"],
)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"clip_sample": False},
        {"clip_sample_range": 0.3},
        {"clip_sample": False, "thresholding": True, "dynamic_thresholding_ratio": 0.9, "sample_max_value": 1.5},
        {"set_alpha_to_one": False, "steps_offset": 1, "clip_sample": False, **STABLE_DIFFUSION},
    ],
    ids=["default-clips", "no-clipping", "clip-range", "thresholding", "stable-diffusion"],
)
@pytest.mark.parametrize("prediction_type", PREDICTION_TYPES)
def test_every_option_of_a_stock_step_is_stock_to_the_bit(
    prediction_type: str, options: dict[str, Any], step: dict[str, Any]
) -> None:
    ours, stock = pair(10, prediction_type=prediction_type, **options)
    for t in some(stock.timesteps):
        assert_same_step(ours, stock, t, eta=1.0, **step)


def test_without_a_generator_the_global_stream_is_read_as_in_stock() -> None:
    ours, stock = pair(10)
    states = torch.get_rng_state()
    got = ours.step(normal(1), 500, normal(2), eta=1.0).prev_sample
    torch.set_rng_state(states)
    assert torch.equal(got, stock.step(normal(1), 500, normal(2), eta=1.0).prev_sample)


def by_hand(
    scheduler: DistributionalDDIMScheduler, t: int, prev: int, output: Tensor, x_t: Tensor, eta: float, noise: Tensor
) -> Tensor:
    """DDIM's equations 12 and 16 in float64, with the previous used timestep."""
    output, x_t, noise = output.double(), x_t.double(), noise.double()
    abar = float(scheduler.alphas_cumprod[t])
    abar_prev = float(scheduler.alphas_cumprod[prev]) if prev >= 0 else float(scheduler.final_alpha_cumprod)
    r, n = math.sqrt(abar), math.sqrt(1 - abar)
    if scheduler.config.prediction_type == "epsilon":
        x_0 = (x_t - n * output) / r
    else:
        x_0 = r * x_t - n * output if scheduler.config.prediction_type == "v_prediction" else output
    eps = (x_t - r * x_0) / n
    if scheduler.config.clip_sample:
        x_0 = x_0.clamp(-1, 1)
    variance = eta**2 * (1 - abar_prev) / (1 - abar) * (1 - abar / abar_prev)
    direction = math.sqrt(max(0.0, 1 - abar_prev - variance))
    return math.sqrt(abar_prev) * x_0 + direction * eps + math.sqrt(variance) * noise


@pytest.mark.parametrize("clip_sample", [False, True])
@pytest.mark.parametrize("eta", [0.0, 1.0])
@pytest.mark.parametrize("prediction_type", PREDICTION_TYPES)
@pytest.mark.parametrize(("spacing", "steps"), [("linspace", 4), ("linspace", 50), ("trailing", 7), ("trailing", 30)])
def test_where_stock_is_wrong_a_point_step_is_the_formula_with_the_used_timestep(
    spacing: str, steps: int, prediction_type: str, eta: float, clip_sample: bool
) -> None:
    """Relative 2e-5: float32 rounding of x_0, which at t = 999 is 1/sqrt(abar) = 157 times x_t for an epsilon head."""
    ours, stock = pair(steps, prediction_type=prediction_type, timestep_spacing=spacing, clip_sample=clip_sample)
    used, differing = [*ours.timesteps.tolist(), -1], 0
    for t, prev in pairwise(used):
        noise = normal(t)
        output, x_t = normal(1), normal(2)
        got = ours.step(output, t, x_t, eta=eta, variance_noise=noise).prev_sample
        expected = by_hand(ours, t, prev, output, x_t, eta, noise)
        torch.testing.assert_close(got.double(), expected, rtol=2e-5, atol=2e-4)
        there = stock.step(output, t, x_t, eta=eta, variance_noise=noise).prev_sample
        differing += not torch.allclose(there.double(), expected, rtol=2e-5, atol=2e-4)
    assert differing > 0  # stock's own previous timestep is not the used one here


def test_where_stock_is_wrong_generators_thresholding_and_clipped_output_still_work() -> None:
    """Only the stride differs: with timesteps set by hand ours steps from 900 to 400, as stock does with two steps."""
    options = {"thresholding": True, "dynamic_thresholding_ratio": 0.9, "clip_sample": False, "sample_max_value": 1.5}
    ours, stock = DistributionalDDIMScheduler(**options), DDIMScheduler(**options)
    ours.set_timesteps(timesteps=[900, 400, 100])
    stock.set_timesteps(2)  # stock's stride is 1000 // 2
    arguments = {"eta": 1.0, "use_clipped_model_output": True}
    got = ours.step(normal(1), 900, normal(2), generator=seeded(0, 3), **arguments)
    want = stock.step(normal(1), 900, normal(2), generator=seeded(0, 3), **arguments)
    torch.testing.assert_close(got.prev_sample, want.prev_sample)
    torch.testing.assert_close(got.pred_original_sample, want.pred_original_sample)
    for scheduler in (ours, stock):
        with pytest.raises(ValueError, match="generator"):
            scheduler.step(normal(1), 900, normal(2), generator=seeded(0, None), variance_noise=normal(3), eta=1.0)


def test_at_zero_terminal_snr_no_number_of_steps_gives_nan() -> None:
    """Stock takes the root of a negative float32 for some step counts at eta = 1; the truth is the float64 formula."""
    options = {
        "prediction_type": "v_prediction",
        "timestep_spacing": "trailing",
        "rescale_betas_zero_snr": True,
        "clip_sample": False,
        **STABLE_DIFFUSION,
    }
    stock_fails = 0
    for steps in range(1, 51):
        ours, stock = pair(steps, **options)
        for t, prev in pairwise([*ours.timesteps.tolist(), -1]):
            got = ours.step(normal(1), t, normal(2), eta=1.0, variance_noise=normal(3)).prev_sample
            assert torch.isfinite(got).all()
            expected = by_hand(ours, t, prev, normal(1), normal(2), 1.0, normal(3))
            torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-3)
        there = stock.step(normal(1), 999, normal(2), eta=1.0, variance_noise=normal(3)).prev_sample
        stock_fails += not bool(torch.isfinite(there).all())
    assert stock_fails > 0


@pytest.mark.parametrize("spacing", ["leading", "trailing", "linspace"])
@pytest.mark.parametrize("prediction_type", PREDICTION_TYPES)
def test_eta_one_is_ddpm_with_fixed_small_variance(prediction_type: str, spacing: str) -> None:
    """DDPM steps to the used timestep for every spacing. 1e-6 relative to the largest number that is added up."""
    options = {"prediction_type": prediction_type, "timestep_spacing": spacing, "clip_sample": False}
    for steps in (1, 4, 10, 30, 1000):
        ours, ddpm = (
            DistributionalDDIMScheduler(eta=1.0, **options),
            DDPMScheduler(variance_type="fixed_small", **options),
        )
        ours.set_timesteps(steps)
        ddpm.set_timesteps(steps)
        for t in some(ours.timesteps):
            got = ours.step(normal(1).double(), t, normal(2).double(), generator=seeded(t, 3)).prev_sample
            want = ddpm.step(normal(1).double(), t, normal(2).double(), generator=seeded(t, 3)).prev_sample
            torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


def test_a_list_of_one_generator_serves_the_whole_batch_as_in_stock() -> None:
    ours, stock = pair(10)
    results = [
        scheduler.step(normal(1), 500, normal(2), eta=1.0, generator=[torch.Generator().manual_seed(3)]).prev_sample
        for scheduler in (ours, stock)
    ]
    assert torch.equal(*results)


@pytest.mark.parametrize("eta", [0.0, 1.0])
@pytest.mark.parametrize("clip_sample", [False, True])
def test_the_reverse_law_of_a_point_is_centred_at_the_step_clipped_or_not(clip_sample: bool, eta: float) -> None:
    ours, _ = pair(10, clip_sample=clip_sample)
    output, x_t = 3 * normal(1), 3 * normal(2)
    law = ours.reverse_distribution(output, 500, x_t, eta=eta)
    still = ours.step(output, 500, x_t, eta=eta, variance_noise=torch.zeros_like(x_t) if eta else None)
    torch.testing.assert_close(law.mean, still.prev_sample)
    torch.testing.assert_close(ours.original_distribution(output, 500, x_t).mean, still.pred_original_sample)
    expected = torch.full_like(law.mean, ours.step_coefficients(500, eta).std_dev ** 2)
    torch.testing.assert_close(law.variance, expected)


@pytest.mark.parametrize("eta", [-0.1, 1.5])
@pytest.mark.parametrize("family", ["point", "gaussian"])
def test_an_eta_that_asks_for_more_noise_than_there_is_is_refused(family: str, eta: float) -> None:
    scheduler = DistributionalDDIMScheduler(noise_family=family)
    scheduler.set_timesteps(4)
    raw = torch.zeros(1, scheduler.num_raw_channels(2), 3)
    with pytest.raises(ValueError, match="out of range"):
        scheduler.step(raw, 750, torch.zeros(1, 2, 3), eta=eta)
