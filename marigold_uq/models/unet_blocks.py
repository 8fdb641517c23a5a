"""The U-Net for fields, in any number of dimensions: residual blocks, attention, and padding that knows periodic axes.

Structure (METHOD: fields): a first convolution; per level `layers_per_block` residual blocks on the way down and one
more on the way up, each of those with the matching state of the way down; halving between levels by averaging,
doubling by repetition; attention in the bottleneck; a last convolution and the head that a family widens.
"""

import math
from collections.abc import Sequence
from typing import Any, Self

import torch
from diffusers.configuration_utils import ConfigMixin
from diffusers.models.modeling_utils import ModelMixin
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["FieldUNet", "double", "halve", "pad_axes"]


CONVOLUTIONS: dict[int, type[nn.Conv1d] | type[nn.Conv2d]] = {1: nn.Conv1d, 2: nn.Conv2d}
RESIDUAL_SCALE = math.sqrt(0.5)  # the sum of two independent terms keeps its variance
INITIAL_BRANCH = 1e-5  # residual branches start almost closed, but with a gradient
FREQUENCIES = 32  # the embedding has a sine and a cosine of each


def pad_axes(x: Tensor, width: int, periodic: Sequence[bool]) -> Tensor:
    """`width` more points at both ends of each spatial axis of x (B, C, ...): wrapped where periodic, else zeros."""
    for mode, chosen in (("circular", True), ("constant", False)):
        if chosen in periodic:
            sizes = [width if axis == chosen else 0 for axis in reversed(periodic) for _ in range(2)]
            x = F.pad(x, sizes, mode=mode)
    return x


def halve(x: Tensor, periodic: Sequence[bool]) -> Tensor:
    """Means of neighbouring pairs along each axis; an odd axis is first continued by one point."""
    for axis, wraps in enumerate(periodic, start=2):
        if x.shape[axis] % 2:
            x = torch.cat([x, x.narrow(axis, 0 if wraps else x.shape[axis] - 1, 1)], axis)
        x = x.unflatten(axis, (-1, 2)).mean(axis + 1)
    return x


def double(x: Tensor, size: Sequence[int]) -> Tensor:
    """Each value twice along each axis, cut to `size`: the way back from `halve`."""
    for axis, length in enumerate(size, start=2):
        x = x.repeat_interleave(2, axis).narrow(axis, 0, length)
    return x


