"""Logarithmic score, the negative log density; a baseline (the paper finds it far worse on PDEs)."""

from torch import Tensor

from marigold_uq.distributions import NoiseDistribution
from marigold_uq.distributions.base import check_value


def log_score(dist: NoiseDistribution, value: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """-log p(value): (B,) for joint families, where masked coordinates leave the event; (B, *event) for the others."""
    if not hasattr(dist, "log_prob"):
        raise TypeError(f"family {dist.name!r} has no density, so no log score; use crps, energy_score or kernel_score")
    value = check_value(dist, value)
    return -(dist.log_prob(value, mask=mask) if dist.joint else dist.log_prob(value))
