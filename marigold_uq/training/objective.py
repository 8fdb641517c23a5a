"""What is minimised: which noise is drawn, and how the predicted distribution is scored against it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate.utils import gather
from torch import Tensor

from marigold_uq.denoising import Denoiser, predict_output
from marigold_uq.distributions import NoiseDistribution
from marigold_uq.schedulers.distributional import DistributionalScheduler
from marigold_uq.scores import SCORES, RunningResidualScale, sample_scores
from marigold_uq.training.noise import training_noise, training_timesteps

__all__ = ["Objective", "ObjectiveConfig", "Prediction", "residual_rows"]

_NEEDS_DIRECTIONS = ("projected", "energy")


@dataclass(frozen=True)
class ObjectiveConfig:
    """What is minimised.

    Args:
        score: "crps", "energy", "kernel", "log", "projected" or "squared_error"; None takes the family's own.
        score_options: Arguments of the score, for instance patch_size of "projected".
        adaptive_bandwidth: Kernel score: the bandwidth follows the running RMS of the residual at each noise level, and
            the score is multiplied by it. With False give score_options bandwidth (and per_dimension: false for an
            absolute one, as in the paper).
        num_draws: Draws of the network per sample, for the family "sample".
        noise_strength: Annealed multi-resolution noise (Marigold: 0.9); 0 is white noise.
        uniform_timesteps: True draws timesteps as the framework does, which for DDIM is uniformly; False gives half of
            the samples the last timestep, where few-step sampling starts.
    """

    score: str | None = None
    score_options: dict[str, Any] = field(default_factory=dict)
    adaptive_bandwidth: bool = True
    num_draws: int = 4
    noise_strength: float = 0.0
    uniform_timesteps: bool = True

    def __post_init__(self) -> None:
        if self.score is not None and self.score not in SCORES:
            raise ValueError(f"unknown score {self.score!r}; choose one of {', '.join(sorted(SCORES))}")
        if self.num_draws < 2:
            raise ValueError(f"num_draws must be at least 2, because a fair score compares draws; got {self.num_draws}")
        if not self.noise_strength >= 0:
            raise ValueError(f"noise_strength must be at least 0; got {self.noise_strength}")


@dataclass(frozen=True)
class Prediction:
    """The predicted distribution of the model output, and what it should have been."""

    law: NoiseDistribution
    target: Tensor  # (B, C, ...)
    x_t: Tensor  # (B, C, ...)
    timesteps: Tensor  # (B,)
    index: Tensor  # (B,), of the noise level


class Objective:
    """Draws timestep and noise, asks the network for the distribution of its output, and scores it.

    Args:
        config: What is minimised.
        scheduler: Schedule and family.
        direction_group: Samples that share the random directions of a projected or energy score. Micro batches of a
            multiple of this size give the same loss as one large batch; where the network is small, directions for
            each sample alone would take as long as the network.
    """

    def __init__(
        self, config: ObjectiveConfig, scheduler: DistributionalScheduler, *, direction_group: int = 1
    ) -> None:
        self.config, self.scheduler, self.direction_group = config, scheduler, direction_group
        self.score = config.score or scheduler.family.default_score
        self.options: Mapping[str, Any] = dict(config.score_options)
        self.scale = RunningResidualScale(scheduler.config.num_train_timesteps)
        """The running residual scale of an adaptive kernel bandwidth: what a checkpoint must keep."""
        self._residuals: list[Tensor] = []

    @property
    def _adaptive(self) -> bool:
        return self.score == "kernel" and self.config.adaptive_bandwidth

    def losses(
        self, denoiser: Denoiser, x_0: Tensor, generators: list[torch.Generator], mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Score of each sample (B,), and its residual row (B, 3) for `note`.

        Args:
            denoiser: The network with its condition bound.
            x_0: Clean targets (B, C, ...).
            generators: One per sample; everything random comes from them.
            mask: True where a coordinate counts, broadcast against x_0.
        """
        prediction = self.predict(denoiser, x_0, generators)
        return self.scores(prediction, generators, mask), residual_rows(prediction, mask)

    def held_out(self, denoiser: Denoiser, x_0: Tensor, generators: list[torch.Generator]) -> Tensor:
        """(B,), comparable between steps: the score, or the marginal CRPS where the score's bandwidth moves."""
        prediction = self.predict(denoiser, x_0, generators)
        if self._adaptive:
            return sample_scores(prediction.law, prediction.target, "crps")
        return self.scores(prediction, generators)

    def note(self, residual_rows: Tensor) -> None:
        """Remember the residuals of a batch, in the batch's order, for the bandwidth of the next steps."""
        if self._adaptive:
            self._residuals.append(residual_rows)

    def update(self) -> None:
        """After an optimiser step: learn from the residuals of all processes."""
        if self._adaptive and self._residuals:
            index, square, count = gather(torch.cat(self._residuals)).unbind(1)
            self._residuals.clear()
            self.scale.update_sums(index.long(), square, count)

    def predict(
        self,
        denoiser: Denoiser,
        x_0: Tensor,
        generators: list[torch.Generator],
        *,
        timesteps: Tensor | None = None,
    ) -> Prediction:
        """Draw timesteps, where none are given on the CPU, and noise, and ask the network."""
        config, scheduler = self.config, self.scheduler
        if timesteps is None:
            timesteps = training_timesteps(scheduler, generators, uniform=config.uniform_timesteps)
        index = scheduler.noise_index(timesteps)
        steps = scheduler.config.num_train_timesteps
        noise = training_noise(x_0.shape[1:], index, steps, config.noise_strength, generators).to(x_0)
        timesteps = timesteps.to(x_0.device)
        x_t = scheduler.add_noise(x_0, noise, timesteps)
        target = scheduler.training_target(x_0, noise, timesteps)
        law = predict_output(denoiser, scheduler, x_t, timesteps, num_draws=config.num_draws, generator=generators)
        return Prediction(law, target, x_t, timesteps, index.to(x_0.device))

    def scores(self, prediction: Prediction, generators: list[torch.Generator], mask: Tensor | None = None) -> Tensor:
        """(B,); random directions come from the generator of the first sample of each group."""
        law, target = prediction.law, prediction.target
        if self._adaptive:
            scale = self.scale(prediction.index)
            return scale * sample_scores(law, target, self.score, mask=mask, bandwidth=scale, **self.options)
        if self.score not in _NEEDS_DIRECTIONS or law.noise_channels:  # an implicit family brings its draws
            return sample_scores(law, target, self.score, mask=mask, **self.options)
        parts = []
        for first in range(0, len(target), self.direction_group):
            rows = slice(first, first + self.direction_group)
            own = {"mask": None if mask is None else mask[rows], "generator": generators[first], **self.options}
            parts.append(sample_scores(law[rows], target[rows], self.score, **own))
        return torch.cat(parts)


def residual_rows(prediction: Prediction, mask: Tensor | None) -> Tensor:
    """(B, 3): the noise index, the sum of squared residuals over coordinates that count, and their number."""
    target = prediction.target
    residual = (target - prediction.law.mean.detach()).flatten(1)
    keep = torch.ones_like(residual, dtype=torch.bool) if mask is None else mask.expand(target.shape).flatten(1)
    square = torch.where(keep, residual, 0.0).square().sum(1)
    return torch.stack([prediction.index.float(), square.float(), keep.sum(1).float()], 1)
