"""Scores of an ensemble as a whole or in part: variogram, Dawid-Sebastiani, threshold-weighted CRPS.

Samples are (M, *batch, *event) with the M members first; every score is unreduced.
"""

import math

import torch
from torch import Tensor

from marigold_uq.metrics.checks import as_ensemble, as_mask
from marigold_uq.precision import full_precision
from marigold_uq.scores.ensemble import ensemble_crps


def variogram_score(
    samples: Tensor,
    target: Tensor,
    event_dims: int,
    *,
    exponent: float = 0.5,
    weight: Tensor | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """sum_ij w_ij (|y_i - y_j|^p - mean_m |x_mi - x_mj|^p)^2 over pairs of coordinates (Scheuerer and Hamill, 2015).

    It sees wrong correlations that the energy score hardly notices, and is blind to a common shift. Each pair counts
    twice, as in the literature. O(M D^2) time, O(M D) memory.

    Args:
        samples: (M, *batch, *event).
        target: (*batch, *event).
        event_dims: how many trailing axes of `target` form the event; at least 1.
        exponent: p > 0.
        weight: (D, D), >= 0; ones without any.
        mask: broadcastable to `target`; pairs with a coordinate that does not count are left out.

    Returns:
        (*batch).
    """
    if not exponent > 0:
        raise ValueError(f"the exponent of a variogram must be positive; got {exponent}")
    samples, target, keep = _flat_event(samples, target, event_dims, mask)
    dim = target.shape[-1]
    if weight is not None and weight.shape != (dim, dim):
        raise ValueError(f"weight must be (D, D) = {(dim, dim)}; got {tuple(weight.shape)}")
    score = target.new_zeros(target.shape[:-1])
    for i in range(dim):  # row by row: a table of pairs of every member would be M D^2
        expected = (samples - samples[..., i : i + 1]).abs().pow(exponent).mean(0)  # (*batch, D)
        gap = ((target - target[..., i : i + 1]).abs().pow(exponent) - expected).square()
        if weight is not None:
            gap = gap * weight[i].to(gap)
        if keep is not None:
            gap = torch.where(keep & keep[..., i : i + 1], gap, 0.0)
        score = score + gap.sum(-1)
    return score


@full_precision
def dawid_sebastiani(samples: Tensor, target: Tensor, event_dims: int = 0, *, mask: Tensor | None = None) -> Tensor:
    """log det S + (y - ybar)^T S^-1 (y - ybar) with the members' mean and unbiased covariance S.

    The log score of a Gaussian without its constant (Dawid and Sebastiani, 1999): proper for every distribution,
    strictly so for its first two moments. With `event_dims=0` every coordinate by itself, 2 log s + ((y - ybar)/s)^2;
    otherwise the event, which needs more members than coordinates.

    Args:
        samples: (M, *batch, *event).
        target: (*batch, *event).
        event_dims: how many trailing axes of `target` form the event.
        mask: broadcastable to `target`; a coordinate with False leaves the event, and scores 0 by itself.

    Returns:
        (*batch), or the target's shape for `event_dims=0`.
    """
    alone = event_dims == 0
    if alone:
        samples, target = samples.unsqueeze(-1), target.unsqueeze(-1)
        mask = None if mask is None else as_mask(mask, target.shape[:-1]).unsqueeze(-1)  # type: ignore[union-attr]
    samples, target, keep = _flat_event(samples, target, max(1, event_dims), mask)
    num_members, dim = samples.shape[0], target.shape[-1]
    if num_members <= dim:
        raise ValueError(
            f"the covariance of {num_members} members is singular in {dim} dimensions: use more than {dim} members, "
            "fewer coordinates, or event_dims=0"
        )
    spread = (samples - samples.mean(0)).movedim(0, -2)  # (*batch, M, D)
    residual = target - samples.mean(0)
    if keep is not None:  # rows and columns of masked coordinates become those of the identity
        spread, residual = torch.where(keep.unsqueeze(-2), spread, 0.0), torch.where(keep, residual, 0.0)
    covariance = spread.mT @ spread / (num_members - 1)
    if keep is not None:
        covariance = covariance + torch.diag_embed((~keep).to(covariance.dtype))
    tril, failed = torch.linalg.cholesky_ex(covariance)
    if bool(failed.any()):
        raise ValueError(
            f"{int((failed > 0).sum())} of {failed.numel()} ensembles have no spread in some direction, where the "
            "score is infinite: leave such coordinates out by a mask"
        )
    white = torch.linalg.solve_triangular(tril, residual.unsqueeze(-1), upper=False).squeeze(-1)
    return 2 * tril.diagonal(dim1=-2, dim2=-1).log().sum(-1) + white.square().sum(-1)


def threshold_weighted_crps(
    samples: Tensor, target: Tensor, *, lower: float = -math.inf, upper: float = math.inf, fair: bool = True
) -> Tensor:
    """Integral of (F(x) - 1{x >= y})^2 over [lower, upper] alone, (...): the CRPS of members and target clamped to it.

    Proper, unlike the CRPS of the cases in which the target happened to fall there.
    """
    if not lower < upper:
        raise ValueError(f"expected lower < upper; got {lower} and {upper}")
    samples, target = as_ensemble(samples, target)
    return ensemble_crps(samples.clamp(lower, upper), target.clamp(lower, upper), fair=fair)


def _flat_event(
    samples: Tensor, target: Tensor, event_dims: int, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Samples (M, *batch, D), target (*batch, D) and mask, with masked values set to 0."""
    samples, target = as_ensemble(samples, target)
    if not 1 <= event_dims <= target.ndim:
        raise ValueError(
            f"event_dims must be within 1..{target.ndim} for target {tuple(target.shape)}; got {event_dims}"
        )
    keep = as_mask(mask, target.shape)
    if keep is not None:
        samples, target = torch.where(keep, samples, 0.0), torch.where(keep, target, 0.0)
        keep = keep.flatten(-event_dims)
    return samples.flatten(-event_dims), target.flatten(-event_dims), keep
