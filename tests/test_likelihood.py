"""Likelihoods against exact models: one step, the divergence, and a bound that a perfect network reaches."""

import math
from collections.abc import Callable

import pytest
import torch
from support.laws import random_law
from support.oracles import (
    SIZES,
    TARGETS,
    Framework,
    Network,
    edm_framework,
    flow_framework,
    gaussian_target,
    perfect_network,
    perfect_network_of,
)
from support.references import dense_components
from torch import Tensor
from torch.distributions import MultivariateNormal, kl_divergence

from marigold_uq.likelihood import evidence_lower_bound, gaussian_divergence, one_step_log_prob
from marigold_uq.schedulers import (
    DistributionalDDIMScheduler,
    DistributionalEDMScheduler,
    DistributionalFlowMatchScheduler,
    DistributionalScheduler,
)

GAUSSIAN_FAMILIES = ("gaussian", "low_rank", "cholesky")


def exact_log_prob(family: str, x_0: Tensor) -> Tensor:
    mean, covariance = TARGETS[family].moments()
    return MultivariateNormal(mean, covariance).log_prob(x_0.flatten(1))


def repeated_bound(network: Network, scheduler: DistributionalScheduler, x_0: Tensor) -> tuple[Tensor, Tensor]:
    """Mean over 400 draws of the bound of each sample, and its standard error."""
    copies = x_0.repeat(400, *[1] * (x_0.ndim - 1))
    draws = evidence_lower_bound(network, scheduler, copies, generator=torch.Generator().manual_seed(0))
    draws = draws.unflatten(0, (400, len(x_0)))
    return draws.mean(0), draws.std(0) / math.sqrt(400)


def zero_snr_scheduler(family: str) -> DistributionalDDIMScheduler:
    return DistributionalDDIMScheduler(
        noise_family=family,
        prediction_type="v_prediction",
        timestep_spacing="trailing",
        rescale_betas_zero_snr=True,
        eta=1.0,
        **SIZES[family],
    )


@pytest.mark.parametrize("family", [*GAUSSIAN_FAMILIES, "low_rank_mixture"])
def test_the_density_of_one_step_is_that_of_the_target(family: str) -> None:
    scheduler, target = zero_snr_scheduler(family), TARGETS[family]
    scheduler.set_timesteps(1)
    generator = torch.Generator().manual_seed(0)
    x_0 = target.draw(5, generator)
    network = perfect_network(family, target, scheduler.alphas_cumprod, "v_prediction")
    found = one_step_log_prob(network, scheduler, x_0, torch.randn(x_0.shape, generator=generator, dtype=x_0.dtype))
    found = found.flatten(1).sum(1) if found.ndim > 1 else found
    if family == "low_rank_mixture":
        parts = [
            MultivariateNormal(m, c).log_prob(x_0.flatten(1)) for m, c in zip(target.means, target.covs, strict=True)
        ]
        expected = (torch.stack(parts) + target.weights.log()[:, None]).logsumexp(0)
    else:
        expected = exact_log_prob(family, x_0)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("event_shape", [(1,), (3,), (2, 5)])
@pytest.mark.parametrize("family", GAUSSIAN_FAMILIES)
def test_the_divergence_is_that_of_dense_gaussians(family: str, event_shape: tuple[int, ...]) -> None:
    law = random_law(family, event_shape)
    mean = law.mean + torch.randn(law.mean.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found = gaussian_divergence(mean, 0.7, law)
    for b in range(2):
        part = dense_components(law, b)[0]
        own = MultivariateNormal(mean[b].flatten(), 0.49 * torch.eye(len(part.mean), dtype=torch.float64))
        torch.testing.assert_close(found[b], kl_divergence(own, MultivariateNormal(part.mean, part.covariance)))


def test_a_family_without_a_closed_divergence_is_refused() -> None:
    with pytest.raises(TypeError, match="closed form for gaussian, low_rank and cholesky; got 'mixture'"):
        gaussian_divergence(torch.zeros(2, 3, dtype=torch.float64), 1.0, random_law("mixture", (3,)))


@pytest.mark.parametrize("steps", [1, 4, 50])
@pytest.mark.parametrize("family", GAUSSIAN_FAMILIES)
def test_the_bound_of_a_perfect_network_is_the_likelihood_itself(family: str, steps: int) -> None:
    """The gap is KL(q(x_1..T | x_0), p(x_1..T | x_0)), which is 0 where every p(x_prev | x_t) is exact."""
    scheduler, target = zero_snr_scheduler(family), TARGETS[family]
    scheduler.set_timesteps(steps)
    network = perfect_network(family, target, scheduler.alphas_cumprod, "v_prediction")
    x_0 = target.draw(2, torch.Generator().manual_seed(0))
    mean, error = repeated_bound(network, scheduler, x_0)
    assert bool(((mean - exact_log_prob(family, x_0)).abs() < 5 * error + 2e-3).all())


@pytest.mark.parametrize(
    ("kind", "at"),
    [(DistributionalEDMScheduler, edm_framework), (DistributionalFlowMatchScheduler, flow_framework)],
)
def test_other_frameworks_reach_the_likelihood_too(kind: type, at: Callable[[float], Framework]) -> None:
    """EDM starts from N(0, sigma_max^2 + 1), which is not quite the marginal: up to .01 nats."""
    scheduler, target = kind(noise_family="gaussian"), gaussian_target((1, 2), [0.7, -1.0], [0.09, 0.5])
    scheduler.set_timesteps(20)
    x_0 = target.draw(3, torch.Generator().manual_seed(0))
    network = perfect_network_of("gaussian", target, at)
    expected = MultivariateNormal(*target.moments()).log_prob(x_0.flatten(1))
    mean, error = repeated_bound(network, scheduler, x_0)
    assert bool(((mean - expected).abs() < 5 * error + 0.01).all())


def test_a_worse_network_has_a_lower_bound() -> None:
    scheduler, target = zero_snr_scheduler("gaussian"), TARGETS["gaussian"]
    scheduler.set_timesteps(4)
    network = perfect_network("gaussian", target, scheduler.alphas_cumprod, "v_prediction")
    x_0 = target.draw(400, torch.Generator().manual_seed(0))
    right, wrong = (
        evidence_lower_bound(
            lambda x, t, shift=shift: network(x, t) + shift, scheduler, x_0, generator=torch.Generator().manual_seed(1)
        )
        for shift in (0.0, 0.2)
    )
    assert float((right - wrong).mean()) > 0


def test_a_chain_that_ends_in_noise_is_refused() -> None:
    scheduler = DistributionalDDIMScheduler(noise_family="gaussian", set_alpha_to_one=False)
    scheduler.set_timesteps(4)
    with pytest.raises(ValueError, match="ends at a noisy x_0"):
        evidence_lower_bound(lambda x, t: torch.cat([x, x], 1), scheduler, torch.zeros(1, 1, 2))
