"""Make the spread honest on held-out data: tau, kappa, the number of steps, and split-conformal intervals.

Order matters. First choose tau or kappa (and steps) by a proper score on one held-out set; then freeze model, steps,
number of members, tau and kappa, and calibrate intervals on a second set that nothing has touched. Only then does the
conformal guarantee hold.
"""

from marigold_uq.calibration.conformal import conformal_images, conformal_rows, cqr_score, residual_ratio
from marigold_uq.calibration.scaling import (
    KappaChoice,
    StepsAndTauChoice,
    TauChoice,
    apply_kappa,
    choose_kappa,
    choose_steps_and_tau,
    choose_tau,
    draw_with_tau,
)
from marigold_uq.calibration.storage import Calibration, read_calibration, store_calibration

__all__ = [
    "Calibration",
    "KappaChoice",
    "StepsAndTauChoice",
    "TauChoice",
    "apply_kappa",
    "choose_kappa",
    "choose_steps_and_tau",
    "choose_tau",
    "conformal_images",
    "conformal_rows",
    "cqr_score",
    "draw_with_tau",
    "read_calibration",
    "residual_ratio",
    "store_calibration",
]
