"""Candidates compared on the same held-out units, and the simplest of them that is as good as the best."""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Comparison:
    """Candidates in rising order of complexity, by their scores on the same held-out units; lower is better.

    Units (rows, trajectories, pictures) are what is independent. Differences are paired: what makes a unit hard for all
    candidates alike cancels. A candidate whose scores are not finite has diverged and is never chosen.

    Args:
        scores: Mean score of each candidate; infinite where it diverged.
        differences: Mean score less that of the best.
        standard_errors: Of the differences; 0 for the best, infinite where a candidate diverged.
        best: Index of the lowest mean score.
        chosen: Index of the simplest candidate within one standard error of the best.
        num_units: How many units were compared.
    """

    scores: tuple[float, ...]
    differences: tuple[float, ...]
    standard_errors: tuple[float, ...]
    best: int
    chosen: int
    num_units: int

    @classmethod
    def of(cls, scores: Tensor) -> "Comparison":
        """Compare scores (N, U) of N candidates, simplest first, on U units."""
        if scores.ndim != 2 or scores.shape[0] < 1 or scores.shape[1] < 2:
            raise ValueError(
                "a comparison needs scores (N, U) of at least 1 candidate on at least 2 units; got shape "
                f"{tuple(scores.shape)}"
            )
        scores = scores.double()
        means = [float(row.mean()) if bool(row.isfinite().all()) else math.inf for row in scores]
        best = min(range(len(means)), key=lambda index: means[index])
        if math.isinf(means[best]):
            raise FloatingPointError(f"all of {len(means)} candidates have scores that are not finite")
        finite = [math.isfinite(mean) for mean in means]
        paired = [(row - scores[best]) if ok else None for row, ok in zip(scores, finite, strict=True)]
        differences = tuple(math.inf if row is None else float(row.mean()) for row in paired)
        num_units = scores.shape[1]
        errors = tuple(math.inf if row is None else float(row.std()) / math.sqrt(num_units) for row in paired)
        return cls(tuple(means), differences, errors, best, _near(differences, errors)[0], num_units)

    def near(self) -> list[int]:
        """Candidates at most one standard error of their difference behind the best, simplest first."""
        return _near(self.differences, self.standard_errors)

    def contenders(self) -> list[int]:
        """The better half, rounded up, and all that are near the best, simplest first: who may still be the best."""
        ranked = sorted(range(len(self.scores)), key=lambda index: self.scores[index])
        return sorted({*ranked[: (len(ranked) + 1) // 2], *self.near()})


def _near(differences: Sequence[float], errors: Sequence[float]) -> list[int]:
    pairs = zip(differences, errors, strict=True)
    return [index for index, (difference, error) in enumerate(pairs) if difference <= error < math.inf]


def unit_means(scores: Tensor, units: Sequence[Hashable]) -> Tensor:
    """Means (U,) of scores (N,) over those of the same unit, in the order in which units first appear."""
    if scores.shape != (len(units),):
        raise ValueError(f"scores must be (N,) with a unit for each; got {tuple(scores.shape)} and {len(units)} units")
    places: dict[Hashable, list[int]] = {}
    for place, unit in enumerate(units):
        places.setdefault(unit, []).append(place)
    return torch.stack([scores[own].mean() for own in places.values()])
