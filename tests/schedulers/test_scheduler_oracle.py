"""With the exact posterior in place of a network, the sampler returns the exact law of x_0.

For any number of steps, any eta, any spacing and any prediction type, if the chain starts from the exact marginal at
the first used timestep. Everything goes through raw channels, `predict_noise` and `step`; see `oracles.py`.
"""

import math
from dataclasses import replace
from itertools import combinations, pairwise, product
from typing import Any

import pytest
import torch
from support.oracles import (
    SIZES,
    TARGETS,
    JointMixture,
    Target,
    gaussian_target,
    in_dtype,
    noisy,
    output_of_original,
    perfect_network,
)
from torch import Tensor

from marigold_uq.distributions import FAMILIES, SampleDistribution
from marigold_uq.sampling import reverse_diffusion
from marigold_uq.schedulers import DistributionalDDIMScheduler

CHAINS = {1: 8192, 4: 8192, 10: 4096, 50: 2048}  # fewer where they cost most; one long run per family makes up for it
STANDARD_ERRORS = 5
EXACT_FAMILIES = sorted(set(FAMILIES) - {"point"})
ETAS = (0.0, 0.5, 1.0)
SCHEDULES: dict[str, dict[str, Any]] = {
    "default": {},  # diffusers' own betas, alpha_bar_T = 4e-5
    "paper": {"num_train_timesteps": 50, "beta_start": 0.001, "beta_end": 0.35},
    "stable diffusion": {"beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012},
}
PREDICTION_TYPES = ("epsilon", "v_prediction", "sample")
SPACINGS = ("leading", "trailing", "linspace")
STEPS = (4, 10, 50)


def build(family: str, **options: Any) -> DistributionalDDIMScheduler:
    return DistributionalDDIMScheduler(noise_family=family, **{"clip_sample": False, **SIZES[family], **options})


def run_chain(
    family: str, target: Target, steps: int | list[int], *, chains: int | None = None, **options: Any
) -> Tensor:
    """x_0 (N, D) of chains that start from the exact marginal at the first used timestep, in float32."""
    scheduler = build(family, **options)
    scheduler.set_timesteps(**({"timesteps": steps} if isinstance(steps, list) else {"num_inference_steps": steps}))
    count = len(scheduler.timesteps)
    target, generator = in_dtype(target, torch.float32), torch.Generator().manual_seed(count)
    x_t = noisy(target, scheduler.alpha_bar(int(scheduler.timesteps[0])), chains or CHAINS[count], generator)
    network = perfect_network(family, target, scheduler.alphas_cumprod, scheduler.config.prediction_type)
    return reverse_diffusion(network, scheduler, x_t, generator=generator).flatten(1).double()


def standard_errors(values: Tensor, expected: Tensor) -> float:
    """The largest distance, in standard errors, of the mean of `values` over the first axis from `expected`."""
    error = values.std(0) / math.sqrt(len(values))
    return float(((values.mean(0) - expected).abs() / error).max())


def assert_law(x_0: Tensor, target: Target) -> None:
    """Mean, covariance and nine points of every marginal distribution function, each within 5 standard errors."""
    mean, cov = target.moments()
    centred = x_0 - mean
    assert standard_errors(x_0, mean) < STANDARD_ERRORS
    assert standard_errors(centred[:, :, None] * centred[:, None, :], cov) < STANDARD_ERRORS
    points = mean + cov.diagonal().sqrt() * torch.linspace(-2, 2, 9, dtype=mean.dtype).unsqueeze(-1)  # (Q, D)
    exact = target.cdf(points)
    error = (exact * (1 - exact) / len(x_0)).sqrt().clamp(min=1 / len(x_0))  # binomial; not below a single chain
    assert (((x_0.unsqueeze(1) <= points).double().mean(0) - exact).abs() / error).max() < STANDARD_ERRORS


def pairwise_cases() -> list[tuple[str, str, str, str, int, float]]:
    """54 of the 1458 combinations, with every pair of values in one of them.

    An orthogonal array: index vectors (family, schedule, prediction type) and sums of them modulo 3, no two of which
    are multiples of each other.
    """
    cases = []
    for (f, family), (s, schedule), (p, kind) in product(
        *map(enumerate, (EXACT_FAMILIES, SCHEDULES, PREDICTION_TYPES))
    ):
        steps, spacing, eta = STEPS[(f + 2 * s + p) % 3], SPACINGS[(f + s + p) % 3], ETAS[(f + s + 2 * p) % 3]
        cases.append((family, schedule, kind, spacing, steps, eta))
    return cases


@pytest.mark.parametrize(("family", "schedule", "prediction_type", "spacing", "steps", "eta"), pairwise_cases())
def test_a_perfect_network_gives_the_exact_law(
    family: str, schedule: str, prediction_type: str, spacing: str, steps: int, eta: float
) -> None:
    target, options = TARGETS[family], SCHEDULES[schedule]
    x_0 = run_chain(
        family, target, steps, prediction_type=prediction_type, timestep_spacing=spacing, eta=eta, **options
    )
    assert_law(x_0, target)


def test_the_cases_hold_every_pair_of_values() -> None:
    values = (EXACT_FAMILIES, SCHEDULES, PREDICTION_TYPES, SPACINGS, STEPS, ETAS)
    for i, j in combinations(range(len(values)), 2):
        seen = {(case[i], case[j]) for case in pairwise_cases()}
        assert seen == set(product(values[i], values[j]))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("prediction_type", PREDICTION_TYPES)
@pytest.mark.parametrize("family", EXACT_FAMILIES)
def test_one_step_from_the_last_timestep_is_exact(family: str, prediction_type: str, schedule: str) -> None:
    options = {"prediction_type": prediction_type, "timestep_spacing": "trailing", **SCHEDULES[schedule]}
    assert_law(run_chain(family, TARGETS[family], 1, **options), TARGETS[family])


@pytest.mark.parametrize("schedule", ["default", "paper"])
@pytest.mark.parametrize("family", ["gaussian", "low_rank", "low_rank_mixture", "cholesky"])
def test_one_step_of_an_epsilon_head_resolves_a_narrow_target(family: str, schedule: str) -> None:
    """N(2, .05^2): a floor of 1e-6 under the variance of eps would make it .16 wide."""
    target = gaussian_target((2, 2), [2.0] * 4, [0.0025] * 4, [[0.0] * 4] * SIZES[family].get("rank", 0))
    if family == "low_rank_mixture":
        target = replace(target, **{name: value.repeat_interleave(2, 0) for name, value in _parts(target).items()})
    options = {"timestep_spacing": "trailing", **SCHEDULES[schedule]}
    assert float(run_chain(family, target, 1, **options).std()) == pytest.approx(0.05, abs=0.001)


def _parts(target: JointMixture) -> dict[str, Tensor]:
    return {"weights": target.weights / 2, "means": target.means, "diag": target.diag, "factor": target.factor}


@pytest.mark.parametrize(("steps", "eta"), [(1, 1.0), (4, 0.0), (50, 0.5)])
@pytest.mark.parametrize("prediction_type", ["v_prediction", "sample"])
@pytest.mark.parametrize("family", EXACT_FAMILIES)
def test_a_perfect_network_gives_the_exact_law_from_pure_noise_at_zero_terminal_snr(
    family: str, prediction_type: str, steps: int, eta: float
) -> None:
    options = {"prediction_type": prediction_type, "timestep_spacing": "trailing", "rescale_betas_zero_snr": True}
    assert build(family, **options).alpha_bar(999) == 0
    assert_law(run_chain(family, TARGETS[family], steps, eta=eta, **options), TARGETS[family])


@pytest.mark.parametrize("family", EXACT_FAMILIES)
def test_many_chains_of_fifty_steps_give_the_exact_law(family: str) -> None:
    options = {"prediction_type": "v_prediction", "timestep_spacing": "linspace", "eta": 0.5}
    assert_law(run_chain(family, TARGETS[family], 50, chains=16384, **options), TARGETS[family])


@pytest.mark.parametrize("eta", ETAS)
@pytest.mark.parametrize("family", EXACT_FAMILIES)
def test_a_perfect_network_gives_the_exact_law_on_timesteps_of_your_own(family: str, eta: float) -> None:
    assert_law(run_chain(family, TARGETS[family], [950, 930, 400, 3], eta=eta), TARGETS[family])


@pytest.mark.parametrize("eta", ETAS)
def test_without_set_alpha_to_one_the_chain_ends_at_the_law_of_the_first_training_step(eta: float) -> None:
    """Stable Diffusion leaves noise of sqrt(1 - abar_0) = .029: N(sqrt(abar_0) m, abar_0 s^2 + 1 - abar_0)."""
    target, alpha_bar = gaussian_target((1, 2), [0.7, -1.0], [0.09, 1e-4]), 1 - 0.00085
    ending = gaussian_target(
        (1, 2), [alpha_bar**0.5 * 0.7, -(alpha_bar**0.5)], [alpha_bar * v + 1 - alpha_bar for v in (0.09, 1e-4)]
    )
    x_0 = run_chain(
        "gaussian", target, 4, set_alpha_to_one=False, steps_offset=1, eta=eta, **SCHEDULES["stable diffusion"]
    )
    assert_law(x_0, ending)
    assert (x_0[:, 1].std() - 0.01).item() > 0.015  # far from the target's own .01


@pytest.mark.parametrize("eta", ETAS)
@pytest.mark.parametrize("num_draws", [1, 3])
def test_draws_from_the_exact_posterior_of_a_mixture_step_to_its_exact_law(num_draws: int, eta: float) -> None:
    """The `sample` family on a law that is no Gaussian: `step` gets draws instead of raw channels."""
    target = TARGETS["low_rank_mixture"]
    scheduler = build("sample", timestep_spacing="trailing", eta=eta)
    scheduler.set_timesteps(4)
    generator = torch.Generator().manual_seed(num_draws)
    x_t = noisy(target, scheduler.alpha_bar(999), 8192, generator)
    for t in scheduler.timesteps:
        alpha_bar = scheduler.alpha_bar(int(t))
        draws = torch.stack([_draw_eps(target, x_t, alpha_bar, generator) for _ in range(num_draws)])
        x_t = scheduler.step(SampleDistribution(draws), t, x_t, generator=generator).prev_sample
    assert_law(x_t.flatten(1), target)


def _draw_eps(target: JointMixture, x_t: Tensor, alpha_bar: float, generator: torch.Generator) -> Tensor:
    loc, diag, factor, logits = target.posterior(x_t.flatten(1), alpha_bar)
    k = torch.multinomial(logits.softmax(1), 1, generator=generator).squeeze(1)  # (B,)
    root = torch.linalg.cholesky(torch.diag_embed(diag) + factor.mT @ factor)[k]
    z = torch.randn(len(k), diag.shape[1], 1, generator=generator, dtype=diag.dtype)
    x_0 = loc[torch.arange(len(k)), k] + (root @ z).squeeze(-1)
    a, b = output_of_original("epsilon", alpha_bar)
    return a * x_t + b * x_0.reshape(x_t.shape)


@pytest.mark.parametrize("alpha_bar", [0.0047, 0.3, 0.95])
def test_the_posterior_of_the_oracle_is_the_textbook_one(alpha_bar: float) -> None:
    """Dense matrices against Woodbury, with r = x_t - sqrt(abar) m_k, n = 1 - abar and V = abar C + n I.

    eps | k ~ N(sqrt(n) V^-1 r, abar C V^-1) and v | k ~ N(sqrt(abar n) (I - C) V^-1 r - sqrt(n) m_k, C V^-1).
    """
    target, generator = TARGETS["low_rank_mixture"], torch.Generator().manual_seed(0)
    x_t, noise = noisy(target, alpha_bar, 5, generator).flatten(1), 1 - alpha_bar
    loc, diag, factor, _ = target.posterior(x_t, alpha_bar)
    cov = torch.diag_embed(diag) + factor.mT @ factor
    for k in range(2):
        c, eye = target.covs[k], torch.eye(4, dtype=torch.float64)
        gain = torch.linalg.inv(alpha_bar * c + noise * eye)
        r = x_t - alpha_bar**0.5 * target.means[k]
        a, b = output_of_original("epsilon", alpha_bar)
        torch.testing.assert_close(a * x_t + b * loc[:, k], noise**0.5 * r @ gain)
        torch.testing.assert_close(b * b * cov[k], alpha_bar * c @ gain)
        a, b = output_of_original("v_prediction", alpha_bar)
        v = (alpha_bar * noise) ** 0.5 * r @ gain @ (eye - c) - noise**0.5 * target.means[k]
        torch.testing.assert_close(a * x_t + b * loc[:, k], v)
        torch.testing.assert_close(b * b * cov[k], c @ gain)


def test_a_diagonal_head_on_a_smooth_field_is_exact_after_one_step_and_too_narrow_after_several() -> None:
    """Its marginals are right at every step, but independent draws average out where the truth is correlated."""
    position = torch.linspace(0, 1, 32, dtype=torch.float64)
    smooth = torch.exp(-0.5 * ((position[:, None] - position) / 0.2).square()) + 1e-4 * torch.eye(32)
    target = gaussian_target((1, 32), [0.0] * 32, [1e-6] * 32, torch.linalg.cholesky(smooth).T.tolist())
    options = {"prediction_type": "v_prediction", "timestep_spacing": "trailing", "rescale_betas_zero_snr": True}
    variance = {n: run_chain("gaussian", target, n, chains=2048, **options).square() for n in (1, 4, 10, 50)}
    assert standard_errors(variance[1], target.moments()[1].diagonal()) < STANDARD_ERRORS
    few, more, many = (float(variance[n].mean().sqrt()) for n in (4, 10, 50))
    assert few < 0.8 < more < 0.95 < many < 1.0  # .77, .88, .98 with 1000 chains; the truth is 1.00


def test_a_point_head_is_too_narrow_by_the_amount_that_its_linear_map_predicts() -> None:
    """For N(m, s^2) the DDIM map is linear, with gain (sqrt(abar abar_p) s^2 + sqrt(n n_p)) / (abar s^2 + n)."""
    target, documented = gaussian_target((1, 1), [0.7], [0.09]), {1: 0.001, 5: 0.11, 50: 0.27}
    for steps, published in documented.items():
        options = {"beta_schedule": "linear", "beta_start": 0.0001, "beta_end": 0.02, "timestep_spacing": "trailing"}
        x_0 = run_chain("point", target, steps, chains=8192, **options)
        scheduler = build("point", **options)
        used = [float(scheduler.alphas_cumprod[999 - i * 1000 // steps]) for i in range(steps)] + [1.0]
        std = math.sqrt(0.09 * used[0] + 1 - used[0])
        for abar, prev in pairwise(used):
            gain = 0.09 * math.sqrt(abar * prev) + math.sqrt((1 - abar) * (1 - prev))
            std *= gain / (0.09 * abar + 1 - abar)
        assert standard_errors(x_0, torch.tensor([0.7])) < STANDARD_ERRORS
        assert standard_errors((x_0 - 0.7).square(), torch.tensor([std**2])) < STANDARD_ERRORS
        assert std < 0.3
        assert std == pytest.approx(published, abs=0.005)  # as stated in the documentation, two digits
