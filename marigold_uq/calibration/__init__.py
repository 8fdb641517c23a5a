"""Calibrate the spread on held-out data: tau, kappa, and split-conformal intervals for every coverage.

Order matters. First choose tau or kappa (and steps) by a proper score on one held-out set; then freeze model, steps,
ensemble size, tau and kappa, and calibrate intervals on a second set that nothing has touched. Only then does the
conformal guarantee hold. `pipeline.calibrate(Calibration(...))` keeps the result with the model.
"""

from marigold_uq.calibration.adaptive import AdaptiveConformal
from marigold_uq.calibration.comparison import Comparison, unit_means
from marigold_uq.calibration.conformal import (
    conformal_images,
    conformal_rows,
    interval_grid_images,
    interval_grid_rows,
    residual_ratio,
    stack_grids,
)
from marigold_uq.calibration.intervals import COVERAGES, IntervalGrid, check_coverage
from marigold_uq.calibration.recalibration import ByGroup, QuantileMap, fit_by_group
from marigold_uq.calibration.scaling import (
    KappaChoice,
    StepsChoice,
    TauChoice,
    apply_kappa,
    choose_gaussian_kappa,
    choose_kappa,
    choose_steps,
    choose_tau,
)
from marigold_uq.calibration.storage import Calibration, read_calibrations, with_calibration

__all__ = [
    "COVERAGES",
    "AdaptiveConformal",
    "ByGroup",
    "Calibration",
    "Comparison",
    "IntervalGrid",
    "KappaChoice",
    "QuantileMap",
    "StepsChoice",
    "TauChoice",
    "apply_kappa",
    "check_coverage",
    "choose_gaussian_kappa",
    "choose_kappa",
    "choose_steps",
    "choose_tau",
    "conformal_images",
    "conformal_rows",
    "fit_by_group",
    "interval_grid_images",
    "interval_grid_rows",
    "read_calibrations",
    "residual_ratio",
    "stack_grids",
    "unit_means",
    "with_calibration",
]
