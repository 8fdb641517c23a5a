"""Gaussian kernel score with k(x, x') = exp(-||x - x'||^2 / gamma^2), closed for every Gaussian family.

S(P, y) = 1/2 E k(X, X') - E k(X, y) + 1/2, where for Z ~ N(m, S)
E exp(-||Z||^2 / gamma^2) = det(I + 2 S/gamma^2)^(-1/2) exp(-m^T (gamma^2 I + 2 S)^-1 m).
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

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
from marigold_uq.distributions.base import expand_mask
from marigold_uq.distributions.linear_algebra import (
    drop_masked,
    low_rank_quadratic,
    tril_of_sum,
)
from marigold_uq.precision import full_precision
from marigold_uq.scores.ensemble import ensemble_kernel_score
from marigold_uq.scores.masking import formula_for, masked_target, zero_masked


def kernel_score(
    dist: NoiseDistribution,
    value: Tensor,
    *,
    bandwidth: float | Tensor = 1.0,
    per_dimension: bool = True,
    mask: Tensor | None = None,
) -> Tensor:
    """(B,) for joint families, (B, *event) for the others.

    gamma = bandwidth * sqrt(number of coordinates that count) with `per_dimension`, which keeps the score sensitive in
    any dimension when bandwidth is about the RMS of the residual; otherwise gamma = bandwidth. `bandwidth` may differ
    from sample to sample, shape (B,).
    """
    if not isinstance(bandwidth, Tensor) and not bandwidth > 0:  # a tensor is not looked at: that would wait for it
        raise ValueError(f"the bandwidth of a kernel must be positive; got {bandwidth}")
    value, keep = masked_target(dist, value, mask)
    gamma = torch.as_tensor(bandwidth, dtype=value.dtype, device=value.device).expand(value.shape[0])
    if not dist.joint:
        return zero_masked(formula_for(FORMULAS, dist)(dist, value, gamma, None), keep)
    if per_dimension:
        gamma = gamma * _num_coordinates(value, keep).sqrt()
    return formula_for(FORMULAS, dist)(dist, value, gamma, keep)


def _num_coordinates(value: Tensor, keep: Tensor | None) -> Tensor:
    """Of each sample, those that count, at least 1: (B,)."""
    if keep is None:
        return value.new_full(value.shape[:1], math.prod(value.shape[1:]))
    return keep.flatten(1).sum(1).clamp(min=1).to(value.dtype)


def _point(dist: PointDistribution, value: Tensor, gamma: Tensor, mask: Tensor | None) -> Tensor:
    residual = value - dist.loc
    if mask is not None:
        residual = torch.where(expand_mask(mask, value), residual, 0.0)
    return -torch.expm1(-residual.flatten(1).square().sum(1) / gamma.square())


def _sample(dist: SampleDistribution, value: Tensor, gamma: Tensor, mask: Tensor | None) -> Tensor:
    return ensemble_kernel_score(dist.draws, value, gamma, mask=mask)


def _gaussian(dist: GaussianDistribution, value: Tensor, gamma: Tensor, mask: Tensor | None) -> Tensor:
    gamma = gamma.reshape(-1, *[1] * (value.ndim - 1))
    to_value = _expected_kernel(value - dist.loc, dist.scale.square(), gamma)
    between = _expected_kernel(torch.zeros_like(dist.loc), 2 * dist.scale.square(), gamma)
    return 0.5 * between - to_value + 0.5


def _mixture(dist: MixtureDistribution, value: Tensor, gamma: Tensor, mask: Tensor | None) -> Tensor:
    gamma = gamma.reshape(-1, *[1] * value.ndim)
    loc, variance, weights = dist.loc, dist.scale.square(), dist.weights
    to_value = (weights * _expected_kernel(value.unsqueeze(1) - loc, variance, gamma)).sum(1)
    between = torch.zeros_like(to_value)
    for i in range(dist.num_components):  # row by row: memory K, not K^2
        row = _expected_kernel(loc[:, i : i + 1] - loc, variance[:, i : i + 1] + variance, gamma)
        between = between + weights[:, i] * (weights * row).sum(1)
    return 0.5 * between - to_value + 0.5


def _components(
    joint: LowRankDistribution | LowRankMixtureDistribution, value: Tensor, gamma: Tensor, mask: Tensor | None
) -> Tensor:
    dist = joint.components()
    parts = [
        drop_masked(value - dist.loc[:, k], dist.cov_diag[:, k], dist.cov_factor[:, k], mask, neutral_diag=0.0)
        for k in range(dist.num_components)
    ]
    weights = dist.weights
    score = torch.full_like(weights[:, 0], 0.5)
    for i, (gap_i, diag_i, factor_i, _) in enumerate(parts):
        score = score - weights[:, i] * _joint_kernel(gap_i, diag_i, factor_i, gamma)
        own = _joint_kernel(torch.zeros_like(gap_i), 2 * diag_i, 2**0.5 * factor_i, gamma)
        score = score + 0.5 * weights[:, i].square() * own
        for j, (gap_j, diag_j, factor_j, _) in enumerate(parts[:i]):
            both = torch.cat([factor_i, factor_j], 1)  # Cov(X_i - X_j) = diag_i + diag_j + U_i U_i^T + U_j U_j^T
            pair = _joint_kernel(gap_i - gap_j, diag_i + diag_j, both, gamma)
            score = score + weights[:, i] * weights[:, j] * pair
    return score


@full_precision
def _cholesky(dist: CholeskyDistribution, value: Tensor, gamma: Tensor, mask: Tensor | None) -> Tensor:
    residual, tril = (value - dist.loc).flatten(1), dist.scale_tril
    if mask is not None:
        keep = expand_mask(mask, value).flatten(1)
        residual, tril = torch.where(keep, residual, 0.0), torch.where(keep.unsqueeze(-1), tril, 0.0)
    to_value = _dense_kernel(residual, tril, gamma)
    between = _dense_kernel(torch.zeros_like(residual), 2**0.5 * tril, gamma)
    return 0.5 * between - to_value + 0.5


FORMULAS: dict[type[NoiseDistribution], Callable[..., Tensor]] = {
    PointDistribution: _point,
    SampleDistribution: _sample,
    GaussianDistribution: _gaussian,
    MixtureDistribution: _mixture,
    LowRankDistribution: _components,
    LowRankMixtureDistribution: _components,
    CholeskyDistribution: _cholesky,
}


def _expected_kernel(mean: Tensor, variance: Tensor, gamma: Tensor) -> Tensor:
    """E exp(-Z^2/gamma^2) for a scalar Z ~ N(mean, variance)."""
    width = gamma.square() + 2 * variance
    return torch.exp(-mean.square() / width) * gamma * width.rsqrt()


def _joint_kernel(mean: Tensor, diag: Tensor, factor: Tensor, gamma: Tensor) -> Tensor:
    """E exp(-||Z||^2/gamma^2) for Z ~ N(mean, diag(d) + U U^T), flat (B, D) and (B, R, D); in the log domain."""
    gamma = gamma.unsqueeze(-1)
    scaled_factor = (2**0.5 / gamma.unsqueeze(-1)) * factor
    quadratic, log_det = low_rank_quadratic(mean / gamma, 1 + 2 * diag / gamma.square(), scaled_factor)
    return torch.exp(-0.5 * log_det - quadratic)


def _dense_kernel(mean: Tensor, scale_tril: Tensor, gamma: Tensor) -> Tensor:
    """E exp(-||Z||^2/gamma^2) for Z ~ N(mean, L L^T), flat (B, D) and (B, D, D); in the log domain."""
    tril = tril_of_sum((2**0.5 / gamma[:, None, None]) * scale_tril, torch.ones_like(mean))  # of I + 2 S/gamma^2
    white = torch.linalg.solve_triangular(tril, (mean / gamma[:, None]).unsqueeze(-1), upper=False)
    log_det = 2 * tril.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    return torch.exp(-0.5 * log_det - white.square().sum((-2, -1)))
