"""Families of distributions for the model output; `FAMILIES` maps config names to classes."""

from marigold_uq.distributions.base import (
    FAMILIES,
    MIN_SCALE,
    MIN_VARIANCE,
    HeadOptions,
    NoiseDistribution,
    family_class,
)
from marigold_uq.distributions.cholesky import CholeskyDistribution
from marigold_uq.distributions.gaussian import GaussianDistribution
from marigold_uq.distributions.low_rank import LowRankDistribution
from marigold_uq.distributions.low_rank_mixture import LowRankMixtureDistribution
from marigold_uq.distributions.mixture import MixtureDistribution
from marigold_uq.distributions.point import PointDistribution
from marigold_uq.distributions.sample import SampleDistribution

__all__ = [
    "FAMILIES",
    "MIN_SCALE",
    "MIN_VARIANCE",
    "CholeskyDistribution",
    "GaussianDistribution",
    "HeadOptions",
    "LowRankDistribution",
    "LowRankMixtureDistribution",
    "MixtureDistribution",
    "NoiseDistribution",
    "PointDistribution",
    "SampleDistribution",
    "family_class",
]
