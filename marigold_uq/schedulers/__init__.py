"""The scheduler: stock DDIM, with a law instead of a point as the model output."""

from marigold_uq.schedulers.scheduling_distributional_ddim import DistributionalDDIMScheduler

__all__ = ["DistributionalDDIMScheduler"]
