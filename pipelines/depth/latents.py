"""Latents of one image: pixels in, the start of each chain, the members they give, and depth maps out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from diffusers.models.autoencoders.autoencoder_tiny import AutoencoderTiny
from torch import Tensor

from marigold_uq.distributions import NoiseDistribution
from marigold_uq.models.condition_encoder import ConditionEncoder
from marigold_uq.novelty import novelty_features
from marigold_uq.randomness import Generators, base_seed, forked, member_generators, member_seed, randn
from marigold_uq.sampling import ReverseStep
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


def draw_starts(
    generator: Generators, shapes: Sequence[tuple[int, ...]], like: Tensor
) -> tuple[list[Tensor], list[torch.Generator]]:
    """x_T of all chains, one tensor per image, and a stream per chain for the noise of its steps.

    The starts are the numbers that diffusers draws: each from its own generator, or all at once from a single one or
    from torch's default stream. A single generator of a single chain goes on as it is, as in diffusers; else the
    streams do not depend on the batch.

    Args:
        generator: One generator, a list with one per chain, or None.
        shapes: (chains, C, h, w) per image.
        like: Gives device and dtype.
    """
    counts = [shape[0] for shape in shapes]
    if not isinstance(generator, torch.Generator | None):
        streams = _checked_generators(generator, sum(counts))
        last = list(accumulate(counts))
        own = [streams[end - count : end] for end, count in zip(last, counts, strict=True)]
        return [randn((), shape, like=like, generator=part) for shape, part in zip(shapes, own, strict=True)], streams
    if len(set(shapes)) == 1:
        drawn = randn((), (sum(counts), *shapes[0][1:]), like=like, generator=generator)
        starts = list(drawn.split(counts))
    else:
        starts = [randn((), shape, like=like, generator=generator) for shape in shapes]
    if generator is not None and sum(counts) == 1:
        return starts, [generator]
    return starts, member_generators(base_seed(generator), sum(counts))


def copied(generator: Generators) -> Generators:
    """The same streams once more; what is drawn from the copies does not move them on."""
    if generator is None:
        return torch.Generator().manual_seed(0)
    return forked(generator) if isinstance(generator, torch.Generator) else [forked(one) for one in generator]


def _checked_generators(generator: Sequence[torch.Generator], count: int) -> list[torch.Generator]:
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
class FirstMoments:
    """Of the distribution of x_0 at the first step, each (C, h, w)."""

    mean: Tensor
    variance: Tensor


@dataclass(frozen=True)
class ChainResult:
    """What one chain gives: where it ends, and what was seen on the way."""

    x_0: Tensor  # (C, h, w)
    epistemic: Tensor | None = None  # (C, h, w), a standard deviation
    first: FirstMoments | None = None
    members: Tensor | None = None  # (E, C, h, w), of the distribution of x_0 at the first step


@dataclass(frozen=True)
class MemberLatents:
    """Members of an image, and what their chains tell together."""

    latents: Tensor  # (E, C, h, w)
    epistemic: Tensor | None = None  # (C, h, w), a standard deviation
    first: FirstMoments | None = None


class FirstDistribution:
    """Observer for `reverse_diffusion`: the distribution of x_0 at the first step, at no extra network call.

    It carries the whole predictive spread (at zero terminal SNR exactly: x_T says nothing of x_0). At later steps part
    of the spread has moved into x_t, where a single chain cannot see it.
    """

    value: NoiseDistribution

    def __call__(self, scheduler: DistributionalScheduler, step: ReverseStep) -> None:
        if step.index == 0:
            law = scheduler.original_distribution(step.law, step.timestep, step.x_t)
            self.value = law.scaled(scheduler.config.tau)

    def moments(self) -> list[FirstMoments]:
        """Per element of the batch."""
        return [FirstMoments(*both) for both in zip(self.value.mean, self.value.variance, strict=True)]


def first_members(law: NoiseDistribution, mode: str, num_members: int, generator: Generators) -> Tensor:
    """Members (E, B, C, h, w) of a distribution: recentred draws, or quantiles at the middles of E equal parts."""
    if mode == "marginal":
        return law.quantile((torch.arange(num_members) + 0.5) / num_members)
    return recentred(law.rsample((num_members,), generator), law.mean)


def recentred(draws: Tensor, mean: Tensor) -> Tensor:
    """Draws (E, ...) moved together, so that their mean is the known one (...).

    The spread stays that of independent draws, and the error of their mean loses its first order.
    """
    return draws - (draws - mean).mean(0)


def merge_chains(chains: list[ChainResult]) -> MemberLatents:
    """Chains of one picture, which differ in their start and their noise, as its members."""
    spreads = [chain.epistemic for chain in chains if chain.epistemic is not None]
    epistemic = torch.stack(spreads).square().mean(0).sqrt() if spreads else None
    first = [chain.first for chain in chains if chain.first is not None]
    return MemberLatents(torch.stack([chain.x_0 for chain in chains]), epistemic, _average(first) if first else None)


def _average(moments: list[FirstMoments]) -> FirstMoments:
    return FirstMoments(
        torch.stack([one.mean for one in moments]).mean(0), torch.stack([one.variance for one in moments]).mean(0)
    )


def member_features(members: MemberLatents) -> Tensor:
    """What `marigold_uq.novelty` compares of one picture, (1, D)."""
    assert members.first is not None
    parts = (members.first.mean, members.first.variance.sqrt(), members.latents.std(0))
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
