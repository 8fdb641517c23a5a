"""Fair estimators from M draws: unbiased for the score of the law that the draws come from.

Pairs of draws are visited one offset at a time, so memory is that of the draws and never M x M x D.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from marigold_uq.distributions.linear_algebra import expand_mask


def ensemble_crps(draws: Tensor, value: Tensor) -> Tensor:
    """Fair CRPS of draws (M, ...) at value (...), in O(M log M) by sorting; with one draw, the absolute error.

    1/M sum |x_m - y| - 1/(M(M-1)) sum_m (2m - M - 1) x_(m), the last being half the mean distance of distinct draws.
    """
    num_draws = draws.shape[0]
    distance = (draws - value).abs().mean(0)
    if num_draws == 1:
        return distance
    rank = torch.arange(1, num_draws + 1, dtype=draws.dtype, device=draws.device)
    weight = (2 * rank - num_draws - 1) / (num_draws * (num_draws - 1))
    return distance - (weight.reshape(-1, *[1] * value.ndim) * draws.sort(0).values).sum(0)


def ensemble_energy_score(
    draws: Tensor, value: Tensor, *, exponent: float = 1.0, lam: float = 1.0, mask: Tensor | None = None
) -> Tensor:
    """Fair energy score of whole events, (B,): mean ||x_m - y||^beta - lam/2 mean over pairs ||x_m - x_n||^beta."""
    return _ensemble_kernel_score(draws, value, lambda gap: _norm(gap) ** exponent, lam, mask)


def ensemble_kernel_score(draws: Tensor, value: Tensor, bandwidth: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """Fair Gaussian kernel score of whole events, (B,)."""

    def rho(gap: Tensor) -> Tensor:
        return -torch.exp(-gap.square().sum(-1) / bandwidth.square())

    return _ensemble_kernel_score(draws, value, rho, 1.0, mask) + 0.5


def _ensemble_kernel_score(
    draws: Tensor, value: Tensor, rho: Callable[[Tensor], Tensor], lam: float, mask: Tensor | None
) -> Tensor:
    """E rho(X, y) - lam/2 E rho(X, X') for a negative definite rho of the difference, given as (..., B, D)."""
    if mask is not None:
        keep = expand_mask(mask, value)
        draws, value = torch.where(keep, draws, 0.0), torch.where(keep, value, 0.0)
    flat, target = draws.flatten(2), value.flatten(1)  # (M, B, D), (B, D)
    num_draws = flat.shape[0]
    to_value = torch.stack([rho(draw - target) for draw in flat]).mean(0)
    if num_draws == 1:
        if lam != 0:
            raise ValueError("a fair score compares draws with each other and needs at least 2; got 1")
        return to_value
    between = sum(rho(gap).sum(0) for gap in _pair_gaps(flat)) / (num_draws * (num_draws - 1) / 2)
    return to_value - 0.5 * lam * between


def _pair_gaps(draws: Tensor) -> Iterator[Tensor]:
    """Differences of all pairs m < n, one m at a time: (M - 1 - m, B, D)."""
    for m in range(draws.shape[0] - 1):
        for rest in draws[m + 1 :].split(max(1, 2**24 // draws[0].numel())):
            yield rest - draws[m]


def _norm(gap: Tensor) -> Tensor:
    """Euclidean norm with gradient 0, not NaN, where two draws coincide."""
    square = gap.square().sum(-1)
    positive = square > 0
    return torch.where(positive, torch.where(positive, square, 1.0).sqrt(), 0.0)
