"""Distributional schedulers: DDIM, EDM and flow matching with one reverse step."""

import math
from typing import Any

from marigold_uq.schedulers.distributional import DistributionalScheduler
from marigold_uq.schedulers.reverse_step import CLEAN, NoiseLevel, OutputForm, StepCoefficients, reverse_step
from marigold_uq.schedulers.scheduling_distributional_ddim import DistributionalDDIMScheduler
from marigold_uq.schedulers.scheduling_distributional_edm import DistributionalEDMScheduler
from marigold_uq.schedulers.scheduling_distributional_flow_match import DistributionalFlowMatchScheduler
from marigold_uq.schedulers.scheduling_distributional_lcm import DistributionalLCMScheduler

FRAMEWORKS: dict[str, type[Any]] = {
    "ddim": DistributionalDDIMScheduler,
    "edm": DistributionalEDMScheduler,
    "flow": DistributionalFlowMatchScheduler,
}
"""Name in a training config -> scheduler."""

UNIT_DATA: dict[str, dict[str, float]] = {
    "ddim": {},
    "edm": {"sigma_data": 1.0, "training_log_mean": -1.2 + math.log(2)},  # EDM's own are for a deviation of .5
    "flow": {},
}
"""Arguments of these schedulers for data of standard deviation 1."""

__all__ = [
    "CLEAN",
    "FRAMEWORKS",
    "UNIT_DATA",
    "DistributionalDDIMScheduler",
    "DistributionalEDMScheduler",
    "DistributionalFlowMatchScheduler",
    "DistributionalLCMScheduler",
    "DistributionalScheduler",
    "NoiseLevel",
    "OutputForm",
    "StepCoefficients",
    "reverse_step",
]
