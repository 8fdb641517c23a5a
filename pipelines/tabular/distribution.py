"""The predictive distribution of the rows of a table in closed form: Gaussian mixtures, and masses on single values."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from marigold_uq.calibration import check_coverage
from marigold_uq.distributions import MixtureDistribution
from marigold_uq.randomness import Generators, rand
from marigold_uq.scores.crps import absolute_moment, mixture_crps

__all__ = ["MassesAndMixture", "PredictiveDistribution"]

Array = NDArray[np.float64]
_BISECTIONS = 80
"""Halvings that bring the bracket of a quantile below rounding, where it is as wide as the distribution."""


@dataclass(frozen=True, eq=False)
class MassesAndMixture:
    """P(X = values_v) = masses_v; the rest of the probability is spread as a mixture of Gaussians. R rows, one output.

    Args:
        values: Rising, (V,); none where the distribution is continuous.
        masses: (R, V).
        mixture: Of shape (R,); None where the values have all the probability.
    """

    values: Tensor
    masses: Tensor
    mixture: MixtureDistribution | None

    @classmethod
    def continuous(cls, mixture: MixtureDistribution) -> "MassesAndMixture":
        """Without masses."""
        return cls(mixture.loc.new_zeros(0), mixture.loc.new_zeros(len(mixture.loc), 0), mixture)

    @classmethod
    def nearest(cls, mixture: MixtureDistribution, values: Sequence[float]) -> "MassesAndMixture":
        """All of the probability moved to the nearest of some rising values."""
        known = mixture.loc.new_tensor(values)
        halfway = (known[1:] + known[:-1]) / 2
        below = mixture.cdf(halfway.unsqueeze(1).expand(-1, len(mixture.loc))).T  # (R, V - 1)
        ends = below.new_zeros(len(below), 1), below.new_ones(len(below), 1)
        return cls(known, torch.cat([ends[0], below, ends[1]], 1).diff(dim=1).clamp(min=0), None)

    @cached_property
    def rest(self) -> Tensor:
        """Probability of the continuous part, (R,)."""
        left = 1 - self.masses.sum(1)
        return torch.zeros_like(left) if self.mixture is None else left.clamp(min=0)

    @property
    def mean(self) -> Tensor:
        """(R,)."""
        mean = self.masses @ self.values
        return mean if self.mixture is None else mean + self.rest * self.mixture.mean

    @property
    def variance(self) -> Tensor:
        """(R,)."""
        mean = self.mean
        variance = (self.masses * (self.values - mean.unsqueeze(1)).square()).sum(1)
        if self.mixture is None:
            return variance
        return variance + self.rest * (self.mixture.variance + (self.mixture.mean - mean).square())

    def cdf(self, value: Tensor) -> Tensor:
        """P(X <= value) for value (..., R)."""
        reached = (self.values <= value.unsqueeze(-1)).to(self.masses.dtype)  # (..., R, V)
        total = (reached * self.masses).sum(-1)
        return total if self.mixture is None else total + self.rest * self.mixture.cdf(value)

    def log_prob(self, value: Tensor) -> Tensor:
        """Log density at value (..., R), or the log of the mass where the value has one."""
        equal = (self.values == value.unsqueeze(-1)).to(self.masses.dtype)
        density = torch.zeros_like(value) if self.mixture is None else self.rest * self.mixture.log_prob(value).exp()
        return torch.where(equal.any(-1), (equal * self.masses).sum(-1), density).log()

    def quantile(self, levels: Tensor) -> Tensor:
        """The least value whose cdf reaches each level, (Q, R)."""
        if self.mixture is None:
            reached = self.masses.cumsum(1).unsqueeze(0) >= levels.reshape(-1, 1, 1) - 1e-12  # (Q, R, V)
            first = torch.where(reached.any(-1), reached.int().argmax(-1), len(self.values) - 1)
            return self.values[first]
        if not len(self.values):
            return self.mixture.quantile(levels)
        return torch.stack([self._quantile(level) for level in levels])

    def _quantile(self, level: Tensor) -> Tensor:
        """(R,): a value with mass where the cdf jumps over the level, else by bisection."""
        reached = self.cdf(self.values.unsqueeze(1).expand(-1, len(self.masses))).T  # (R, V)
        jumps = (reached >= level) & (reached - self.masses < level)
        ends = self.mixture.quantile([1e-9, 1 - 1e-9])  # type: ignore[union-attr]
        low, high = ends[0].clamp(max=float(self.values[0])), ends[1].clamp(min=float(self.values[-1]))
        for _ in range(_BISECTIONS):
            middle = 0.5 * (low + high)
            below = self.cdf(middle) < level
            low, high = torch.where(below, middle, low), torch.where(below, high, middle)
        return torch.where(jumps.any(1), self.values[jumps.int().argmax(1)], high)

    def sample(self, count: int, generator: Generators) -> Tensor:
        """(count, R)."""
        uniform = rand((count,), (len(self.masses),), like=self.masses, generator=generator)
        index = (uniform.unsqueeze(-1) >= self.masses.cumsum(1)).sum(-1)  # V for the continuous part
        if self.mixture is None:
            return self.values[index.clamp(max=len(self.values) - 1)]
        drawn = self.mixture.rsample((count,), generator)
        return torch.where(index < len(self.values), torch.cat([self.values, drawn.new_zeros(1)])[index], drawn)

    def crps(self, target: Tensor) -> Tensor:
        """E|X - y| - 1/2 E|X - X'| for targets (R,): exact, without draws."""
        masses, values, rest = self.masses, self.values, self.rest
        score = (masses * (values - target.unsqueeze(1)).abs()).sum(1)
        score = score - 0.5 * ((masses @ (values.unsqueeze(1) - values).abs()) * masses).sum(1)
        if self.mixture is None:
            return score
        mixture = self.mixture
        to_target = self._distance(mixture, target)
        between = to_target - mixture_crps(mixture.loc, mixture.scale, mixture.weights, target)  # 1/2 E|X - X'|
        for v, value in enumerate(values):
            score = score - rest * masses[:, v] * self._distance(mixture, value.expand_as(target))
        return score + rest * to_target - rest.square() * between

    @staticmethod
    def _distance(mixture: MixtureDistribution, value: Tensor) -> Tensor:
        """E|X - value| of the continuous part, (R,)."""
        return (mixture.weights * absolute_moment(value.unsqueeze(1) - mixture.loc, mixture.scale)).sum(1)


