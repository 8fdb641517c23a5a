"""How good the predictive draws for test rows are: one test set, all splits of a set, means over splits."""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from marigold_uq.metrics import central_interval, crps, gaussian_nll, interval_score, pit, reliability, squared_error
from marigold_uq.tabular.uci import UCISplit

Array = NDArray[np.float64]
SplitScores = dict[str, Any]
"""Metric -> number, and curve -> list of numbers, of one test set."""

_LEVELS = (0.5, 0.8, 0.9, 0.95)
RELIABILITY_LEVELS = tuple(round(0.05 * i, 2) for i in range(1, 20))
PIT_BINS = 20
_MIN_RELATIVE_SCALE = 1e-6
"""Smallest standard deviation behind the Gaussian NLL, as a share of that of the training targets."""


def score_rows(
    samples: Array, targets: Array, *, target_scale: float, interval: Array | None = None, seed: int = 0
) -> SplitScores:
    """Scores of one test set, in the units of y.

    Args:
        samples: Draws (M, rows), M >= 2.
        targets: What was true, (rows,).
        target_scale: Standard deviation of the training targets; it floors the spread behind the Gaussian NLL.
        interval: The model's own 95 % interval (rows, 2), conformal for example; scored beside that of the draws.
        seed: Breaks the ties of the PIT.

    Returns:
        `rmse` of the mean of the draws, fair `crps`, `nll` (Gaussian; left out where all draws of a row agree, as
        for a target of few values: such a distribution has no density), `coverage_50` .. `coverage_95` and `width_95`
        of central intervals between Weibull quantiles, `interval_score_95`; `interval_coverage_95`,
        `interval_width_95` and `interval_score_own_95` with an interval; the curves `reliability` at
        `RELIABILITY_LEVELS` and `pit`, counts in `PIT_BINS` bins.
    """
    draws, truth = torch.from_numpy(np.array(samples)), torch.from_numpy(np.array(targets))
    scores: SplitScores = {
        "num_rows": len(truth),
        "rmse": math.sqrt(squared_error(draws, truth).mean()),
        "crps": float(crps(draws, truth).mean()),
    }
    if (draws != draws[0]).any(0).all():
        scores["nll"] = float(gaussian_nll(draws, truth, min_scale=_MIN_RELATIVE_SCALE * target_scale).mean())
    covered = reliability(draws, truth, [*_LEVELS, *RELIABILITY_LEVELS]).mean(1).tolist()  # one number per level
    scores |= {f"coverage_{round(100 * level)}": share for level, share in zip(_LEVELS, covered, strict=False)}
    lower, upper = central_interval(draws, 0.95)
    scores["width_95"] = float((upper - lower).mean())
    scores["interval_score_95"] = float(interval_score(lower, upper, truth, 0.95).mean())
    if interval is not None:
        scores |= _score_interval(interval, targets)
    scores["reliability"] = covered[len(_LEVELS) :]
    where = pit(draws, truth, generator=torch.Generator().manual_seed(seed))
    scores["pit"] = torch.histc(where, PIT_BINS, 0, 1).long().tolist()
    return scores


def _score_interval(interval: Array, targets: Array) -> SplitScores:
    """Coverage, mean width and interval score of given 95 % intervals (rows, 2)."""
    if interval.shape != (len(targets), 2):
        raise ValueError(f"expected intervals ({len(targets)}, 2), lower and upper end per row; got {interval.shape}")
    lower, upper = interval.T
    low, high, truth = (torch.from_numpy(np.array(values)) for values in (lower, upper, targets))
    score = interval_score(low, high, truth, 0.95)
    return {
        "interval_coverage_95": float(((lower <= targets) & (targets <= upper)).mean()),
        "interval_width_95": float((upper - lower).mean()),
        "interval_score_own_95": float(score.mean()),
    }


class ProbabilisticRegressor(Protocol):
    """What is scored: the part of `DiffusionRegressor` that other models can be given too."""

    def fit(self, X: Array, y: Array) -> Any:
        """Train on rows (n, F) and targets (n,)."""
        ...

    def sample(self, X: Array, ensemble_size: int) -> Array:
        """Draws (ensemble_size, rows)."""
        ...

    def predict_interval(self, X: Array, coverage: float) -> Array:
        """Central intervals (rows, 2)."""
        ...


