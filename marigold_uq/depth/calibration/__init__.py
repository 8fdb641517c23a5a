"""Calibration of depth on images of the user's own: a model, or maps made by others.

`options` is what can be chosen, `pixels` what is compared, `spread` where a standard deviation comes from, `fitting`
what is chosen and what it covers on images left out, `pipelines` and `files` what is written, `report` the page with
pictures.
"""

from marigold_uq.depth.calibration.commands import run_calibration, run_intervals
from marigold_uq.depth.calibration.files import MapCalibration, calibrate_files
from marigold_uq.depth.calibration.fitting import Fit, fit, leave_out
from marigold_uq.depth.calibration.options import DepthCalibration, IntervalOptions
from marigold_uq.depth.calibration.pipelines import calibrate_depth, calibrate_modes
from marigold_uq.depth.calibration.spread import SpreadRule, Stated

__all__ = [
    "DepthCalibration",
    "Fit",
    "IntervalOptions",
    "MapCalibration",
    "SpreadRule",
    "Stated",
    "calibrate_depth",
    "calibrate_files",
    "calibrate_modes",
    "fit",
    "leave_out",
    "run_calibration",
    "run_intervals",
]
