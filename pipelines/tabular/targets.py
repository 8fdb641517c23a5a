"""Targets that are positive or bounded: a rising change of variables, and what it does to a predictive distribution.

A model is trained on z = forward(y). Quantiles, the distribution function and the density of y follow exactly. Mean,
variance and CRPS have no closed form any more; they are integrals over quantiles.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = [
    "Bounded",
    "Identity",
    "Positive",
    "TargetTransform",
    "TransformedDistribution",
    "choose_transform",
    "transform_from_config",
]

Array = NDArray[np.float64]
_MIN_GAIN = 0.05
"""Nats per row by which the logarithm must fit a normal distribution better than the target itself."""
_NODES = 512


class TargetTransform(ABC):
    """A rising map of one target onto the real line; the fields are what a saved pipeline keeps."""

    name: ClassVar[str]

    @abstractmethod
    def forward(self, y: ArrayLike) -> Array:
        """z of y; values outside the domain are an error."""

    @abstractmethod
    def inverse(self, z: ArrayLike) -> Array:
        """y of z; quantiles of y are the inverse of quantiles of z."""

    @abstractmethod
    def log_derivative(self, y: ArrayLike) -> Array:
        """log dz/dy: the log density of y is that of z plus this."""

    def to_config(self) -> dict[str, Any]:
        """JSON-ready."""
        return {"name": self.name, **asdict(self)}  # type: ignore[call-overload]


@dataclass(frozen=True)
class Identity(TargetTransform):
    """z = y."""

    name: ClassVar[str] = "identity"

    def forward(self, y: ArrayLike) -> Array:
        """The same."""
        return np.asarray(y, dtype=np.float64)

    def inverse(self, z: ArrayLike) -> Array:
        """The same."""
        return np.asarray(z, dtype=np.float64)

    def log_derivative(self, y: ArrayLike) -> Array:
        """0."""
        return np.zeros_like(np.asarray(y, dtype=np.float64))


@dataclass(frozen=True)
class Positive(TargetTransform):
    """z = log(y - low), for a target above `low`: a tail as heavy as that of a log-normal distribution."""

    low: float = 0.0
    name: ClassVar[str] = "positive"

    def forward(self, y: ArrayLike) -> Array:
        """log(y - low)."""
        values = np.asarray(y, dtype=np.float64)
        if not (values > self.low).all():
            raise ValueError(f"the target must be above {self.low:g}; got {values.min():g}")
        return np.log(values - self.low)

    def inverse(self, z: ArrayLike) -> Array:
        """low + exp(z)."""
        return self.low + np.exp(np.asarray(z, dtype=np.float64))

    def log_derivative(self, y: ArrayLike) -> Array:
        """-log(y - low)."""
        return -self.forward(y)


@dataclass(frozen=True)
class Bounded(TargetTransform):
    """z = logit((y - low) / (high - low)), for a target strictly between two bounds."""

    low: float = 0.0
    high: float = 1.0
    name: ClassVar[str] = "bounded"

    def __post_init__(self) -> None:
        if not self.low < self.high:
            raise ValueError(f"low must be below high; got {self.low} and {self.high}")

    def forward(self, y: ArrayLike) -> Array:
        """log(y - low) - log(high - y)."""
        values = np.asarray(y, dtype=np.float64)
        if not ((values > self.low) & (values < self.high)).all():
            raise ValueError(
                f"the target must lie strictly between {self.low:g} and {self.high:g}; it reaches from "
                f"{values.min():g} to {values.max():g}. Widen the bounds"
            )
        return np.log(values - self.low) - np.log(self.high - values)

    def inverse(self, z: ArrayLike) -> Array:
        """low + (high - low) / (1 + exp(-z)), without overflow."""
        share = 0.5 * (1 + np.tanh(0.5 * np.asarray(z, dtype=np.float64)))
        return self.low + (self.high - self.low) * share

    def log_derivative(self, y: ArrayLike) -> Array:
        """log(high - low) - log(y - low) - log(high - y)."""
        values = np.asarray(y, dtype=np.float64)
        return np.log(self.high - self.low) - np.log(values - self.low) - np.log(self.high - values)


_TRANSFORMS: dict[str, type[TargetTransform]] = {kind.name: kind for kind in (Identity, Positive, Bounded)}


def transform_from_config(config: Mapping[str, Any]) -> TargetTransform:
    """Rebuild from `to_config`."""
    options = dict(config)
    name = options.pop("name")
    if name not in _TRANSFORMS:
        raise ValueError(f"a target transform must be one of {', '.join(_TRANSFORMS)}; got {name!r}")
    return _TRANSFORMS[name](**options)


def choose_transform(targets: ArrayLike) -> TargetTransform:
    """`Positive` where all targets are above 0 and their logarithm fits a normal distribution clearly better.

    Log likelihoods per row, with the change of variables: -log sd(y) against -log sd(log y) - mean(log y). This is a
    guess from the targets alone; whether it helps a model, its CRPS on held-out rows says. Bounds are never guessed.
    """
    y = np.asarray(targets, dtype=np.float64)
    if len(y) < 2 or y.min() <= 0 or y.std() == 0:
        return Identity()
    logarithm = np.log(y)
    gain = np.log(y.std()) - np.log(logarithm.std()) - logarithm.mean()
    return Positive() if gain > _MIN_GAIN else Identity()


class _Predictive(Protocol):
    """A distribution for every row."""

    def quantile(self, levels: ArrayLike) -> Array:
        """For several levels (rows, levels)."""
        ...

    def cdf(self, y: ArrayLike) -> Array:
        """(rows,)."""
        ...

    def log_prob(self, y: ArrayLike) -> Array:
        """(rows,)."""
        ...


@dataclass(frozen=True, eq=False)
class TransformedDistribution:
    """The distribution of y = inverse(z) for every row, one output.

    `quantile`, `interval`, `cdf`, `log_prob` and `pdf` are exact. `mean`, `variance` and `crps` use 512 quantiles at
    the middles of equal shares of probability. Half a share is cut from either tail: the mean of a log-normal
    distribution with sigma = 1 comes out 0.4 % too low, its standard deviation 5 %.

    Args:
        base: The distribution of z.
        transform: From y to z.
    """

    base: _Predictive
    transform: TargetTransform

    def quantile(self, levels: ArrayLike) -> Array:
        """(rows, levels), the inverse of the quantiles of z; (rows,) for one number."""
        return self.transform.inverse(self.base.quantile(levels))

    ppf = quantile

    def interval(self, coverage: float = 0.95) -> Array:
        """Central interval between quantiles, (rows, 2)."""
        return self.quantile([(1 - coverage) / 2, (1 + coverage) / 2])

    def cdf(self, y: ArrayLike) -> Array:
        """P(Y <= y) of every row."""
        return self.base.cdf(self.transform.forward(y))

    def log_prob(self, y: ArrayLike) -> Array:
        """log p_z(forward(y)) + log dz/dy."""
        return self.base.log_prob(self.transform.forward(y)) + self.transform.log_derivative(y)

    def pdf(self, y: ArrayLike) -> Array:
        """Density at y."""
        return np.exp(self.log_prob(y))

    @cached_property
    def _middles(self) -> Array:
        """Quantiles at the middles of equal shares, (rows, 512)."""
        return self.quantile((np.arange(_NODES) + 0.5) / _NODES)

    @property
    def mean(self) -> Array:
        """Expectation, (rows,)."""
        return self._middles.mean(1)

    @property
    def variance(self) -> Array:
        """(rows,)."""
        return self._middles.var(1)

    @property
    def std(self) -> Array:
        """Standard deviation, (rows,)."""
        return np.sqrt(self.variance)

    def crps(self, y: ArrayLike) -> Array:
        """E|Y - y| - 1/2 E|Y - Y'| of the quantiles, the second as a sum over their order, (rows,)."""
        values, truth = self._middles, np.asarray(y, dtype=np.float64)[:, None]
        rank = 2 * np.arange(1, _NODES + 1) - _NODES - 1
        return np.abs(values - truth).mean(1) - (values * rank).sum(1) / _NODES**2
