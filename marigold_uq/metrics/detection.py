"""How well a score tells two kinds of samples apart."""

import torch
from torch import Tensor

from marigold_uq.metrics.reduce import Estimate
from marigold_uq.precision import accumulator_dtype

__all__ = ["auroc"]


def auroc(scores: Tensor, is_positive: Tensor) -> Estimate:
    """Area under the ROC curve: how often a positive sample scores higher than a negative one, ties counted half.

    The standard error is DeLong's, with samples as independent units; NaN with fewer than two of a kind.

    Args:
        scores: (N,), higher for samples that are meant to be positive.
        is_positive: (N,), boolean.
    """
    if scores.ndim != 1 or scores.shape != is_positive.shape or is_positive.dtype != torch.bool:
        raise ValueError(
            f"expected scores (N,) and a boolean is_positive (N,); got {tuple(scores.shape)} and "
            f"{is_positive.dtype} {tuple(is_positive.shape)}"
        )
    if bool(scores.isnan().any()) or not bool(is_positive.any()) or bool(is_positive.all()):
        raise ValueError("an AUROC needs samples of both kinds and scores without NaN")
    positive, negative = scores[is_positive], scores[~is_positive]
    wins = _share_below(negative, positive)  # of every positive sample
    losses = 1 - _share_below(positive, negative)
    variance = wins.var(correction=1) / len(wins) + losses.var(correction=1) / len(losses)
    return Estimate(wins.mean(), variance.sqrt(), torch.tensor(len(scores)))


def _share_below(others: Tensor, values: Tensor) -> Tensor:
    """For each value the share of the others below it, ties counted half."""
    ordered = others.sort().values
    below, not_above = (torch.searchsorted(ordered, values.contiguous(), right=right) for right in (False, True))
    return (below + not_above).to(accumulator_dtype(values.device)) / (2 * len(others))
