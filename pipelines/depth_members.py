"""Members of one image in latent space: from chains, or from the law at the first step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from marigold_uq.denoising import Denoiser, predict_noise
from marigold_uq.pipelines.depth_call import DepthCall
from marigold_uq.randomness import Generators, base_seed, member_seed
from marigold_uq.schedulers.scheduling_distributional_ddim import DistributionalDDIMScheduler


@dataclass(frozen=True)
class ChainResult:
    """What one chain gives: one latent (ensemble) or several draws around `mean` (trajectory); the spread along it."""

    latents: Tensor  # (draws, C, h, w)
    mean: Tensor | None = None  # (C, h, w)
    epistemic: Tensor | None = None  # (C, h, w), a standard deviation


@dataclass(frozen=True)
class MemberLatents:
    """All members of an image."""

    latents: Tensor  # (E, C, h, w)
    epistemic: Tensor | None  # (C, h, w), a standard deviation


def merge_chains(chains: list[ChainResult], num_members: int) -> MemberLatents:
    """Members in the order first draw of every chain, second draw of every chain, ...; surplus draws are dropped.

    Draws from laws are moved together by one latent, so that their mean is the mean of the laws: the spread stays that
    of independent draws, and the error of their mean loses its first order.
    """
    draws = torch.stack([chain.latents for chain in chains], 1).flatten(0, 1)[:num_members]  # (E, C, h, w)
    means = [chain.mean for chain in chains if chain.mean is not None]
    if means:
        centres = torch.stack(means).repeat(chains[0].latents.shape[0], 1, 1, 1)[:num_members]
        draws = draws - (draws - centres).mean(0)
    spreads = [chain.epistemic for chain in chains if chain.epistemic is not None]
    return MemberLatents(draws, torch.stack(spreads).square().mean(0).sqrt() if spreads else None)


def draw_first_law(
    denoiser: Denoiser,
    scheduler: DistributionalDDIMScheduler,
    x_T: Tensor,
    *,
    num_draws: int,
    generator: Generators,
) -> list[ChainResult]:
    """Draws from the head's law of x_0 given x_T at the first used timestep, per start.

    There the law carries the whole predictive spread (at zero terminal SNR exactly: x_T says nothing of x_0); at later
    steps part of it has moved into x_t, where a single chain cannot see it.
    """
    t = scheduler.timesteps[0]
    law = predict_noise(denoiser, scheduler, scheduler.scale_model_input(x_T, t), t, generator=generator)
    law = scheduler.original_distribution(law, t, x_T).scaled(scheduler.config.tau)
    draws = law.rsample((num_draws,), generator)  # (K, B, C, h, w)
    return [ChainResult(draws[:, b], law.mean[b]) for b in range(len(x_T))]


def first_law_quantiles(
    denoiser: Denoiser, scheduler: DistributionalDDIMScheduler, x_T: Tensor, *, num_levels: int
) -> list[ChainResult]:
    """The mean and quantiles of the head's law of x_0 given x_T at the first used timestep.

    The levels lie in the middle of `num_levels` equal parts of (0, 1).
    """
    t = scheduler.timesteps[0]
    law = predict_noise(denoiser, scheduler, scheduler.scale_model_input(x_T, t), t)
    law = scheduler.original_distribution(law, t, x_T).scaled(scheduler.config.tau)
    levels = (torch.arange(num_levels, device=x_T.device) + 0.5) / num_levels
    maps = torch.cat([law.mean[None], law.quantile(levels)])  # (1 + K, B, C, h, w)
    return [ChainResult(maps[:, b]) for b in range(len(x_T))]


def chain_generators(generator: Generators, num_images: int, num_chains: int) -> list[torch.Generator]:
    """A stream per chain; a single generator of a single chain is used as it is, as diffusers would."""
    if generator is not None and not isinstance(generator, torch.Generator):
        return list(generator)
    if generator is not None and num_images * num_chains == 1:
        return [generator]
    base = base_seed(generator)
    return [
        torch.Generator().manual_seed(member_seed(base, i, m)) for i in range(num_images) for m in range(num_chains)
    ]


def split_latents(latents: Tensor | list[Tensor], call: DepthCall) -> list[Tensor]:
    """Starts given by the user, as one tensor (chains, C, h, w) per image."""
    if isinstance(latents, Tensor):
        if latents.ndim != 4 or latents.shape[0] != call.num_images * call.num_chains:
            raise ValueError(
                f"latents must have shape (images x chains = {call.num_images * call.num_chains}, C, h, w); got "
                f"{tuple(latents.shape)}"
            )
        return list(latents.split(call.num_chains))
    if not all(isinstance(one, Tensor) for one in latents) or len(latents) != call.num_images:
        raise ValueError(f"latents is a tensor, or a list of one tensor per image, {call.num_images} of them")
    return list(latents)