@dataclass(frozen=True, eq=False)
class PredictiveDistribution:
    """The predictive distribution of every row, exactly: nothing here is drawn but what `sample` returns.

    All results are in units of y and (rows,), or (rows, outputs) where y had that axis. Outputs are independent given
    the features.

    Args:
        outputs: One distribution of all rows per output.
        is_flat: Whether the axis of outputs is left out.
    """

    outputs: tuple[MassesAndMixture, ...]
    is_flat: bool = False

    def __len__(self) -> int:
        """Rows."""
        return len(self.outputs[0].masses)

    @property
    def mean(self) -> Array:
        """Expectation."""
        return self._collect(lambda one: one.mean)

    @property
    def variance(self) -> Array:
        """Variance."""
        return self._collect(lambda one: one.variance)

    @property
    def std(self) -> Array:
        """Standard deviation."""
        return np.sqrt(self.variance)

    def cdf(self, y: ArrayLike) -> Array:
        """P(Y <= y) of every row."""
        return self._at(y, MassesAndMixture.cdf)

    def log_prob(self, y: ArrayLike) -> Array:
        """Log density at y; where single values have probability, the log of that of y."""
        return self._at(y, MassesAndMixture.log_prob)

    def pdf(self, y: ArrayLike) -> Array:
        """Density at y, or its probability."""
        return np.exp(self.log_prob(y))

    def crps(self, y: ArrayLike) -> Array:
        """CRPS of every row at what was true, the lower the better."""
        return self._at(y, MassesAndMixture.crps)

    def quantile(self, levels: float | ArrayLike) -> Array:
        """For a number one quantile per row; for several (rows, levels[, outputs])."""
        given = torch.as_tensor(np.asarray(levels, dtype=np.float64))
        if not bool(((given > 0) & (given < 1)).all()) or given.ndim > 1:
            raise ValueError(f"quantile levels must lie strictly between 0 and 1; got {given.tolist()}")
        found = self._collect(lambda one: one.quantile(given.reshape(-1)).T)  # (rows, Q[, outputs])
        return found[:, 0] if given.ndim == 0 else found

    ppf = quantile

    def interval(self, coverage: float = 0.95) -> Array:
        """Central interval between quantiles, (rows, 2[, outputs])."""
        tail = (1 - check_coverage(coverage)) / 2
        return self.quantile([tail, 1 - tail])

    def sample(self, count: int = 1, generator: Generators = None) -> Array:
        """Draws (count, rows[, outputs]); a list of generators has one per row."""
        return self._collect(lambda one: one.sample(count, generator))

    def _collect(self, part: Callable[[MassesAndMixture], Tensor]) -> Array:
        """One result per output on the last axis."""
        found = torch.stack([part(one) for one in self.outputs], -1).numpy()
        return found[..., 0] if self.is_flat else found

    def _at(self, y: ArrayLike, part: Callable[[MassesAndMixture, Tensor], Tensor]) -> Array:
        """Something at values that broadcast against (rows[, outputs])."""
        shape = (len(self),) if self.is_flat else (len(self), len(self.outputs))
        try:
            values = np.broadcast_to(np.asarray(y, dtype=np.float64), shape)
        except ValueError as error:
            raise ValueError(f"y must fit the shape {shape} of the distribution; got {np.shape(y)}") from error
        columns = torch.from_numpy(values.reshape(len(self), -1).copy())
        results = iter(columns.unbind(1))
        return self._collect(lambda one: part(one, next(results)))