def score_estimator(model: ProbabilisticRegressor, split: UCISplit, *, ensemble_size: int, seed: int) -> SplitScores:
    """Fit on the training rows, draw for the test rows; scores, and seconds of wall and processor time of both."""
    scores: SplitScores = {}
    with timed(scores, "fit"):
        model.fit(split.train_features, split.train_targets)
    with timed(scores, "sample"):
        samples = model.sample(split.test_features, ensemble_size)
    interval = model.predict_interval(split.test_features, 0.95)
    scale = float(split.train_targets.std())
    return {**score_rows(samples, split.test_targets, target_scale=scale, interval=interval, seed=seed), **scores}


def crps_scorer(model: Any, X: Any, y: Any, sample_weight: Any = None) -> float:
    """Minus the mean CRPS: `scoring=` of `cross_val_score` and `GridSearchCV`, which look for the largest score."""
    return -float(model.crps(X, y, sample_weight))


def coverage_scorer(coverage: float = 0.95) -> Callable[[Any, Any, Any], float]:
    """Share of targets within `predict_interval(X, coverage)`, as `scoring=`: to report, not to choose models by."""

    def share(model: Any, X: Any, y: Any) -> float:
        lower, upper = np.moveaxis(model.predict_interval(X, coverage), 1, 0)
        return float(np.mean((lower <= y) & (y <= upper)))

    return share


@contextmanager
def timed(scores: dict[str, Any], name: str) -> Iterator[None]:
    """Enter `NAME_seconds` (wall) and `NAME_cpu_seconds` (processor) of the block into `scores`."""
    wall, cpu = time.perf_counter(), time.process_time()
    yield
    scores[f"{name}_seconds"] = time.perf_counter() - wall
    scores[f"{name}_cpu_seconds"] = time.process_time() - cpu


Factory = Callable[[int], ProbabilisticRegressor]
"""A fresh model for a seed."""


def score_all_splits(
    factory: Factory,
    splits: Sequence[UCISplit],
    *,
    ensemble_size: int,
    seed: int,
    done: Sequence[SplitScores] = (),
    keep: Callable[[list[SplitScores]], None] = lambda scores: None,
    settings: Callable[[Any], Mapping[str, Any]] = lambda model: {},
) -> list[SplitScores]:
    """Scores of every split, one fit each, seeded with seed + split; those in `done` are taken as they are.

    `keep` is called with all scores after each split; `settings` adds facts about the fitted model.
    """
    scores = list(done)
    for number, split in list(enumerate(splits))[len(scores) :]:
        model = factory(seed + number)
        one = score_estimator(model, split, ensemble_size=ensemble_size, seed=seed)
        scores.append({**one, **settings(model)})
        keep(scores)
    return scores


@dataclass(frozen=True)
class Spread:
    """A metric over splits; splits share training rows, so the standard error is a guide, not a confidence interval."""

    mean: float
    std: float | None  # with n - 1; None for one split
    standard_error: float | None
    num_splits: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """Mean, standard deviation and std / sqrt(n)."""
        if not values:
            raise ValueError("no splits to average: evaluate at least one")
        deviation = stdev(values) if len(values) > 1 else None
        error = None if deviation is None else deviation / math.sqrt(len(values))
        return cls(fmean(values), deviation, error, len(values))


def summarize_splits(splits: Sequence[Mapping[str, Any]]) -> dict[str, Spread]:
    """Every number that all splits have, over splits; curves and counts of rows are left out."""
    names = [name for name, value in splits[0].items() if isinstance(value, float)]
    return {name: Spread.of([float(one[name]) for one in splits]) for name in names if all(name in s for s in splits)}


def pooled_curves(splits: Sequence[Mapping[str, Any]]) -> tuple[list[float], list[int]]:
    """Reliability (mean over test rows of all splits) and PIT counts (their sum)."""
    rows = np.array([one["num_rows"] for one in splits], dtype=np.float64)
    curve = np.average([one["reliability"] for one in splits], axis=0, weights=rows)
    return curve.tolist(), np.sum([one["pit"] for one in splits], axis=0).tolist()
