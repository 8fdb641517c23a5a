"""TinyViT: convolutions at strides 4 and 8, attention in windows at strides 8 and 16; written for MobileSAM's weights.

Wu et al., TinyViT: Fast Pretraining Distillation for Small Vision Transformers (ECCV 2022); Zhang et al., Faster
Segment Anything (2023) trained it as the image encoder of Segment Anything and added the neck. Batch norms are folded
into the convolutions before them, so nothing behaves differently in training, and pictures may have any size.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

PREFIX = "image_encoder."
UNUSED = ("norm_head.", "head.")
"""Weights of the published file that belong to its classifier, which an image encoder does not run."""
BATCH_NORM_EPS = 1e-5


class MBConv(nn.Module):
    """Inverted bottleneck: widen, look around, narrow; the activation comes after the shortcut."""

    def __init__(self, channels: int, expansion: int) -> None:
        super().__init__()
        hidden = expansion * channels
        self.conv1 = nn.Conv2d(channels, hidden, 1)
        self.conv2 = nn.Conv2d(hidden, hidden, 3, padding=1, groups=hidden)
        self.conv3 = nn.Conv2d(hidden, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) to the same shape."""
        return F.gelu(x + self.conv3(F.gelu(self.conv2(F.gelu(self.conv1(x))))))


