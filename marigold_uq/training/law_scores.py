"""The loss of a batch of laws: which score, with which bandwidth, along whose directions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch
from accelerate.utils import gather
from torch import Tensor

from marigold_uq.distributions import NoiseDistribution
from marigold_uq.scores import RunningResidualScale, sample_scores

NEEDS_DIRECTIONS = ("projected", "energy")


class LawScores:
    """Scores laws, one number per sample, and keeps the running residual scale of an adaptive kernel bandwidth.

    Args:
        score: Name of the score.
        options: Its arguments.
        adaptive_bandwidth: Kernel score: the bandwidth follows the residuals, and the score is multiplied by it.
        num_train_timesteps: T.
        direction_group: Samples that share random directions. Micro batches of a multiple of this size give the same
            loss as one large batch; where the network is small, directions for each sample alone would take as long.
    """

    def __init__(
        self,
        score: str,
        options: Mapping[str, Any],
        *,
        adaptive_bandwidth: bool,
        num_train_timesteps: int,
        direction_group: int = 1,
    ) -> None:
        self.score, self.options = score, dict(options)
        self.adaptive = score == "kernel" and adaptive_bandwidth
        self.scale = RunningResidualScale(num_train_timesteps)
        self.direction_group = direction_group
        self._residuals: list[Tensor] = []

    def __call__(
        self,
        law: NoiseDistribution,
        target: Tensor,
        timesteps: Tensor,
        generators: list[torch.Generator],
        mask: Tensor | None = None,
    ) -> Tensor:
        """(B,); random directions come from the generator of the first sample of each group."""
        if self.adaptive:
            scale = self.scale(timesteps)
            return scale * sample_scores(law, target, self.score, mask=mask, bandwidth=scale, **self.options)
        if self.score in NEEDS_DIRECTIONS and not law.noise_channels:  # an implicit law brings its draws
            parts = []
            for first in range(0, len(target), self.direction_group):
                rows = slice(first, first + self.direction_group)
                some = None if mask is None else mask[rows]
                own = {"mask": some, "generator": generators[first], **self.options}
                parts.append(sample_scores(_rows(law, rows), target[rows], self.score, **own))
            return torch.cat(parts)
        return sample_scores(law, target, self.score, mask=mask, **self.options)

    def held_out(
        self, law: NoiseDistribution, target: Tensor, timesteps: Tensor, generators: list[torch.Generator]
    ) -> Tensor:
        """(B,), comparable between steps: the score, or the marginal CRPS where the score's bandwidth moves."""
        return sample_scores(law, target, "crps") if self.adaptive else self(law, target, timesteps, generators)

    def note(self, residuals: Tensor) -> None:
        """Remember the `residual_rows` of a batch that was scored, for the next steps' bandwidth."""
        if self.adaptive:
            self._residuals.append(residuals)

    def update(self) -> None:
        """After an optimiser step: learn from the residuals of all processes, in the batch's order."""
        if self.adaptive and self._residuals:
            timesteps, square, count = gather(torch.cat(self._residuals)).unbind(1)
            self._residuals.clear()
            self.scale.update_sums(timesteps.long(), square, count)


def residual_rows(law: NoiseDistribution, target: Tensor, timesteps: Tensor, mask: Tensor | None = None) -> Tensor:
    """(B, 3): the timestep, the sum of squared residuals over coordinates that count, and their number."""
    residual = (target - law.mean.detach()).flatten(1)
    keep = torch.ones_like(residual, dtype=torch.bool) if mask is None else mask.expand(target.shape).flatten(1)
    square = torch.where(keep, residual, 0.0).square().sum(1)
    return torch.stack([timesteps.float(), square.float(), keep.sum(1).float()], 1)


def _rows(law: NoiseDistribution, rows: slice) -> NoiseDistribution:
    """The laws of some samples of the batch."""
    return type(law)(**{parameter.name: getattr(law, parameter.name)[rows] for parameter in fields(law)})
