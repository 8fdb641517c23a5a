"""Quadratic forms and determinants of diag(d) + U U^T in O(D r^2), by Woodbury and the determinant lemma.

Tensors are (..., *event) for vectors and (..., R, *event) for factors; the event is flattened here, D coordinates.
"""

import math
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
T = TypeVar("T")


def full_precision(function: Callable[P, T]) -> Callable[P, T]:
    """Run without autocast: inside it even float32 matrix products would be done in half precision."""

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        with torch.autocast("cuda", enabled=False), torch.autocast("cpu", enabled=False):
            return function(*args, **kwargs)

    return run


@full_precision
def low_rank_quadratic(residual: Tensor, diag: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
    """r^T S^-1 r and log det S of S = diag(d) + U U^T, for flat residual, diag (..., D) and factor (..., R, D).

    With w = d^-1/2 U the form is the least square min_x |d^-1/2 r - w x|^2 + |x|^2, and det S / det d = det(I + w^T w).
    Both come from Gram-Schmidt on the rows [w^T, I] and [d^-1/2 r, 0]. Factorising I + w^T w itself would square the
    condition number and fail in float32 for large, nearly parallel factors; here every pivot is at least 1.
    """
    root, rank = diag.sqrt(), factor.shape[-2]
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
    factorisation fails in float32 for strongly correlated laws.
    """
    upper = torch.linalg.qr(torch.cat([tril.mT, torch.diag_embed(scale)], -2)).R
    sign = torch.where(upper.diagonal(dim1=-2, dim2=-1) < 0, -1.0, 1.0).to(upper.dtype)
    return upper.mT * sign.unsqueeze(-2)


def low_rank_log_density(residual: Tensor, diag: Tensor, factor: Tensor, mask: Tensor | None = None) -> Tensor:
    """log N(residual; 0, diag(d) + U U^T) of events (B, *event), factor (B, R, *event); returns (B,)."""
    residual, diag, factor, count = drop_masked(residual, diag, factor, mask, neutral_diag=1.0)
    quadratic, log_det = low_rank_quadratic(residual, diag, factor)
    return -0.5 * (quadratic + log_det + count * math.log(2 * math.pi))


def drop_masked(
    residual: Tensor, diag: Tensor, factor: Tensor, mask: Tensor | None, *, neutral_diag: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Flatten the event and take masked coordinates out of it; also the number of coordinates left, (B,).

    A Gaussian's marginal law drops rows and columns; a row with residual 0, factor 0 and a neutral diagonal entry
    (one for a density, zero for a kernel) contributes exactly nothing, and keeps the tensors rectangular.
    """
    if mask is None:
        count = residual.new_full(residual.shape[:1], residual[0].numel())
        return residual.flatten(1), diag.flatten(1), factor.flatten(2), count
    keep = expand_mask(mask, residual).flatten(1)  # (B, D)
    zero = residual.new_zeros(())
    return (
        torch.where(keep, residual.flatten(1), zero),
        torch.where(keep, diag.flatten(1), zero + neutral_diag),
        torch.where(keep.unsqueeze(1), factor.flatten(2), zero),
        keep.sum(1).to(residual.dtype),
    )


def expand_mask(mask: Tensor, like: Tensor) -> Tensor:
    """A boolean mask broadcast to (B, *event); anything else is an error."""
    if mask.dtype != torch.bool:
        raise TypeError(f"a mask is boolean, True where a coordinate counts; got dtype {mask.dtype}")
    try:
        return mask.expand(like.shape)
    except RuntimeError as error:
        raise ValueError(f"mask of shape {tuple(mask.shape)} does not broadcast to {tuple(like.shape)}") from error
