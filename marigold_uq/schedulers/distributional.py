"""What all distributional schedulers share; a framework adds noise levels, the form of its output and timesteps."""

import copy
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
from diffusers.schedulers.scheduling_ddim import DDIMSchedulerOutput
from torch import Tensor

from marigold_uq.component_config import store_in_config
from marigold_uq.distributions import HeadOptions, NoiseDistribution, PointDistribution, family_class
from marigold_uq.distributions.base import check_tau
from marigold_uq.precision import at_least_float32
from marigold_uq.randomness import Generators
from marigold_uq.schedulers.reverse_step import (
    NoiseLevel,
    OutputForm,
    StepCoefficients,
    original_coefficients,
    reverse_step,
)

Timestep = int | float | Tensor


class DistributionalScheduler:
    """A scheduler whose model output is a distribution: `step` draws x_prev from the reverse one of Theorem 1.

    To be mixed into a scheduler of diffusers, before it. Its config has noise_family, num_components, rank,
    pooled_weights, eta and tau.
    """

    config: Any
    timesteps: Tensor  # (S,), falling
    num_inference_steps: int | None
    init_noise_sigma: float
    """x_T is this times N(0, I)."""
    set_timesteps: Callable[..., None]
    """Chooses the timesteps of a chain, as diffusers' scheduler of the framework does."""

    def for_chain(self, num_inference_steps: int, device: Any = None) -> Self:
        """A copy with the timesteps of one call; this scheduler stays as it is, so that calls may run at once."""
        own = copy.copy(self)  # setting timesteps replaces attributes and changes none in place
        own.set_timesteps(num_inference_steps, device=device)
        return own

    @abstractmethod
    def noise_level(self, timestep: Timestep) -> NoiseLevel[Any]:
        """(a, s) at one timestep, or tensors (B,) for a timestep per sample."""

    @abstractmethod
    def previous_level(self, timestep: int | float) -> NoiseLevel[float]:
        """(a', s') at the next used timestep, or at the end of the chain."""

    @abstractmethod
    def output_form(self, level: NoiseLevel[Any]) -> OutputForm[Any]:
        """(p, q) of the network's output at a noise level."""

    @abstractmethod
    def sample_timesteps(self, batch: int, generator: Generators = None) -> Tensor:
        """Timesteps (B,) to train at, drawn as the framework does."""

    @property
    @abstractmethod
    def noisiest_timestep(self) -> int | float:
        """The timestep of most noise, where sampling starts."""

    @abstractmethod
    def timesteps_at(self, ranks: Tensor) -> Tensor:
        """Timesteps (B,) of which these shares of all training timesteps have no more noise, ranks (B,) in [0, 1)."""

    @abstractmethod
    def table_position(self, timesteps: Tensor) -> Tensor:
        """Where timesteps fall in a table over the noise of T = num_train_timesteps parts: numbers from 0 to T.

        Training visits all parts alike, so that it can learn a row for each: the position is T times the rank.
        """

    def noise_index(self, timesteps: Tensor, num_rows: int | None = None) -> Tensor:
        """The row of a table of `num_rows`, by default T, whose part holds timesteps: 0..num_rows - 1, by the noise."""
        count = self.config.num_train_timesteps
        return self.table_position(timesteps).long().clamp(max=count - 1) * (num_rows or count) // count

    def table_timesteps(self, num_rows: int) -> Tensor:
        """A timestep for each row of such a table: its middle, and for the last the one where sampling starts."""
        middle = self.timesteps_at((torch.arange(num_rows) + 0.5) / num_rows)
        middle[-1] = self.noisiest_timestep
        return middle

    @property
    def family(self) -> type[NoiseDistribution]:
        """The class that reads the raw output."""
        return family_class(self.config.noise_family)

    @property
    def head_options(self) -> HeadOptions:
        """Sizes of the head that this scheduler reads."""
        return HeadOptions(self.config.num_components, self.config.rank, self.config.pooled_weights)

    def num_raw_channels(self, target_channels: int) -> int:
        """Output channels of a network for this scheduler and a target of `target_channels` channels."""
        return self.family.num_raw_channels(target_channels, self.head_options)

    def noise_distribution(self, raw: Tensor, event_shape: Sequence[int] | None = None) -> NoiseDistribution:
        """The distribution of the model output that raw network output (B, channels, ...) stands for."""
        return self.family.from_raw(raw, self.head_options, event_shape=event_shape)

    def scale_model_input(self, sample: Tensor, timestep: Timestep | None = None) -> Tensor:
        """What the network sees of x_t: x_t itself, unless the framework scales it."""
        return sample

    def add_noise(self, original_samples: Tensor, noise: Tensor, timesteps: Tensor) -> Tensor:
        """x_t = a x_0 + s eps, computed in at least float32 and returned in the dtype of x_0."""
        level = self._level_beside(timesteps, original_samples)
        x_t = level.signal * at_least_float32(original_samples) + level.noise * at_least_float32(noise)
        return x_t.to(original_samples.dtype)

    def training_target(self, original: Tensor, noise: Tensor, timesteps: Tensor) -> Tensor:
        """What the distribution is scored at: o = p x_0 + q eps, in at least float32."""
        form = self.output_form(self._level_beside(timesteps, original))
        return form.original * at_least_float32(original) + form.noise * at_least_float32(noise)

    def step_coefficients(self, timestep: int | float, eta: float | None = None) -> StepCoefficients:
        """A, B and sigma of the step from `timestep` to the previous used one (Theorem 1)."""
        eta = self.config.eta if eta is None else eta
        level = self.noise_level(timestep)
        return reverse_step(level, self.previous_level(timestep), self.output_form(level), eta)

    def reverse_distribution(
        self,
        model_output: Tensor | NoiseDistribution,
        timestep: Timestep,
        sample: Tensor,
        *,
        eta: float | None = None,
        tau: float | None = None,
    ) -> NoiseDistribution:
        """Theorem 1: of x_prev given x_t, sum_k pi_k N(A x_t + B mu_k, tau (B^2 Sigma_k + sigma^2 I))."""
        output = self._read(model_output, sample)
        c = self.step_coefficients(as_number(timestep), eta)
        moved = output.affine(c.output, c.sample * sample.to(output.dtype))
        return moved.convolved(c.std_dev**2).scaled(self.config.tau if tau is None else tau)

    def original_distribution(
        self, model_output: Tensor | NoiseDistribution, timestep: Timestep, sample: Tensor
    ) -> NoiseDistribution:
        """The head's distribution of x_0 given x_t: the step that goes to x_0 at once. Its variance is U_t.

        `timestep` may be one for all or one per sample, (B,).
        """
        output = self._read(model_output, sample)
        if isinstance(timestep, Tensor) and timestep.ndim:
            level = self._level_beside(timestep, output.mean)
        else:
            level = self.noise_level(as_number(timestep))
        of_sample, of_output = original_coefficients(level, self.output_form(level))
        return output.affine(of_output, of_sample * sample.to(output.dtype))

    def step(
        self,
        model_output: Tensor | NoiseDistribution,
        timestep: Timestep,
        sample: Tensor,
        eta: float | None = None,
        *,
        generator: Generators = None,
        return_dict: bool = True,
        tau: float | None = None,
    ) -> Any:
        """Draw x_prev from the reverse distribution; `eta=None` and `tau=None` use the config's.

        `model_output` is raw output or a distribution; `pred_original_sample` is the mean of x_0 given x_t.
        """
        self._check_steps()
        self._check_point(model_output)
        output = self._read(model_output, sample)
        drawn = self.reverse_distribution(output, timestep, sample, eta=eta, tau=tau).rsample(generator=generator)
        original = self.original_distribution(output, timestep, sample).mean
        result = DDIMSchedulerOutput(drawn.to(sample.dtype), original.to(sample.dtype))
        return result if return_dict else (result.prev_sample, result.pred_original_sample)

    def calibrate(self, tau: float) -> None:
        """Store a tau chosen on held-out data (see `marigold_uq.calibration`); it survives save and load."""
        store_in_config(self, tau=check_tau(tau))

    def _read(self, model_output: Tensor | NoiseDistribution, sample: Tensor) -> NoiseDistribution:
        """The distribution that raw output stands for, or the one given, of the sample's shape."""
        if not isinstance(model_output, NoiseDistribution):
            return self.noise_distribution(model_output, sample.shape[1:])
        if model_output.shape != sample.shape:
            raise ValueError(
                f"a distribution of shape {tuple(model_output.shape)} does not fit x_t of shape {tuple(sample.shape)}"
            )
        return model_output

    def _check_steps(self) -> None:
        if self.num_inference_steps is None:
            raise ValueError("run 'set_timesteps' before 'step': the number of inference steps is not set")

    def _check_point(self, model_output: Tensor | NoiseDistribution) -> None:
        """A point scheduler steps with a mean; taking it of a distribution would drop the spread without a word."""
        if self.family is not PointDistribution or isinstance(model_output, Tensor | PointDistribution):
            return
        raise TypeError(
            f"noise_family='point' would drop the spread of a {type(model_output).__name__}: pass its mean, or use "
            f"a scheduler of family {model_output.name!r}"
        )

    def _level_beside(self, timesteps: Tensor, sample: Tensor) -> NoiseLevel[Tensor]:
        """Levels of timesteps (B,) that broadcast against the sample, in its precision or float32."""
        level, like = self.noise_level(timesteps), at_least_float32(sample[:0])
        signal, noise = (part.to(like).reshape(-1, *[1] * (sample.ndim - 1)) for part in (level.signal, level.noise))
        return NoiseLevel(signal, noise)


def as_number(timestep: Timestep) -> int | float:
    """A timestep as a Python number, an integer where the schedule's are."""
    return timestep.item() if isinstance(timestep, Tensor) else timestep


def check_head(noise_family: str, num_components: int, rank: int, eta: float, tau: float) -> None:
    """The arguments that all distributional schedulers have in common."""
    family_class(noise_family).check_head(HeadOptions(num_components, rank))
    if not (eta >= 0 and eta < float("inf")):
        raise ValueError(f"eta must be finite and at least 0 (0 is DDIM, 1 is DDPM); got {eta}")
    check_tau(tau)
