"""Diffusing what a baseline leaves over: its map as a latent, the frame both live in, and the way back.

A picture's frame is a line from 0 to 1 that holds the baseline's map with room at both ends: of the logarithm of metres
for a metric baseline, of the map itself for any other. In it, twice the value less 1 is what an autoencoder encodes.
The decoded *change* between the baseline's latent and a member's is added to the map itself: where nothing is left
over, the prediction is the baseline's map, sharp as it was, whatever the autoencoder would make of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from marigold_uq.models.depth_baseline import OPENERS, BaselineNetwork, DepthBaseline
from marigold_uq.models.depth_cells import DepthCells
from marigold_uq.models.widen import insert_condition_channels, narrow, silence_mean
from marigold_uq.pipelines.depth.latents import PictureCondition, decode_maps, encode_pixels

if TYPE_CHECKING:
    from marigold_uq.pipelines.depth.pipeline import MarigoldUQDepthPipeline

__all__ = [
    "Anchor",
    "Frame",
    "anchor_pictures",
    "anchored",
    "check_baseline",
    "decode_anchored",
    "encode_map",
    "give_baseline",
]

ROOM = 0.1
"""What a frame has beyond the map at either end, as a share of the map's range."""
FACTOR = 2.0
"""The same for metric maps: how many times nearer or farther than the map's ends the truth may be."""
NEAREST = 1e-3
"""Metres; a metric map that is nearer counts as that."""


@dataclass(frozen=True)
class Frame:
    """What the values 0 and 1 of pictures stand for, (B, 1, 1, 1) each; logarithms of metres for metric maps."""

    low: Tensor
    high: Tensor
    metric: bool

    @classmethod
    def around(cls, maps: Tensor, metric: bool) -> Frame:
        """The frames of maps (B, 1, H, W)."""
        values = maps.clamp(min=NEAREST).log() if metric else maps
        low, high = values.amin((1, 2, 3), keepdim=True), values.amax((1, 2, 3), keepdim=True)
        if metric:
            room = torch.full_like(low, FACTOR).log()
        else:
            span = high - low
            flat = span <= 1e-6 * torch.maximum(low.abs(), high.abs()).clamp(min=1e-6)
            room = torch.where(flat, torch.maximum(high.abs(), torch.ones_like(high)), ROOM * span)
        return cls(low - room, high + room, metric)

    def place(self, maps: Tensor) -> Tensor:
        """Values in the frame: 0 to 1, and beyond where the maps leave it."""
        values = maps.clamp(min=NEAREST).log() if self.metric else maps
        return (values - self.low) / (self.high - self.low)

    def read(self, places: Tensor) -> Tensor:
        """The inverse of `place` for metric maps; other maps have no unit, and stay where they are."""
        return (self.low + places * (self.high - self.low)).exp() if self.metric else places

    def __getitem__(self, index: int) -> Frame:
        """The frame of one picture, (1, 1, 1)."""
        return Frame(self.low[index], self.high[index], self.metric)


@dataclass(frozen=True)
class Anchor:
    """A baseline's map of one picture, and how a latent of what it leaves over becomes a map again."""

    latent: Tensor  # (C, h, w), of the map
    places: Tensor  # (1, H, W), the map in its frame
    frame: Frame
    scale: float  # of the residual

    def latents(self, residuals: Tensor) -> Tensor:
        """Latents (E, C, h, w) that a decoder reads."""
        return self.latent + self.scale * residuals.to(self.latent)

    def maps(self, change: Tensor) -> Tensor:
        """Maps (E, H, W) from what decoding says of the change of the baseline's map in its frame, (E, H, W)."""
        places = self.places + change
        return self.frame.read(places) if self.frame.metric else places.clamp(0, 1)


@torch.no_grad()
def anchor_pictures(vae: Any, baseline: DepthBaseline, pixels: Tensor, batch_size: int | None = None) -> list[Anchor]:
    """The anchors of pictures (B, 3, H, W) in [-1, 1]."""
    maps = torch.cat([baseline(part) for part in pixels.split(batch_size or len(pixels))])
    frame = Frame.around(maps, bool(baseline.config.metric))
    places = frame.place(maps)
    latents = encode_map(vae, places, batch_size)
    scale = float(baseline.config.residual_scale)
    return [Anchor(latents[b], places[b], frame[b], scale) for b in range(len(pixels))]


def anchored(conditions: Sequence[PictureCondition], anchors: Sequence[Anchor]) -> list[PictureCondition]:
    """What is known of pictures and of their baselines' maps."""
    return [
        replace(
            condition, channels=torch.cat([condition.channels, anchor.latent.to(condition.channels)]), anchor=anchor
        )
        for condition, anchor in zip(conditions, anchors, strict=True)
    ]