class TimestepEmbedding(nn.Module):
    """Sines and cosines of t at geometric frequencies 1 .. 1/max_period, then a two-layer MLP.

    Neighbouring timesteps have neighbouring embeddings: the fastest frequency turns by one radian per step.
    """

    def __init__(self, channels: int, max_period: float) -> None:
        super().__init__()
        self.max_period = max_period
        self.first = nn.Linear(2 * FREQUENCIES, channels)
        self.second = nn.Linear(channels, channels)

    def forward(self, timestep: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Embedding (B, channels) of timesteps (B,) in the dtype that the network computes in.

        By default that of the weights; under `enable_layerwise_casting` they are stored in another.
        """
        # Not a buffer: `half()` would round the frequencies.
        exponents = torch.linspace(0, -1, FREQUENCIES, dtype=torch.float32, device=timestep.device)
        angles = timestep.float()[:, None] * self.max_period**exponents  # (B, frequencies)
        features = torch.cat([angles.cos(), angles.sin()], 1).to(dtype or self.first.weight.dtype)
        return F.silu(self.second(F.silu(self.first(features))))


class SelfAttention(nn.Module):
    """One head over all points, as a residual branch."""

    def __init__(self, channels: int, dimension: int) -> None:
        super().__init__()
        convolution = CONVOLUTIONS[dimension]
        self.norm = group_norm(channels)
        self.query_key_value = convolution(channels, 3 * channels, 1)
        self.projection = convolution(channels, channels, 1)
        nn.init.xavier_uniform_(self.projection.weight, gain=INITIAL_BRANCH)

    def forward(self, x: Tensor) -> Tensor:
        """x (B, C, ...) -> (B, C, ...)."""
        points = self.query_key_value(self.norm(x)).flatten(2).transpose(1, 2)  # (B, points, 3 C)
        attended = F.scaled_dot_product_attention(*points.chunk(3, -1))
        branch = self.projection(attended.transpose(1, 2).reshape(x.shape))
        return (x + branch) * RESIDUAL_SCALE


class ResidualBlock(nn.Module):
    """norm, silu, convolution; plus the timestep; norm, silu, dropout, convolution; plus the input; maybe attention."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        *,
        embedding_channels: int,
        dropout: float,
        periodic: Sequence[bool],
        attention: bool = False,
        resamples: bool = False,
    ) -> None:
        super().__init__()
        convolution = CONVOLUTIONS[len(periodic)]
        self.periodic = tuple(periodic)
        self.norm_1, self.norm_2 = group_norm(in_channels), group_norm(out_channels)
        self.conv_1, self.conv_2 = convolution(in_channels, out_channels, 3), convolution(out_channels, out_channels, 3)
        nn.init.xavier_uniform_(self.conv_2.weight, gain=INITIAL_BRANCH)
        self.embedding = nn.Linear(embedding_channels, out_channels)
        self.dropout = nn.Dropout(dropout)
        projects = resamples or in_channels != out_channels
        self.shortcut = convolution(in_channels, out_channels, 1) if projects else nn.Identity()
        self.attention = SelfAttention(out_channels, len(periodic)) if attention else nn.Identity()

    def forward(self, x: Tensor, embedding: Tensor, size: Sequence[int] | None = None) -> Tensor:
        """x (B, C, ...) with embedding (B, E); doubled to `size` inside the block if that is given."""
        branch = F.silu(self.norm_1(x))
        if size is not None:
            x, branch = double(x, size), double(branch, size)
        branch = self.conv_1(pad_axes(branch, 1, self.periodic))
        branch = branch + self.embedding(embedding)[(..., *[None] * len(self.periodic))]
        branch = self.dropout(F.silu(self.norm_2(branch)))
        branch = self.conv_2(pad_axes(branch, 1, self.periodic))
        return self.attention((self.shortcut(x) + branch) * RESIDUAL_SCALE)


class DownBlock(ResidualBlock):
    """A residual block at half the resolution."""

    def forward(self, x: Tensor, embedding: Tensor, size: Sequence[int] | None = None) -> Tensor:
        """x (B, C, ...) -> (B, C', half of each axis, rounded up)."""
        return super().forward(halve(x, self.periodic), embedding)


