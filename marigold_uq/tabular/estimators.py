"""Fit an estimator on a split and score it: `DiffusionRegressor`, or anything else that draws samples."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import yaml
from numpy.typing import NDArray

from marigold_uq.tabular import DiffusionRegressor
from marigold_uq.tabular.scores import SplitScores, score_rows
from marigold_uq.tabular.uci import UCISplit

Array = NDArray[np.float64]


class ProbabilisticRegressor(Protocol):
    """What is scored: the part of `DiffusionRegressor` that other models can be given too."""

    def fit(self, X: Array, y: Array) -> Any:
        """Train on rows (n, F) and targets (n,)."""
        ...

    def sample(self, X: Array, n_samples: int) -> Array:
        """Draws (n_samples, rows)."""
        ...

    def predict_interval(self, X: Array, coverage: float) -> Array:
        """Central intervals (rows, 2)."""
        ...


def score_estimator(model: ProbabilisticRegressor, split: UCISplit, *, num_samples: int, seed: int) -> SplitScores:
    """Fit on the training rows, draw for the test rows; scores, and seconds of wall and processor time of both.

    An interval that is infinite (too few rows to calibrate) is not scored.
    """
    scores: SplitScores = {}
    with timed(scores, "fit"):
        model.fit(split.train_features, split.train_targets)
    with timed(scores, "sample"):
        samples = model.sample(split.test_features, num_samples)
    interval = model.predict_interval(split.test_features, 0.95)
    own = interval if np.isfinite(interval).all() else None
    scale = float(split.train_targets.std())
    return {**score_rows(samples, split.test_targets, target_scale=scale, interval=own, seed=seed), **scores}


@dataclass
class timed:
    """Enters `NAME_seconds` (wall) and `NAME_cpu_seconds` (processor) of its block into `scores`."""

    scores: dict[str, Any]
    name: str

    def __enter__(self) -> None:
        self._start = time.perf_counter(), time.process_time()

    def __exit__(self, *error: object) -> None:
        wall, cpu = self._start
        self.scores[f"{self.name}_seconds"] = time.perf_counter() - wall
        self.scores[f"{self.name}_cpu_seconds"] = time.process_time() - cpu


Factory = Callable[[int], ProbabilisticRegressor]
"""A fresh model for a seed."""


def score_all_splits(
    factory: Factory,
    splits: Sequence[UCISplit],
    *,
    num_samples: int,
    seed: int,
    done: Sequence[SplitScores] = (),
    keep: Callable[[list[SplitScores]], None] = lambda scores: None,
    settings: Callable[[Any], Mapping[str, Any]] = lambda model: {},
) -> list[SplitScores]:
    """Scores of every split, one fit each, seeded with seed + split; those in `done` are taken as they are.

    `keep` is called with all scores after each split; `settings` adds what a fitted model says about itself.
    """
    scores = list(done)
    for number, split in list(enumerate(splits))[len(scores) :]:
        model = factory(seed + number)
        one = score_estimator(model, split, num_samples=num_samples, seed=seed)
        scores.append({**one, **settings(model)})
        keep(scores)
    return scores


def model_options(entries: Sequence[str]) -> dict[str, Any]:
    """NAME=VALUE pairs of a command line as arguments of `DiffusionRegressor`; values are read as JSON, or as YAML."""
    pairs = [entry.partition("=") for entry in entries]
    wrong = [name for name, mark, _ in pairs if not mark or name not in DiffusionRegressor().get_params()]
    if wrong:
        raise ValueError(f"expected NAME=VALUE with NAME an argument of DiffusionRegressor; got {', '.join(wrong)}")
    return {name: _read_value(value) for name, _, value in pairs}


def _read_value(text: str) -> Any:
    try:
        return json.loads(text)  # to YAML 1e-3 is text
    except json.JSONDecodeError:
        return yaml.safe_load(text)
