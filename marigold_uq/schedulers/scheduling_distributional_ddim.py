"""DDIM and DDPM sampling when the network predicts the distribution of the noise instead of its mean.

The module path is written into model_index.json of saved pipelines: it is a file format. `SchedulerMixin` must be
importable from here, or diffusers cannot load the component again.
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import torch
from diffusers.configuration_utils import register_to_config
from diffusers.schedulers.scheduling_ddim import DDIMScheduler, DDIMSchedulerOutput
from diffusers.schedulers.scheduling_utils import SchedulerMixin
from diffusers.utils import logging
from torch import Tensor

from marigold_uq.distributions import NoiseDistribution, PointDistribution, family_class
from marigold_uq.distributions.base import check_tau
from marigold_uq.precision import at_least_float32
from marigold_uq.randomness import Generators, randint
from marigold_uq.schedulers.distributional import Timestep, check_head
from marigold_uq.schedulers.point_steps import PointSteps
from marigold_uq.schedulers.reverse_step import NoiseLevel, OutputForm, StepCoefficients

__all__ = ["DistributionalDDIMScheduler", "SchedulerMixin", "StepCoefficients"]

logger = logging.get_logger(__name__)

PREDICTION_TYPES = ("epsilon", "sample", "v_prediction")


class DistributionalDDIMScheduler(PointSteps):
    """DDIM whose model output is a distribution: `x_prev` is drawn from the closed-form reverse one of Theorem 1.

    Args:
        noise_family: What the raw output means, a key of `marigold_uq.distributions.FAMILIES`. With "point" this is
            stock DDIM, bit for bit wherever stock steps to the previous *used* timestep.
        num_components: Components K of the mixture families.
        rank: Rank r of the low-rank families.
        pooled_weights: Mixture weights shared by all positions of a channel.
        eta: 0 is DDIM, 1 is DDPM; the default of `step`.
        tau: Multiplies the covariance of each component of the reverse distribution; 1 leaves it alone.
        clip_sample: None means the stock default for "point" (on) and off for every other family, where clipping the
            mean would change the distribution.

    The other arguments are those of `DDIMScheduler`.
    """

    timesteps: Tensor  # (S,), falling

    @register_to_config
    def __init__(
        self,
        num_train_timesteps: int = 1000,
        beta_start: float = 0.0001,
        beta_end: float = 0.02,
        beta_schedule: str = "linear",
        trained_betas: np.ndarray | list[float] | None = None,
        clip_sample: bool | None = None,
        set_alpha_to_one: bool = True,
        steps_offset: int = 0,
        prediction_type: Literal["epsilon", "sample", "v_prediction"] = "epsilon",
        thresholding: bool = False,
        dynamic_thresholding_ratio: float = 0.995,
        clip_sample_range: float = 1.0,
        sample_max_value: float = 1.0,
        timestep_spacing: Literal["leading", "trailing", "linspace"] = "leading",
        rescale_betas_zero_snr: bool = False,
        noise_family: str = "point",
        num_components: int = 1,
        rank: int = 0,
        pooled_weights: bool = False,
        eta: float = 0.0,
        tau: float = 1.0,
    ) -> None:
        is_point = family_class(noise_family) is PointDistribution
        if clip_sample is None:
            clip_sample = is_point
        if not is_point and (clip_sample or thresholding):
            raise ValueError(
                f"clip_sample={clip_sample}, thresholding={thresholding} would change the distribution of family "
                f"{noise_family!r}: set both to False (only 'point' may clip)"
            )
        if prediction_type not in PREDICTION_TYPES:
            raise ValueError(f"prediction_type must be one of {', '.join(PREDICTION_TYPES)}; got {prediction_type!r}")
        check_head(noise_family, num_components, rank, eta, tau)
        super().__init__(
            num_train_timesteps=num_train_timesteps,
            beta_start=beta_start,
            beta_end=beta_end,
            beta_schedule=beta_schedule,
            trained_betas=trained_betas,
            clip_sample=clip_sample,
            set_alpha_to_one=set_alpha_to_one,
            steps_offset=steps_offset,
            prediction_type=prediction_type,
            thresholding=thresholding,
            dynamic_thresholding_ratio=dynamic_thresholding_ratio,
            clip_sample_range=clip_sample_range,
            sample_max_value=sample_max_value,
            timestep_spacing=timestep_spacing,
            rescale_betas_zero_snr=rescale_betas_zero_snr,
        )

    @classmethod
    def from_config(cls, config: Any = None, return_unused_kwargs: bool = False, **kwargs: Any) -> Any:
        """Build from any stock DDIM, DDPM or PNDM config; family, eta, tau are given by keyword.

        Stock configs clip by default. A distribution is not clipped: coming from another class, clipping is turned off
        for the distributional families, with a warning.
        """
        stock = isinstance(config, dict) and config.get("_class_name") != cls.__name__
        # Stock classes carry our entries along, so the family may have come from here and be on its way back.
        family = kwargs.get("noise_family", config.get("noise_family", "point")) if stock else "point"
        if family != "point":
            for name in ("clip_sample", "thresholding"):
                if config.get(name) and name not in kwargs:
                    logger.warning(f"{name} is off: it would change the distribution of family {family!r}")
                    kwargs[name] = False
        return super().from_config(config, return_unused_kwargs=return_unused_kwargs, **kwargs)

    def add_noise(self, original_samples: Tensor, noise: Tensor, timesteps: Tensor) -> Tensor:
        """x_t of `original_samples`, in their dtype; stock's numbers, but computed in at least float32.

        In bfloat16 sqrt(1 - alpha_bar) is 0 at small t, where `step` knows it to be .03.
        """
        original, eps = at_least_float32(original_samples), at_least_float32(noise)
        return DDIMScheduler.add_noise(self, original, eps, timesteps).to(original_samples.dtype)

    def get_velocity(self, sample: Tensor, noise: Tensor, timesteps: Tensor) -> Tensor:
        """v of x_0 = `sample`, in at least float32, which is what targets are scored in."""
        return super().get_velocity(at_least_float32(sample), at_least_float32(noise), timesteps)

    def training_target(self, original: Tensor, noise: Tensor, timesteps: Tensor) -> Tensor:
        """What the distribution is scored at: eps, v or x_0, as `prediction_type` says."""
        if self.config.prediction_type == "epsilon":
            return noise
        if self.config.prediction_type == "v_prediction":
            return self.get_velocity(original, noise, timesteps)
        return original

    def sample_timesteps(self, batch: int, generator: Generators = None) -> Tensor:
        """Uniform over all timesteps, as DDPM is trained."""
        return randint(self.config.num_train_timesteps, batch, generator=generator)

    @property
    def noisiest_timestep(self) -> int:
        """The last one."""
        return self.config.num_train_timesteps - 1

    def timesteps_at(self, ranks: Tensor) -> Tensor:
        """As in `DistributionalScheduler`: whole ones."""
        last = self.config.num_train_timesteps
        return (ranks * last).long().clamp(max=last - 1)

    def table_position(self, timesteps: Tensor) -> Tensor:
        """The timesteps themselves."""
        return timesteps

    def set_timesteps(
        self,
        num_inference_steps: int | None = None,
        device: str | torch.device | None = None,
        timesteps: Sequence[int] | None = None,
    ) -> None:
        """Stock spacing for `num_inference_steps`, or your own strictly falling `timesteps`."""
        if (num_inference_steps is None) == (timesteps is None):
            raise ValueError("pass either num_inference_steps or timesteps, not both and not neither")
        if num_inference_steps is not None and num_inference_steps < 1:
            raise ValueError(f"num_inference_steps must be at least 1; got {num_inference_steps}")
        last = self.config.num_train_timesteps - 1
        if timesteps is None:
            super().set_timesteps(num_inference_steps, device)
            timesteps = [t for t in self.timesteps.tolist() if t >= 0]  # stock trailing may round past the end, to -1
        used = tuple(int(t) for t in timesteps)
        falling = all(a > b for a, b in pairwise(used))
        if not used or not falling or used[0] > last or used[-1] < 0:
            self.num_inference_steps = None  # stock may have set it: no step may follow
            raise ValueError(
                f"timesteps must fall strictly within {last}..0; got {list(used[:5])}... "
                f"(spacing {self.config.timestep_spacing!r}, steps_offset {self.config.steps_offset})"
            )
        self.num_inference_steps = len(used)
        self.timesteps = torch.tensor(used, dtype=torch.int64, device=device)
        self._used_timesteps = used

    def previous_timestep(self, timestep: int) -> int:
        """The next lower *used* timestep, -1 at the end of the chain."""
        if self.num_inference_steps is None:
            raise ValueError("run 'set_timesteps' first: the previous timestep depends on the number of steps")
        return max((t for t in self._used_timesteps if t < timestep), default=-1)

    def alpha_bar(self, timestep: int) -> float:
        """Cumulative alpha at a timestep; the final one (1, or alpha_bar_0) below 0."""
        return float(self.alphas_cumprod[timestep] if timestep >= 0 else self.final_alpha_cumprod)

    def noise_level(self, timestep: Timestep) -> NoiseLevel[Any]:
        """a = sqrt(alpha_bar_t), s = sqrt(1 - alpha_bar_t)."""
        if isinstance(timestep, Tensor) and timestep.ndim:
            alpha_bar = self.alphas_cumprod.to(timestep.device)[timestep]  # (B,)
            return NoiseLevel(alpha_bar.sqrt(), (1 - alpha_bar).sqrt())
        alpha_bar_t = self.alpha_bar(int(timestep))
        return NoiseLevel(math.sqrt(alpha_bar_t), math.sqrt(1 - alpha_bar_t))

    def previous_level(self, timestep: int | float) -> NoiseLevel[float]:
        """That of the previous used timestep, or of the final alpha_bar."""
        return self.noise_level(self.previous_timestep(int(timestep)))

    def output_form(self, level: NoiseLevel[Any]) -> OutputForm[Any]:
        """eps, x_0 or v = a eps - s x_0."""
        if self.config.prediction_type == "v_prediction":
            return OutputForm(-level.noise, level.signal)
        return OutputForm(0.0, 1.0) if self.config.prediction_type == "epsilon" else OutputForm(1.0, 0.0)

    def step(
        self,
        model_output: Tensor | NoiseDistribution,
        timestep: Timestep,
        sample: Tensor,
        eta: float | None = None,
        use_clipped_model_output: bool = False,
        generator: Generators = None,
        variance_noise: Tensor | None = None,
        return_dict: bool = True,
        tau: float | None = None,
    ) -> DDIMSchedulerOutput | tuple[Tensor, ...]:
        """Draw x_prev; arguments in stock's order, those that are missing come from the config.

        `model_output` is raw output or a distribution; `pred_original_sample` is the mean of x_0 given x_t. Clipped
        output and given noise exist for "point" alone, as in stock.
        """
        self._check_steps()
        if self.family is not PointDistribution:
            if use_clipped_model_output or variance_noise is not None:
                raise ValueError("use_clipped_model_output and variance_noise exist for noise_family='point' only")
            return super().step(
                model_output, timestep, sample, eta, generator=generator, return_dict=return_dict, tau=tau
            )
        self._check_point(model_output)
        # A distribution is kept in float32; back in the sample's dtype the step is stock's, and x_t keeps its dtype.
        output = model_output if isinstance(model_output, Tensor) else model_output.mean.to(sample.dtype)
        eta, tau = (self.config.eta if eta is None else eta), (self.config.tau if tau is None else check_tau(tau))
        result = self._point_step(
            output, int(timestep), sample, eta, tau, use_clipped_model_output, generator, variance_noise
        )
        return result if return_dict else (result.prev_sample, result.pred_original_sample)