def group_norm(channels: int) -> nn.GroupNorm:
    """Groups of at least four channels, at most 32 groups, that divide the channels."""
    groups = max(g for g in range(1, min(32, max(1, channels // 4)) + 1) if channels % g == 0)
    return nn.GroupNorm(groups, channels, eps=1e-6)


class FieldUNet(ModelMixin, ConfigMixin):
    """What UNet1d and UNet2d share. `forward(x, timestep)` is the raw tensor: with the condition bound, a Denoiser.

    `conv_in` and `conv_out` are plain convolutions, padded from outside, so that `models.widen` can replace them.
    """

    def _build(
        self,
        in_channels: int,
        out_channels: int,
        channels: Sequence[int],
        layers: int,
        attention_levels: Sequence[int],
        periodic: Sequence[bool],
        **options: Any,
    ) -> None:
        _check(channels, layers, attention_levels)
        self.periodic = tuple(bool(axis) for axis in periodic)
        convolution = CONVOLUTIONS[len(self.periodic)]
        self.embedding = TimestepEmbedding(options["embedding_channels"], options.pop("max_period"))
        shared = {**options, "periodic": self.periodic}
        self.conv_in = convolution(in_channels, channels[0], 3)
        skips = self._build_down(channels, layers, attention_levels, shared)
        self.middle = ResidualBlock(channels[-1], channels[-1], attention=True, **shared)
        self._build_up(channels, layers, attention_levels, skips, shared)
        self.norm_last = group_norm(channels[0])
        self.conv_last = convolution(channels[0], channels[0], 3)
        self.conv_out = convolution(channels[0], out_channels, 3)

    def _build_down(
        self, channels: Sequence[int], layers: int, attention_levels: Sequence[int], shared: dict[str, Any]
    ) -> list[int]:
        """The way down; returns the channels of the states it leaves behind, conv_in's first."""
        self.down = nn.ModuleList()
        widths = [channels[0]]
        for level, width in enumerate(channels):
            if level:
                self.down.append(DownBlock(widths[-1], width, resamples=True, **shared))
                widths.append(width)
            for _ in range(layers):
                self.down.append(ResidualBlock(widths[-1], width, attention=level in attention_levels, **shared))
                widths.append(width)
        return widths

    def _build_up(
        self,
        channels: Sequence[int],
        layers: int,
        attention_levels: Sequence[int],
        skips: list[int],
        shared: dict[str, Any],
    ) -> None:
        """The way up; `joins` says of each block whether it takes a state of the way down, or doubles."""
        self.up = nn.ModuleList()
        self.joins: list[bool] = []
        before = channels[-1]
        for level, width in reversed(list(enumerate(channels))):
            if level + 1 < len(channels):
                self.up.append(ResidualBlock(before, before, resamples=True, **shared))
                self.joins.append(False)
            for index in range(layers + 1):
                attends = level in attention_levels and index == layers
                self.up.append(ResidualBlock(before + skips.pop(), width, attention=attends, **shared))
                self.joins.append(True)
                before = width

    def forward(self, x: Tensor, timestep: Tensor | int | float) -> Tensor:
        """Raw output (B, out_channels, ...) for x (B, in_channels, ...), at one timestep or one per sample (B,)."""
        embedding = self.embedding(self._timesteps(x, timestep), x.dtype)
        x = self.conv_in(pad_axes(x, 1, self.periodic))
        states = [x]
        for block in self.down:
            x = block(x, embedding)
            states.append(x)
        x = self.middle(x, embedding)
        for block, joins in zip(self.up, self.joins, strict=True):
            if joins:
                x = block(torch.cat([x, states.pop()], 1), embedding)
            else:
                x = block(x, embedding, states[-1].shape[2:])
        x = self.conv_last(pad_axes(F.silu(self.norm_last(x)), 1, self.periodic))
        return self.conv_out(pad_axes(x, 1, self.periodic))

    def _timesteps(self, x: Tensor, timestep: Tensor | int | float) -> Tensor:
        """One timestep per sample; x is checked on the way."""
        expected = self.conv_in.in_channels
        if x.ndim != 2 + len(self.periodic) or x.shape[1] != expected or 0 in x.shape:
            raise ValueError(
                f"{type(self).__name__} takes (batch, {expected} channels, {len(self.periodic)} spatial axes); "
                f"got {tuple(x.shape)}. Concatenate x_t, condition and grid along axis 1"
            )
        t = torch.as_tensor(timestep, device=x.device)
        if t.ndim > 1 or (t.ndim == 1 and len(t) not in (1, len(x))):
            raise ValueError(f"one timestep, or one for each of the {len(x)} samples; got shape {tuple(t.shape)}")
        return t.expand(len(x))

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """torch's own `to`: diffusers' (0.42) warns of modules to be kept in float32 where there are none."""
        return nn.Module.to(self, *args, **kwargs)


def _check(channels: Sequence[int], layers: int, attention_levels: Sequence[int]) -> None:
    if not channels or min(channels) < 1 or layers < 1:
        raise ValueError(
            f"block_out_channels (one per level) and layers_per_block are positive; got {channels} and {layers}"
        )
    if any(not 0 <= level < len(channels) for level in attention_levels):
        raise ValueError(f"attention_levels count from 0 to {len(channels) - 1}; got {tuple(attention_levels)}")
