"""Theorem 1 against brute force: coefficients, the reverse law of every family, tau, and the law of x_0."""

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from support.oracles import SIZES, TARGETS, noisy, perfect_network
from torch import Tensor

from marigold_uq.distributions import (
    FAMILIES,
    CholeskyDistribution,
    GaussianDistribution,
    LowRankDistribution,
    LowRankMixtureDistribution,
    MixtureDistribution,
    NoiseDistribution,
    PointDistribution,
    SampleDistribution,
)
from marigold_uq.schedulers import DistributionalDDIMScheduler

PREDICTION_TYPES = ("epsilon", "v_prediction", "sample")
EVENT = (2, 3)
ALL = sorted(FAMILIES)


def build(family: str, steps: int = 4, **options: Any) -> DistributionalDDIMScheduler:
    settings = {"clip_sample": False, "timestep_spacing": "linspace", **SIZES[family], **options}
    scheduler = DistributionalDDIMScheduler(noise_family=family, **settings)
    scheduler.set_timesteps(steps)
    return scheduler


def random_law(scheduler: DistributionalDDIMScheduler, batch: int = 3) -> NoiseDistribution:
    generator = torch.Generator().manual_seed(0)
    if scheduler.family is SampleDistribution:
        return SampleDistribution(torch.randn(5, batch, *EVENT, generator=generator, dtype=torch.float64))
    is_flat = scheduler.family is CholeskyDistribution
    shape = (scheduler.num_raw_channels(math.prod(EVENT)),) if is_flat else (scheduler.num_raw_channels(2), EVENT[1])
    raw = torch.randn(batch, *shape, generator=generator, dtype=torch.float64)
    return scheduler.noise_distribution(raw, EVENT)


def components(law: NoiseDistribution) -> tuple[Tensor, Tensor]:
    """Means (B, K, D) and full covariances (B, K, D, D) of the components, one for the families that have none."""
    match law:
        case PointDistribution():
            mean = law.loc.flatten(1).unsqueeze(1)
            return mean, torch.diag_embed(torch.zeros_like(mean))
        case GaussianDistribution():
            return law.loc.flatten(1).unsqueeze(1), torch.diag_embed(law.scale.square().flatten(1).unsqueeze(1))
        case MixtureDistribution():
            return law.loc.flatten(2), torch.diag_embed(law.scale.square().flatten(2))
        case LowRankDistribution():
            factor = law.cov_factor.flatten(2)
            cov = torch.diag_embed(law.cov_diag.flatten(1)) + factor.mT @ factor
            return law.loc.flatten(1).unsqueeze(1), cov.unsqueeze(1)
        case CholeskyDistribution():
            return law.loc.flatten(1).unsqueeze(1), (law.scale_tril @ law.scale_tril.mT).unsqueeze(1)
        case LowRankMixtureDistribution():
            factor = law.cov_factor.flatten(3)
            return law.loc.flatten(2), torch.diag_embed(law.cov_diag.flatten(2)) + factor.mT @ factor
        case SampleDistribution():
            mean = law.draws.transpose(0, 1).flatten(2)
            return mean, torch.diag_embed(torch.zeros_like(mean))
    raise AssertionError(f"no components known for {law}")


def original_and_eps(prediction_type: str, alpha_bar: float, x_t: float, o: float) -> tuple[float, float]:
    """x_0 and eps for a model output o, from x_t = r x_0 + n eps and v = r eps - n x_0."""
    r, n = math.sqrt(alpha_bar), math.sqrt(1 - alpha_bar)
    if prediction_type == "epsilon":
        return (x_t - n * o) / r, o
    if prediction_type == "v_prediction":
        return r * x_t - n * o, n * x_t + r * o
    return o, (x_t - r * o) / n


