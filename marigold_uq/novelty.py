"""Is an input unlike what the model knows? What it says about the input, against what it says about held-out ones.

Three signs of a sample, all from one call: the head's total variance at the first step, the spread between members, and
how unusual the distribution of x_0 is as a whole. `pipeline.fit_novelty(held_out)` learns what they are for data in
distribution; `output_novelty=True` compares. Everything is per sample: an image, a row, a forecast.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["SIGNS", "Novelty", "NoveltyReference", "novelty_features"]

Array = NDArray[np.float64]
SIGNS = ("head", "members", "distance")
"""What tells a novel sample: the first two are entries of the features, the third is a distance of the rest."""
_MAX_RANKED = 499
"""Held-out samples that p-values are ranked among; more would make a saved config long, and p-values no more useful."""
_FOLDS = 5
_SMALLEST = 1e-12
_DIGITS = 9


def novelty_features(mean: Tensor, std: Tensor, between: Tensor) -> Tensor:
    """What is compared of N samples, (N, 2 + 2 C), or (N, 2 + 5 C) for maps; float64.

    First the logs of the head's and of the members' spread. Then, per channel, the mean and the log standard deviation
    of x_0, and of maps their variation over space: the log spread of the mean, that of its differences between
    neighbours, and the spread of the log standard deviation. Logs make all of it free of units.

    Args:
        mean: (N, C, *space), of x_0 at the first step, averaged over members.
        std: (N, C, *space), of the same distribution.
        between: (N, C, *space), the standard deviation between members, or between models.
    """
    if not mean.shape == std.shape == between.shape or mean.ndim < 2:
        raise ValueError(
            f"mean, std and between must have one shape (N, C, *space); got {tuple(mean.shape)}, {tuple(std.shape)} "
            f"and {tuple(between.shape)}"
        )
    mean, std, between = (part.double() for part in (mean, std, between))
    signs = [_log(_rms(part)).mean(1, keepdim=True) for part in (std, between)]
    log_std = _log(std)
    if mean.ndim == 2:
        return torch.cat([*signs, mean, log_std], 1)
    space = tuple(range(2, mean.ndim))
    flat = (mean.mean(space), _log(mean.std(space, correction=0)), _log(_roughness(mean)))
    return torch.cat([*signs, *flat, log_std.mean(space), log_std.std(space, correction=0)], 1)


@dataclass(frozen=True)
class NoveltyReference:
    """What the features of held-out samples in distribution are; made by `fit`, kept by `Calibration`.

    One part of the held-out samples gives means and a shrunk covariance, the other is ranked. So p-values are
    conformal: of new samples in distribution at most a share `false_alarm_rate` is flagged, on average over held-out
    sets.

    Args:
        center, scale: (D,) of the features.
        precision: (D - 2, D - 2), of the scaled features after the two spreads.
        distances: Mean and standard deviation of the Mahalanobis distances.
        ranked: Scores of held-out samples that the fit did not see, rising.
        false_alarm_rate: Of `Novelty.is_novel`.
        conditions: The call that it was fitted with.
    """

    center: tuple[float, ...]
    scale: tuple[float, ...]
    precision: tuple[tuple[float, ...], ...]
    distances: tuple[float, float]
    ranked: tuple[float, ...]
    false_alarm_rate: float
    conditions: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def fit(
        cls, features: Array | Tensor, *, false_alarm_rate: float = 0.05, conditions: Mapping[str, int] | None = None
    ) -> Self:
        """From the features (N, D) of independent held-out samples.

        Every other sample, at most 499 of them, is kept for the ranks; so pass one of each scene or trajectory.
        """
        from sklearn.covariance import LedoitWolf  # slow to import, and only fitting needs it

        values = _checked(np.asarray(features, np.float64))
        if not 0 < false_alarm_rate < 1:
            raise ValueError(f"false_alarm_rate must lie strictly between 0 and 1; got {false_alarm_rate!r}")
        least = max(20, 2 * (math.ceil(1 / false_alarm_rate) - 1))
        if len(values) < least:
            raise ValueError(f"a false_alarm_rate of {false_alarm_rate:g} needs {least} samples; got {len(values)}")
        held_out = np.zeros(len(values), bool)
        held_out[1::2][:_MAX_RANKED] = True
        train, ranked = values[~held_out], values[held_out]
        center, scale = train.mean(0), train.std(0)
        scale = np.where(scale > 1e-9 * (1 + abs(center)), scale, 1.0)
        law = (train - center)[:, 2:] / scale[2:]
        precision = LedoitWolf(assume_centered=True).fit(law).precision_
        distance = _held_out_distances(law, LedoitWolf())
        unranked = cls(
            _rounded(center), _rounded(scale), tuple(_rounded(row) for row in precision),
            (float(distance.mean()), float(distance.std())), (), false_alarm_rate, dict(conditions or {}),
        )  # fmt: skip
        return cls(**{**unranked._values(), "ranked": tuple(np.sort(unranked.score(ranked)).tolist())})

    def signs(self, features: Array | Tensor) -> dict[str, Array]:
        """Each of `SIGNS`, (N,), in standard deviations above the mean of samples in distribution."""
        values = _checked(np.asarray(features, np.float64))
        if values.shape[1] != len(self.center):
            raise ValueError(f"the reference was fitted on {len(self.center)} features; got {values.shape[1]}")
        values = (values - np.array(self.center)) / np.array(self.scale)
        distance = _mahalanobis(values[:, 2:], np.array(self.precision))
        mean, std = self.distances
        return dict(zip(SIGNS, (values[:, 0], values[:, 1], (distance - mean) / std), strict=True))

    def score(self, features: Array | Tensor) -> Array:
        """The strongest of the signs, (N,)."""
        return np.stack(list(self.signs(features).values())).max(0)

    def p_value(self, features: Array | Tensor) -> Array:
        """(N,): share of samples in distribution that look at least as novel, this one counted among them."""
        at_least = len(self.ranked) - np.searchsorted(self.ranked, self.score(features), side="left")
        return (1 + at_least) / (len(self.ranked) + 1)

    def to_dict(self) -> dict[str, Any]:
        """Plain lists and numbers, as JSON has them."""
        values = self._values()
        return {name: _as_lists(value) for name, value in values.items()} | {"conditions": dict(self.conditions)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Undo `to_dict`."""
        return cls(**{name: _as_tuples(value) for name, value in values.items()})

    def _values(self) -> dict[str, Any]:
        return {one.name: getattr(self, one.name) for one in fields(self)}


