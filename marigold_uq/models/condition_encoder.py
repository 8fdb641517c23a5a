"""What the U-Net sees of a picture: features of a pretrained image encoder, fused to the grid of the latents.

A depth pipeline with such a component does not encode its pictures with the VAE. The U-Net stays a stock diffusers
model: its input is [condition, depth latent].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.models.modeling_utils import ModelMixin
from torch import Tensor, nn

from marigold_uq.models.tiny_vit import LayerNorm2d, TinyViT

__all__ = ["ConditionEncoder", "ModelMixin"]  # diffusers looks for ModelMixin in the module of a component


@dataclass(frozen=True)
class Condition:
    """What is known of a batch of pictures."""

    channels: Tensor  # (B, C, h, w), for the U-Net
    guide: Tensor  # (B, G, h parts, w parts), for the decoder


class ConditionEncoder(ModelMixin, ConfigMixin):
    """A backbone, and its features of several resolutions fused to condition channels and to a guide of the decoder.

    Args:
        backbone: Name in `BACKBONES`.
        backbone_options: What it is made of.
        levels: Which of its feature maps are used.
        cell: Pixels along the edge of a latent cell.
        parts: Parts of a latent cell along its edge; the guide has one place for each part.
        condition_channels: Channels for the U-Net; two more say where a cell lies.
        guide_channels: Channels for the decoder.
        pixels: The guide sees the picture itself as pixels^2 values per part.
    """

    @register_to_config
    def __init__(
        self,
        backbone: str = "tiny_vit",
        backbone_options: Mapping[str, Any] | None = None,
        levels: Sequence[int] = (1, 2, 3),
        cell: int = 16,
        parts: int = 2,
        condition_channels: int = 96,
        guide_channels: int = 64,
        pixels: int = 4,
    ) -> None:
        super().__init__()
        if backbone not in BACKBONES:
            raise ValueError(f"unknown backbone {backbone!r}; choose one of {', '.join(sorted(BACKBONES))}")
        self.network = BACKBONES[backbone](dict(backbone_options or {}))
        strides = [self.network.strides[level] for level in levels]
        channels = [self.network.channels[level] for level in levels]
        if any(stride > cell or cell % stride for stride in strides):
            raise ValueError(f"cells of {cell} pixels need strides that divide them; levels {levels} have {strides}")
        self.norms = nn.ModuleList(LayerNorm2d(count) for count in channels)
        self.projections = nn.ModuleList(
            _to_grid(count, condition_channels, cell // stride) for count, stride in zip(channels, strides, strict=True)
        )
        self.mix = nn.Conv2d(condition_channels, condition_channels, 3, padding=1)
        self.finest = strides.index(min(strides))
        self.guide_features = nn.Conv2d(channels[self.finest], guide_channels, 1)
        self.guide_colours = nn.Conv2d(3 * pixels**2, guide_channels, 3, padding=1)

    @property
    def out_channels(self) -> int:
        """Condition channels of the U-Net's input."""
        return int(self.config.condition_channels) + 2

    def forward(self, pixels: Tensor) -> Condition:
        """Pictures (B, 3, H, W) in [-1, 1], of whole cells."""
        return self.fuse(self.features(pixels), self.thumbnail(pixels))

    def features(self, pixels: Tensor) -> list[Tensor]:
        """The backbone's features of the levels used: what can be kept while the backbone does not learn."""
        features = self.network(pixels)
        return [features[level] for level in self.config.levels]

    def features_after(self, first: Tensor) -> list[Tensor]:
        """What `features` gave, from its first level on: the later stages see what was kept, and can learn so."""
        levels = list(self.config.levels)
        if not hasattr(self.network, "after") or levels != list(range(levels[0], len(self.network.channels))):
            raise ValueError(
                f"later stages are run from the first kept level on: a backbone with `after` and all levels from that "
                f"one on are needed; got {self.config.backbone!r} and levels {levels}"
            )
        return list(self.network.after(levels[0], first))

    def thumbnail(self, pixels: Tensor) -> Tensor:
        """The picture as the guide sees it, `pixels` values along the edge of a part."""
        factor = self.config.cell // (self.config.parts * self.config.pixels)
        return F.avg_pool2d(pixels, factor)

    def fuse(self, features: Sequence[Tensor], thumbnail: Tensor) -> Condition:
        """Condition and guide from what `features` and `thumbnail` gave."""
        normal = [norm(own) for norm, own in zip(self.norms, features, strict=True)]
        mixed = F.gelu(torch.stack([p(own) for p, own in zip(self.projections, normal, strict=True)]).sum(0))
        channels = torch.cat([self.mix(mixed), _places(mixed)], 1)
        colours = self.guide_colours(F.pixel_unshuffle(thumbnail, self.config.pixels))
        finest = self.guide_features(normal[self.finest])
        if finest.shape[-2:] != colours.shape[-2:]:
            finest = F.interpolate(finest, size=colours.shape[-2:], mode="bilinear")
        return Condition(channels, F.gelu(finest + colours))


def _to_grid(channels: int, out_channels: int, factor: int) -> nn.Module:
    """From a feature map to the grid of the latents, which is `factor` times as coarse."""
    if factor == 1:
        return nn.Conv2d(channels, out_channels, 1)
    return nn.Conv2d(channels, out_channels, factor + 1, stride=factor, padding=factor // 2)


def _places(like: Tensor) -> Tensor:
    """Row and column from -1 to 1, (B, 2, h, w)."""
    height, width = like.shape[-2:]
    rows = torch.linspace(-1, 1, height, device=like.device, dtype=like.dtype)
    columns = torch.linspace(-1, 1, width, device=like.device, dtype=like.dtype)
    grid = torch.stack(torch.meshgrid(rows, columns, indexing="ij"))
    return grid.expand(len(like), -1, -1, -1)


class TransformersBackbone(nn.Module):
    """Any vision backbone of transformers, for instance DINOv2, from its config.

    `options` are those of the config with its `model_type`, and optionally `mean` and `std` of the pixels it expects.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__()
        from transformers import AutoBackbone, AutoConfig

        own = dict(options)
        self.mean, self.std = own.pop("mean", TinyViT.mean), own.pop("std", TinyViT.std)
        if "model_type" not in own:
            raise ValueError("backbone 'transformers' needs the model_type of its config, for instance dinov2")
        config = AutoConfig.for_model(own.pop("model_type"), **own)
        self.network = AutoBackbone.from_config(config)
        self.channels = tuple(self.network.channels)
        self.strides = tuple(_stride_of(config, name) for name in self.network.out_features)

    def forward(self, pixels: Tensor) -> list[Tensor]:
        """Feature maps of pictures (B, 3, H, W) in [-1, 1]."""
        mean, std = (pixels.new_tensor(values).view(1, 3, 1, 1) for values in (self.mean, self.std))
        return list(self.network(((pixels + 1) / 2 - mean) / std).feature_maps)


def _stride_of(config: Any, name: str) -> int:
    """Pixels per place of a feature map: a transformer keeps its patches, a pyramid halves them from stage to stage."""
    patch = getattr(config, "patch_size", None)
    if patch is None:
        raise ValueError(f"{type(config).__name__} has no patch_size: its strides are not known")
    if not hasattr(config, "depths"):
        return int(patch)
    return int(patch) * 2 ** max(0, config.stage_names.index(name) - 1)


BACKBONES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "tiny_vit": lambda options: TinyViT(**options),
    "transformers": TransformersBackbone,
}
"""Name in a config -> what makes the backbone: a module with `channels` and `strides` that returns feature maps."""
