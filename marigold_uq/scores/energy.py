"""Energy score: in closed form along directions for Gaussian families, from draws for the others.

||x|| = c_D E_a |a . x| over uniform unit vectors a, hence ES(P, y) = c_D E_a CRPS(a . X, a . y); and a . X is a
one-dimensional Gaussian (mixture), whose CRPS is closed. No draw of X is needed, no bandwidth, O(D r) per direction.
"""

import math

import torch
from torch import Tensor

from marigold_uq.distributions import (
    LowRankMixtureDistribution,
    NoiseDistribution,
    PointDistribution,
    SampleDistribution,
)
from marigold_uq.distributions.base import expand_mask
from marigold_uq.precision import full_precision
from marigold_uq.scores.crps import crps, mixture_crps
from marigold_uq.scores.directions import check_patch_size, fold_patches, isotropic_directions, patch_shape
from marigold_uq.scores.ensemble import coordinate_energy_score, ensemble_energy_score
from marigold_uq.scores.masking import masked_target, needs_generator, zero_masked


@full_precision
def energy_score(
    dist: NoiseDistribution,
    value: Tensor,
    *,
    exponent: float = 1.0,
    lam: float = 1.0,
    mask: Tensor | None = None,
    patch_size: int | None = None,
    num_directions: int = 64,
    num_draws: int = 64,
    generator: torch.Generator | None = None,
    directions: Tensor | None = None,
) -> Tensor:
    """E||X - y||^beta - lam/2 E||X - X'||^beta: (B,) for joint families, (B, *event) for the others.

    Joint Gaussian families with exponent 1 use the projected closed form along `num_directions` random directions;
    with `patch_size` the score of each patch of coordinates by itself, averaged over patches (local correlations,
    which isotropic directions drown in high dimension). Anything else uses `num_draws` draws, fairly. Both need a
    `generator`, or the first, for a compiled graph, which can hold none, its unit vectors as `directions` (N, *event),
    or (N, *patch). Masked coordinates leave the event of a joint family and score 0 in the others.
    """
    if not 0 < exponent < 2:
        raise ValueError(f"the energy score is proper for exponents strictly between 0 and 2; got {exponent}")
    (value, keep), plain = masked_target(dist, value, mask), exponent == lam == 1.0
    if plain and dist.joint and dist.has_density:
        check_patch_size(patch_size)
        shape = value.shape[1:] if patch_size is None else patch_shape(value.shape[1:], patch_size)
        if directions is None:
            what = "the energy score of a joint Gaussian family looks along random lines"
            directions = isotropic_directions(
                shape, num_directions, like=value, generator=needs_generator(generator, what)
            )
        return _projected_energy(dist, value, keep, patch_size, directions)
    if patch_size is not None:
        raise ValueError(
            f"patch_size={patch_size} needs the projected closed form: a joint Gaussian family with exponent 1 and "
            f"lam 1; got family {dist.name!r}, exponent {exponent}, lam {lam}. Leave patch_size out."
        )
    if plain and not dist.joint:
        return crps(dist, value, mask=keep)  # in one dimension the two are the same
    if isinstance(dist, PointDistribution):  # X = X', so the second term is 0
        return ensemble_energy_score(dist.loc.unsqueeze(0), value, exponent=exponent, lam=0.0, mask=keep)
    if isinstance(dist, SampleDistribution):
        draws = dist.draws
    else:
        draws = dist.rsample((num_draws,), needs_generator(generator, "this energy score is estimated from draws"))
    if dist.joint:
        return ensemble_energy_score(draws, value, exponent=exponent, lam=lam, mask=keep)
    return zero_masked(coordinate_energy_score(draws, value, exponent=exponent, lam=lam), keep)


def _projected_energy(
    dist: NoiseDistribution, value: Tensor, mask: Tensor | None, patch_size: int | None, directions: Tensor
) -> Tensor:
    constant = projection_constant(math.prod(directions.shape[1:]))
    if patch_size is not None:
        return constant * patch_projected_crps(dist, value, patch_size, directions, mask)
    return constant * projected_crps(dist, value, directions, mask).mean(1)


def projection_constant(dim: int) -> float:
    """c_D = sqrt(pi) Gamma((D+1)/2) / Gamma(D/2), so that ||x|| = c_D E|a . x|; it is 1 for D = 1."""
    return math.exp(0.5 * math.log(math.pi) + math.lgamma((dim + 1) / 2) - math.lgamma(dim / 2))


@full_precision
def projected_crps(dist: NoiseDistribution, value: Tensor, directions: Tensor, mask: Tensor | None = None) -> Tensor:
    """CRPS of a . X at a . y for directions (N, *event): (B, N). Masked coordinates are projected out."""
    if directions.shape[1:] != value.shape[1:]:
        raise ValueError(
            f"directions are (N, *event) with event {tuple(value.shape[1:])}; got {tuple(directions.shape)}"
        )
    parts = dist.components()
    a = directions.flatten(1).unsqueeze(0)  # (1, N, D)
    if mask is not None:
        keep = expand_mask(mask, value)
        value = torch.where(keep, value, 0.0)  # a masked target may be NaN
        a = a * keep.flatten(1).unsqueeze(1)  # (B, N, D)
    gap = (value.unsqueeze(1) - parts.loc).flatten(2) @ a.mT  # (B, K, N)
    shared = (parts.cov_factor.flatten(3) @ a.unsqueeze(1).mT).square().sum(2)  # (B, K, N)
    variance = parts.cov_diag.flatten(2) @ a.square().mT + shared
    scale = variance.clamp(min=torch.finfo(variance.dtype).tiny).sqrt()  # 0 where all coordinates are masked
    weights = parts.weights.unsqueeze(-1).expand_as(gap)
    return mixture_crps(-gap, scale, weights, torch.zeros_like(gap[:, 0]))


def patch_projected_crps(
    dist: NoiseDistribution, value: Tensor, patch_size: int, directions: Tensor, mask: Tensor | None = None
) -> Tensor:
    """Mean CRPS along unit `directions` (N, *patch) within each patch, (B,).

    The distribution of a patch is the marginal one of its coordinates. Patches tile the event; those that stick out of
    it are padded with masked coordinates, which leave the event exactly. The mean is over patches with any left.
    """
    whole, space = dist.components(), value.ndim - 2
    keep = torch.ones_like(value, dtype=torch.bool) if mask is None else expand_mask(mask, value)
    patches = LowRankMixtureDistribution(
        loc=fold_patches(whole.loc, patch_size, space),
        cov_diag=fold_patches(whole.cov_diag, patch_size, space),
        cov_factor=fold_patches(whole.cov_factor, patch_size, space),
        logits=whole.logits.repeat_interleave(_num_patches(value, patch_size), 0),
    )
    part, part_keep = fold_patches(value, patch_size, space), fold_patches(keep, patch_size, space)
    along = projected_crps(patches, part, directions, part_keep)  # (B P, N)
    occupied = part_keep.flatten(1).any(1).unflatten(0, (value.shape[0], _num_patches(value, patch_size)))  # (B, P)
    total = (along.mean(1).unflatten(0, occupied.shape) * occupied).sum(1)
    return total / occupied.sum(1).clamp(min=1)


def _num_patches(value: Tensor, patch_size: int) -> int:
    return math.prod([-(-length // patch_size) for length in value.shape[2:]])
