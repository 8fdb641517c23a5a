"""Latents of one image: pixels in, the start of each chain, the members they give, and depth maps out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from diffusers.models.autoencoders.autoencoder_tiny import AutoencoderTiny
from torch import Tensor

from marigold_uq.denoising import Denoiser
from marigold_uq.distributions import NoiseDistribution
from marigold_uq.models.condition_encoder import ConditionEncoder
from marigold_uq.novelty import novelty_features
from marigold_uq.randomness import Generators, base_seed, member_seed, randn
from marigold_uq.sampling import one_step_distribution
from marigold_uq.schedulers.distributional import DistributionalScheduler

if TYPE_CHECKING:
    from marigold_uq.pipelines.depth.baseline import Anchor

_SPREAD_DRAWS = 8

# ------------------------------------------------------------------------------------------------------------ encode


def posterior_mode(vae: Any, pixels: Tensor) -> Tensor:
    """Unscaled latents (B, C, h, w) of pixels (B, 3, H, W) in [-1, 1]; an `AutoencoderTiny` has no posterior."""
    output = vae.encode(_laid_out(vae, pixels))
    return output.latent_dist.mode() if hasattr(output, "latent_dist") else output.latents


def encode_pixels(vae: Any, pixels: Tensor, batch_size: int | None = None) -> Tensor:
    """The latents that the U-Net sees, (B, C, h, w): `posterior_mode` times the scaling factor."""
    parts = pixels.to(vae.dtype).split(batch_size or len(pixels))
    return torch.cat([posterior_mode(vae, part) for part in parts]) * vae.config.scaling_factor


@dataclass(frozen=True)
class PictureCondition:
    """What is known of one picture before the first step."""

    channels: Tensor  # (C, h, w), for the U-Net
    guide: Tensor | None = None  # (G, h', w'), what the image encoder tells the decoder
    anchor: Anchor | None = None  # the baseline's map, where there is one


def encode_conditions(
    vae: Any, image_encoder: ConditionEncoder | None, pixels: Tensor, batch_size: int
) -> list[PictureCondition]:
    """What U-Net and decoder know of each of the pictures (B, 3, H, W), from the image encoder where there is one."""
    if image_encoder is None:
        return [PictureCondition(latent) for latent in encode_pixels(vae, pixels, batch_size)]
    batches = [image_encoder(part) for part in pixels.to(image_encoder.dtype).split(batch_size)]
    return [
        PictureCondition(channels, guide)
        for batch in batches
        for channels, guide in zip(batch.channels, batch.guide, strict=True)
    ]


# -------------------------------------------------------------------------------------------------- starts and seeds


def chain_generators(generator: Generators, num_images: int, num_chains: int) -> list[torch.Generator]:
    """A stream per chain; a single generator of a single chain is used as it is, as diffusers would."""
    count = num_images * num_chains
    if isinstance(generator, torch.Generator | None):
        if generator is not None and count == 1:
            return [generator]
        base = base_seed(generator)
        seeds = [member_seed(base, i, m) for i in range(num_images) for m in range(num_chains)]
        return [torch.Generator().manual_seed(seed) for seed in seeds]
    if not isinstance(generator, list | tuple) or not all(isinstance(one, torch.Generator) for one in generator):
        raise ValueError(f"generator must be a torch.Generator, a list of them or None; got {type(generator).__name__}")
    if len(generator) != count:
        raise ValueError(f"a list of generators has one per chain, images x chains = {count}; got {len(generator)}")
    if len({one.device.type for one in generator}) > 1:
        raise ValueError("all generators of a list must be on the same device")
    return list(generator)


def split_latents(latents: Tensor | list[Tensor], num_images: int, num_chains: int) -> list[Tensor]:
    """Starts given by the user, as one tensor (chains, C, h, w) per image."""
    if isinstance(latents, Tensor):
        if latents.ndim != 4 or latents.shape[0] != num_images * num_chains:
            raise ValueError(
                f"latents must have shape (images x chains = {num_images * num_chains}, C, h, w); got "
                f"{tuple(latents.shape)}"
            )
        return list(latents.split(num_chains))
    if not all(isinstance(one, Tensor) for one in latents) or len(latents) != num_images:
        raise ValueError(f"latents must be a tensor, or a list of one tensor per image, {num_images} of them")
    return list(latents)


# ----------------------------------------------------------------------------------------------------------- members


@dataclass(frozen=True)
class ChainResult:
    """What one chain gives: one latent (ensemble) or several draws around `mean` (trajectory); the spread along it."""

    latents: Tensor  # (draws, C, h, w)
    mean: Tensor | None = None  # (C, h, w)
    epistemic: Tensor | None = None  # (C, h, w), a standard deviation
    first: FirstMoments | None = None


@dataclass(frozen=True)
class FirstMoments:
    """Of the distribution of x_0 at the first step, each (C, h, w)."""

    mean: Tensor
    variance: Tensor


@dataclass(frozen=True)
class MemberLatents:
    """All members of an image."""

    latents: Tensor  # (E, C, h, w)
    epistemic: Tensor | None  # (C, h, w), a standard deviation
    guide: Tensor | None  # (G, h', w'), what the image encoder tells the decoder
    first: FirstMoments | None = None  # averaged over chains
    anchor: Anchor | None = None  # the baseline's map: the latents are what it leaves over


def draw_first_distribution(
    denoiser: Denoiser,
    scheduler: DistributionalScheduler,
    x_T: Tensor,
    *,
    num_draws: int,
    generator: Generators,
) -> list[ChainResult]:
    """Draws from the head's distribution of x_0 given x_T at the first used timestep, per start.

    There it carries the whole predictive spread (at zero terminal SNR exactly: x_T says nothing of x_0). At later
    steps part of the spread has moved into x_t, where a single chain cannot see it.
    """
    distribution = one_step_distribution(denoiser, scheduler, x_T, generator=generator)
    draws = distribution.rsample((num_draws,), generator)  # (K, B, C, h, w)
    return [ChainResult(draws[:, b], one.mean, first=one) for b, one in enumerate(_first_moments(distribution))]


def first_distribution_quantiles(
    denoiser: Denoiser, scheduler: DistributionalScheduler, x_T: Tensor, *, num_levels: int
) -> list[ChainResult]:
    """Mean and quantiles (1 + num_levels, C, h, w) of the distribution that `draw_first_distribution` draws from.

    The levels lie in the middle of `num_levels` equal parts of (0, 1).
    """
    distribution = one_step_distribution(denoiser, scheduler, x_T)
    levels = (torch.arange(num_levels) + 0.5) / num_levels
    maps = torch.cat([distribution.mean[None], distribution.quantile(levels)])  # (1 + K, B, C, h, w)
    return [ChainResult(maps[:, b], first=one) for b, one in enumerate(_first_moments(distribution))]


def _first_moments(distribution: NoiseDistribution) -> list[FirstMoments]:
    return [FirstMoments(*moments) for moments in zip(distribution.mean, distribution.variance, strict=True)]


def merge_chains(
    chains: list[ChainResult], num_members: int, condition: PictureCondition | None = None
) -> MemberLatents:
    """Members in the order first draw of every chain, second draw of every chain, ...; surplus draws are dropped.

    Draws around known means are moved together by one latent, so that their mean is the mean of those means. The spread
    stays that of independent draws, and the error of their mean loses its first order.
    """
    draws = torch.stack([chain.latents for chain in chains], 1).flatten(0, 1)[:num_members]  # (E, C, h, w)
    means = [chain.mean for chain in chains if chain.mean is not None]
    if means:
        centres = torch.stack(means).repeat(chains[0].latents.shape[0], 1, 1, 1)[:num_members]
        draws = draws - (draws - centres).mean(0)
    spreads = [chain.epistemic for chain in chains if chain.epistemic is not None]
    epistemic = torch.stack(spreads).square().mean(0).sqrt() if spreads else None
    first = [chain.first for chain in chains if chain.first is not None]
    guide, anchor = (None, None) if condition is None else (condition.guide, condition.anchor)
    return MemberLatents(draws, epistemic, guide, _average(first) if first else None, anchor)


def _average(moments: list[FirstMoments]) -> FirstMoments:
    """Of chains of one picture, which differ only in their start."""
    return FirstMoments(
        torch.stack([one.mean for one in moments]).mean(0), torch.stack([one.variance for one in moments]).mean(0)
    )


def member_features(members: MemberLatents, num_members: int) -> Tensor:
    """What `marigold_uq.novelty` compares of one picture, (1, D)."""
    assert members.first is not None
    parts = (members.first.mean, members.first.variance.sqrt(), members.latents[-num_members:].std(0))
    return novelty_features(*(part.float().unsqueeze(0) for part in parts))


# ------------------------------------------------------------------------------------------------------------ decode


def decode_maps(vae: Any, latents: Tensor, batch_size: int, guide: Tensor | None = None) -> Tensor:
    """Latents (E, C, h, w) -> maps (E, H, W) in [0, 1], in at least float32."""
    maps = []
    guided = {} if guide is None else {"guide": guide[None].to(vae.dtype)}
    for part in latents.to(vae.dtype).split(batch_size):
        decoded = vae.decode(_laid_out(vae, part / vae.config.scaling_factor), return_dict=False, **guided)[0]
        maps.append((decoded.mean(1).clip(-1.0, 1.0) + 1.0) / 2.0)
    return torch.cat(maps).float()


def decode_spread(decode: Callable[[Tensor], Tensor], centre: Tensor, std: Tensor) -> Tensor:
    """Standard deviation (H, W) of the decoded map where the latent is N(centre, diag(std^2)), both (C, h, w).

    From _SPREAD_DRAWS independent draws, so the relative error is about 1 / sqrt(2 (_SPREAD_DRAWS - 1)) per pixel. A
    decoder is not linear, so half differences of antithetic pairs or its Jacobian at the centre would give another
    number. The numbers drawn are the same for every image, so that maps compare.
    """
    generator = torch.Generator().manual_seed(member_seed(0))
    draws = centre + std * randn((), (_SPREAD_DRAWS, *std.shape), like=std, generator=generator)
    return decode(draws).std(0)


def _laid_out(vae: Any, pictures: Tensor) -> Tensor:
    """The same numbers, channels last for a tiny autoencoder, which then decodes ten members in half the time.

    Others keep the order that diffusers has, whose results are matched to the bit.
    """
    return pictures.contiguous(memory_format=torch.channels_last) if isinstance(vae, AutoencoderTiny) else pictures
