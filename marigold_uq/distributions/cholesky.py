"""One Gaussian with a full covariance, for small fixed D (Sigma^mv, Cholesky, in the paper)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from marigold_uq.distributions.base import (
    ONE_OF_EACH,
    HeadOptions,
    InitialBlock,
    NoiseDistribution,
    check_tau,
    expand_mask,
    positive,
    register,
)
from marigold_uq.distributions.gaussian import GaussianDistribution
from marigold_uq.distributions.linear_algebra import tril_of_sum
from marigold_uq.distributions.low_rank_mixture import LowRankMixtureDistribution
from marigold_uq.precision import at_least_float32, full_precision
from marigold_uq.randomness import Generators, randn


@register("cholesky")
@dataclass(frozen=True, eq=False)
class CholeskyDistribution(NoiseDistribution):
    """N(loc, L L^T), one event = all D coordinates of a sample.

    L = diag(s) R: s = softplus + 1e-6 and the rows of R are the normalised [raw_{j<i}, 1], so that Sigma_ii = s_i^2.
    The raw output is flat, (B, D + D(D+1)/2): loc, then the lower triangle row by row.
    """

    layout = "[loc, lower triangle row by row]"
    joint = True
    default_score = "kernel"

    loc: Tensor  # (B, *event)
    scale_tril: Tensor  # (B, D, D)

    def _expected_shapes(self) -> dict[str, Sequence[int]]:
        dim = self.loc.shape[1:].numel()
        return {"scale_tril": (self.loc.shape[0], dim, dim)}

    @classmethod
    def num_blocks(cls, head: HeadOptions = ONE_OF_EACH) -> int:
        raise ValueError(
            "a cholesky head has no fixed number of channels per target channel: an event of D coordinates takes "
            "D + D(D+1)/2 numbers from a flat head (num_raw_channels(D)); for convolutional networks use 'low_rank'"
        )

    @classmethod
    def num_raw_channels(cls, target_channels: int, head: HeadOptions = ONE_OF_EACH) -> int:
        """D + D(D+1)/2 for D = target_channels coordinates."""
        return target_channels + target_channels * (target_channels + 1) // 2

    @classmethod
    def initial_blocks(cls, head: HeadOptions, scale: float) -> list[InitialBlock]:
        raise ValueError("a cholesky head is flat and cannot be had by widening a convolution; use 'low_rank'")

    @classmethod
    def from_raw(
        cls, raw: Tensor, head: HeadOptions = ONE_OF_EACH, *, event_shape: Sequence[int] | None = None
    ) -> Self:
        """Without `event_shape` the event is a vector of the D that fits the raw width."""
        dim = _solve_dimension(raw.shape[-1]) if event_shape is None else math.prod(event_shape)
        width = cls.num_raw_channels(dim)
        if raw.ndim != 2 or raw.shape[1] != width:
            raise ValueError(
                f"family 'cholesky' expects flat raw output (B, D + D(D+1)/2) = (B, {width}) for D = {dim}: "
                f"{cls.layout}; got shape {tuple(raw.shape)}"
            )
        raw = at_least_float32(raw)
        loc = raw[:, :dim].reshape(-1, *(event_shape or (dim,)))
        return cls(loc, _normalised_rows(raw[:, dim:], dim))

    @property
    def mean(self) -> Tensor:
        return self.loc

    @property
    def variance(self) -> Tensor:
        return self.scale_tril.square().sum(-1).reshape(self.loc.shape)

    def covariance(self) -> Tensor:
        return self.scale_tril @ self.scale_tril.mT

    @full_precision
    def rsample(self, sample_shape: Sequence[int] = (), generator: Generators = None) -> Tensor:
        batch, dim = self.scale_tril.shape[:2]
        z = randn(sample_shape, (batch, dim), like=self.loc, generator=generator)
        return self.loc + (self.scale_tril @ z.unsqueeze(-1)).squeeze(-1).reshape(*sample_shape, *self.loc.shape)

    @full_precision
    def _log_density(self, value: Tensor, mask: Tensor | None) -> Tensor:
        event, tril = 1 - self.loc.ndim, self.scale_tril
        residual = (value - self.loc).flatten(event)  # (..., B, D)
        count = residual.new_full(residual.shape[:-1], residual.shape[-1])
        if mask is not None:
            keep = expand_mask(mask, value).flatten(event)
            residual = torch.where(keep, residual, 0.0)
            tril = tril_of_sum(torch.where(keep.unsqueeze(-1), tril, 0.0), (~keep).to(tril.dtype))
            count = keep.sum(-1).to(residual.dtype)
        white = torch.linalg.solve_triangular(tril, residual.unsqueeze(-1), upper=False).squeeze(-1)
        log_det = 2 * tril.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        return -0.5 * (white.square().sum(-1) + log_det + count * math.log(2 * math.pi))

    def affine(self, scale: float | Tensor, shift: float | Tensor) -> Self:
        rows = torch.as_tensor(scale, dtype=self.loc.dtype, device=self.loc.device)
        rows = rows.expand_as(self.loc).flatten(1)  # (B, D)
        signed = rows.unsqueeze(-1) * self.scale_tril * torch.where(rows < 0, -1.0, 1.0).to(rows).unsqueeze(-2)
        return type(self)(scale * self.loc + shift, signed)  # same covariance, diagonal >= 0

    def scaled(self, tau: float) -> Self:
        return type(self)(self.loc, math.sqrt(check_tau(tau)) * self.scale_tril)

    def _convolved(self, variance: float) -> Self:
        scale = torch.full_like(self.scale_tril[..., 0], math.sqrt(variance))
        return type(self)(self.loc, tril_of_sum(self.scale_tril, scale))

    def marginal(self) -> GaussianDistribution:
        return GaussianDistribution(self.loc, self.stddev)

    def components(self) -> LowRankMixtureDistribution:
        """One component of rank D: L L^T."""
        columns = self.scale_tril.mT.reshape(*self.scale_tril.shape[:2], *self.loc.shape[1:])
        return LowRankMixtureDistribution.single(self.loc, torch.zeros_like(self.loc), columns)


def _normalised_rows(triangle: Tensor, dim: int) -> Tensor:
    """(B, D(D+1)/2) raw numbers -> L = diag(s) R with unit rows in R."""
    rows, columns = torch.tril_indices(dim, dim, device=triangle.device)
    raw = triangle.new_zeros(triangle.shape[0], dim, dim)
    raw[:, rows, columns] = triangle
    scale = positive(raw.diagonal(dim1=-2, dim2=-1))
    eye = torch.eye(dim, dtype=raw.dtype, device=raw.device)
    unit = raw.tril(-1) + eye
    return scale.unsqueeze(-1) * unit / unit.norm(dim=-1, keepdim=True)


def _solve_dimension(width: int) -> int:
    """The D with D + D(D+1)/2 = width."""
    dim = round((math.sqrt(9 + 8 * width) - 3) / 2)
    if dim < 1 or dim + dim * (dim + 1) // 2 != width:
        raise ValueError(
            f"{width} raw numbers fit no cholesky head: D + D(D+1)/2 is 2, 5, 9, 14, ... for D = 1, 2, 3, 4"
        )
    return dim
