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
    """What one chain gives: one latent (ensemble) or several draws (trajectory), and the head's spread along it."""

    latents: Tensor  # (draws, C, h, w)
    epistemic: Tensor | None = None  # (C, h, w), a standard deviation


@dataclass(frozen=True)
class MemberLatents:
    """All members of an image."""

    latents: Tensor  # (E, C, h, w)
    epistemic: Tensor | None  # (chains, C, h, w)


def merge_chains(chains: list[ChainResult], num_members: int) -> MemberLatents:
    """Members in the order first draw of every chain, second draw of every chain, ...; surplus draws are dropped."""
    draws = torch.stack([chain.latents for chain in chains], 1).flatten(0, 1)  # (draws x chains, C, h, w)
    spreads = [chain.epistemic for chain in chains if chain.epistemic is not None]
    return MemberLatents(draws[:num_members], torch.stack(spreads) if spreads else None)


def draw_first_law(
    denoiser: Denoiser,
    scheduler: DistributionalDDIMScheduler,
    x_T: Tensor,
    *,
    num_draws: int,
    generator: Generators,
) -> Tensor:
    """Draws (B, num_draws, C, h, w) from the head's law of x_0 given x_T at the first used timestep.

    There the law carries the whole predictive spread (at zero terminal SNR exactly: x_T says nothing of x_0); at later
    steps part of it has moved into x_t, where a single chain cannot see it. Symmetric laws are drawn in antithetic
    pairs, which makes their mean exact.
    """
    t = scheduler.timesteps[0]
    law = predict_noise(denoiser, scheduler, scheduler.scale_model_input(x_T, t), t, generator=generator)
    law = scheduler.original_distribution(law, t, x_T).scaled(scheduler.config.tau)
    if not scheduler.family.symmetric:
        return law.rsample((num_draws,), generator).transpose(0, 1)
    half = law.rsample((-(-num_draws // 2),), generator)
    pairs = torch.stack([half, 2 * law.mean - half], 1).flatten(0, 1)
    return pairs[:num_draws].transpose(0, 1)


def chain_generators(generator: Generators, call: DepthCall) -> list[torch.Generator]:
    """A stream per chain; a single generator of a single chain is used as it is, as diffusers would."""
    if isinstance(generator, list | tuple):
        return list(generator)
    if isinstance(generator, torch.Generator) and call.num_images * call.num_chains == 1:
        return [generator]
    base = base_seed(generator)
    return [
        torch.Generator().manual_seed(member_seed(base, i, m))
        for i in range(call.num_images)
        for m in range(call.num_chains)
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
    if len(latents) != call.num_images:
        raise ValueError(f"a list of latents has one tensor per image, {call.num_images}; got {len(latents)}")
    return list(latents)