@dataclass(frozen=True)
class Novelty:
    """How unlike the known each of N samples is.

    Args:
        features: (N, D), see `novelty_features`.
        reference: What they are compared with; None where none was fitted.
        conditions: Denoising steps and ensemble size of the call.
        uncertainty: The call's way to uncertainty, where a pipeline has several.
    """

    features: Array
    reference: NoveltyReference | None
    conditions: Mapping[str, int]
    uncertainty: str | None = None

    @property
    def p_value(self) -> Array:
        """(N,): small for novel samples, uniform for samples in distribution."""
        return self._reference.p_value(self.features)

    @property
    def is_novel(self) -> NDArray[np.bool_]:
        """(N,): p-values within the reference's false alarm rate."""
        return self.p_value <= self._reference.false_alarm_rate

    @property
    def score(self) -> Array:
        """(N,): the strongest of the signs; it ranks where p-values have reached their smallest."""
        return self._reference.score(self.features)

    @property
    def signs(self) -> dict[str, Array]:
        """`head`, `members` and `distance`, (N,), in standard deviations above samples in distribution."""
        return self._reference.signs(self.features)

    @property
    def _reference(self) -> NoveltyReference:
        if self.reference is None:
            raise ValueError("there is nothing to compare with: run pipeline.fit_novelty(held-out inputs) first")
        return self.reference


def _log(values: Tensor) -> Tensor:
    return values.clamp(min=_SMALLEST).log()


def _rms(values: Tensor) -> Tensor:
    """Over space, (N, C)."""
    return values.square().flatten(2).mean(2).sqrt() if values.ndim > 2 else values


def _roughness(maps: Tensor) -> Tensor:
    """Root mean square of differences between neighbours along all axes of space, (N, C)."""
    steps = [_rms(maps.diff(dim=axis)).square() for axis in range(2, maps.ndim) if maps.shape[axis] > 1]
    return torch.stack(steps).mean(0).sqrt() if steps else maps.new_zeros(maps.shape[:2])


def _mahalanobis(values: Array, precision: Array) -> Array:
    return np.sqrt(np.einsum("ni,ij,nj->n", values, precision, values))


def _held_out_distances(values: Array, estimator: Any) -> Array:
    """Mahalanobis distance of each sample by the mean and covariance of other folds.

    By its own it would be too small, the more so the more features there are, and every new sample would look far.
    """
    distances = np.empty(len(values))
    for fold in range(_FOLDS):
        inside = np.arange(len(values)) % _FOLDS == fold
        others = estimator.fit(values[~inside])
        distances[inside] = _mahalanobis(values[inside] - others.location_, others.precision_)
    return distances


def _checked(features: Array) -> Array:
    if features.ndim != 2 or features.shape[1] < 3 or not np.isfinite(features).all():
        raise ValueError(f"features must be finite, (N, D) with D of at least 3; got shape {features.shape}")
    return features


def _rounded(values: Array) -> tuple[float, ...]:
    return tuple(float(f"{value:.{_DIGITS}g}") for value in values)


def _as_lists(value: Any) -> Any:
    return [_as_lists(one) for one in value] if isinstance(value, tuple) else value


def _as_tuples(value: Any) -> Any:
    return tuple(_as_tuples(one) for one in value) if isinstance(value, Sequence) else value
