"""What a model says about one image: members, a mean with a standard deviation, or a mean with a confidence.

Maps are (H, W); after `select` they may have any shape that all maps of the prediction share.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from marigold_uq.alignment import apply_alignment, ensemble_members
from marigold_uq.depth.evaluation.options import Space
from marigold_uq.distributions import GaussianDistribution
from marigold_uq.metrics import (
    central_interval,
    coverage,
    crps,
    ensemble_statistics,
    expected_coverage,
    interval_score,
    interval_width,
    normal_nll,
    pit,
    quantiles,
)
from marigold_uq.metrics.intervals import IntervalMethod
from marigold_uq.scores import crps as law_crps

_Interval = tuple[Tensor, Tensor]  # lower and upper end, (L, ...) for L levels

_expected_coverage = cache(expected_coverage)  # a quadrature, the same for every image


class PredictionError(ValueError):
    """The prediction of one image is missing or unusable: it is named and counted, and the evaluation goes on."""


@dataclass(frozen=True)
class Prediction(ABC):
    """One image's prediction; `point` is what depth metrics score."""

    point: Tensor  # (H, W)

    @property
    @abstractmethod
    def kind(self) -> str:
        """Name of what is there; a data set is scored with one kind only."""

    @property
    def uncertainty(self) -> Tensor | None:
        """Larger where the model is less sure, (H, W); only its order counts."""
        return None

    @property
    def has_law(self) -> bool:
        """Whether intervals and a PIT exist."""
        return False

    def select(self, pick: Callable[[Tensor], Tensor]) -> Self:
        """Every map through `pick`, which chooses pixels or changes the precision."""
        maps = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        return replace(self, **{name: pick(value) for name, value in maps.items() if value is not None})

    @abstractmethod
    def aligned(self, scale: Tensor, shift: Tensor, space: Space) -> Self:
        """In the target's units: scale * prediction + shift, inverted where it is a disparity."""

    @abstractmethod
    def clipped(self, low: float, high: float) -> Self:
        """Within the range of possible depths."""

    @abstractmethod
    def statistics(
        self, target: Tensor, *, level: float, method: IntervalMethod, min_scale: float
    ) -> dict[str, Tensor]:
        """Per-pixel statistics, each of the target's shape, under the names of `marigold_uq.metrics`."""

    def interval(self, levels: Sequence[float], method: IntervalMethod) -> _Interval:
        """Ends of the central intervals with these nominal coverages."""
        raise NotImplementedError(f"a prediction of kind {self.kind!r} has no intervals")

    def expected_coverage(self, level: float, method: IntervalMethod) -> float:
        """What an interval of nominal `level` covers if the prediction is calibrated."""
        raise NotImplementedError(f"a prediction of kind {self.kind!r} has no intervals")

    def pit(self, target: Tensor, generator: torch.Generator) -> Tensor:
        """Probability integral transform of the target, uniform on [0, 1] if the prediction is calibrated."""
        raise NotImplementedError(f"a prediction of kind {self.kind!r} has no distribution")

    @abstractmethod
    def arrays(self) -> dict[str, NDArray[np.float32]]:
        """What an npz of this prediction holds."""


@dataclass(frozen=True)
class Members(Prediction):
    """E maps, equally likely; a single one is a prediction without uncertainty.

    `point` is their median, unless the model has a point prediction of its own: a calibrated pipeline stretches its
    members around their mean, which moves the median, and keeps its prediction.
    """

    samples: Tensor  # (E, H, W)
    bounds: Tensor | None = None  # (L, 2, H, W), ends of calibrated intervals

    @classmethod
    def of(cls, samples: Tensor, point: Tensor | None = None, bounds: Tensor | None = None) -> Members:
        """Members with the point prediction, by default their median."""
        if samples.ndim != 3 or samples.numel() == 0:
            raise PredictionError(f"samples have shape {tuple(samples.shape)}; expected (E, H, W) with E >= 1 members")
        samples = samples.detach().cpu().float()
        if point is None:
            point = samples[0] if len(samples) == 1 else quantiles(samples, 0.5)
        return cls(point.detach().cpu().float(), samples, None if bounds is None else bounds.detach().cpu().float())

    @property
    def kind(self) -> str:
        return "members" if self.has_law else "point"

    @property
    def has_law(self) -> bool:
        return len(self.samples) > 1

    @property
    def uncertainty(self) -> Tensor | None:
        return self.samples.std(dim=0, correction=1) if self.has_law else None

    def aligned(self, scale: Tensor, shift: Tensor, space: Space) -> Self:
        return self.select(lambda maps: apply_alignment(maps, scale, shift, space=space))

    def clipped(self, low: float, high: float) -> Self:
        return self.select(lambda maps: maps.clamp(low, high))

    def mutually_aligned(self, mask: Tensor) -> Members:
        """Members aligned to each other on the pixels of `mask`, for members of unknown scale and shift each."""
        return Members.of(ensemble_members(self.samples, mask=mask).members) if self.has_law else self

    def statistics(
        self, target: Tensor, *, level: float, method: IntervalMethod, min_scale: float
    ) -> dict[str, Tensor]:
        if not self.has_law:
            error = (self.point - target).abs()
            return {"squared_error": error.square(), "absolute_error": error, "crps": crps(self.samples, target)}
        return ensemble_statistics(self.samples, target, min_scale=min_scale, level=level, method=method)

    def interval(self, levels: Sequence[float], method: IntervalMethod) -> _Interval:
        return central_interval(self.samples, list(levels), method)

    def expected_coverage(self, level: float, method: IntervalMethod) -> float:
        return _expected_coverage(len(self.samples), level, method)

    def pit(self, target: Tensor, generator: torch.Generator) -> Tensor:
        return pit(self.samples, target, generator=generator)

    def arrays(self) -> dict[str, NDArray[np.float32]]:
        return {"samples": self.samples.numpy(), "point": self.point.numpy()}


