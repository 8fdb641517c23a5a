"""How likely a target is: its density in one step, and a bound over a chain from divergences in closed form."""

import math

import torch
from torch import Tensor

from marigold_uq.denoising import Denoiser, predict_noise
from marigold_uq.distributions import CholeskyDistribution, GaussianDistribution, LowRankDistribution, NoiseDistribution
from marigold_uq.precision import full_precision
from marigold_uq.randomness import Generators, randn
from marigold_uq.sampling import check_start, one_step_distribution
from marigold_uq.schedulers.distributional import DistributionalScheduler
from marigold_uq.schedulers.reverse_step import NoiseLevel


def one_step_log_prob(
    denoiser: Denoiser,
    scheduler: DistributionalScheduler,
    x_0: Tensor,
    x_T: Tensor,
    mask: Tensor | None = None,
) -> Tensor:
    """Log density of x_0 under `one_step_distribution` at x_T: (B,) for joint families, the shape of x_0 for others.

    At zero terminal SNR it does not depend on x_T and is the exact log likelihood of the one-step sampler.
    """
    return one_step_distribution(denoiser, scheduler, x_T).log_prob(x_0, mask)


@torch.no_grad()
def evidence_lower_bound(
    denoiser: Denoiser, scheduler: DistributionalScheduler, x_0: Tensor, *, generator: Generators = None
) -> Tensor:
    """A draw of the lower bound on log p(x_0) of the ancestral chain (eta = 1), (B,), in nats; its mean is the bound.

    log p(x_0) >= E log p(x_0 | x_1) - sum_t KL(q(x_prev | x_t, x_0), p(x_prev | x_t)) - KL(q(x_T | x_0), p(x_T)): the
    reverse distributions are those that `step` draws from at eta = 1, tau included, every divergence is between
    Gaussians and in closed form, only x_t ~ q(x_t | x_0) is drawn. Families: gaussian, low_rank, cholesky. A last step
    that keeps noise (set_alpha_to_one=False) bounds the density of that noisy x_0's mean and is refused.
    """
    check_start(scheduler)
    times = [t.item() for t in scheduler.timesteps]
    if scheduler.previous_level(times[-1]).noise > 0:
        raise ValueError("the chain ends at a noisy x_0, whose density is another one: use set_alpha_to_one=True")
    bound = -_prior_divergence(scheduler, scheduler.noise_level(times[0]), x_0)
    for t, number in zip(scheduler.timesteps, times, strict=True):
        level, prev = scheduler.noise_level(number), scheduler.previous_level(number)
        eps = randn((), x_0.shape, like=x_0, generator=generator)
        x_t = level.signal * x_0 + level.noise * eps
        output = predict_noise(denoiser, scheduler, x_t, t, generator=generator)
        reverse = scheduler.reverse_distribution(output, t, x_t, eta=1.0)
        if prev.noise == 0:
            bound = bound + _event_sum(reverse.log_prob(x_0))
        else:
            bound = bound - gaussian_divergence(*_forward_posterior(level, prev, x_0, x_t), reverse)
    return bound


def _forward_posterior(
    level: NoiseLevel[float], prev: NoiseLevel[float], x_0: Tensor, x_t: Tensor
) -> tuple[Tensor, float]:
    """Mean and standard deviation of q(x_prev | x_t, x_0), with the sigma of Theorem 1 at eta = 1."""
    ratio = level.signal * prev.noise / (prev.signal * level.noise)
    std_dev = prev.noise * math.sqrt(max(0.0, 1 - ratio**2))
    direction = math.sqrt(max(0.0, prev.noise**2 - std_dev**2))
    return prev.signal * x_0 + direction * (x_t - level.signal * x_0) / level.noise, std_dev


def _prior_divergence(scheduler: DistributionalScheduler, level: NoiseLevel[float], x_0: Tensor) -> Tensor:
    """KL(q(x_T | x_0), N(0, init_noise_sigma^2 I)), (B,)."""
    size = float(scheduler.init_noise_sigma)
    prior = GaussianDistribution(torch.zeros_like(x_0), torch.full_like(x_0, size))
    return gaussian_divergence(level.signal * x_0, level.noise, prior)


@full_precision
def gaussian_divergence(mean: Tensor, std_dev: float, other: NoiseDistribution) -> Tensor:
    """KL(N(mean, std_dev^2 I), other) of whole events, (B,), for a Gaussian `other`, in closed form.

    1/2 [ tr(S^-1) s^2 + (m - mu)^T S^-1 (m - mu) - D + log det S - D log s^2 ], where all but the trace is a density:
    -log N(m; mu, S) without its constant; a trace is a sum of D such quadratic forms, or closed for S = diag + U U^T.
    """
    if not isinstance(other, GaussianDistribution | LowRankDistribution | CholeskyDistribution):
        raise TypeError(f"the divergence has a closed form for gaussian, low_rank and cholesky; got {other.name!r}")
    dim = math.prod(mean.shape[1:])
    fit = -_event_sum(other.log_prob(mean)) - 0.5 * dim * math.log(2 * math.pi)
    variance = std_dev**2
    return fit + 0.5 * (variance * _trace_of_precision(other) - dim - dim * math.log(variance))


def _trace_of_precision(dist: GaussianDistribution | LowRankDistribution | CholeskyDistribution) -> Tensor:
    """tr S^-1, (B,)."""
    if isinstance(dist, GaussianDistribution):
        return dist.scale.square().reciprocal().flatten(1).sum(1)
    if isinstance(dist, CholeskyDistribution):
        eye = torch.eye(dist.scale_tril.shape[-1], dtype=dist.dtype, device=dist.scale_tril.device)
        inverse = torch.linalg.solve_triangular(dist.scale_tril, eye.expand_as(dist.scale_tril), upper=False)
        return inverse.square().sum((-2, -1))
    # Woodbury: S^-1 = d^-1 - W (I + U^T W)^-1 W^T with W = d^-1 U
    diag, factor = dist.cov_diag.flatten(1), dist.cov_factor.flatten(2)  # (B, D), (B, R, D)
    weighted = factor / diag.unsqueeze(1)
    inner = torch.eye(factor.shape[1], dtype=dist.dtype, device=diag.device) + weighted @ factor.mT
    removed = torch.linalg.solve(inner, weighted @ weighted.mT).diagonal(dim1=-2, dim2=-1).sum(-1)
    return diag.reciprocal().sum(1) - removed


def _event_sum(log_density: Tensor) -> Tensor:
    """Of whole events, (B,), from that of events or of coordinates."""
    return log_density if log_density.ndim == 1 else log_density.flatten(1).sum(1)
