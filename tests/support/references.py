"""Slow, obvious formulas that the library is compared with: loops, dense matrices, numerical integrals.

Nothing here knows how the library computes a score; laws are read through their public parameters only.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product

import torch
from scipy import special
from torch import Tensor
from torch.distributions import MultivariateNormal

from marigold_uq.distributions import (
    CholeskyDistribution,
    GaussianDistribution,
    LowRankDistribution,
    LowRankMixtureDistribution,
    MixtureDistribution,
    NoiseDistribution,
    PointDistribution,
    SampleDistribution,
)

STANDARD_ERRORS = 5
"""Tolerance of every Monte-Carlo comparison: a right formula fails about once in two million comparisons."""


@dataclass(frozen=True)
class Component:
    """One Gaussian of a mixture, dense."""

    weight: float
    mean: Tensor  # (D,)
    covariance: Tensor  # (D, D)


def dense_components(law: NoiseDistribution, index: int) -> list[Component]:
    """Sample `index` of a batch of joint laws (or of independent Gaussians) as weights, means and full covariances."""
    if isinstance(law, GaussianDistribution):
        return [Component(1.0, law.loc[index].flatten(), torch.diag(law.scale[index].flatten() ** 2))]
    if isinstance(law, PointDistribution):
        mean = law.loc[index].flatten()
        return [Component(1.0, mean, mean.new_zeros(len(mean), len(mean)))]
    if isinstance(law, SampleDistribution):
        points = [dense_components(PointDistribution(draw), index)[0] for draw in law.draws]
        return [replace(point, weight=1 / len(points)) for point in points]
    if isinstance(law, CholeskyDistribution):
        tril = law.scale_tril[index]
        return [Component(1.0, law.loc[index].flatten(), tril @ tril.T)]
    if isinstance(law, LowRankDistribution):
        factor = law.cov_factor[index].flatten(1)
        return [Component(1.0, law.loc[index].flatten(), law.cov_diag[index].flatten().diag() + factor.T @ factor)]
    if isinstance(law, LowRankMixtureDistribution):
        return [_mixture_component(law, index, k) for k in range(law.num_components)]
    raise TypeError(f"no dense form of {type(law).__name__}")


def _mixture_component(law: LowRankMixtureDistribution, index: int, k: int) -> Component:
    single = LowRankDistribution(law.loc[:, k], law.cov_diag[:, k], law.cov_factor[:, k])
    weight = float(law.logits[index, k].exp() / law.logits[index].exp().sum())
    return replace(dense_components(single, index)[0], weight=weight)


def total_covariance(law: NoiseDistribution, index: int) -> Tensor:
    """Cov X of one sample, (D, D): within components plus between them; coordinates of a mixture are independent."""
    if isinstance(law, MixtureDistribution):
        return law.variance[index].flatten().diag()
    parts = dense_components(law, index)
    mean = torch.stack([part.weight * part.mean for part in parts]).sum(0)
    spread = [part.covariance + torch.outer(part.mean - mean, part.mean - mean) for part in parts]
    return torch.stack([part.weight * matrix for part, matrix in zip(parts, spread, strict=True)]).sum(0)


def restricted(law: NoiseDistribution, index: int, keep: Tensor) -> NoiseDistribution:
    """The law of the kept coordinates of one sample, as a batch of one with event (number kept,)."""
    rows = keep.flatten().nonzero()[:, 0]
    if isinstance(law, PointDistribution):
        return PointDistribution(law.loc[index].flatten()[rows][None])
    if isinstance(law, SampleDistribution):
        return SampleDistribution(law.draws[:, index].flatten(1)[:, rows][:, None])
    if isinstance(law, CholeskyDistribution):
        covariance = dense_components(law, index)[0].covariance[rows][:, rows]
        return CholeskyDistribution(law.loc[index].flatten()[rows][None], torch.linalg.cholesky(covariance)[None])
    if isinstance(law, LowRankDistribution):
        diag, factor = law.cov_diag[index].flatten()[rows], law.cov_factor[index].flatten(1)[:, rows]
        return LowRankDistribution(law.loc[index].flatten()[rows][None], diag[None], factor[None])
    if isinstance(law, LowRankMixtureDistribution):
        loc, diag = law.loc[index].flatten(1)[:, rows], law.cov_diag[index].flatten(1)[:, rows]
        factor = law.cov_factor[index].flatten(2)[:, :, rows]
        return LowRankMixtureDistribution(loc[None], diag[None], factor[None], law.logits[index][None])
    raise TypeError(f"{type(law).__name__} has independent coordinates: restrict its score instead")


def crps_by_integral(cdf: Callable[[Tensor], Tensor], value: float, low: float, high: float) -> float:
    """Integral of (F(x) - 1{x >= value})^2 over [low, high], by the trapezoidal rule on either side of the jump."""
    left = torch.linspace(low, value, 20_001, dtype=torch.float64)
    right = torch.linspace(value, high, 20_001, dtype=torch.float64)
    return float(torch.trapezoid(cdf(left) ** 2, left) + torch.trapezoid((1 - cdf(right)) ** 2, right))


def mixture_cdf(weights: Tensor, means: Tensor, scales: Tensor) -> Callable[[Tensor], Tensor]:
    """The distribution function of a one-dimensional Gaussian mixture, parameters (K,)."""

    def cdf(x: Tensor) -> Tensor:
        z = (x[:, None] - means) / scales
        return (weights * 0.5 * (1 + torch.erf(z / math.sqrt(2)))).sum(1)

    return cdf


def energy_by_pairs(draws: Tensor, value: Tensor, exponent: float = 1.0, lam: float = 1.0) -> float:
    """Fair energy score of draws (M, D) at value (D,), pair by pair."""
    to_value = sum(float((x - value).norm()) ** exponent for x in draws) / len(draws)
    pairs = [float((x - z).norm()) ** exponent for x, z in combinations(draws, 2)]
    return to_value - 0.5 * lam * sum(pairs) / len(pairs)


def kernel_by_pairs(draws: Tensor, value: Tensor, gamma: float) -> float:
    """Fair Gaussian kernel score of draws (M, D) at value (D,), pair by pair."""

    def kernel(x: Tensor, z: Tensor) -> float:
        return math.exp(-float((x - z).square().sum()) / gamma**2)

    pairs = [kernel(x, z) for x, z in combinations(draws, 2)]
    return 0.5 * sum(pairs) / len(pairs) - sum(kernel(x, value) for x in draws) / len(draws) + 0.5


def dense_log_density(parts: Sequence[Component], value: Tensor) -> float:
    """log p(value) from torch's own multivariate normal law with a full covariance."""
    logs = [math.log(p.weight) + MultivariateNormal(p.mean, p.covariance).log_prob(value.flatten()) for p in parts]
    return float(torch.stack(logs).logsumexp(0))


