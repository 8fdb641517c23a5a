"""DDIM and DDPM sampling when the network predicts a law of the noise instead of its mean.

The module path is written into model_index.json of saved pipelines: it is a file format. `SchedulerMixin` must be
importable from here, or diffusers cannot load the component again.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import torch
from diffusers.configuration_utils import register_to_config
from diffusers.schedulers.scheduling_ddim import DDIMScheduler, DDIMSchedulerOutput
from diffusers.schedulers.scheduling_utils import SchedulerMixin
from diffusers.utils import logging
from torch import Tensor

from marigold_uq.component_config import store_in_config
from marigold_uq.distributions import HeadOptions, NoiseDistribution, PointDistribution, family_class
from marigold_uq.distributions.base import check_tau
from marigold_uq.precision import at_least_float32
from marigold_uq.randomness import Generators, randn

__all__ = ["DistributionalDDIMScheduler", "SchedulerMixin", "StepCoefficients"]

logger = logging.get_logger(__name__)

PREDICTION_TYPES = ("epsilon", "sample", "v_prediction")


@dataclass(frozen=True)
class StepCoefficients:
    """x_prev = sample * x_t + output * o + std_dev * z, for the head's own output o (Theorem 1)."""

    sample: float  # A
    output: float  # B
    std_dev: float  # sigma


