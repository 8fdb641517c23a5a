"""Fair estimators from M draws: unbiased for the score of the law that the draws come from.

The difference of a pair is never kept, not even for gradients: memory is a few times that of the draws, M x D, and
never M x M x D.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from marigold_uq.distributions.linear_algebra import expand_mask

BLOCK = 4096
"""Coordinates per call of cdist, which adds up one after the other: over a whole map float32 would lose four digits."""


def coordinate_energy_score(draws: Tensor, value: Tensor, *, exponent: float = 1.0, lam: float = 1.0) -> Tensor:
    """Fair energy score of every coordinate by itself: draws (M, ...) at value (...)."""
    num_pairs = _num_pairs(draws.shape[0], lam)
    gap = (draws - value).abs()
    to_value = torch.where(gap > 0, gap, 1.0).pow(exponent).where(gap > 0, 0.0).mean(0)  # no infinite slope at 0
    if lam == 0:
        return to_value
    between: Tensor = _SumOverPairs.apply(draws, exponent)
    return to_value - 0.5 * lam * between / num_pairs


def ensemble_energy_score(
    draws: Tensor, value: Tensor, *, exponent: float = 1.0, lam: float = 1.0, mask: Tensor | None = None
) -> Tensor:
    """Fair energy score of whole events, (B,): mean ||x_m - y||^beta - lam/2 mean over pairs ||x_m - x_n||^beta."""
    return _ensemble_kernel_score(draws, value, lambda distance: distance**exponent, lam, mask)


def ensemble_kernel_score(draws: Tensor, value: Tensor, bandwidth: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """Fair Gaussian kernel score of whole events, (B,)."""

    def rho(distance: Tensor) -> Tensor:
        return -torch.exp(-(distance / bandwidth.unsqueeze(-1)).square())

    return _ensemble_kernel_score(draws, value, rho, 1.0, mask) + 0.5


def _ensemble_kernel_score(
    draws: Tensor, value: Tensor, rho: Callable[[Tensor], Tensor], lam: float, mask: Tensor | None
) -> Tensor:
    """E rho(X, y) - lam/2 E rho(X, X') for a negative definite rho of the distance, which is given as (B, n)."""
    _num_pairs(draws.shape[0], lam)
    if mask is not None:
        keep = expand_mask(mask, value)
        draws, value = torch.where(keep, draws, 0.0), torch.where(keep, value, 0.0)
    dtype = torch.result_type(draws, value)
    members = draws.to(dtype).flatten(2).transpose(0, 1)  # (B, M, D)
    target = value.to(dtype).flatten(1).unsqueeze(1)  # (B, 1, D)
    to_value = rho(_distances(members, target)[..., 0]).mean(1)
    if lam == 0:
        return to_value
    first, second = torch.triu_indices(len(draws), len(draws), offset=1, device=draws.device)
    return to_value - 0.5 * lam * rho(_distances(members, members)[:, first, second]).mean(1)


def _distances(left: Tensor, right: Tensor) -> Tensor:
    """Euclidean distances (B, M, N), from differences and not from inner products; gradient 0 where two points meet."""
    square = torch.zeros((), dtype=left.dtype, device=left.device)
    for one, other in zip(left.split(BLOCK, -1), right.split(BLOCK, -1), strict=True):
        square = square + torch.cdist(one, other, compute_mode="donot_use_mm_for_euclid_dist").square()
    apart = square > 0
    return torch.where(apart, torch.where(apart, square, 1.0).sqrt(), 0.0)


def _num_pairs(num_draws: int, lam: float) -> int:
    if num_draws < 2 and lam != 0:
        raise ValueError(f"a fair score compares draws with each other and needs at least 2; got {num_draws}")
    return num_draws * (num_draws - 1) // 2


class _SumOverPairs(torch.autograd.Function):
    """Sum over m < n of |x_m - x_n|^beta, coordinate by coordinate; pairs are visited again for the gradient."""

    @staticmethod
    def forward(ctx: Any, draws: Tensor, exponent: float) -> Tensor:
        ctx.save_for_backward(draws)
        ctx.exponent = exponent
        total = torch.zeros_like(draws[0])
        for m in range(draws.shape[0] - 1):
            total += (draws[m + 1 :] - draws[m]).abs_().pow_(exponent).sum(0)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (draws,) = ctx.saved_tensors
        slopes = torch.zeros_like(draws)
        for m in range(draws.shape[0] - 1):
            gap = draws[m + 1 :] - draws[m]
            sign = gap.sign()
            slope = gap.abs_().pow_(ctx.exponent - 1).mul_(sign).mul_(ctx.exponent)
            slope.nan_to_num_(nan=0.0)  # infinity times sign 0, where two draws meet
            slopes[m + 1 :] += slope
            slopes[m] -= slope.sum(0)
        return slopes * grads[0], None
