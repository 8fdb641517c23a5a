"""Distributional schedulers: DDIM, EDM and flow matching with one reverse step."""

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

__all__ = [
    "CLEAN",
    "FRAMEWORKS",
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