def brute_force(scheduler: DistributionalDDIMScheduler, t: int, prev: int, eta: float) -> tuple[float, float, float]:
    """A, B, sigma: DDIM's own equation at x_t = 1, o = 0 and at x_t = 0, o = 1."""
    alpha_bar = float(scheduler.alphas_cumprod[t])
    alpha_bar_prev = float(scheduler.alphas_cumprod[prev]) if prev >= 0 else 1.0
    variance = eta**2 * (1 - alpha_bar_prev) / (1 - alpha_bar) * (1 - alpha_bar / alpha_bar_prev)
    weights = []
    for x_t, o in ((1.0, 0.0), (0.0, 1.0)):
        x_0, eps = original_and_eps(scheduler.config.prediction_type, alpha_bar, x_t, o)
        weights.append(math.sqrt(alpha_bar_prev) * x_0 + math.sqrt(max(0, 1 - alpha_bar_prev - variance)) * eps)
    return weights[0], weights[1], math.sqrt(variance)


def standard_errors(values: Tensor, expected: Tensor) -> float:
    """The largest distance, in standard errors, of the mean of `values` over the first axis from `expected`."""
    error = values.std(0).clamp(min=1e-12) / math.sqrt(len(values))  # constants must agree to rounding
    return float(((values.mean(0) - expected).abs() / error).max())


