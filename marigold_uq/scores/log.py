"""Logarithmic score, the negative log density; a baseline (the paper finds it far worse on PDEs)."""

from torch import Tensor

from marigold_uq.distributions import NoiseDistribution
from marigold_uq.scores.masking import masked_target


def log_score(dist: NoiseDistribution, value: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """-log p(value): (B,) for joint families, where masked coordinates leave the event; (B, *event) for the others."""
    value, keep = masked_target(dist, value, mask)
    return -dist.log_prob(value, keep)
