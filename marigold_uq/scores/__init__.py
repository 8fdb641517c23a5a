"""Scoring rules, lower is better: `score(dist, value)`, unreduced; `mean_score` is the one reduction."""

from marigold_uq.scores.bandwidth import RunningResidualScale
from marigold_uq.scores.crps import crps
from marigold_uq.scores.energy import energy_score, projected_crps
from marigold_uq.scores.kernel import kernel_score
from marigold_uq.scores.log import log_score
from marigold_uq.scores.masking import masked_mean
from marigold_uq.scores.projected import Directions, projected_score, random_directions
from marigold_uq.scores.reduction import SCORES, mean_score, sample_scores
from marigold_uq.scores.squared import squared_error

__all__ = [
    "SCORES",
    "Directions",
    "RunningResidualScale",
    "crps",
    "energy_score",
    "kernel_score",
    "log_score",
    "masked_mean",
    "mean_score",
    "projected_crps",
    "projected_score",
    "random_directions",
    "sample_scores",
    "squared_error",
]
