"""The smallest pipeline with an uncertainty: a scheduler and a calibration."""

from __future__ import annotations

from typing import Any

from marigold_uq.pipelines.base import UncertaintyPipeline
from marigold_uq.schedulers.scheduling_distributional_ddim import DistributionalDDIMScheduler


class TinyUncertaintyPipeline(UncertaintyPipeline):
    """Two ways to uncertainty, and an entry that had another name once."""

    uncertainty_modes = ("ensemble", "trajectory")

    def __init__(
        self,
        scheduler: DistributionalDDIMScheduler,
        default_denoising_steps: int | None = None,
        calibration: list[dict[str, Any]] | None = None,
    ) -> None:
        super().__init__()
        self.register_modules(scheduler=scheduler)
        self.register_to_config(default_denoising_steps=default_denoising_steps, calibration=calibration)

    @classmethod
    def upgrade_config(cls, config: dict[str, Any]) -> dict[str, Any]:
        """The steps had diffusers' other name."""
        config = super().upgrade_config(config)
        steps = config.pop("default_num_inference_steps", None)
        return config if steps is None else {**config, "default_denoising_steps": steps}


def tiny_uncertainty_pipeline() -> TinyUncertaintyPipeline:
    """Uncalibrated."""
    return TinyUncertaintyPipeline(DistributionalDDIMScheduler(noise_family="gaussian"))
