"""What a stack is trained for: the random numbers drawn for each row, and the score of each row."""

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor, nn

from marigold_uq.distributions import NoiseDistribution, SampleDistribution
from marigold_uq.models.mlp import StackedBaseline
from marigold_uq.schedulers.distributional import DistributionalScheduler
from marigold_uq.scores import sample_scores

Batch = Mapping[str, Tensor]
"""Name -> (S, B, ...): columns of the tables and what was drawn."""


class Objective(Protocol):
    """One kind of training."""

    def draw(self, num_rows: int, generator: torch.Generator) -> dict[str, Tensor]:
        """Random numbers of `num_rows` training rows of one model, each (num_rows, ...)."""
        ...

    def examples(self, rows: Batch) -> dict[str, Tensor]:
        """What `scores` needs of rows with their draws, worked out for a whole epoch at once; each (n, ...)."""
        ...

    def scores(self, model: nn.Module, batch: Batch) -> Tensor:
        """Score of every row, (S, B), lower is better."""
        ...


class BaselineObjective:
    """Squared error of f, with dropout in training; columns `features` and `target`."""

    def __init__(self, model: StackedBaseline) -> None:
        self.num_units = model.num_hidden_units if model.config.dropout else 0

    def draw(self, num_rows: int, generator: torch.Generator) -> dict[str, Tensor]:
        """Uniform numbers that decide which hidden units drop."""
        return {"uniform": torch.rand(num_rows, self.num_units, generator=generator)} if self.num_units else {}

    def examples(self, rows: Batch) -> dict[str, Tensor]:
        """As they are."""
        return dict(rows)

    def scores(self, model: nn.Module, batch: Batch) -> Tensor:
        """Mean over targets of (f(c) - y)^2; without `uniform` in the batch nothing drops."""
        prediction = model(batch["features"], batch.get("uniform"))
        return (prediction - batch["target"]).square().mean(-1)


class DenoisingObjective:
    """The family's own score of the predicted noise distribution: CRPS, energy score or squared error.

    Columns are `features`, `baseline` and `residual`, the x_0 of the diffusion.

    Args:
        scheduler: Family, prediction type and schedule.
        num_targets: Target columns C.
        num_draws: Draws M of a family that is known through draws only.
        one_step: Train the timestep alone from which a chain of one step starts.
    """

    def __init__(
        self,
        scheduler: DistributionalScheduler,
        num_targets: int = 1,
        *,
        num_draws: int = 4,
        one_step: bool = False,
    ) -> None:
        if scheduler.family.noise_channels and num_draws < 2:
            raise ValueError(
                f"the fair score of family {scheduler.family.name!r} needs num_draws >= 2; got {num_draws}"
            )
        self.scheduler = scheduler
        self.num_draws = num_draws if scheduler.family.noise_channels else 0
        self.num_targets = num_targets
        self.only_timestep = scheduler.for_chain(1).timesteps[0] if one_step else None

    def draw(self, num_rows: int, generator: torch.Generator) -> dict[str, Tensor]:
        """Timesteps as the framework draws them, for DDIM uniformly, and noise."""
        only = self.only_timestep
        drawn = {
            "timestep": self.scheduler.sample_timesteps(num_rows, generator) if only is None else only.repeat(num_rows),
            "noise": torch.randn(num_rows, self.num_targets, generator=generator),
        }
        if self.num_draws:
            channels = self.scheduler.family.noise_channels
            drawn["input_noise"] = torch.randn(num_rows, self.num_draws, channels, generator=generator)
        return drawn

    def examples(self, rows: Batch) -> dict[str, Tensor]:
        """x_t as the network sees it, its position in the table, and the target that the distribution is scored at."""
        timestep = rows["timestep"]
        of_noise = rows["residual"], rows["noise"], timestep  # each (n, ...)
        kept = {name: column for name, column in rows.items() if name not in ("noise", "residual", "timestep")}
        return {
            **kept,
            "x_t": self.scheduler.scale_model_input(self.scheduler.add_noise(*of_noise), timestep),
            "position": self.scheduler.table_position(timestep),
            "target": self.scheduler.training_target(*of_noise),
        }

    def scores(self, model: nn.Module, batch: Batch) -> Tensor:
        """Score of the predicted distribution at `target`, mean over targets, (S, B)."""
        target = batch["target"]
        scores = sample_scores(self._distribution(model, batch), target.flatten(0, 1))
        return scores.unflatten(0, tuple(target.shape[:2]))

    def _distribution(self, model: nn.Module, batch: Batch) -> NoiseDistribution:
        """All draws of an implicit distribution are rows of one network call."""
        x_t, position, features, baseline = (batch[name] for name in ("x_t", "position", "features", "baseline"))
        if not self.num_draws:
            return self.scheduler.noise_distribution(model(x_t, position, features, baseline).flatten(0, 1))
        x_t, features, baseline = (v.repeat_interleave(self.num_draws, 1) for v in (x_t, features, baseline))
        raw = model(torch.cat([x_t, batch["input_noise"].flatten(1, 2)], -1), position, features, baseline)
        return SampleDistribution(raw.unflatten(1, (-1, self.num_draws)).movedim(2, 0).flatten(1, 2))  # (M, S B, C)
