"""A standard deviation for every pixel of a map: stated by its model, or learnt from a confidence, or from nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, Self, get_args

import numpy as np
import torch
from scipy.optimize import isotonic_regression
from torch import Tensor

from marigold_uq.depth.evaluation.prediction import MeanConfidence, Prediction, PredictionError

Base = Literal["stated", "map", "one", "depth"]
_NUM_BINS = 20
_SMALLEST = 1e-3
"""Of the largest: a confidence never promises an error of 0."""


@dataclass(frozen=True)
class Stated:
    """What a model says of some pixels, in its own units; any shape that all maps share.

    Args:
        point: The prediction.
        std: Its standard deviation, where the model states one.
        confidence: Larger is surer, without units.
        map_std: Standard deviation of the whole map over its pixels.
    """

    point: Tensor
    std: Tensor | None = None
    confidence: Tensor | None = None
    map_std: float = 1.0

    @classmethod
    def of(cls, prediction: Prediction) -> Self:
        """A whole map."""
        point = prediction.point.double()
        finite = point[point.isfinite()]
        map_std = float(finite.std(correction=0)) if finite.numel() else float("nan")
        if isinstance(prediction, MeanConfidence):
            return cls(point, None, prediction.confidence.double(), map_std)
        std = prediction.uncertainty
        return cls(point, None if std is None else std.double(), None, map_std)

    @property
    def kind(self) -> str:
        """What there is beside the prediction."""
        return "std" if self.std is not None else "confidence" if self.confidence is not None else "none"

    def at(self, places: Tensor) -> Stated:
        """Some pixels of a map, by their number."""

        def pick(values: Tensor | None) -> Tensor | None:
            return None if values is None else values.flatten()[places]

        return Stated(self.point.flatten()[places], pick(self.std), pick(self.confidence), self.map_std)


@dataclass(frozen=True)
class SpreadRule:
    """How what is stated becomes a standard deviation, up to the factor kappa.

    Args:
        base: "stated" takes the model's own, "map" the standard deviation of the whole map (for relative maps), "one" a
            constant and "depth" a share of the prediction (for metric ones).
        confidences: Rising; where the errors in units of the base were measured.
        errors: Those errors, never rising; between confidences they are interpolated.
    """

    base: Base = "stated"
    confidences: tuple[float, ...] = ()
    errors: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        for name in ("confidences", "errors"):
            object.__setattr__(self, name, tuple(float(value) for value in getattr(self, name)))
        if self.base not in get_args(Base):
            raise ValueError(f"base must be one of {', '.join(get_args(Base))}; got {self.base!r}")
        if len(self.confidences) != len(self.errors) or list(self.confidences) != sorted(set(self.confidences)):
            raise ValueError("confidences must rise, with one error each")

    @property
    def kind(self) -> str:
        """What maps must state: see `Stated.kind`."""
        return "std" if self.base == "stated" else "confidence" if self.confidences else "none"

    def spread(self, stated: Stated) -> Tensor:
        """Of the prediction's shape, in its units."""
        if stated.kind != self.kind:
            raise PredictionError(
                f"the calibration is for maps with {self.kind!r} beside the mean; got {stated.kind!r}"
            )
        base = self.of_base(stated)
        if stated.confidence is None or not self.confidences:
            return base
        values = np.interp(stated.confidence.numpy(), self.confidences, self.errors)
        return base * torch.from_numpy(np.asarray(values))

    def of_base(self, stated: Stated) -> Tensor:
        """The spread without what the confidence says."""
        if self.base == "stated":
            assert stated.std is not None  # `kind` is checked
            return stated.std
        if self.base == "depth":
            return stated.point.abs()
        return torch.full_like(stated.point, stated.map_std if self.base == "map" else 1.0)

    def to_dict(self) -> dict[str, Any]:
        """Plain, as JSON has it."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Undo `to_dict`."""
        return cls(**values)

    @classmethod
    def learnt(cls, base: Base, confidence: Tensor, relative_error: Tensor) -> Self:
        """From pixels (n,): the mean error in units of the base falls with confidence, by isotonic regression."""
        order = np.argsort(confidence.numpy(), kind="stable")
        bins = [part for part in np.array_split(order, _NUM_BINS) if len(part)]
        x, place = np.unique([confidence.numpy()[part].mean() for part in bins], return_inverse=True)
        sums = np.bincount(place, weights=[relative_error.numpy()[part].sum() for part in bins])
        counts = np.bincount(place, weights=[len(part) for part in bins])
        y = isotonic_regression(sums / counts, weights=counts, increasing=False).x
        floor = max(_SMALLEST * float(y.max()), np.finfo(np.float64).tiny)
        return cls(base, tuple(x.tolist()), tuple(np.maximum(y, floor).tolist()))


def candidate_rules(kind: str, *, metric: bool, learn: Callable[[Base], SpreadRule]) -> list[SpreadRule]:
    """The rules that maps of this kind allow, to be compared by their scores.

    The zero of a relative map is arbitrary, so a share of the prediction means nothing there.
    """
    if kind == "std":
        return [SpreadRule("stated")]
    bases: tuple[Base, ...] = ("one", "depth") if metric else ("map",)
    return [learn(base) if kind == "confidence" else SpreadRule(base) for base in bases]