@dataclass(frozen=True)
class MeanStd(Prediction):
    """N(point, std^2) at every pixel. Clipping moves the mean only."""

    std: Tensor  # (H, W)

    @property
    def kind(self) -> str:
        return "mean and std"

    @property
    def has_law(self) -> bool:
        return True

    @property
    def uncertainty(self) -> Tensor | None:
        return self.std

    def aligned(self, scale: Tensor, shift: Tensor, space: Space) -> Self:
        if space == "disparity":
            raise ValueError(
                "mean and std of a disparity are no Gaussian in depth; convert them to depth, or give samples"
            )
        return replace(self, point=apply_alignment(self.point, scale, shift), std=scale.abs().to(self.std) * self.std)

    def clipped(self, low: float, high: float) -> Self:
        return replace(self, point=self.point.clamp(low, high))

    def statistics(
        self, target: Tensor, *, level: float, method: IntervalMethod, min_scale: float
    ) -> dict[str, Tensor]:
        (lower,), (upper,) = self.interval([level], method)
        error, variance = (self.point - target).abs(), self.std.square()
        law = GaussianDistribution(self.point, self.std.clamp(min=torch.finfo(self.std.dtype).tiny))
        return {
            "predicted_squared_error": variance,
            "squared_error": error.square(),
            "variance": variance,
            "absolute_error": error,
            "crps": law_crps(law, target),
            "gaussian_nll": normal_nll(self.point, self.std, target, min_scale=min_scale),
            "coverage": coverage(lower, upper, target),
            "interval_width": interval_width(lower, upper),
            "interval_score": interval_score(lower, upper, target, level),
        }

    def interval(self, levels: Sequence[float], method: IntervalMethod) -> _Interval:
        tails = torch.tensor([(1 + level) / 2 for level in levels], dtype=torch.float64)
        reach = torch.special.ndtri(tails).to(self.std).reshape(-1, *(1,) * self.std.ndim) * self.std  # (L, ...)
        return self.point - reach, self.point + reach

    def expected_coverage(self, level: float, method: IntervalMethod) -> float:
        return level

    def pit(self, target: Tensor, generator: torch.Generator) -> Tensor:
        difference = target - self.point
        standardised = torch.where(difference == 0, 0.0, difference / self.std)  # 0 / 0 where std is 0 and all is right
        return torch.special.ndtr(standardised)

    def arrays(self) -> dict[str, NDArray[np.float32]]:
        return {"mean": self.point.numpy(), "std": self.std.numpy()}


@dataclass(frozen=True)
class MeanConfidence(Prediction):
    """A map and a confidence without units: larger is surer, and nothing but the order means anything."""

    confidence: Tensor  # (H, W)

    @property
    def kind(self) -> str:
        return "mean and confidence"

    @property
    def uncertainty(self) -> Tensor | None:
        return -self.confidence

    def aligned(self, scale: Tensor, shift: Tensor, space: Space) -> Self:
        return replace(self, point=apply_alignment(self.point, scale, shift, space=space))

    def clipped(self, low: float, high: float) -> Self:
        return replace(self, point=self.point.clamp(low, high))

    def statistics(
        self, target: Tensor, *, level: float, method: IntervalMethod, min_scale: float
    ) -> dict[str, Tensor]:
        error = (self.point - target).abs()
        return {"squared_error": error.square(), "absolute_error": error}

    def arrays(self) -> dict[str, NDArray[np.float32]]:
        return {"mean": self.point.numpy(), "confidence": self.confidence.numpy()}


_KEYS = ("samples", "point", "mean", "std", "confidence")
_ALIASES = {"depth": "mean", "uncertainty": "std"}
"""Names in the npz that `marigold-uq depth` writes."""


def prediction_from_arrays(arrays: Mapping[str, NDArray[np.generic]], where: str) -> Prediction:
    """The prediction in an npz: `samples`, or `mean` with `std` or `confidence`, or `mean` alone; `where` names it."""
    named = {**{_ALIASES[key]: value for key, value in arrays.items() if key in _ALIASES}, **arrays}
    maps = {key: _as_float(named[key], key, where) for key in _KEYS if key in named}
    if "samples" in maps:
        return Members.of(maps["samples"], maps.get("point"))
    maps.pop("point", None)
    if "mean" not in maps:
        raise PredictionError(
            f"{where} holds {sorted(arrays) or 'nothing'}; expected samples, or mean with std or confidence"
        )
    for key, value in maps.items():
        if value.ndim != 2 or value.shape != maps["mean"].shape:
            raise PredictionError(f"{where}: {key} has shape {tuple(value.shape)}; expected equal maps (H, W)")
    if "std" in maps:
        if bool((maps["std"] < 0).any()):
            raise PredictionError(f"{where}: std has negative entries; expected a standard deviation")
        return MeanStd(maps["mean"], maps["std"])
    if "confidence" in maps:
        return MeanConfidence(maps["mean"], maps["confidence"])
    return Members.of(maps["mean"][None])


def _as_float(array: NDArray[np.generic], key: str, where: str) -> Tensor:
    if array.dtype.kind not in "fiu":
        raise PredictionError(f"{where}: {key} holds {array.dtype}; expected numbers")
    return torch.from_numpy(np.ascontiguousarray(array, dtype=np.float32))