class Merging(nn.Module):
    """From one stage to the next: more channels, and half the resolution where `stride` is 2."""

    def __init__(self, channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out_channels, 1)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, stride=stride, padding=1, groups=out_channels)
        self.conv3 = nn.Conv2d(out_channels, out_channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) to (B, C', H / stride, W / stride), rounded up."""
        return self.conv3(F.gelu(self.conv2(F.gelu(self.conv1(x)))))


class WindowAttention(nn.Module):
    """Self-attention among the tokens of a window, with a learned bias for each distance (|dy|, |dx|)."""

    offsets: Tensor  # (N, N), which of the biases a pair of tokens takes

    def __init__(self, channels: int, num_heads: int, window: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm = nn.LayerNorm(channels)
        self.qkv = nn.Linear(channels, 3 * channels)
        self.proj = nn.Linear(channels, channels)
        self.attention_biases = nn.Parameter(torch.zeros(num_heads, window * window))
        row, column = torch.arange(window * window) // window, torch.arange(window * window) % window
        distance = [(place[:, None] - place[None]).abs() for place in (row, column)]
        self.register_buffer("offsets", distance[0] * window + distance[1], persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens (B, N, C) of B windows to the same shape."""
        windows, tokens, channels = x.shape
        heads = self.qkv(self.norm(x)).view(windows, tokens, self.num_heads, -1).transpose(1, 2)  # (B, heads, N, 3 c)
        query, key, value = heads.chunk(3, dim=-1)
        bias = self.attention_biases[:, self.offsets]  # (heads, N, N)
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=bias[None].to(query))
        return self.proj(mixed.transpose(1, 2).reshape(windows, tokens, channels))


class Mlp(nn.Module):
    """Two linear layers per token."""

    def __init__(self, channels: int, ratio: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(channels)
        self.fc1 = nn.Linear(channels, ratio * channels)
        self.fc2 = nn.Linear(ratio * channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        """(..., C) to the same shape."""
        return self.fc2(F.gelu(self.fc1(self.norm(x))))


class AttentionBlock(nn.Module):
    """Attention in windows, a depthwise convolution across their borders, an MLP."""

    def __init__(self, channels: int, num_heads: int, window: int, mlp_ratio: int) -> None:
        super().__init__()
        self.window = window
        self.attn = WindowAttention(channels, num_heads, window)
        self.local_conv = nn.Conv2d(channels, channels, 3, padding=1, groups=channels)
        self.mlp = Mlp(channels, mlp_ratio)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) to the same shape."""
        x = self.local_conv(x + self._attend(x))
        tokens = x.permute(0, 2, 3, 1)
        return (tokens + self.mlp(tokens)).permute(0, 3, 1, 2)

    def _attend(self, x: Tensor) -> Tensor:
        """Attention in windows; the picture is padded with zeros to whole ones."""
        batch, channels, height, width = x.shape
        size = self.window
        padded = F.pad(x, (0, -width % size, 0, -height % size))
        rows, columns = padded.shape[2] // size, padded.shape[3] // size
        grid = padded.view(batch, channels, rows, size, columns, size)
        windows = grid.permute(0, 2, 4, 3, 5, 1).reshape(-1, size * size, channels)
        mixed = self.attn(windows).view(batch, rows, columns, size, size, channels)
        whole = mixed.permute(0, 5, 1, 3, 2, 4).reshape(batch, channels, rows * size, columns * size)
        return whole[..., :height, :width]


class Stage(nn.Module):
    """Blocks at one resolution, then the way to the next stage."""

    def __init__(self, blocks: Sequence[nn.Module], downsample: nn.Module | None) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*blocks)
        self.downsample = downsample

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The features of this stage, and what the next one starts from."""
        features = self.blocks(x)
        return features, features if self.downsample is None else self.downsample(features)


class LayerNorm2d(nn.Module):
    """Normalises the channels of each pixel."""

    def __init__(self, channels: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) to the same shape."""
        normal = F.layer_norm(x.permute(0, 2, 3, 1), self.weight.shape, self.weight, self.bias, self.eps)
        return normal.permute(0, 3, 1, 2)


class TinyViT(nn.Module):
    """Features of a picture at strides 4, 8, 16 and 16, the last through the neck.

    Args:
        widths: channels of the four stages.
        depths: blocks per stage.
        num_heads: attention heads per stage; the first stage is convolutional and has none.
        windows: edge of the windows in tokens; likewise.
        neck_channels: channels of the last features.
        mlp_ratio: width of the MLPs in channels.
        expansion: width of the convolutional blocks in channels.
    """

    strides = (4, 8, 16, 16)
    mean = (0.485, 0.456, 0.406)
    std = (0.229, 0.224, 0.225)

    def __init__(
        self,
        widths: Sequence[int] = (64, 128, 160, 320),
        depths: Sequence[int] = (2, 2, 6, 2),
        num_heads: Sequence[int] = (2, 4, 5, 10),
        windows: Sequence[int] = (7, 7, 14, 7),
        neck_channels: int = 256,
        mlp_ratio: int = 4,
        expansion: int = 4,
    ) -> None:
        super().__init__()
        first = widths[0]
        self.channels = (*widths[:3], neck_channels)
        self.patch_embed = nn.Sequential(
            nn.Conv2d(3, first // 2, 3, 2, 1), nn.GELU(), nn.Conv2d(first // 2, first, 3, 2, 1)
        )
        merging = [Merging(a, b, stride) for (a, b), stride in zip(pairwise(widths), (2, 2, 1), strict=True)]
        self.stages = nn.ModuleList()
        for i, (width, depth, downsample) in enumerate(zip(widths, depths, [*merging, None], strict=True)):
            blocks: list[nn.Module] = [
                AttentionBlock(width, num_heads[i], windows[i], mlp_ratio) if i else MBConv(width, expansion)
                for _ in range(depth)
            ]
            self.stages.append(Stage(blocks, downsample))
        self.neck = nn.Sequential(
            nn.Conv2d(widths[-1], neck_channels, 1, bias=False),
            LayerNorm2d(neck_channels),
            nn.Conv2d(neck_channels, neck_channels, 3, padding=1, bias=False),
            LayerNorm2d(neck_channels),
        )

    def forward(self, pixels: Tensor) -> list[Tensor]:
        """Features of pictures (B, 3, H, W) in [-1, 1]: (B, C_k, H / s_k, W / s_k), rounded up."""
        mean, std = (pixels.new_tensor(values).view(1, 3, 1, 1) for values in (self.mean, self.std))
        return self._features(self.patch_embed(((pixels + 1) / 2 - mean) / std), self.stages)

    def after(self, stage: int, features: Tensor) -> list[Tensor]:
        """The features of all stages that follow from those of an early stage, theirs the first."""
        downsample: Any = self.stages[stage].downsample
        if downsample is None:
            raise ValueError(f"nothing follows the last stage; got stage {stage} of {len(self.stages)}")
        return [features, *self._features(downsample(features), self.stages[stage + 1 :])]

    def learn_after(self, stage: int) -> None:
        """Gradients for the weights of `after` alone."""
        self.requires_grad_(False)
        for learning in (self.stages[stage].downsample, self.stages[stage + 1 :], self.neck):
            learning.requires_grad_(True)

    def _features(self, x: Tensor, stages: Iterable[nn.Module]) -> list[Tensor]:
        features = []
        for stage in stages:
            own, x = stage(x)
            features.append(own)
        return [*features[:-1], self.neck(features[-1])]


def mobile_sam_weights(published: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The image encoder of MobileSAM's published file as the state of a `TinyViT`; batch norms are folded."""
    state = {name.removeprefix(PREFIX): value for name, value in published.items() if name.startswith(PREFIX)}
    if not state:
        raise ValueError(f"no weights named {PREFIX}*: expected the state dict that MobileSAM's authors published")
    state = {name: value for name, value in state.items() if not name.startswith(UNUSED)}
    folded: dict[str, Tensor] = {}
    for name, value in state.items():
        if name.endswith(".c.weight"):
            convolution = name.removesuffix(".c.weight")
            weight, bias = _fold(value, {key: state[f"{convolution}.bn.{key}"] for key in BATCH_NORM})
            folded[f"{_own_name(convolution)}.weight"], folded[f"{_own_name(convolution)}.bias"] = weight, bias
        elif ".bn." not in name:
            folded[_own_name(name)] = value
    return folded


BATCH_NORM = ("weight", "bias", "running_mean", "running_var")


def _fold(kernel: Tensor, norm: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """A convolution without bias and the batch norm after it, as one convolution with bias."""
    gain = norm["weight"] / (norm["running_var"] + BATCH_NORM_EPS).sqrt()
    return kernel * gain.view(-1, 1, 1, 1), norm["bias"] - norm["running_mean"] * gain


def _own_name(name: str) -> str:
    return name.replace("patch_embed.seq.", "patch_embed.").replace("layers.", "stages.", 1)
