"""Metrics: statistics per sample, and one reducer that averages them.

`probabilistic` for ensembles, `intervals` for quantiles and coverage, `reduce` for means, standard
errors and ratios over one or many processes.
"""

from marigold_uq.metrics.dependence import dawid_sebastiani, threshold_weighted_crps, variogram_score
from marigold_uq.metrics.detection import auroc
from marigold_uq.metrics.intervals import nested_interval
from marigold_uq.metrics.probabilistic import (
    absolute_error,
    central_interval,
    coverage,
    crps,
    energy_score,
    ensemble_statistics,
    ensemble_variance,
    expected_coverage,
    gaussian_nll,
    interval_score,
    interval_width,
    normal_nll,
    pit,
    quantiles,
    rank_histogram,
    ranks,
    reliability,
    spread_skill,
    squared_error,
    student_t_interval,
    weighted_interval_score,
)
from marigold_uq.metrics.reduce import DERIVED, DerivedQuantity, Estimate, MeanAccumulator, SampleTable

__all__ = [
    "DERIVED",
    "DerivedQuantity",
    "Estimate",
    "MeanAccumulator",
    "SampleTable",
    "absolute_error",
    "auroc",
    "central_interval",
    "coverage",
    "crps",
    "dawid_sebastiani",
    "energy_score",
    "ensemble_statistics",
    "ensemble_variance",
    "expected_coverage",
    "gaussian_nll",
    "interval_score",
    "interval_width",
    "nested_interval",
    "normal_nll",
    "pit",
    "quantiles",
    "rank_histogram",
    "ranks",
    "reliability",
    "spread_skill",
    "squared_error",
    "student_t_interval",
    "threshold_weighted_crps",
    "variogram_score",
    "weighted_interval_score",
]