def dense_kernel_score(parts: Sequence[Component], value: Tensor, gamma: float) -> float:
    """1/2 E k(X, X') - E k(X, y) + 1/2 with inverses and determinants of full matrices."""

    def expected(mean: Tensor, covariance: Tensor) -> float:
        matrix = gamma**2 * torch.eye(len(mean), dtype=mean.dtype) + 2 * covariance
        form = mean @ torch.linalg.inv(matrix) @ mean
        return float(torch.linalg.det(matrix / gamma**2) ** -0.5 * torch.exp(-form))

    to_value = sum(p.weight * expected(value.flatten() - p.mean, p.covariance) for p in parts)
    between = sum(
        p.weight * q.weight * expected(p.mean - q.mean, p.covariance + q.covariance) for p, q in product(parts, parts)
    )
    return 0.5 * between - to_value + 0.5


def expected_norm(mean: Tensor, scale: float) -> float:
    """E||N(mean, scale^2 I)||, the mean of a noncentral chi variable, by Kummer's function."""
    dim = len(mean)
    size = float(mean.square().sum()) / (2 * scale**2)
    gammas = math.exp(math.lgamma((dim + 1) / 2) - math.lgamma(dim / 2))
    return scale * math.sqrt(2) * gammas * float(special.hyp1f1(-0.5, dim / 2, -size))


def patch_masks(event_shape: Sequence[int], patch_size: int) -> list[Tensor]:
    """For each patch of the event (all channels, patch_size along every other axis) the coordinates that lie in it."""
    channels, *space = event_shape
    starts = [range(0, length, patch_size) for length in space]
    masks = []
    for corner in product(*starts):
        mask = torch.zeros(channels, *space, dtype=torch.bool)
        mask[(slice(None), *[slice(start, start + patch_size) for start in corner])] = True
        masks.append(mask)
    return masks


def mean_and_error(values: Tensor) -> tuple[Tensor, Tensor]:
    """Monte-Carlo mean over the first axis and its standard error."""
    return values.mean(0), values.std(0) / math.sqrt(len(values))


def assert_within_standard_errors(values: Tensor, expected: Tensor | float, slack: float = 1e-9) -> None:
    """The mean of independent values (N, ...) is `expected`, up to STANDARD_ERRORS of its own standard errors."""
    mean, error = mean_and_error(values)
    excess = ((mean - expected).abs() - slack) / error.clamp(min=slack)
    assert float(excess.max()) < STANDARD_ERRORS, f"off by {float(excess.max()):.1f} standard errors"
