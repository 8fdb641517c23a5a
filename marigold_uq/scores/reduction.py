"""The one place where scores are averaged and masks applied."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from marigold_uq.distributions import NoiseDistribution
from marigold_uq.distributions.base import at_least_float32
from marigold_uq.distributions.linear_algebra import expand_mask
from marigold_uq.scores.crps import crps
from marigold_uq.scores.energy import energy_score
from marigold_uq.scores.kernel import kernel_score
from marigold_uq.scores.log import log_score
from marigold_uq.scores.projected import projected_score
from marigold_uq.scores.squared import squared_error

SCORES: dict[str, Callable[..., Tensor]] = {
    "crps": crps,
    "energy": energy_score,
    "kernel": kernel_score,
    "log": log_score,
    "projected": projected_score,
    "squared_error": squared_error,
}
"""Name in a config -> score. Scores return (B, *event) or, for whole events, (B,)."""


def mean_score(
    dist: NoiseDistribution,
    value: Tensor,
    score: str | None = None,
    *,
    mask: Tensor | None = None,
    weight: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """Average score of a batch: the training loss.

    `mask` (True where a coordinate counts) may hide invalid or NaN targets; a joint law drops those coordinates from
    its event, a coordinate-wise score from the average. `weight` (B,) weighs samples. `score=None` takes the family's
    own.
    """
    name = score or dist.default_score
    if name not in SCORES:
        raise ValueError(f"unknown score {name!r}; choose one of {', '.join(sorted(SCORES))}")
    value = at_least_float32(value)
    if mask is not None:
        value = torch.where(expand_mask(mask, value), value, dist.mean.detach())
        if SCORES[name] not in (crps, squared_error):
            options["mask"] = mask
    return masked_mean(SCORES[name](dist, value, **options), mask, weight)


def masked_mean(values: Tensor, mask: Tensor | None = None, weight: Tensor | None = None) -> Tensor:
    """Mean of (B, *event) over the coordinates that count, or of (B,) over the samples that have any."""
    keep = torch.ones_like(values)
    if mask is not None:
        keep = (expand_mask(mask, values) if values.ndim > 1 else mask.flatten(1).any(1)).to(values.dtype)
    if weight is not None:
        keep = keep * weight.reshape(-1, *[1] * (values.ndim - 1))
    return (values * keep).sum() / keep.sum().clamp(min=torch.finfo(values.dtype).tiny)
