"""Affine alignment: members to each other, predictions to ground truth, relative depth to metres."""

from marigold_uq.alignment.members import (
    AlignedMembers,
    EnsembledDepth,
    align_members,
    ensemble_members,
    in_units_of,
    member_moments,
    pairwise_rmse,
)
from marigold_uq.alignment.metric import MetricAlignment, fit_metric
from marigold_uq.alignment.targets import apply_alignment, least_squares_alignment

__all__ = [
    "AlignedMembers",
    "EnsembledDepth",
    "MetricAlignment",
    "align_members",
    "apply_alignment",
    "ensemble_members",
    "fit_metric",
    "in_units_of",
    "least_squares_alignment",
    "member_moments",
    "pairwise_rmse",
]
