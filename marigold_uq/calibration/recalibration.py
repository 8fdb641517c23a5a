"""Recalibrate whole distributions on held-out data: a monotone map between stated and observed probabilities.

A model states F(y) = p; of held-out targets a share R(p) lies below such points. R o F is the recalibrated distribution
(Kuleshov, Fenner and Ermon, 2018): its quantile at level q is the model's at level R^-1(q). `fit_by_group` makes such a
map, or conformal half widths, for each group by itself.
"""

import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Self, TypeVar

import numpy as np
import torch
from scipy.optimize import isotonic_regression
from torch import Tensor

from marigold_uq.distributions.order_statistics import member_quantiles
from marigold_uq.precision import at_least_float32

__all__ = ["ByGroup", "QuantileMap", "fit_by_group"]

T = TypeVar("T")
_MIN_UNITS = 20


@dataclass(frozen=True)
class QuantileMap:
    """R: stated probability -> observed share, piecewise linear and rising from (0, 0) to (1, 1).

    Args:
        stated: Probabilities of the knots, rising.
        observed: Shares at the knots, never falling.
    """

    stated: tuple[float, ...] = (0.0, 1.0)
    observed: tuple[float, ...] = (0.0, 1.0)

    def __post_init__(self) -> None:
        for name in ("stated", "observed"):
            values = tuple(float(v) for v in getattr(self, name))
            object.__setattr__(self, name, values)
            if len(values) < 2 or (values[0], values[-1]) != (0.0, 1.0) or list(values) != sorted(values):
                raise ValueError(f"{name} probabilities must rise from 0 to 1; got {list(values)}")
        if len(self.stated) != len(self.observed):
            raise ValueError(f"got {len(self.stated)} stated probabilities for {len(self.observed)} observed shares")

    @classmethod
    def fit(cls, pit: Tensor, *, num_levels: int = 99) -> Self:
        """From F(y) of independent held-out targets (n,): the map is their empirical distribution.

        Knots lie at the quantiles of the PIT values (`marigold_uq.metrics.pit`) at evenly spread levels, as many as
        `num_levels` and n allow.
        """
        _check_pit(pit)
        count = min(num_levels, len(pit))
        levels = torch.arange(1, count + 1, dtype=torch.float64) / (count + 1)
        knots = member_quantiles(pit.double(), levels.tolist(), "weibull")
        return cls((0.0, *knots.tolist(), 1.0), (0.0, *levels.tolist(), 1.0))

    @classmethod
    def fit_quantiles(cls, levels: Sequence[float], quantiles: Tensor, target: Tensor) -> Self:
        """From predicted quantiles (Q, n) at rising levels and held-out targets (n,), by isotonic regression.

        The observed shares of targets at or below each quantile are made monotone: quantiles of separate models cross.
        """
        if quantiles.shape != (len(levels), *target.shape) or target.ndim != 1:
            raise ValueError(
                f"expected quantiles (Q, n) for {len(levels)} levels and target (n,); got {tuple(quantiles.shape)} and "
                f"{tuple(target.shape)}"
            )
        if bool(quantiles.isnan().any()) or bool(target.isnan().any()) or not len(target):
            raise ValueError("quantiles and target must hold numbers, without NaN")
        if list(levels) != sorted(set(levels)) or not all(0 < level < 1 for level in levels):
            raise ValueError(f"levels must rise within (0, 1); got {list(levels)}")
        shares = (target <= quantiles).double().mean(1).numpy(force=True)
        observed = np.clip(isotonic_regression(shares).x, 0.0, 1.0)
        return cls((0.0, *levels, 1.0), (0.0, *observed.tolist(), 1.0))

    def probabilities(self, stated: Tensor) -> Tensor:
        """R(p): what the model's probabilities are worth."""
        return _interpolate(stated, self.stated, self.observed)

    def levels(self, wanted: Tensor) -> Tensor:
        """R^-1(q): the level to ask the model for where a share q is wanted below."""
        return _interpolate(wanted, self.observed, self.stated)

    def quantiles(self, quantile: Callable[[Tensor], Tensor], wanted: Tensor) -> Tensor:
        """Recalibrated quantiles of a model given by its quantile function, such as `distribution.quantile`."""
        return quantile(self.levels(wanted))

    def draws(self, samples: Tensor) -> Tensor:
        """Draws (M, ...) of the recalibrated distribution, with the ranks they had: (M, ...).

        The m-th smallest moves to the recalibrated quantile at m / (M + 1), so dependence between coordinates stays.
        Draws never leave the range of those given: where a model is over-confident, stretch by kappa first.
        """
        values = at_least_float32(samples)
        count = len(values)
        levels = self.levels(torch.arange(1, count + 1, dtype=torch.float64) / (count + 1))
        moved = member_quantiles(values, levels.tolist(), "weibull")
        return moved.gather(0, values.argsort(dim=0, stable=True).argsort(dim=0))

    def to_dict(self) -> dict[str, list[float]]:
        """Plain lists, as JSON has them."""
        return {"stated": list(self.stated), "observed": list(self.observed)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Sequence[float]]) -> Self:
        """Undo `to_dict`."""
        return cls(tuple(values["stated"]), tuple(values["observed"]))


