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
DIRECTION_GROUP = 8
"""Samples that share random directions: drawn for each alone they would take as long as the network. Micro batches of
a multiple of this size give the same loss as one large batch."""


class LawScores:
    """Scores laws, one number per sample, and keeps the running residual scale of an adaptive kernel bandwidth."""

    def __init__(
        self, score: str, options: Mapping[str, Any], *, adaptive_bandwidth: bool, num_train_timesteps: int
    ) -> None:
        self.score, self.options = score, dict(options)
        self.adaptive = score == "kernel" and adaptive_bandwidth
        self.scale = RunningResidualScale(num_train_timesteps)
        self._residuals: list[Tensor] = []

    def __call__(
        self, law: NoiseDistribution, target: Tensor, timesteps: Tensor, generators: list[torch.Generator]
    ) -> Tensor:
        """(B,); random directions come from the generator of the first sample of each group."""
        if self.adaptive:
            scale = self.scale(timesteps)
            return scale * sample_scores(law, target, self.score, bandwidth=scale, **self.options)
        if self.score in NEEDS_DIRECTIONS and law.joint and not law.noise_channels:
            groups = [slice(first, first + DIRECTION_GROUP) for first in range(0, len(target), DIRECTION_GROUP)]
            return torch.cat(
                [
                    sample_scores(
                        _rows(law, rows), target[rows], self.score, generator=generators[rows][0], **self.options
                    )
                    for rows in groups
                ]
            )
        return sample_scores(law, target, self.score, **self.options)

    def held_out(
        self, law: NoiseDistribution, target: Tensor, timesteps: Tensor, generators: list[torch.Generator]
    ) -> Tensor:
        """(B,), comparable between steps: the score, or the marginal CRPS where the score's bandwidth moves."""
        return sample_scores(law, target, "crps") if self.adaptive else self(law, target, timesteps, generators)

    def note(self, law: NoiseDistribution, target: Tensor, timesteps: Tensor) -> None:
        """Remember the residuals of a batch that was scored, for the next steps' bandwidth."""
        if self.adaptive:
            square = (target - law.mean.detach()).flatten(1).square()
            count = torch.full_like(square[:, 0], square.shape[1])
            self._residuals.append(torch.stack([timesteps.float(), square.sum(1).float(), count.float()], 1))

    def update(self) -> None:
        """After an optimiser step: learn from the residuals of all processes, in the batch's order."""
        if self.adaptive and self._residuals:
            timesteps, square, count = gather(torch.cat(self._residuals)).unbind(1)
            self._residuals.clear()
            self.scale.update_sums(timesteps.long(), square, count)


def _rows(law: NoiseDistribution, rows: slice) -> NoiseDistribution:
    """The laws of some samples of the batch."""
    return type(law)(**{parameter.name: getattr(law, parameter.name)[rows] for parameter in fields(law)})
