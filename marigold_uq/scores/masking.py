"""Masked targets, the same way in every score: hidden from value and gradient before, counted as 0 after."""

from collections.abc import Callable

import torch
from torch import Tensor

from marigold_uq.distributions import NoiseDistribution
from marigold_uq.distributions.base import check_value, expand_mask


def masked_target(dist: NoiseDistribution, value: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The checked target, the mean where it is masked (it may be NaN there), and the mask in full shape."""
    value = check_value(dist, value)
    if mask is None:
        return value, None
    keep = expand_mask(mask, value)
    return torch.where(keep, value, dist.mean.detach()), keep


def zero_masked(scores: Tensor, keep: Tensor | None) -> Tensor:
    """Scores (B, *event) with 0 where a coordinate does not count."""
    return scores if keep is None else torch.where(keep, scores, 0.0)


def masked_mean(values: Tensor, keep: Tensor | None) -> Tensor:
    """Mean of (B, *event) over each sample's coordinates that count, (B,); 0 for a sample without any."""
    if keep is None:
        return values.flatten(1).mean(1)
    keep = keep.flatten(1)
    return torch.where(keep, values.flatten(1), 0.0).sum(1) / keep.sum(1).clamp(min=1)


def formula_for(
    table: dict[type[NoiseDistribution], Callable[..., Tensor]], dist: NoiseDistribution
) -> Callable[..., Tensor]:
    """The closed form of a family in a score's table."""
    if type(dist) not in table:
        names = ", ".join(kind.__name__ for kind in table)
        raise TypeError(f"no formula for a {type(dist).__name__}; there is one for {names}")
    return table[type(dist)]


def needs_generator(generator: torch.Generator | None, what: str) -> torch.Generator:
    """Randomness is an argument; a score that draws says so instead of reading the global stream."""
    if generator is None:
        raise ValueError(f"{what}: pass generator=torch.Generator().manual_seed(...)")
    return generator
