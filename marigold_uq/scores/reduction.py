"""The one place where scores are averaged and masks applied."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from marigold_uq.distributions import NoiseDistribution
from marigold_uq.distributions.base import check_value
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
    """Average score of a batch: every coordinate that counts weighs the same, for joint laws every sample.

    `mask` (True where a coordinate counts) may hide invalid or NaN targets; a joint law drops those coordinates from
    its event, a coordinate-wise score from the average. `weight` (B,) weighs samples. `score=None` takes the family's
    own.
    """
    values, mask = _masked_scores(dist, value, score, mask, options)
    return masked_mean(values, mask, weight)


def sample_scores(
    dist: NoiseDistribution, value: Tensor, score: str | None = None, *, mask: Tensor | None = None, **options: Any
) -> Tensor:
    """Score of each sample, (B,): of the event, or the mean over its coordinates that count; arguments as above.

    Its mean over a batch does not depend on how the batch is cut into parts, which is what several processes need.
    """
    values, mask = _masked_scores(dist, value, score, mask, options)
    if values.ndim == 1:
        return values
    if mask is None:
        return values.flatten(1).mean(1)
    keep = mask.flatten(1)
    return torch.where(keep, values.flatten(1), 0.0).sum(1) / keep.sum(1).clamp(min=1)


def _masked_scores(
    dist: NoiseDistribution, value: Tensor, score: str | None, mask: Tensor | None, options: dict[str, Any]
) -> tuple[Tensor, Tensor | None]:
    """Unreduced scores, with masked targets hidden from the gradient, and the mask in full shape."""
    name = score or dist.default_score
    if name not in SCORES:
        raise ValueError(f"unknown score {name!r}; choose one of {', '.join(sorted(SCORES))}")
    value = check_value(dist, value)
    if mask is not None:
        mask = expand_mask(mask, value)
        value = torch.where(mask, value, dist.mean.detach())
        if SCORES[name] not in (crps, squared_error):
            options = {**options, "mask": mask}
    return SCORES[name](dist, value, **options), mask


def masked_mean(values: Tensor, mask: Tensor | None = None, weight: Tensor | None = None) -> Tensor:
    """Mean of (B, *event) over the coordinates that count, or of (B,) over the samples that have any.

    The mask of (B,) values is that of their events, (B, *event), or already (B,).
    """
    keep = torch.ones_like(values)
    if mask is not None:
        keep = expand_mask(mask if values.ndim > 1 else mask.reshape(len(mask), -1).any(1), values).to(values.dtype)
    if weight is not None:
        keep = keep * weight.reshape(-1, *[1] * (values.ndim - 1))
    counted = torch.where(keep != 0, values, 0.0)  # a masked value may be NaN
    return (counted * keep).sum() / keep.sum().clamp(min=torch.finfo(values.dtype).tiny)
