"""DDIM of the family `point`: diffusers' own step wherever it is right, and what only a point can do."""

import math
from abc import abstractmethod

from diffusers.schedulers.scheduling_ddim import DDIMScheduler, DDIMSchedulerOutput
from torch import Tensor

from marigold_uq.distributions import NoiseDistribution, PointDistribution
from marigold_uq.randomness import Generators, randn
from marigold_uq.schedulers.distributional import DistributionalScheduler, Timestep
from marigold_uq.schedulers.reverse_step import original_coefficients

__all__ = ["PointSteps"]


class PointSteps(DistributionalScheduler, DDIMScheduler):
    """Steps of a mean, clipped or not; other families pass through."""

    @abstractmethod
    def previous_timestep(self, timestep: int) -> int:
        """The next lower timestep that the chain uses, -1 at its end."""

    def reverse_distribution(
        self,
        model_output: Tensor | NoiseDistribution,
        timestep: Timestep,
        sample: Tensor,
        *,
        eta: float | None = None,
        tau: float | None = None,
    ) -> NoiseDistribution:
        """Theorem 1; a clipped `point` step has a distribution too, a Gaussian around the clipped step."""
        output = self._read(model_output, sample)
        if not (isinstance(output, PointDistribution) and self._clips):
            return super().reverse_distribution(output, timestep, sample, eta=eta, tau=tau)
        std_dev = self.step_coefficients(int(timestep), eta).std_dev
        _, mean = self._point_moments(output.loc, int(timestep), sample.to(output.dtype), std_dev, use_clipped=False)
        return PointDistribution(mean).convolved(std_dev**2).scaled(self.config.tau if tau is None else tau)

    def original_distribution(
        self, model_output: Tensor | NoiseDistribution, timestep: Timestep, sample: Tensor
    ) -> NoiseDistribution:
        """The head's distribution of x_0 given x_t; a point is clipped where the config says so."""
        original = super().original_distribution(model_output, timestep, sample)
        return PointDistribution(self._clip(original.loc)) if isinstance(original, PointDistribution) else original

    def _point_step(
        self,
        output: Tensor,
        timestep: int,
        sample: Tensor,
        eta: float,
        tau: float,
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
        if eta > 0 and variance_noise is None:  # the numbers that stock draws, from any kind of generators
            variance_noise = randn((), sample.shape, like=output, generator=generator)
        if self._agrees_with_stock(timestep, eta, tau):
            return DDIMScheduler.step(self, output, timestep, sample, eta, use_clipped, variance_noise=variance_noise)
        original, prev_sample = self._point_moments(output, timestep, sample, std_dev, use_clipped)
        if variance_noise is not None:
            prev_sample = prev_sample + math.sqrt(tau) * std_dev * variance_noise
        return DDIMSchedulerOutput(prev_sample.to(sample.dtype), original.to(sample.dtype))

    def _point_moments(
        self, output: Tensor, timestep: int, sample: Tensor, std_dev: float, use_clipped: bool
    ) -> tuple[Tensor, Tensor]:
        """Clipped x_0 and the step without its noise, a' x_0 + lambda eps."""
        level, prev = self.noise_level(timestep), self.previous_level(timestep)
        of_sample, of_output = original_coefficients(level, self.output_form(level))
        unclipped = of_sample * sample + of_output * output
        original = self._clip(unclipped)
        eps = (sample - level.signal * (original if use_clipped else unclipped)) / level.noise
        direction = math.sqrt(max(0.0, prev.noise**2 - std_dev**2))
        return original, prev.signal * original + direction * eps

    def _agrees_with_stock(self, timestep: int, eta: float, tau: float) -> bool:
        """Whether stock DDIM means the same previous timestep, tau changes nothing, and nothing under a root is < 0."""
        stock_prev = timestep - self.config.num_train_timesteps // self.num_inference_steps
        prev = self.previous_timestep(timestep)
        alpha_bar_prev = self.alphas_cumprod[prev] if prev >= 0 else self.final_alpha_cumprod
        std_dev = eta * self._get_variance(timestep, prev) ** 0.5
        real = bool(1 - alpha_bar_prev - std_dev**2 >= 0)  # in float32, as stock computes it
        return max(stock_prev, -1) == prev and real and (tau == 1 or eta == 0)

    @property
    def _clips(self) -> bool:
        return bool(self.config.thresholding or self.config.clip_sample)

    def _clip(self, original: Tensor) -> Tensor:
        if self.config.thresholding:
            return self._threshold_sample(original)
        if self.config.clip_sample:
            return original.clamp(-self.config.clip_sample_range, self.config.clip_sample_range)
        return original
