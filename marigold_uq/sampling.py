"""The reverse loop that all pipelines share."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from tqdm.auto import tqdm

from marigold_uq.denoising import Denoiser, predict_output
from marigold_uq.distributions import NoiseDistribution, PointDistribution
from marigold_uq.randomness import Generators, randn
from marigold_uq.schedulers.distributional import DistributionalScheduler


@dataclass(frozen=True)
class ReverseStep:
    """What an observer sees of one step, before x_prev is drawn."""

    index: int
    timestep: int | float
    x_t: Tensor  # (B, *event)
    law: NoiseDistribution  # the distribution of the model output given x_t


class StepObserver(Protocol):
    """Collects something along the trajectory, at no extra network call; see `marigold_uq.uncertainty`."""

    def __call__(self, scheduler: DistributionalScheduler, step: ReverseStep) -> None: ...


class StepCallback(Protocol):
    """May replace x_prev after each step: (index, timestep, x_prev) -> x_prev."""

    def __call__(self, index: int, timestep: int | float, x_prev: Tensor) -> Tensor: ...


def initial_noise(shape: Sequence[int], *, like: Tensor, generator: Generators = None) -> Tensor:
    """x_T ~ N(0, I) of shape (B, *event)."""
    return randn((), shape, like=like, generator=generator)


def check_start(scheduler: DistributionalScheduler) -> None:
    """The chain starts from pure noise: a first timestep where x_t is mostly signal would return that noise."""
    if scheduler.num_inference_steps is None:
        raise ValueError("run scheduler.set_timesteps(...) before sampling")
    first = scheduler.timesteps[0].item()
    share = scheduler.noise_level(first).signal_share
    if share > 0.5:
        spacing = scheduler.config.get("timestep_spacing")
        raise ValueError(
            "the chain starts from pure noise, so x_t must be mostly noise at its first timestep; at this one, "
            f"t = {first}, {share:.0%} of its variance is signal. Build the scheduler with timestep_spacing='trailing' "
            f"(it has {spacing!r}) or take more steps (it takes {scheduler.num_inference_steps})"
        )


def one_step_distribution(
    denoiser: Denoiser,
    scheduler: DistributionalScheduler,
    x_T: Tensor,
    *,
    num_draws: int = 1,
    generator: Generators = None,
) -> NoiseDistribution:
    """The distribution of x_0 at the first timestep, by one network call: moments, quantiles, density and draws.

    It is what a chain of one step draws from, tau included. At zero terminal SNR x_T says nothing about x_0 and it
    carries the whole predictive spread; `num_draws` is for families that are known through draws only.
    """
    check_start(scheduler)
    t, x_t = scheduler.timesteps[0], x_T * scheduler.init_noise_sigma
    output = predict_output(denoiser, scheduler, x_t, t, num_draws=num_draws, generator=generator)
    return scheduler.original_distribution(output, t, x_t).scaled(scheduler.config.tau)


def reverse_diffusion(
    denoiser: Denoiser,
    scheduler: DistributionalScheduler,
    x_T: Tensor,
    *,
    generator: Generators = None,
    observers: Iterable[StepObserver] = (),
    callback: StepCallback | None = None,
    follow_mean: bool = False,
    progress: dict[str, Any] | bool = False,
    grad: bool = False,
) -> Tensor:
    """Draw x_0 from x_T ~ N(0, I) along `scheduler.timesteps` (run `set_timesteps` first).

    With a list of generators, one per batch element, each element's noise is its own, bit for bit, whatever the batch.
    `follow_mean` steps with the mean alone, as the ordinary diffusion model of that mean would.
    `progress` is True or tqdm's keyword arguments. With `grad` the gradient flows through all steps and draws; mixture
    weights get none.
    """
    check_start(scheduler)
    with torch.set_grad_enabled(grad):
        return _run_chain(denoiser, scheduler, x_T, generator, list(observers), callback, follow_mean, progress)


def _run_chain(
    denoiser: Denoiser,
    scheduler: DistributionalScheduler,
    x_T: Tensor,
    generator: Generators,
    observers: list[StepObserver],
    callback: StepCallback | None,
    follow_mean: bool,
    progress: dict[str, Any] | bool,
) -> Tensor:
    x_t = x_T * scheduler.init_noise_sigma
    options = progress if isinstance(progress, dict) else {"disable": not progress}
    # The network gets t as a tensor: a compiled one would be compiled again for every new int.
    for index, t in enumerate(tqdm(scheduler.timesteps, **{"leave": False, **options})):
        law = predict_output(denoiser, scheduler, x_t, t, generator=generator)
        timestep = t.item()
        for observe in observers:
            observe(scheduler, ReverseStep(index, timestep, x_t, law))
        output = PointDistribution(law.mean) if follow_mean else law
        x_t = scheduler.step(output, timestep, x_t, generator=generator, return_dict=False)[0]
        if callback is not None:
            x_t = callback(index, timestep, x_t)
    return x_t
