"""How a prediction is compared with a data set's depth: alignment, then clipping, on the valid pixels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from marigold_uq.alignment import least_squares_alignment
from marigold_uq.depth.data import DepthDataset, DepthSample
from marigold_uq.depth.evaluation.options import AlignmentOptions, Space
from marigold_uq.depth.evaluation.prediction import Members, Prediction, PredictionError
from marigold_uq.depth.evaluation.predictors import Predictor

_FIT_RESOLUTION = {"eth3d": 1024}
"""Data sets whose published protocol fits on thinned maps: longer edge in pixels."""
_TARGET_RANGE = (0.5, 2.0)
"""Without a range of the data set: from so many times the smallest to so many times the largest true depth."""


@dataclass(frozen=True)
class Aligned:
    """A prediction in the target's units at the N valid pixels, as maps (1, N)."""

    prediction: Prediction
    target: Tensor  # (1, N), float64
    scale: float
    shift: float


@dataclass(frozen=True)
class DepthProtocol:
    """Alignment and clipping with all defaults filled in; `describe` states it in the results."""

    method: str
    space: Space
    mutual: bool
    max_resolution: int | None
    depth_range: tuple[float, float] | None

    @classmethod
    def of(cls, options: AlignmentOptions, predictor: Predictor, dataset: DepthDataset, name: str) -> DepthProtocol:
        """What `options` mean for this predictor and the data set called `name`."""
        method = options.method
        if method == "auto":
            method = "none" if predictor.metric else "least_squares"
        return cls(
            method=method,
            space=predictor.space,
            mutual=options.mutual,
            max_resolution=options.max_resolution or _FIT_RESOLUTION.get(name),
            depth_range=_depth_range(options.clip, dataset),
        )

    def align(self, prediction: Prediction, sample: DepthSample) -> Aligned:
        """The same scale and shift for every member; clipping only afterwards."""
        target, valid = sample["depth"][0].double(), sample["valid"][0]
        _check_fit(prediction, valid)
        if self.mutual and isinstance(prediction, Members):
            prediction = prediction.mutually_aligned(valid)
        scale, shift = self._fit(prediction.point, target, valid)
        pixels = target[valid][None]  # (1, N)
        low, high = self._range(pixels)
        aligned = prediction.select(lambda maps: maps[..., valid].unsqueeze(-2)).aligned(scale, shift, self.space)
        return Aligned(aligned.clipped(low, high), pixels, float(scale), float(shift))

    def _fit(self, point: Tensor, target: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
        if self.method == "none":
            return torch.tensor(1.0, dtype=torch.float64), torch.tensor(0.0, dtype=torch.float64)
        try:
            return least_squares_alignment(point, target, valid, max_resolution=self.max_resolution, space=self.space)
        except ValueError as error:  # too few valid pixels are this image's fault, not the run's
            raise PredictionError(f"cannot be aligned: {error}") from error

    def _range(self, target: Tensor) -> tuple[float, float]:
        if self.depth_range is not None:
            return self.depth_range
        return _TARGET_RANGE[0] * float(target.min()), _TARGET_RANGE[1] * float(target.max())

    def describe(self) -> dict[str, Any]:
        """In numbers, and in a sentence for the reader of a table."""
        return {
            "method": self.method,
            "space": self.space,
            "mutual": self.mutual,
            "max_resolution": self.max_resolution,
            "clip": "target" if self.depth_range is None else list(self.depth_range),
            "text": self.text,
        }

    @property
    def text(self) -> str:
        """One sentence."""
        fit = f"least-squares scale and shift of the point prediction in {self.space}, the same for every member"
        edge = f", fitted at {self.max_resolution} px" if self.max_resolution else ""
        mutual = "members aligned to each other, then " if self.mutual else ""
        if self.depth_range is None:
            clip = f"clipped to [{_TARGET_RANGE[0]:g} min, {_TARGET_RANGE[1]:g} max] of the image's true depth"
        else:
            clip = f"clipped to [{self.depth_range[0]:g}, {self.depth_range[1]:g}] m"
        return f"{mutual}{'no alignment (metric)' if self.method == 'none' else fit + edge}; then {clip}"


def _depth_range(clip: str, dataset: DepthDataset) -> tuple[float, float] | None:
    """The data set's own range, or None for that of each image's target."""
    source: Any = getattr(dataset, "spec", dataset)
    low, high = float(getattr(source, "min_depth", 0.0)), float(getattr(source, "max_depth", float("inf")))
    if clip == "target" or (clip == "auto" and low <= 0):
        return None
    if low <= 0:
        raise ValueError(
            f"clip='dataset' needs a smallest depth > 0, and this data set's range is ({low:g}, {high:g}); set "
            "data.options.min_depth (and max_depth), or clip='target'"
        )
    return low, high


def _check_fit(prediction: Prediction, valid: Tensor) -> None:
    """Same size as the target, and finite wherever that is valid."""
    if prediction.point.shape != valid.shape:
        raise PredictionError(
            f"the prediction is {' x '.join(map(str, prediction.point.shape))} and the image "
            f"{' x '.join(map(str, valid.shape))} (H x W, after the data set's crop); predict at that size, or resize"
        )
    bad = torch.zeros_like(valid)

    def look(maps: Tensor) -> Tensor:
        bad.logical_or_((~maps.isfinite()).reshape(-1, *valid.shape).any(dim=0))
        return maps

    prediction.select(look)
    if count := int((bad & valid).sum()):
        raise PredictionError(f"NaN or infinite at {count} of {int(valid.sum())} valid pixels")