def decode_anchored(
    vae: Any, anchor: Anchor, residuals: Tensor, batch_size: int, guide: Tensor | None = None
) -> Tensor:
    """Residual latents (E, C, h, w) -> maps (E, H, W), in metres or in [0, 1]."""
    own = decode_maps(vae, anchor.latent[None], batch_size, guide)
    return anchor.maps(decode_maps(vae, anchor.latents(residuals), batch_size, guide) - own)


@torch.no_grad()
def encode_map(vae: Any, places: Tensor, batch_size: int | None = None) -> Tensor:
    """Latents (B, C, h, w) of maps (B, 1, H, W) in a frame, which ends at 0 and 1."""
    values = 2 * places.clamp(0, 1) - 1
    if isinstance(vae, DepthCells):
        coarse = F.avg_pool2d(values, vae.pixels_per_value).to(vae.dtype)
        return vae.encode(coarse, torch.ones_like(coarse, dtype=torch.bool))[0]
    return encode_pixels(vae, values.expand(-1, 3, -1, -1), batch_size)


# ---------------------------------------------------------------------------------------------- pipelines and baselines


def give_baseline(pipeline: MarigoldUQDepthPipeline, baseline: DepthBaseline) -> None:
    """Turn a depth pipeline into one of residuals, in place: a point model whose prediction is the baseline's map.

    The U-Net sees the baseline's latent after the rest of its condition, through new input channels of zeros, and its
    mean is set to nothing left over. A variance head is taken off, and a calibration forgotten.
    """
    if pipeline.baseline is not None:
        raise ValueError(f"this pipeline has the baseline {pipeline.baseline.config.name!r} already")
    config = pipeline.scheduler.config
    if config.get("prediction_type") == "epsilon":
        raise ValueError(
            "residuals start where nothing is left over, which a network that predicts epsilon cannot say; start from "
            "a model of prediction_type 'v_prediction' or 'sample'"
        )
    head = {"num_components": config.num_components, "rank": config.rank}
    if config.noise_family != "point":
        narrow(pipeline.unet, config.noise_family, **head)
    kind: Any = type(pipeline.scheduler)
    whole = {"set_alpha_to_one": True} if "set_alpha_to_one" in config else {}  # else the last step leaves noise
    pipeline.scheduler = kind.from_config(config, noise_family="point", num_components=1, rank=0, tau=1.0, **whole)
    channels = pipeline.vae.config.latent_channels
    insert_condition_channels(pipeline.unet, channels, before=channels)
    silence_mean(pipeline.unet)
    pipeline.register_modules(baseline=baseline)
    pipeline.register_to_config(calibration=None, **promised(baseline))


def promised(baseline: DepthBaseline) -> dict[str, Any]:
    """What the prediction of a pipeline around this baseline means, as its config says it."""
    invariant = not baseline.config.metric
    return {
        "prediction_type": baseline.output_space,
        "scale_invariant": invariant,
        "shift_invariant": invariant,
    }


def check_baseline(baseline: DepthBaseline | None, config: Mapping[str, Any]) -> None:
    """A pipeline must promise what its baseline gives."""
    if baseline is None:
        return
    expected = promised(baseline)
    different = {name: config[name] for name in expected if config[name] != expected[name]}
    if different:
        raise ValueError(f"with baseline {baseline.config.name!r} the config must have {expected}; got {different}")


class PipelineNetwork(BaselineNetwork):
    """The prediction of one of our own depth pipelines, by the mean, from a fixed start."""

    def __init__(self, name: str) -> None:
        super().__init__()
        from marigold_uq.pipelines.depth.pipeline import MarigoldUQDepthPipeline

        pipeline = MarigoldUQDepthPipeline.from_pretrained(name)
        pipeline.set_progress_bar_config(disable=True)
        config = pipeline.config
        self.space, self.options = config.prediction_type, {}
        self.metric = not (config.scale_invariant or config.shift_invariant)
        self.pipeline = pipeline
        for part, module in pipeline.components.items():
            if isinstance(module, torch.nn.Module):
                self.add_module(part, module)

    def forward(self, images: Tensor) -> Tensor:
        starts = [torch.Generator().manual_seed(0) for _ in images]
        output = self.pipeline(list(images.float()), generator=starts, output_type="pt")
        assert not isinstance(output, tuple)  # return_dict is on
        return output.prediction[:, 0]

    def save(self, folder: Path) -> None:
        self.pipeline.save_pretrained(folder)


OPENERS["pipeline"] = lambda name, revision, options: PipelineNetwork(name)