@dataclass(frozen=True)
class ByGroup(Generic[T]):
    """Something fitted for each group by itself, and for all together where a group is unknown or was too small.

    Args:
        pooled: Fitted on everything.
        groups: Fitted on one group each.
    """

    pooled: T
    groups: Mapping[Hashable, T] = field(default_factory=dict)

    def of(self, group: Hashable) -> T:
        """That of the group; of all, with a warning, where there is none."""
        if group not in self.groups:
            warnings.warn(f"group {group!r} was not calibrated by itself; it takes what holds for all", stacklevel=2)
            return self.pooled
        return self.groups[group]


def fit_by_group(
    fit: Callable[[Tensor], T], values: Tensor, groups: Sequence[Hashable], *, min_units: int = _MIN_UNITS
) -> ByGroup[T]:
    """Fit `interval_grid_rows`, `QuantileMap.fit`, ... to the rows of each group (Mondrian calibration).

    What held on average then holds in every group. A group of fewer than `min_units` rows takes what is fitted to all,
    with a warning that names it.

    Args:
        fit: From rows of `values` to what is calibrated.
        values: (n, ...), such as scores or PIT values.
        groups: (n,), known before the target is; never chosen by it.
        min_units: Least rows of a group: 19 promise 95 %.
    """
    names = groups.tolist() if hasattr(groups, "tolist") else list(groups)
    if len(names) != len(values):
        raise ValueError(f"groups must name one group per row; got {len(names)} for {len(values)} rows")
    sizes = Counter(names)
    small = sorted(str(name) for name, size in sizes.items() if size < min_units)
    if small:
        warnings.warn(
            f"too few rows (fewer than {min_units}) in {', '.join(small)}: they take what is fitted to all",
            stacklevel=2,
        )
    fitted = {
        name: fit(values[torch.tensor([one == name for one in names], device=values.device)])
        for name, size in sizes.items()
        if size >= min_units
    }
    return ByGroup(fit(values), fitted)


def _interpolate(values: Tensor, x: Sequence[float], y: Sequence[float]) -> Tensor:
    values = at_least_float32(values)
    if not bool(((values >= 0) & (values <= 1)).all()):
        raise ValueError("probabilities and levels must lie within [0, 1]")
    found: Any = np.interp(values.double().numpy(force=True), x, y)
    return torch.as_tensor(found).to(values)


def _check_pit(pit: Tensor) -> None:
    if pit.ndim != 1 or not len(pit) or not bool(((pit >= 0) & (pit <= 1)).all()):
        raise ValueError(f"PIT values must be (n,) within [0, 1]; got shape {tuple(pit.shape)}")