class DistributionalDDIMScheduler(DDIMScheduler):
    """DDIM whose model output is a law: `x_prev` is drawn from the closed-form reverse law of Theorem 1.

    Args:
        noise_family: What the raw output means, a key of `marigold_uq.distributions.FAMILIES`. With "point" this is
            stock DDIM, bit for bit wherever stock steps to the previous *used* timestep.
        num_components: Components K of the mixture families.
        rank: Rank r of the low-rank families.
        pooled_weights: Mixture weights shared by all positions of a channel.
        eta: 0 is DDIM, 1 is DDPM; the default of `step`.
        tau: Multiplies the covariance of each component of the reverse law; 1 leaves it alone.
        clip_sample: None means the stock default for "point" (on) and off for every other family, where clipping the
            mean would change the law.

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
                f"clip_sample={clip_sample}, thresholding={thresholding} would change the law of family "
                f"{noise_family!r}: set both to False (only 'point' may clip)"
            )
        if prediction_type not in PREDICTION_TYPES:
            raise ValueError(f"prediction_type is one of {', '.join(PREDICTION_TYPES)}; got {prediction_type!r}")
        family_class(noise_family).check_head(HeadOptions(num_components, rank, pooled_weights))
        if not (eta >= 0 and math.isfinite(eta)):
            raise ValueError(f"eta must be finite and at least 0 (0 is DDIM, 1 is DDPM); got {eta}")
        check_tau(tau)
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

        Stock configs clip by default. A law is not clipped: coming from another class, clipping is turned off for the
        distributional families, with a warning.
        """
        stock = isinstance(config, dict) and config.get("_class_name") != cls.__name__
        # Stock classes carry our entries along, so the family may have come from here and be on its way back.
        family = kwargs.get("noise_family", config.get("noise_family", "point")) if stock else "point"
        if family != "point":
            for name in ("clip_sample", "thresholding"):
                if config.get(name) and name not in kwargs:
                    logger.warning(f"{name} is off: it would change the law of family {family!r}")
                    kwargs[name] = False
        return super().from_config(config, return_unused_kwargs=return_unused_kwargs, **kwargs)

    @property
    def family(self) -> type[NoiseDistribution]:
        """The class that reads the raw output."""
        return family_class(self.config.noise_family)

    def num_raw_channels(self, target_channels: int) -> int:
        """Output channels of a network for this scheduler and a target of `target_channels` channels."""
        return self.family.num_raw_channels(target_channels, self.head_options)

    @property
    def head_options(self) -> HeadOptions:
        """Sizes of the head that this scheduler reads."""
        return HeadOptions(self.config.num_components, self.config.rank, self.config.pooled_weights)

    def noise_distribution(self, raw: Tensor, event_shape: Sequence[int] | None = None) -> NoiseDistribution:
        """The law of the model output that raw network output (B, channels, ...) stands for."""
        return self.family.from_raw(raw, self.head_options, event_shape=event_shape)

    def add_noise(self, original_samples: Tensor, noise: Tensor, timesteps: Tensor) -> Tensor:
        """x_t of `original_samples`, in their dtype; stock's numbers, but computed in at least float32.

        In bfloat16 sqrt(1 - alpha_bar) is 0 at small t, where `step` knows it to be .03.
        """
        original, eps = at_least_float32(original_samples), at_least_float32(noise)
        return super().add_noise(original, eps, timesteps).to(original_samples.dtype)

    def get_velocity(self, sample: Tensor, noise: Tensor, timesteps: Tensor) -> Tensor:
        """v of x_0 = `sample`, in at least float32, which is what targets are scored in."""
        return super().get_velocity(at_least_float32(sample), at_least_float32(noise), timesteps)

    def training_target(self, original: Tensor, noise: Tensor, timesteps: Tensor) -> Tensor:
        """What the law is scored against: eps, v or x_0, as `prediction_type` says."""
        if self.config.prediction_type == "epsilon":
            return noise
        if self.config.prediction_type == "v_prediction":
            return self.get_velocity(original, noise, timesteps)
        return original

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
            raise ValueError(f"num_inference_steps is at least 1; got {num_inference_steps}")
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

    def step_coefficients(self, timestep: int, eta: float | None = None) -> StepCoefficients:
        """A, B and sigma of the step from `timestep` to the previous used one (Theorem 1)."""
        eta = self.config.eta if eta is None else eta
        return self._coefficients(self.alpha_bar(timestep), self.alpha_bar(self.previous_timestep(timestep)), eta)

    def _coefficients(self, alpha_bar_t: float, alpha_bar_prev: float, eta: float) -> StepCoefficients:
        kind = self.config.prediction_type
        signal, noise = math.sqrt(alpha_bar_t), math.sqrt(1 - alpha_bar_t)
        signal_prev = math.sqrt(alpha_bar_prev)
        ratio = (1 - alpha_bar_prev) / (1 - alpha_bar_t) * (1 - alpha_bar_t / alpha_bar_prev)
        variance = eta**2 * max(0.0, ratio)
        if eta < 0 or variance > (1 - alpha_bar_prev) * (1 + 1e-6):
            raise ValueError(
                f"eta = {eta} is out of range: 0 is DDIM, 1 is DDPM; its sigma = {math.sqrt(variance):.3g} exceeds the "
                f"noise that x_prev holds, {math.sqrt(1 - alpha_bar_prev):.3g}"
            )
        direction = math.sqrt(max(0.0, 1 - alpha_bar_prev - variance))  # lambda; rounding may leave -1e-17
        std_dev = math.sqrt(variance)
        if kind == "v_prediction":
            return StepCoefficients(
                signal_prev * signal + direction * noise, direction * signal - signal_prev * noise, std_dev
            )
        if kind == "sample":
            return StepCoefficients(direction / noise, signal_prev - direction * signal / noise, std_dev)
        if alpha_bar_t == 0:
            raise ValueError(
                "at zero terminal SNR x_t is pure noise and an epsilon head says nothing about x_0; use "
                "prediction_type='v_prediction' or 'sample', or rescale_betas_zero_snr=False"
            )
        return StepCoefficients(signal_prev / signal, direction - signal_prev / signal * noise, std_dev)

    def reverse_distribution(
        self,
        model_output: Tensor | NoiseDistribution,
        timestep: int | Tensor,
        sample: Tensor,
        *,
        eta: float | None = None,
        tau: float | None = None,
    ) -> NoiseDistribution:
        """Theorem 1: the law of x_prev given x_t, sum_k pi_k N(A x_t + B mu_k, tau (B^2 Sigma_k + sigma^2 I)).

        A clipped `point` step has a law too: a Gaussian around the clipped step.
        """
        law = self._law(model_output, sample)
        c = self.step_coefficients(int(timestep), eta)
        x_t = sample.to(law.dtype)
        if isinstance(law, PointDistribution) and self._clips:
            _, mean = self._point_moments(law.loc, int(timestep), x_t, c.std_dev, use_clipped=False)
            moved: NoiseDistribution = PointDistribution(mean)
        else:
            moved = law.affine(c.output, c.sample * x_t)
        return moved.convolved(c.std_dev**2).scaled(self.config.tau if tau is None else tau)

    def original_distribution(
        self, model_output: Tensor | NoiseDistribution, timestep: int | Tensor, sample: Tensor
    ) -> NoiseDistribution:
        """The head's law of x_0 given x_t: the step that goes to alpha_bar = 1 at once. Its variance is U_t."""
        law = self._law(model_output, sample)
        c = self._coefficients(self.alpha_bar(int(timestep)), 1.0, 0.0)
        original = law.affine(c.output, c.sample * sample.to(law.dtype))
        return PointDistribution(self._clip(original.loc)) if isinstance(original, PointDistribution) else original

    def _law(self, model_output: Tensor | NoiseDistribution, sample: Tensor) -> NoiseDistribution:
        if isinstance(model_output, NoiseDistribution):
            return model_output
        return self.noise_distribution(model_output, sample.shape[1:])

    def step(
        self,
        model_output: Tensor | NoiseDistribution,
        timestep: int | Tensor,
        sample: Tensor,
        eta: float | None = None,
        use_clipped_model_output: bool = False,
        generator: Generators = None,
        variance_noise: Tensor | None = None,
        return_dict: bool = True,
    ) -> DDIMSchedulerOutput | tuple[Tensor, ...]:
        """Draw x_prev from the reverse law. `model_output` is raw output or a law; `eta=None` uses the config's.

        `pred_original_sample` is the mean of the law of x_0 given x_t. Clipped output and given noise exist for
        "point" alone, as in stock.
        """
        if self.num_inference_steps is None:
            raise ValueError("run 'set_timesteps' before 'step': the number of inference steps is not set")
        eta = self.config.eta if eta is None else eta
        if self.family is PointDistribution:
            if isinstance(model_output, NoiseDistribution) and not isinstance(model_output, PointDistribution):
                raise TypeError(
                    f"noise_family='point' would drop the spread of a {type(model_output).__name__}: pass its mean, or "
                    f"use a scheduler of family {model_output.name!r}"
                )
            # A law is kept in float32; back in the sample's dtype the step is stock's, and x_t keeps its dtype.
            output = model_output.loc.to(sample.dtype) if isinstance(model_output, PointDistribution) else model_output
            result = self._point_step(
                output, int(timestep), sample, eta, use_clipped_model_output, generator, variance_noise
            )
        else:
            if use_clipped_model_output or variance_noise is not None:
                raise ValueError("use_clipped_model_output and variance_noise exist for noise_family='point' only")
            law = self._law(model_output, sample)
            prev_sample = self.reverse_distribution(law, timestep, sample, eta=eta).rsample(generator=generator)
            original = self.original_distribution(law, timestep, sample).mean
            result = DDIMSchedulerOutput(prev_sample.to(sample.dtype), original.to(sample.dtype))
        return result if return_dict else (result.prev_sample, result.pred_original_sample)

    def _point_step(
        self,
        output: Tensor,
        timestep: int,
        sample: Tensor,
        eta: float,
        use_clipped: bool,
        generator: Generators,
        variance_noise: Tensor | None,
    ) -> DDIMSchedulerOutput:
        """Stock DDIM where it is right; the same formula with the right previous timestep elsewhere."""
        if output.shape != sample.shape:
            raise ValueError(
                f"family 'point' expects model output of the sample's shape {tuple(sample.shape)}; got "
                f"{tuple(output.shape)}"
            )
        std_dev = self.step_coefficients(timestep, eta).std_dev  # an epsilon head at zero SNR ends here, with an error
        if eta > 0 and variance_noise is not None and generator is not None:
            raise ValueError("pass either generator or variance_noise, not both")
        if isinstance(generator, Sequence) and len(generator) == 1 < len(sample):
            generator = generator[0]  # stock lets a list of one serve the whole batch
        if eta > 0 and variance_noise is None:  # the numbers that stock draws, from any kind of generators
            variance_noise = randn((), sample.shape, like=output, generator=generator)
        if self._agrees_with_stock(timestep, eta):
            return super().step(output, timestep, sample, eta, use_clipped, variance_noise=variance_noise)
        original, prev_sample = self._point_moments(output, timestep, sample, std_dev, use_clipped)
        if variance_noise is not None:
            prev_sample = prev_sample + math.sqrt(self.config.tau) * std_dev * variance_noise
        return DDIMSchedulerOutput(prev_sample.to(sample.dtype), original.to(sample.dtype))

    def _point_moments(
        self, output: Tensor, timestep: int, sample: Tensor, std_dev: float, use_clipped: bool
    ) -> tuple[Tensor, Tensor]:
        """Clipped x_0 and the step without its noise, sqrt(abar_prev) x_0 + lambda eps."""
        abar, abar_prev = self.alpha_bar(timestep), self.alpha_bar(self.previous_timestep(timestep))
        c = self._coefficients(abar, 1.0, 0.0)
        unclipped = c.sample * sample + c.output * output
        original = self._clip(unclipped)
        eps = (sample - math.sqrt(abar) * (original if use_clipped else unclipped)) / math.sqrt(1 - abar)
        direction = math.sqrt(max(0.0, 1 - abar_prev - std_dev**2))
        return original, math.sqrt(abar_prev) * original + direction * eps

    def _agrees_with_stock(self, timestep: int, eta: float) -> bool:
        """Whether stock DDIM means the same previous timestep, tau changes nothing, and nothing under a root is < 0."""
        stock_prev = timestep - self.config.num_train_timesteps // self.num_inference_steps
        prev = self.previous_timestep(timestep)
        alpha_bar_prev = self.alphas_cumprod[prev] if prev >= 0 else self.final_alpha_cumprod
        std_dev = eta * self._get_variance(timestep, prev) ** 0.5
        real = bool(1 - alpha_bar_prev - std_dev**2 >= 0)  # in float32, as stock computes it
        return max(stock_prev, -1) == prev and real and (self.config.tau == 1 or eta == 0)

    @property
    def _clips(self) -> bool:
        return bool(self.config.thresholding or self.config.clip_sample)

    def _clip(self, original: Tensor) -> Tensor:
        if self.config.thresholding:
            return self._threshold_sample(original)
        if self.config.clip_sample:
            return original.clamp(-self.config.clip_sample_range, self.config.clip_sample_range)
        return original

    def calibrate(self, tau: float) -> None:
        """Store a tau chosen on held-out data (see `marigold_uq.calibration`); it survives save and load."""
        store_in_config(self, tau=check_tau(tau))
