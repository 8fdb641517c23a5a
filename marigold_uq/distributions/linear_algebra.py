"""Quadratic forms and determinants of diag(d) + U U^T in O(D r^2), by Woodbury and the determinant lemma.

Tensors are (..., *event) for vectors and (..., R, *event) for factors; the event is flattened here, D coordinates.
"""

import math

import torch
from torch import Tensor

from marigold_uq.distributions.base import expand_mask
from marigold_uq.precision import full_precision


@full_precision
def low_rank_quadratic(residual: Tensor, diag: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
    """r^T S^-1 r and log det S of S = diag(d) + U U^T, for flat residual, diag (..., D) and factor (..., R, D).

    The residual may have more leading axes than the covariance.

    With w = d^-1/2 U the form is the least square min_x |d^-1/2 r - w x|^2 + |x|^2, and det S / det d = det(I + w^T w).
    Both come from Gram-Schmidt on the rows [w^T, I] and [d^-1/2 r, 0]. Factorising I + w^T w itself would square the
    condition number and fail in float32 for large, nearly parallel factors; here every pivot is at least 1.
    """
    root, rank = diag.sqrt(), factor.shape[-2]
    factor = factor.expand(*residual.shape[:-1], *factor.shape[-2:])
    eye = torch.eye(rank, rank + 1, dtype=diag.dtype, device=diag.device).mT  # a row of zeros below the identity
    whitened = torch.cat([factor, residual.unsqueeze(-2)], -2) / root.unsqueeze(-2)  # (..., R + 1, D)
    rows = torch.cat([whitened, eye.expand(*whitened.shape[:-1], rank)], -1)  # (..., R + 1, D + R)
    log_det = diag.log().sum(-1)
    for _ in range(rank):
        pivot, rows = rows[..., :1, :], rows[..., 1:, :]
        square = pivot.square().sum(-1, keepdim=True)  # (..., 1, 1)
        rows = rows - (rows @ pivot.mT) / square * pivot
        log_det = log_det + square.log()[..., 0, 0]
    return rows.square().sum((-2, -1)), log_det


@full_precision
def tril_of_sum(tril: Tensor, scale: Tensor) -> Tensor:
    """The lower triangular T with T T^T = L L^T + diag(scale^2), for tril (..., D, D) and scale (..., D).

    From the QR decomposition of [L^T; diag(scale)]: forming the sum would square the condition number, and its Cholesky
    factorisation fails in float32 for strongly correlated distributions.
    """
    upper = torch.linalg.qr(torch.cat([tril.mT, torch.diag_embed(scale)], -2)).R
    sign = torch.where(upper.diagonal(dim1=-2, dim2=-1) < 0, -1.0, 1.0).to(upper.dtype)
    return upper.mT * sign.unsqueeze(-2)


def low_rank_log_density(residual: Tensor, diag: Tensor, factor: Tensor, mask: Tensor | None = None) -> Tensor:
    """log N(residual; 0, diag(d) + U U^T) of events (..., B, *event), factor (B, R, *event); returns (..., B)."""
    residual, diag, factor, count = drop_masked(residual, diag, factor, mask, neutral_diag=1.0)
    quadratic, log_det = low_rank_quadratic(residual, diag, factor)
    return -0.5 * (quadratic + log_det + count * math.log(2 * math.pi))


def drop_masked(
    residual: Tensor, diag: Tensor, factor: Tensor, mask: Tensor | None, *, neutral_diag: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Flatten the event and take masked coordinates out of it; also the number of coordinates left, (..., B).

    A Gaussian's marginal distribution drops rows and columns; a row with residual 0, factor 0 and a neutral diagonal
    entry (one for a density, zero for a kernel) contributes exactly nothing, and keeps the tensors rectangular.
    """
    keep = None if mask is None else expand_mask(mask, residual)
    first = residual.ndim - diag.ndim + 1  # where the event starts in (..., B, *event)
    residual, diag, factor = residual.flatten(first), diag.flatten(1), factor.flatten(2)
    if keep is None:
        return residual, diag, factor, residual.new_full(residual.shape[:-1], residual.shape[-1])
    keep, zero = keep.flatten(first), residual.new_zeros(())  # (..., B, D)
    return (
        torch.where(keep, residual, zero),
        torch.where(keep, diag, zero + neutral_diag),
        torch.where(keep.unsqueeze(-2), factor, zero),
        keep.sum(-1).to(residual.dtype),
    )
