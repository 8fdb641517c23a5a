"""Latent consistency models (Luo et al., 2023): networks distilled to name x_0 in a few steps.

The module path is written into model_index.json of saved pipelines: it is a file format. `SchedulerMixin` must be
importable from here, or diffusers cannot load the component again.
"""

import copy
from typing import Any

from diffusers.configuration_utils import register_to_config
from diffusers.schedulers.scheduling_lcm import LCMScheduler, LCMSchedulerOutput
from diffusers.schedulers.scheduling_utils import SchedulerMixin
from torch import Tensor

from marigold_uq.distributions import NoiseDistribution, PointDistribution
from marigold_uq.randomness import Generators
from marigold_uq.schedulers.distributional import DistributionalScheduler, Timestep, as_number, check_head
from marigold_uq.schedulers.scheduling_distributional_ddim import DistributionalDDIMScheduler

__all__ = ["DistributionalLCMScheduler", "SchedulerMixin"]


class DistributionalLCMScheduler(DistributionalScheduler, LCMScheduler):
    """Stock LCM steps with the interface of the other schedulers; `point` is the only family.

    A distilled network does not predict the mean of a reverse step, so there is no distribution to read; the noise of
    its steps makes the members of an ensemble differ. The step keeps no count: batches and threads may share one.

    Args:
        noise_family, num_components, rank, pooled_weights: As of the other schedulers; one value is possible.
        eta, tau: Without effect.

    The other arguments are those of `LCMScheduler`.
    """

    whole_timesteps = True

    @register_to_config
    def __init__(
        self,
        num_train_timesteps: int = 1000,
        beta_start: float = 0.00085,
        beta_end: float = 0.012,
        beta_schedule: str = "scaled_linear",
        trained_betas: Any = None,
        original_inference_steps: int = 50,
        clip_sample: bool = False,
        clip_sample_range: float = 1.0,
        set_alpha_to_one: bool = True,
        steps_offset: int = 0,
        prediction_type: str = "epsilon",
        thresholding: bool = False,
        dynamic_thresholding_ratio: float = 0.995,
        sample_max_value: float = 1.0,
        timestep_spacing: str = "leading",
        timestep_scaling: float = 10.0,
        rescale_betas_zero_snr: bool = False,
        noise_family: str = "point",
        num_components: int = 1,
        rank: int = 0,
        pooled_weights: bool = False,
        eta: float = 0.0,
        tau: float = 1.0,
    ) -> None:
        check_head(noise_family, num_components, rank, eta, tau)
        if noise_family != "point":
            raise ValueError(
                f"a checkpoint distilled for LCM predicts x_0 itself and no distribution: its family is 'point', not "
                f"{noise_family!r}"
            )
        super().__init__(
            num_train_timesteps=num_train_timesteps,
            beta_start=beta_start,
            beta_end=beta_end,
            beta_schedule=beta_schedule,
            trained_betas=trained_betas,
            original_inference_steps=original_inference_steps,
            clip_sample=clip_sample,
            clip_sample_range=clip_sample_range,
            set_alpha_to_one=set_alpha_to_one,
            steps_offset=steps_offset,
            prediction_type=prediction_type,
            thresholding=thresholding,
            dynamic_thresholding_ratio=dynamic_thresholding_ratio,
            sample_max_value=sample_max_value,
            timestep_spacing=timestep_spacing,
            timestep_scaling=timestep_scaling,
            rescale_betas_zero_snr=rescale_betas_zero_snr,
        )

    alpha_bar = DistributionalDDIMScheduler.alpha_bar
    noise_level = DistributionalDDIMScheduler.noise_level
    output_form = DistributionalDDIMScheduler.output_form
    sample_timesteps = DistributionalDDIMScheduler.sample_timesteps
    noisiest_timestep = DistributionalDDIMScheduler.noisiest_timestep
    timesteps_at = DistributionalDDIMScheduler.timesteps_at
    table_position = DistributionalDDIMScheduler.table_position

    def previous_level(self, timestep: int | float) -> Any:
        """That of the next lower used timestep, or of the final alpha_bar."""
        self._check_steps()
        return self.noise_level(max((t for t in self.timesteps.tolist() if t < timestep), default=-1))

    def step(  # type: ignore[override]  # stock's LCM scheduler has another order of arguments than its DDIM
        self,
        model_output: Tensor | NoiseDistribution,
        timestep: Timestep,
        sample: Tensor,
        generator: Generators = None,
        return_dict: bool = True,
    ) -> LCMSchedulerOutput | tuple[Tensor, ...]:
        """Stock's step from any of the used timesteps; arguments in stock's order."""
        self._check_steps()
        output = self._read(model_output, sample)
        if not isinstance(output, PointDistribution):
            raise ValueError(f"family 'point' has one value per step; got a {type(output).__name__}")
        lone = copy.copy(self)
        lone._step_index = None  # stock counts its calls; here the timestep alone says where the step starts
        own = output.mean.to(sample.dtype)
        return LCMScheduler.step(lone, own, int(as_number(timestep)), sample, generator, return_dict)
