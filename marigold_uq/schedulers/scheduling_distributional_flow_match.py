"""Rectified flow when the network predicts a distribution of the velocity.

The module path is written into model_index.json of saved pipelines: it is a file format. `SchedulerMixin` must be
importable from here, or diffusers cannot load the component again.
"""

from typing import Any, Literal

import torch
from diffusers.configuration_utils import register_to_config
from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler
from diffusers.schedulers.scheduling_utils import SchedulerMixin
from torch import Tensor

from marigold_uq.schedulers.continuous import ContinuousScheduler
from marigold_uq.schedulers.distributional import Timestep, as_number, check_head
from marigold_uq.schedulers.reverse_step import NoiseLevel, OutputForm

__all__ = ["DistributionalFlowMatchScheduler", "SchedulerMixin"]


class DistributionalFlowMatchScheduler(ContinuousScheduler, FlowMatchEulerDiscreteScheduler):
    """x_t = (1 - s) x_0 + s eps with timesteps s num_train_timesteps; the network puts out eps - x_0.

    Takes the place of diffusers' FlowMatchEulerDiscreteScheduler, the schedule of models like Stable Diffusion 3.

    Args:
        noise_family: What the raw output means, a key of `marigold_uq.distributions.FAMILIES`.
        num_components, rank, pooled_weights: Sizes of its head.
        eta: 0 is Euler's step, 1 the ancestral one; the default of `step`.
        tau: Multiplies the covariance of each component of the reverse distribution; 1 leaves it alone.
        training_logit_mean, training_logit_std: Of logit(s) in training, before the time shift.

    The other arguments are those of `FlowMatchEulerDiscreteScheduler`. Inverted sigmas and its own stochastic sampling
    are refused: the first is another convention, of the second `eta` takes the place.
    """

    init_noise_sigma = 1.0

    @register_to_config
    def __init__(
        self,
        num_train_timesteps: int = 1000,
        shift: float = 1.0,
        use_dynamic_shifting: bool = False,
        base_shift: float | None = 0.5,
        max_shift: float | None = 1.15,
        base_image_seq_len: int = 256,
        max_image_seq_len: int = 4096,
        invert_sigmas: bool = False,
        shift_terminal: float | None = None,
        use_karras_sigmas: bool = False,
        use_exponential_sigmas: bool = False,
        use_beta_sigmas: bool = False,
        time_shift_type: Literal["exponential", "linear"] = "exponential",
        stochastic_sampling: bool = False,
        noise_family: str = "point",
        num_components: int = 1,
        rank: int = 0,
        pooled_weights: bool = False,
        eta: float = 0.0,
        tau: float = 1.0,
        training_logit_mean: float = 0.0,
        training_logit_std: float = 1.0,
    ) -> None:
        check_head(noise_family, num_components, rank, eta, tau)
        if invert_sigmas or stochastic_sampling:
            raise ValueError(
                f"invert_sigmas={invert_sigmas}, stochastic_sampling={stochastic_sampling}: leave both off (eta = 1 "
                "draws fresh noise at every step)"
            )
        super().__init__(
            num_train_timesteps=num_train_timesteps,
            shift=shift,
            use_dynamic_shifting=use_dynamic_shifting,
            base_shift=base_shift,
            max_shift=max_shift,
            base_image_seq_len=base_image_seq_len,
            max_image_seq_len=max_image_seq_len,
            invert_sigmas=invert_sigmas,
            shift_terminal=shift_terminal,
            use_karras_sigmas=use_karras_sigmas,
            use_exponential_sigmas=use_exponential_sigmas,
            use_beta_sigmas=use_beta_sigmas,
            time_shift_type=time_shift_type,
            stochastic_sampling=stochastic_sampling,
        )
        self.num_inference_steps = None
        self._chain = {}

    def set_timesteps(self, num_inference_steps: int | None = None, *args: Any, **kwargs: Any) -> None:
        """Stock's, with its arguments: device, sigmas, mu (of dynamic shifting), timesteps."""
        if num_inference_steps is not None and num_inference_steps < 1:
            raise ValueError(f"num_inference_steps must be at least 1; got {num_inference_steps}")
        super().set_timesteps(num_inference_steps, *args, **kwargs)
        self._note_chain()

    def noise_level(self, timestep: Timestep) -> NoiseLevel[Any]:
        """a = 1 - s, s = t / num_train_timesteps."""
        if isinstance(timestep, Tensor) and timestep.ndim:
            noise = timestep / self.config.num_train_timesteps
            return NoiseLevel(1 - noise, noise)
        number = as_number(timestep)
        time = self._chain[number][0] if number in self._chain else number / self.config.num_train_timesteps
        return NoiseLevel(1 - time, time)

    def previous_level(self, timestep: int | float) -> NoiseLevel[float]:
        """The next lower time of the chain, 0 at the end."""
        time = self._next_noise(timestep)
        return NoiseLevel(1 - time, time)

    def output_form(self, level: NoiseLevel[Any]) -> OutputForm[Any]:
        """The velocity eps - x_0."""
        return OutputForm(-1.0, 1.0)

    def normal_score(self, timesteps: Tensor) -> Tensor:
        """(logit(s) - training_logit_mean) / training_logit_std, with the schedule's static shift undone."""
        time = timesteps / self.config.num_train_timesteps
        time = (time / (self.config.shift - (self.config.shift - 1) * time)).clamp(0, 1)
        return (torch.logit(time) - self.config.training_logit_mean) / self.config.training_logit_std

    def timesteps_of_score(self, score: Tensor) -> Tensor:
        """Logit-normal times, moved by the schedule's static shift."""
        time = torch.sigmoid(self.config.training_logit_mean + self.config.training_logit_std * score)
        time = self.config.shift * time / (1 + (self.config.shift - 1) * time)
        return time * self.config.num_train_timesteps

    @property
    def noisiest_timestep(self) -> float:
        """Pure noise, s = 1."""
        return float(self.config.num_train_timesteps)
