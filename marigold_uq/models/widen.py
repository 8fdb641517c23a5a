"""Surgery on a U-Net's first and last convolution: pretrained point predictor -> network of any family, and back.

The network stays a plain diffusers model with other channel counts, so stock diffusers loads the result.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from marigold_uq.component_config import store_in_config
from marigold_uq.distributions import HeadOptions, family_class

__all__ = ["add_condition_channels", "insert_condition_channels", "narrow", "silence_mean", "widen"]


@torch.no_grad()
def add_condition_channels(unet: Any, condition_channels: int) -> None:
    """Marigold's conv_in: the pretrained filters repeated for [condition, target], divided by the number of copies.

    A network whose input already holds condition and target is left as it is.
    """
    target_channels, channels = unet.conv_out.out_channels, unet.conv_in.in_channels
    if channels == target_channels + condition_channels:
        return
    if channels != target_channels or condition_channels % channels:
        raise ValueError(
            f"cannot add {condition_channels} condition channels to a network with {channels} input and "
            f"{target_channels} output channels: expected {target_channels} inputs (a plain diffusion model, "
            f"condition_channels a multiple of them) or {target_channels + condition_channels} (already conditional)"
        )
    copies = 1 + condition_channels // channels
    weight = torch.cat([unet.conv_in.weight] * copies, 1) / copies
    _replace(unet, "conv_in", weight, unet.conv_in.bias)


@torch.no_grad()
def insert_condition_channels(unet: Any, count: int, *, before: int) -> None:
    """New input channels with zero weights before the last `before` ones: the output stays what it was."""
    weight = unet.conv_in.weight
    first, last = weight[:, :-before], weight[:, -before:]
    new = weight.new_zeros(weight.shape[0], count, *weight.shape[2:])
    _replace(unet, "conv_in", torch.cat([first, new, last], 1), unet.conv_in.bias)


@torch.no_grad()
def silence_mean(unet: Any) -> None:
    """Set the output of a point predictor to zero, in place; it learns from there."""
    for parameter in unet.conv_out.parameters():
        parameter.zero_()


@torch.no_grad()
def widen(
    unet: Any,
    noise_family: str,
    *,
    num_components: int = 1,
    rank: int = 0,
    initial_scale: float = 0.5,
    initial_factor: float = 0.01,
    seed: int = 0,
) -> None:
    """Turn a point predictor into the network of `noise_family`, in place; the predicted mean stays what it was.

    Scales start constant at `initial_scale`; mixture components start with equal weights, spread evenly over one
    `initial_scale` either side of the pretrained output; low-rank factors start near zero but not at it, where their
    gradient would vanish. An implicit family gets input channels for its noise, with zero weights.
    """
    family = family_class(noise_family)
    head, generator = unet.conv_out, torch.Generator().manual_seed(seed)
    bias = head.bias if head.bias is not None else head.weight.new_zeros(head.out_channels)
    weights, biases = [], []
    for block in family.initial_blocks(HeadOptions(num_components, rank), initial_scale):
        noise = torch.randn(head.weight.shape, generator=generator) if block.is_factor else None
        weights.append(_block_weight(head.weight, block.copies_mean, noise, initial_factor))
        biases.append(block.bias + (bias if block.copies_mean else torch.zeros_like(bias)))
    _replace(unet, "conv_out", torch.cat(weights), torch.cat(biases))
    if family.noise_channels:
        first = unet.conv_in.weight
        extra = first.new_zeros(first.shape[0], family.noise_channels, *first.shape[2:])
        _replace(unet, "conv_in", torch.cat([first, extra], 1), unet.conv_in.bias)


def _block_weight(pretrained: Tensor, copies_mean: bool, noise: Tensor | None, initial_factor: float) -> Tensor:
    if copies_mean:
        return pretrained
    if noise is None:
        return torch.zeros_like(pretrained)
    return initial_factor / math.sqrt(pretrained[0].numel()) * noise.to(pretrained)


@torch.no_grad()
def narrow(unet: Any, noise_family: str, *, num_components: int = 1, rank: int = 0) -> None:
    """Undo `widen`: keep the rows of the mean (of the middle component, or the two middle ones, of a mixture).

    Right after `widen` this is the original network, to the bit unless the number of components is even, where the
    biases are back to rounding error.
    """
    family = family_class(noise_family)
    blocks = family.initial_blocks(HeadOptions(num_components, rank), 1.0)
    head = unet.conv_out
    if head.out_channels % len(blocks):
        raise ValueError(
            f"conv_out has {head.out_channels} channels, not a multiple of the {len(blocks)} blocks of family "
            f"{noise_family!r} {family.layout}: it was not widened for num_components={num_components}, rank={rank}"
        )
    means = [i for i, block in enumerate(blocks) if block.copies_mean]
    middle = means[(len(means) - 1) // 2 : len(means) // 2 + 1]
    weight = head.weight.unflatten(0, (len(blocks), -1))[middle].mean(0)
    bias = head.bias.unflatten(0, (len(blocks), -1))[middle].mean(0)
    _replace(unet, "conv_out", weight, bias)
    if family.noise_channels:
        _replace(unet, "conv_in", unet.conv_in.weight[:, : -family.noise_channels], unet.conv_in.bias)


def _replace(unet: Any, name: str, weight: Tensor, bias: Tensor | None) -> None:
    """Put a convolution with these parameters in place and keep the config in step."""
    old: Any = getattr(unet, name)
    new: nn.Conv2d = nn.utils.skip_init(  # random initial weights would be drawn from the global stream
        type(old),
        weight.shape[1] * old.groups,
        weight.shape[0],
        old.kernel_size,
        stride=old.stride,
        padding=old.padding,
        dilation=old.dilation,
        groups=old.groups,
        bias=bias is not None,
        padding_mode=old.padding_mode,
        device=weight.device,
        dtype=weight.dtype,
    )
    new.weight.copy_(weight)
    if bias is not None and new.bias is not None:
        new.bias.copy_(bias)
    new.requires_grad_(old.weight.requires_grad).train(old.training)
    setattr(unet, name, new)
    if hasattr(unet, "register_to_config"):
        store_in_config(unet, **{"in_channels" if name == "conv_in" else "out_channels": _channels(new, name)})


def _channels(conv: nn.Conv2d, name: str) -> int:
    return conv.in_channels if name == "conv_in" else conv.out_channels
