"""Training over several steps: the network also learns from states that it made itself.

Trained one step ahead, a network never sees its own errors, which a rollout feeds back to it. Here some steps of
training start from the model's own states: the truth `num_leads` steps later is what they are scored against.

A drawn state is one of the states that could have been; the truth that follows is the continuation of another one. So
the distribution learned behind it also holds how far the draw was from the truth: samples grow wider, and calibration
has to narrow them. The mean feeds back the network's error alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from marigold_uq.pipelines.field import FieldForecastPipeline
from marigold_uq.randomness import member_seed
from marigold_uq.sampling import initial_noise, reverse_diffusion

__all__ = ["Rollout", "RolloutConfig", "Start", "own_starts"]


LENGTH_STREAM = 8


@dataclass(frozen=True)
class RolloutConfig:
    """Training over several steps.

    Args:
        num_leads: Steps of the longest rollout; 1 trains one step ahead.
        start_step: Until then, one step ahead.
        grow_steps: Training steps from there until rollouts are as long as they get; 0 takes them at once.
        feedback: What is fed back: "mean" or "sample" of the distribution of the next state.
        gradient: "last": the loss of the last of 1 to n steps, a number drawn anew for each batch, and its gradient
            through that step alone. "all": the mean loss of all n steps, its gradient through the states fed back too.
        denoising_steps: Of each state that is fed back.
    """

    num_leads: int = 1
    start_step: int = 0
    grow_steps: int = 0
    feedback: Literal["mean", "sample"] = "mean"
    gradient: Literal["last", "all"] = "last"
    denoising_steps: int = 1

    def __post_init__(self) -> None:
        least = {"num_leads": 1, "start_step": 0, "grow_steps": 0, "denoising_steps": 1}
        wrong = {name: getattr(self, name) for name, bound in least.items() if getattr(self, name) < bound}
        if wrong:
            bounds = ", ".join(f"{name} at least {least[name]}" for name in wrong)
            raise ValueError(f"must be: {bounds}; got {wrong}")

    def longest(self, step: int) -> int:
        """Steps of the longest rollout after so many training steps: 1, then growing evenly to `num_leads`."""
        if step < self.start_step:
            return 1
        share = 1.0 if self.grow_steps == 0 else min(1.0, (step - self.start_step) / self.grow_steps)
        return min(self.num_leads, 1 + max(1, int(share * (self.num_leads - 1))))


@dataclass
class Rollout:
    """Where in the curriculum training is; a `Stateful`."""

    config: RolloutConfig = field(default_factory=RolloutConfig)
    seed: int = 0
    step: int = 0

    @property
    def active(self) -> bool:
        """Whether any rollout is longer than one step."""
        return self.config.num_leads > 1

    def length(self) -> int:
        """Steps of the current batch's rollout, the same for all parts of an effective batch."""
        longest = self.config.longest(self.step)
        if self.config.gradient == "all" or longest == 1:
            return longest
        chosen = np.random.default_rng(member_seed(self.seed, LENGTH_STREAM, self.step))
        return int(chosen.integers(1, longest + 1))

    def scored(self, length: int) -> range:
        """The lead times, counted from 0, whose losses count."""
        return range(length) if self.config.gradient == "all" else range(length - 1, length)

    def state_dict(self) -> dict[str, Any]:
        """The step."""
        return {"step": self.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Undo `state_dict`."""
        self.step = int(state_dict["step"])


class Start(NamedTuple):
    """What one step starts from: states (B, num_history, C, *space), oldest first, and the time (B,) of the last."""

    history: Tensor
    time: Tensor | None


def own_starts(
    pipeline: FieldForecastPipeline,
    network: nn.Module,
    start: Start,
    length: int,
    generators: list[torch.Generator],
    config: RolloutConfig,
) -> Iterator[Start]:
    """`start`, and what the model makes of it: what each of `length` steps begins with."""
    for lead in range(length):
        yield start
        if lead + 1 < length:
            start = _next_start(pipeline, network, start, generators, config)


def _next_start(
    pipeline: FieldForecastPipeline,
    network: nn.Module,
    start: Start,
    generators: list[torch.Generator],
    config: RolloutConfig,
) -> Start:
    """One step later, the newest state being the model's own."""
    encoder, grad = pipeline.encoder, config.gradient == "all"
    with torch.set_grad_enabled(grad):
        condition = encoder.condition(start.history, start.time)
        increment = reverse_diffusion(
            pipeline.denoiser(condition, network),
            pipeline.scheduler.for_chain(config.denoising_steps, condition.device),
            initial_noise((len(condition), *encoder.event_shape), like=condition, generator=generators),
            generator=generators,
            follow_mean=config.feedback == "mean",
            grad=grad,
        )
        newest = encoder.decode(start.history[:, -1], increment.float())
    history = torch.cat([start.history[:, 1:], newest.unsqueeze(1)], 1)
    return Start(history, None if start.time is None else start.time + encoder.config.time_step)
