"""Fair estimators from M draws: unbiased for the score of the distribution that the draws come from.

The difference of a pair is never kept, not even for gradients: memory is a few times that of the draws, M x D, and
never M x M x D.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from marigold_uq.distributions.base import expand_mask
from marigold_uq.distributions.order_statistics import sort_members
from marigold_uq.precision import accumulator_dtype, full_precision

BLOCK = 4096
"""Longest sum of squares left to the distance kernel's own precision; blocks are added up in float64."""

CHUNK_ELEMENTS = 2**21
"""Numbers held at once beyond the inputs: 8 MB in float32."""


@full_precision
def ensemble_crps(draws: Tensor, value: Tensor, *, fair: bool = True) -> Tensor:
    """CRPS of every coordinate: draws (M, ...) at value (...), in O(M log M).

    With the members in ascending order, sum_{i<j} |x_i - x_j| = sum_i (2 i - M - 1) x_(i): no M x M table. Without
    `fair` the pairs are divided by M^2, the score of the empirical distribution itself. One draw has no pairs: |x - y|.
    """
    num_draws = draws.shape[0]
    # Around the target the sum does not cancel large common offsets (kelvin, metres far away).
    deviations = sort_members(draws - value)
    to_value = deviations.abs().mean(0)
    if num_draws == 1:
        return to_value
    rank = torch.arange(1, num_draws + 1, dtype=deviations.dtype, device=deviations.device)
    pairs = torch.tensordot(2 * rank - num_draws - 1, deviations, dims=1)  # sum over i < j of |x_i - x_j|
    return to_value - pairs / (num_draws * (num_draws - 1 if fair else num_draws))


def coordinate_energy_score(draws: Tensor, value: Tensor, *, exponent: float = 1.0, lam: float = 1.0) -> Tensor:
    """Fair energy score of every coordinate by itself: draws (M, ...) at value (...)."""
    gap = (draws - value).abs()
    to_value = torch.where(gap > 0, gap, 1.0).pow(exponent).where(gap > 0, 0.0).mean(0)  # no infinite slope at 0
    if lam == 0:
        return to_value
    check_draws(draws)
    between: Tensor = _SumOverPairs.apply(draws, exponent)
    return to_value - lam * between / (len(draws) * (len(draws) - 1))


def ensemble_energy_score(
    draws: Tensor,
    value: Tensor,
    *,
    exponent: float = 1.0,
    lam: float = 1.0,
    mask: Tensor | None = None,
    fair: bool = True,
    chunk_elements: int = CHUNK_ELEMENTS,
) -> Tensor:
    """Energy score of whole events, (B,): mean ||x_m - y||^beta - lam/2 mean over pairs ||x_m - x_n||^beta."""
    return _pair_score(draws, value, lambda distance: distance**exponent, lam, mask, fair, chunk_elements)


def ensemble_kernel_score(draws: Tensor, value: Tensor, bandwidth: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """Fair Gaussian kernel score of whole events, (B,)."""

    def rho(distance: Tensor) -> Tensor:
        return -torch.exp(-(distance / bandwidth[:, None, None]).square())

    return _pair_score(draws, value, rho, 1.0, mask, True, CHUNK_ELEMENTS) + 0.5


def _pair_score(
    draws: Tensor,
    value: Tensor,
    rho: Callable[[Tensor], Tensor],
    lam: float,
    mask: Tensor | None,
    fair: bool,
    chunk_elements: int,
) -> Tensor:
    """E rho(X, y) - lam/2 E rho(X, X') for a negative definite rho of the distances, which come as (B, n, m)."""
    keep = None if mask is None else expand_mask(mask, value).flatten(1)
    distance = _distances(value.flatten(1), draws.flatten(2), keep, chunk_elements)  # (B, M + 1, M + 1)
    to_value = rho(distance[:, :1, 1:]).mean((1, 2))
    if lam == 0:
        return to_value
    check_draws(draws)
    num_draws = len(draws)
    first, second = torch.triu_indices(num_draws, num_draws, offset=1, device=draws.device)
    between = rho(distance[:, None, first + 1, second + 1]).sum((1, 2))
    return to_value - lam * between / (num_draws * (num_draws - 1 if fair else num_draws))


def _distances(value: Tensor, draws: Tensor, keep: Tensor | None, chunk_elements: int) -> Tensor:
    """Euclidean distances (B, 1 + M, 1 + M) between value (B, D) and draws (M, B, D), gradient 0 where two meet.

    From differences and not from inner products, block by block of coordinates: cdist adds up one after the other, and
    over a whole map float32 would lose four digits. Masked coordinates count nothing, whatever they hold.
    """
    num_points, (num_rows, dim) = 1 + len(draws), value.shape
    dtype = accumulator_dtype(value.device)
    square = torch.zeros(num_rows, num_points, num_points, dtype=dtype, device=value.device)
    step = min(BLOCK, max(1, chunk_elements // max(1, num_points * num_rows)))
    for start in range(0, dim, step):
        part = slice(start, start + step)
        block = torch.cat([value[:, part].unsqueeze(1), draws[:, :, part].movedim(0, 1)], 1)  # (B, 1 + M, d)
        if keep is not None:
            block = torch.where(keep[:, None, part], block, 0.0)
        square = square + torch.cdist(block, block, compute_mode="donot_use_mm_for_euclid_dist").to(dtype).square()
    apart = square > 0
    return torch.where(apart, torch.where(apart, square, 1.0).sqrt(), 0.0).to(value.dtype)


def check_draws(draws: Tensor) -> None:
    """Pairs need two."""
    if draws.shape[0] < 2:
        raise ValueError(f"a fair score compares draws with each other and needs at least 2; got {draws.shape[0]}")


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
