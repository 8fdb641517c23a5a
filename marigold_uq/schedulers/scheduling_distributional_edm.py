"""The EDM framework of Karras et al. (2022) when the network predicts a distribution.

The module path is written into model_index.json of saved pipelines: it is a file format. `SchedulerMixin` must be
importable from here, or diffusers cannot load the component again.
"""

import math
from typing import Any, Literal

import torch
from diffusers.configuration_utils import register_to_config
from diffusers.schedulers.scheduling_edm_euler import EDMEulerScheduler
from diffusers.schedulers.scheduling_utils import SchedulerMixin
from torch import Tensor

from marigold_uq.schedulers.continuous import ContinuousScheduler
from marigold_uq.schedulers.distributional import Timestep, as_number, check_head
from marigold_uq.schedulers.reverse_step import CLEAN, NoiseLevel, OutputForm

__all__ = ["DistributionalEDMScheduler", "SchedulerMixin"]


SHARED_WITH_EULER = (
    *("sigma_min", "sigma_max", "num_train_timesteps", "prediction_type", "noise_family", "num_components"),
    *("rank", "pooled_weights", "eta", "tau"),
)
"""Entries of a continuous Euler config that mean the same here."""


class DistributionalEDMScheduler(ContinuousScheduler, EDMEulerScheduler):
    """x_t = x_0 + sigma eps; the network sees c_in x_t and c_noise = ln(sigma) / 4; x_0 = c_skip x_t + c_out F.

    Timesteps are c_noise, F is the network's output. Given x_t it is affine in x_0, so its distribution goes through
    Theorem 1 like any other.
    `eta` takes the place of churn: 0 is Euler's step, 1 redraws as much noise as DDPM would.

    Args:
        noise_family: What the raw output means, a key of `marigold_uq.distributions.FAMILIES`.
        num_components, rank, pooled_weights: Sizes of its head.
        eta: 0 is the deterministic step, 1 the ancestral one; the default of `step`.
        tau: Multiplies the covariance of each component of the reverse distribution; 1 leaves it alone.
        training_log_mean, training_log_std: ln(sigma) is drawn from N(mean, std^2) in training.

    The other arguments are those of `EDMEulerScheduler`.
    """

    @register_to_config
    def __init__(
        self,
        sigma_min: float = 0.002,
        sigma_max: float = 80.0,
        sigma_data: float = 0.5,
        sigma_schedule: Literal["karras", "exponential"] = "karras",
        num_train_timesteps: int = 1000,
        prediction_type: Literal["epsilon", "v_prediction"] = "epsilon",
        rho: float = 7.0,
        final_sigmas_type: Literal["zero", "sigma_min"] = "zero",
        noise_family: str = "point",
        num_components: int = 1,
        rank: int = 0,
        pooled_weights: bool = False,
        eta: float = 0.0,
        tau: float = 1.0,
        training_log_mean: float = -1.2,
        training_log_std: float = 1.2,
    ) -> None:
        check_head(noise_family, num_components, rank, eta, tau)
        if not 0 < sigma_min < sigma_max < math.inf or not 0 < sigma_data < math.inf:
            raise ValueError(
                f"expected 0 < sigma_min < sigma_max and sigma_data > 0; got {sigma_min}, {sigma_max} and {sigma_data}"
            )
        if prediction_type not in ("epsilon", "v_prediction"):
            raise ValueError(f"prediction_type must be epsilon or v_prediction, c_out's sign; got {prediction_type!r}")
        super().__init__(
            sigma_min=sigma_min,
            sigma_max=sigma_max,
            sigma_data=sigma_data,
            sigma_schedule=sigma_schedule,
            num_train_timesteps=num_train_timesteps,
            prediction_type=prediction_type,
            rho=rho,
            final_sigmas_type=final_sigmas_type,
        )
        self._chain = {}

    @classmethod
    def from_config(cls, config: Any = None, return_unused_kwargs: bool = False, **kwargs: Any) -> Any:
        """Build from the config of any EDM scheduler, or of an Euler scheduler with continuous timesteps and v.

        That one (of Stable Video Diffusion) is EDM's preconditioning with sigma_data = 1. The other Euler schedulers
        read networks that were trained with discrete betas: `DistributionalDDIMScheduler` is their framework.
        """
        if isinstance(config, dict) and "beta_schedule" in config and config.get("_class_name") != cls.__name__:
            kind = (config.get("timestep_type"), config.get("prediction_type"))
            if kind != ("continuous", "v_prediction") or None in (config.get("sigma_min"), config.get("sigma_max")):
                raise ValueError(
                    f"a scheduler with betas, timestep_type={kind[0]!r} and prediction_type={kind[1]!r} belongs to "
                    "DistributionalDDIMScheduler.from_config; EDM reads Euler configs that are continuous, with "
                    "v_prediction and their own sigma_min and sigma_max"
                )
            config = {"sigma_data": 1.0, **{name: value for name, value in config.items() if name in SHARED_WITH_EULER}}
        return super().from_config(config, return_unused_kwargs=return_unused_kwargs, **kwargs)

    def set_timesteps(
        self, num_inference_steps: int | None = None, device: Any = None, sigmas: Tensor | list[float] | None = None
    ) -> None:
        """The schedule of the config; stock's `sigmas` are positions on it, 0 for sigma_max to 1 for sigma_min."""
        if (num_inference_steps is None) == (sigmas is None):
            raise ValueError("pass either num_inference_steps or sigmas, not both and not neither")
        count = len(sigmas) if sigmas is not None else num_inference_steps
        if not count or count < 1:
            raise ValueError(f"num_inference_steps must be at least 1; got {num_inference_steps}")
        super().set_timesteps(count, device, None if sigmas is None else torch.as_tensor(sigmas))
        self._note_chain()

    def noise_level(self, timestep: Timestep) -> NoiseLevel[Any]:
        """a = 1, s = sigma = exp(4 c_noise)."""
        if isinstance(timestep, Tensor) and timestep.ndim:
            return NoiseLevel(torch.ones_like(timestep), torch.exp(4 * timestep))
        number = as_number(timestep)
        return NoiseLevel(1.0, self._chain[number][0] if number in self._chain else math.exp(4 * number))

    def previous_level(self, timestep: int | float) -> NoiseLevel[float]:
        """The next lower sigma of the chain, at the end 0 (or sigma_min, as the config says)."""
        sigma = self._next_noise(timestep)
        return NoiseLevel(1.0, sigma) if sigma else CLEAN

    def output_form(self, level: NoiseLevel[Any]) -> OutputForm[Any]:
        """F = (x_0 - c_skip x_t)/c_out, c_skip = d^2/(sigma^2 + d^2) and |c_out| = sigma d/sqrt(sigma^2 + d^2)."""
        data = self.config.sigma_data if self.config.prediction_type == "epsilon" else -self.config.sigma_data
        width = (level.noise**2 + data**2) ** 0.5
        return OutputForm(level.noise / (data * width), -data / width)

    def scale_model_input(self, sample: Tensor, timestep: Timestep | None = None) -> Tensor:
        """c_in x_t = x_t / sqrt(sigma^2 + sigma_data^2)."""
        if timestep is None:
            raise ValueError("the scale of the model's input depends on the timestep: pass it")
        if isinstance(timestep, Tensor) and timestep.ndim:
            sigma: Any = self._level_beside(timestep, sample).noise
        else:
            sigma = self.noise_level(timestep).noise
        return (sample / (sigma**2 + self.config.sigma_data**2) ** 0.5).to(sample.dtype)

    def normal_score(self, timesteps: Tensor) -> Tensor:
        """(ln(sigma) - training_log_mean) / training_log_std."""
        return (4 * timesteps - self.config.training_log_mean) / self.config.training_log_std

    def timesteps_of_score(self, score: Tensor) -> Tensor:
        """c_noise of ln(sigma) = training_log_mean + training_log_std score."""
        return 0.25 * (self.config.training_log_mean + self.config.training_log_std * score)

    @property
    def noisiest_timestep(self) -> float:
        """c_noise of sigma_max."""
        return 0.25 * math.log(self.config.sigma_max)
