"""The one place where scores are averaged."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from marigold_uq.distributions import NoiseDistribution
from marigold_uq.distributions.base import expand_mask
from marigold_uq.scores.crps import crps
from marigold_uq.scores.energy import energy_score
from marigold_uq.scores.kernel import kernel_score
from marigold_uq.scores.log import log_score
from marigold_uq.scores.masking import masked_mean
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
"""Name in a config -> score. Scores take a mask and return (B, *event) or, for whole events, (B,)."""


def mean_score(
    dist: NoiseDistribution,
    value: Tensor,
    score: str | None = None,
    *,
    mask: Tensor | None = None,
    weight: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """Average of `sample_scores` over a batch, the loss of all trainers; `weight` (B,) weighs samples."""
    scores = sample_scores(dist, value, score, mask=mask, **options)
    return scores.mean() if weight is None else (weight * scores).sum() / weight.sum()


def sample_scores(
    dist: NoiseDistribution, value: Tensor, score: str | None = None, *, mask: Tensor | None = None, **options: Any
) -> Tensor:
    """Score of each sample, (B,): of the event, or the mean over its coordinates that count.

    `mask` (True where a coordinate counts) may hide invalid or NaN targets; a joint family drops those coordinates from
    its event, a coordinate-wise score from the average. A sample without any scores 0, so that the mean over a batch
    does not depend on how the batch is cut into parts, which is what several processes need. `score=None` takes the
    family's own.
    """
    name = score or dist.default_score
    if name not in SCORES:
        raise ValueError(f"unknown score {name!r}; choose one of {', '.join(sorted(SCORES))}")
    values = SCORES[name](dist, value, mask=mask, **options)
    keep = None if mask is None else expand_mask(mask, value)
    if values.ndim > 1:
        return masked_mean(values, keep)
    return values if keep is None else torch.where(keep.flatten(1).any(1), values, 0.0)
