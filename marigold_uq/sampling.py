"""The reverse loop that all pipelines share."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from tqdm.auto import tqdm

from marigold_uq.denoising import Denoiser, predict_noise
from marigold_uq.distributions import NoiseDistribution, PointDistribution
from marigold_uq.randomness import Generators, randn
from marigold_uq.schedulers.scheduling_distributional_ddim import DistributionalDDIMScheduler


@dataclass(frozen=True)
class ReverseStep:
    """What an observer sees of one step, before x_prev is drawn."""

    index: int
    timestep: int
    x_t: Tensor  # (B, *event)
    law: NoiseDistribution  # of the model output given x_t


class StepObserver(Protocol):
    """Collects something along the trajectory, at no extra network call; see `marigold_uq.uncertainty`."""

    def __call__(self, scheduler: DistributionalDDIMScheduler, step: ReverseStep) -> None: ...


class StepCallback(Protocol):
    """May replace x_prev after each step: (index, timestep, x_prev) -> x_prev."""

    def __call__(self, index: int, timestep: int, x_prev: Tensor) -> Tensor: ...


def initial_noise(shape: Sequence[int], *, like: Tensor, generator: Generators = None) -> Tensor:
    """x_T ~ N(0, I) of shape (B, *event)."""
    return randn((), shape, like=like, generator=generator)


def check_start(scheduler: DistributionalDDIMScheduler) -> None:
    """The chain starts from pure noise: a first timestep where x_t is mostly signal would return that noise."""
    if scheduler.num_inference_steps is None:
        raise ValueError("run scheduler.set_timesteps(...) before sampling")
    first = int(scheduler.timesteps[0])
    if scheduler.alpha_bar(first) > 0.5:
        raise ValueError(
            f"the chain starts from pure noise, but at its first timestep, t = {first}, x_t must be mostly signal: "
            f"{scheduler.alpha_bar(first):.0%} of its variance. Build the scheduler with timestep_spacing='trailing' "
            f"(it has {scheduler.config.timestep_spacing!r}) or take more steps (it takes "
            f"{scheduler.num_inference_steps})"
        )


@torch.no_grad()
def reverse_diffusion(
    denoiser: Denoiser,
    scheduler: DistributionalDDIMScheduler,
    x_T: Tensor,
    *,
    generator: Generators = None,
    observers: Iterable[StepObserver] = (),
    callback: StepCallback | None = None,
    follow_mean: bool = False,
    progress: dict[str, Any] | bool = False,
) -> Tensor:
    """Draw x_0 from x_T along `scheduler.timesteps` (run `set_timesteps` first).

    With a list of generators, one per batch element, each element's noise is its own, bit for bit, whatever the batch.
    `follow_mean` steps with the mean of the law instead of the law, as the ordinary diffusion model of that mean would.
    `progress` is True or tqdm's keyword arguments.
    """
    check_start(scheduler)
    observers, x_t = list(observers), x_T
    options = progress if isinstance(progress, dict) else {"disable": not progress}
    # The network gets t as a tensor: a compiled one would be compiled again for every new int.
    for index, t in enumerate(tqdm(scheduler.timesteps, **{"leave": False, **options})):
        law = predict_noise(denoiser, scheduler, scheduler.scale_model_input(x_t, t), t, generator=generator)
        timestep = int(t)
        for observe in observers:
            observe(scheduler, ReverseStep(index, timestep, x_t, law))
        output = PointDistribution(law.mean) if follow_mean else law
        x_t = scheduler.step(output, timestep, x_t, generator=generator, return_dict=False)[0]
        if callback is not None:
            x_t = callback(index, timestep, x_t)
    return x_t