@pytest.mark.parametrize("spacing", ["leading", "trailing", "linspace"])
@pytest.mark.parametrize("prediction_type", PREDICTION_TYPES)
def test_coefficients_are_those_of_the_ddim_equation_at_every_used_step(prediction_type: str, spacing: str) -> None:
    for steps in (1, 3, 7, 50, 333):
        scheduler = build("gaussian", steps, prediction_type=prediction_type, timestep_spacing=spacing)
        used = [*scheduler.timesteps.tolist(), -1]
        for t, prev in pairwise(used):
            for eta in (0.0, 0.3, 1.0):
                c = scheduler.step_coefficients(t, eta)
                expected = brute_force(scheduler, t, prev, eta)
                assert (c.sample, c.output, c.std_dev) == pytest.approx(expected, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("eta", [0.0, 0.5, 1.0])
def test_at_zero_terminal_snr_the_first_step_has_the_limits_of_theorem_1(eta: float) -> None:
    """sigma^2 = eta^2 (1 - abar_p), A = lambda, B = -sqrt(abar_p) for v and +sqrt(abar_p) for x_0."""
    for prediction_type, sign in (("v_prediction", -1), ("sample", 1)):
        scheduler = build(
            "gaussian", timestep_spacing="trailing", prediction_type=prediction_type, rescale_betas_zero_snr=True
        )
        c, alpha_bar_prev = scheduler.step_coefficients(999, eta), scheduler.alpha_bar(749)
        variance = eta**2 * (1 - alpha_bar_prev)
        expected = (math.sqrt(1 - alpha_bar_prev - variance), sign * math.sqrt(alpha_bar_prev), math.sqrt(variance))
        assert (c.sample, c.output, c.std_dev) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("family", ALL)
def test_an_epsilon_head_at_zero_terminal_snr_is_refused(family: str) -> None:
    scheduler = build(family, timestep_spacing="trailing", rescale_betas_zero_snr=True)
    law, x_t = random_law(scheduler), torch.zeros(3, *EVENT, dtype=torch.float64)
    for act in (scheduler.step, scheduler.reverse_distribution, scheduler.original_distribution):
        with pytest.raises(ValueError, match="v_prediction"):
            act(law, 999, x_t)


@pytest.mark.parametrize("tau", [1.0, 0.3, 2.0])
@pytest.mark.parametrize("eta", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("prediction_type", PREDICTION_TYPES)
@pytest.mark.parametrize("family", ALL)
def test_the_reverse_law_has_the_components_of_theorem_1(
    family: str, prediction_type: str, eta: float, tau: float
) -> None:
    """A x_t + B mu_k and tau (B^2 Sigma_k + sigma^2 I), for each component; the spread of the mu_k is not touched."""
    scheduler = build(family, prediction_type=prediction_type)
    law = random_law(scheduler)
    x_t = torch.randn(3, *EVENT, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    means, covs = components(law)
    used = [999, 666, 333, 0, -1]  # linspace, 4 steps
    for t, prev in pairwise(used):
        a, b, sigma = brute_force(scheduler, t, prev, eta)
        reverse_means, reverse_covs = components(scheduler.reverse_distribution(law, t, x_t, eta=eta, tau=tau))
        identity = torch.eye(math.prod(EVENT), dtype=torch.float64)
        torch.testing.assert_close(reverse_means, a * x_t.flatten(1).unsqueeze(1) + b * means)
        torch.testing.assert_close(reverse_covs, tau * (b * b * covs + sigma**2 * identity))


@pytest.mark.parametrize("family", ["mixture", "low_rank_mixture"])
def test_the_reverse_law_keeps_the_weights(family: str) -> None:
    scheduler = build(family)
    law, x_t = random_law(scheduler), torch.zeros(3, *EVENT, dtype=torch.float64)
    torch.testing.assert_close(scheduler.reverse_distribution(law, 666, x_t, eta=1.0, tau=0.5).weights, law.weights)


@pytest.mark.parametrize("family", ALL)
def test_config_eta_and_tau_are_the_defaults_of_step_and_reverse_distribution(family: str) -> None:
    stored, plain = build(family, eta=0.7, tau=0.4), build(family)
    law, x_t = random_law(plain), torch.ones(3, *EVENT, dtype=torch.float64)
    expected = plain.reverse_distribution(law, 666, x_t, eta=0.7, tau=0.4)
    for got, want in zip(components(stored.reverse_distribution(law, 666, x_t)), components(expected), strict=True):
        torch.testing.assert_close(got, want)
    drawn = stored.step(law, 666, x_t, generator=torch.Generator().manual_seed(3)).prev_sample
    torch.testing.assert_close(drawn, expected.rsample(generator=torch.Generator().manual_seed(3)))


@pytest.mark.parametrize("family", ALL)
def test_step_draws_deviate_from_their_component_by_the_root_of_tau(family: str) -> None:
    """The same random numbers give mu_k + sqrt(tau) e, so tau = 1 and 1/4 tell mu_k = 2 x(1/4) - x(1)."""
    law, x_t = random_law(build(family)), torch.zeros(3, *EVENT, dtype=torch.float64)
    draws = {}
    for tau in (0.25, 1.0, 4.0):
        scheduler = build(family, eta=1.0, tau=tau)
        draws[tau] = scheduler.step(law, 333, x_t, generator=torch.Generator().manual_seed(5)).prev_sample.flatten(1)
    assert (draws[4.0] - draws[1.0]).abs().min() > 0
    torch.testing.assert_close(draws[4.0] - draws[1.0], 2 * (draws[1.0] - draws[0.25]))
    means = components(scheduler.reverse_distribution(law, 333, x_t))[0]  # (B, K, D)
    gap = (2 * draws[0.25] - draws[1.0]).unsqueeze(1) - means
    closest = gap.abs().amax(2).amin(1) if law.joint else gap.abs().amin(1)  # one component for all coordinates, or not
    assert closest.max() < 1e-12


@pytest.mark.parametrize("tau", [1.0, 0.3])
@pytest.mark.parametrize("eta", [0.0, 1.0])
@pytest.mark.parametrize("family", ALL)
def test_drawing_an_output_and_stepping_with_it_has_the_law_of_the_reverse_distribution(
    family: str, eta: float, tau: float
) -> None:
    """Draw-then-step: a drawn o goes through the ordinary step of a point scheduler; 5 standard errors, 20000 draws.

    With tau, sqrt(tau) multiplies o - mu_k (that is `scaled`) as well as the noise of the step.
    """
    scheduler, ordinary = build(family, tau=tau), build("point", tau=tau)
    law, x_t = random_law(scheduler, batch=1), torch.full((1, *EVENT), 0.4, dtype=torch.float64)
    generator, count = torch.Generator().manual_seed(7), 20000
    o = law.scaled(tau).rsample((count,), generator).squeeze(1)
    stepped = ordinary.step(o, 666, x_t.expand(count, -1, -1), eta=eta, generator=generator).prev_sample.flatten(1)
    reverse = scheduler.reverse_distribution(law, 666, x_t, eta=eta)
    drawn = reverse.rsample((count,), generator).squeeze(1).flatten(1)
    mean, products = reverse.mean.flatten(), []
    for draws in (stepped, drawn):
        assert standard_errors(draws, mean) < 5
        assert standard_errors((draws - mean).square(), reverse.variance.flatten()) < 5
        products.append((draws - mean)[:, :, None] * (draws - mean)[:, None, :])  # (count, D, D)
    assert standard_errors(products[0] - products[1], torch.zeros(())) < 5  # the two are independent draws


@pytest.mark.parametrize("prediction_type", PREDICTION_TYPES)
@pytest.mark.parametrize("family", ALL)
def test_the_law_of_the_original_is_the_affine_image_of_the_law_of_the_output(
    family: str, prediction_type: str
) -> None:
    scheduler = build(family, prediction_type=prediction_type)
    law = random_law(scheduler)
    x_t = torch.randn(3, *EVENT, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    means, covs = components(law)
    for t in (999, 333, 0):
        alpha_bar = float(scheduler.alphas_cumprod[t])
        a, _ = original_and_eps(prediction_type, alpha_bar, 1.0, 0.0)
        b, _ = original_and_eps(prediction_type, alpha_bar, 0.0, 1.0)
        original = scheduler.original_distribution(law, t, x_t)
        got_means, got_covs = components(original)
        torch.testing.assert_close(got_means, a * x_t.flatten(1).unsqueeze(1) + b * means)
        torch.testing.assert_close(got_covs, b * b * covs)
        told = scheduler.step(law, t, x_t, generator=torch.Generator().manual_seed(0)).pred_original_sample
        torch.testing.assert_close(told, original.mean)


@pytest.mark.parametrize("prediction_type", PREDICTION_TYPES)
@pytest.mark.parametrize("family", ["gaussian", "mixture", "low_rank", "cholesky", "low_rank_mixture"])
def test_mean_variance_plus_variance_of_the_mean_is_the_total_variance_at_every_timestep(
    family: str, prediction_type: str
) -> None:
    """E[Var(x_0 | x_t)] + Var(E[x_0 | x_t]) = Var(x_0); 5 standard errors, 4000 draws of x_t."""
    scheduler, target = build(family, prediction_type=prediction_type), TARGETS[family]
    network = perfect_network(family, target, scheduler.alphas_cumprod, prediction_type)
    total = target.moments()[1].diagonal()
    for t in (10, 200, 600):
        x_t = noisy(target, scheduler.alpha_bar(t), 4000, torch.Generator().manual_seed(t))
        original = scheduler.original_distribution(network(x_t, t), t, x_t)
        variance, mean = original.variance.flatten(1), original.mean.flatten(1)
        parts = variance + (mean - target.moments()[0]).square()
        assert standard_errors(parts, total) < 5


@pytest.mark.parametrize("family", ["gaussian", "mixture", "low_rank", "cholesky", "low_rank_mixture"])
def test_at_zero_terminal_snr_one_call_gives_the_total_variance(family: str) -> None:
    """x_T says nothing about x_0, so the head's law of x_0 is the law of x_0 itself."""
    options = {"prediction_type": "v_prediction", "timestep_spacing": "trailing", "rescale_betas_zero_snr": True}
    scheduler, target = build(family, **options), TARGETS[family]
    x_t = torch.randn(4, *target.event_shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    raw = perfect_network(family, target, scheduler.alphas_cumprod, "v_prediction")(x_t, 999)
    original, (mean, cov) = scheduler.original_distribution(raw, 999, x_t), target.moments()
    torch.testing.assert_close(original.mean.flatten(1), mean.expand(4, -1))
    torch.testing.assert_close(original.variance.flatten(1), cov.diagonal().expand(4, -1))


@pytest.mark.parametrize("prediction_type", PREDICTION_TYPES)
def test_training_targets_are_what_the_prediction_type_says(prediction_type: str) -> None:
    scheduler = build("gaussian", prediction_type=prediction_type)
    generator = torch.Generator().manual_seed(0)
    x_0, eps = torch.randn(2, 4, *EVENT, generator=generator)
    t = torch.tensor([0, 10, 500, 999])
    alpha_bar = scheduler.alphas_cumprod[t].reshape(-1, 1, 1)
    expected = {
        "epsilon": eps,
        "v_prediction": alpha_bar.sqrt() * eps - (1 - alpha_bar).sqrt() * x_0,
        "sample": x_0,
    }
    torch.testing.assert_close(scheduler.training_target(x_0, eps, t), expected[prediction_type])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("family", ALL)
def test_step_returns_the_dtype_of_the_sample(family: str, dtype: torch.dtype) -> None:
    scheduler = build(family, eta=1.0)
    x_t = torch.zeros(3, *EVENT, dtype=dtype)
    for t in scheduler.timesteps:
        result = scheduler.step(random_law(scheduler), t, x_t, generator=torch.Generator().manual_seed(0))
        assert result.prev_sample.dtype == result.pred_original_sample.dtype == dtype


def test_a_raw_output_with_the_wrong_channels_says_what_was_expected() -> None:
    scheduler = build("low_rank", rank=2)
    with pytest.raises(ValueError, match=r"4 x 2 = 8 channels on axis 1; got 6"):
        scheduler.step(torch.zeros(1, 6, 3), 666, torch.zeros(1, 2, 3))
    with pytest.raises(ValueError, match="sample's shape"):
        build("point").step(torch.zeros(1, 6, 3), 666, torch.zeros(1, 2, 3))


def test_what_only_a_point_can_do_is_refused_for_laws_and_the_other_way_round() -> None:
    scheduler, x_t = build("gaussian"), torch.zeros(3, *EVENT, dtype=torch.float64)
    for extra in ({"use_clipped_model_output": True}, {"variance_noise": x_t}):
        with pytest.raises(ValueError, match="'point' only"):
            scheduler.step(random_law(scheduler), 666, x_t, **extra)
    with pytest.raises(TypeError, match="would drop the spread of a GaussianDistribution"):
        build("point").step(random_law(scheduler), 666, x_t)


def test_a_step_before_the_timesteps_are_set_is_refused() -> None:
    scheduler = DistributionalDDIMScheduler(noise_family="gaussian")
    with pytest.raises(ValueError, match="set_timesteps"):
        scheduler.step(torch.zeros(1, 2, 3), 10, torch.zeros(1, 1, 3))
    with pytest.raises(ValueError, match="set_timesteps"):
        scheduler.previous_timestep(10)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_training_in_half_precision_sees_the_noise_that_sampling_sees(dtype: torch.dtype) -> None:
    """Stable Diffusion's first timesteps: in bfloat16 stock's noise scales .0292, .0413, .0718 are 0, 0, .0625."""
    scheduler = DistributionalDDIMScheduler(
        beta_schedule="scaled_linear", beta_start=0.00085, beta_end=0.012, prediction_type="v_prediction"
    )
    timesteps = torch.tensor([0, 1, 5])
    zero, one = torch.zeros(3, 1, dtype=dtype), torch.ones(3, 1, dtype=dtype)
    scale = torch.tensor([math.sqrt(1 - scheduler.alpha_bar(int(t))) for t in timesteps]).unsqueeze(1)
    noised = scheduler.add_noise(zero, one, timesteps)
    assert noised.dtype == dtype
    assert torch.equal(noised, scale.to(dtype))
    torch.testing.assert_close(scheduler.training_target(one, zero, timesteps), -scale)
    torch.testing.assert_close(scheduler.get_velocity(one, zero, timesteps), -scale)
