"""Other people's probabilistic regressors behind one interface, at their defaults, each on one thread.

    python scripts/studies/uci/peer_models.py forest_leaf5 --ensemble_size 100 IN.npz OUT.npz --seed 0

It runs in the environment of a peer, so it imports numpy and the peer's own package only: neither this project nor
torch. IN holds `train_features`, `train_targets` and `test_features`; OUT gets `samples` (M, rows), `interval`
(rows, 2) and the seconds. There may be several pairs, with a seed each; the path of each finished OUT is printed.
`scripts.studies.uci.peers` starts it.
"""

import argparse
import os
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from statistics import NormalDist
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

_Array = NDArray[np.float64]

LEVELS = (0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.975, 0.99)
"""Quantiles that are learnt, where each level costs a model or an output; between them they are interpolated."""
_FOREST_LEVELS = tuple((number + 0.5) / 200 for number in range(200))
_ROWS_PER_VALUE = 20
"""A target is discrete if each of its values is seen so often on average, as in `recipe.known_values`."""
_PROCESS_ROWS = 1000


class PeerModel(ABC):
    """`fit`, `sample` and `predict_interval`, as `DiffusionRegressor` has them, for one target.

    Args:
        model: With `fit(X, y)`.
        seed: Of the draws.
    """

    def __init__(self, model: Any, seed: int) -> None:
        self.model, self.seed = model, seed

    def fit(self, X: _Array, y: _Array) -> Self:
        """Train on rows (n, F) and targets (n,)."""
        self.model.fit(X, y)
        return self

    @abstractmethod
    def sample(self, X: _Array, ensemble_size: int) -> _Array:
        """Independent draws (ensemble_size, rows)."""

    @abstractmethod
    def predict_interval(self, X: _Array, coverage: float) -> _Array:
        """Central interval, (rows, 2)."""


class GaussianPeer(PeerModel):
    """A model that predicts mean and standard deviation; draws and intervals are those of the normal distribution.

    Args:
        model: With `fit(X, y)`.
        moments: Model, rows -> mean and standard deviation, (rows,) each.
        seed: Of the draws.
    """

    def __init__(self, model: Any, moments: Callable[[Any, _Array], tuple[_Array, _Array]], seed: int) -> None:
        super().__init__(model, seed)
        self.moments = moments

    def sample(self, X: _Array, ensemble_size: int) -> _Array:
        """Normal draws (ensemble_size, rows)."""
        mean, std = self.moments(self.model, X)
        return mean + std * np.random.default_rng(self.seed).normal(size=(ensemble_size, len(mean)))

    def predict_interval(self, X: _Array, coverage: float) -> _Array:
        """mean -+ z std, (rows, 2)."""
        mean, std = self.moments(self.model, X)
        reach = NormalDist().inv_cdf((1 + coverage) / 2) * std
        return np.stack([mean - reach, mean + reach], axis=1)


class QuantilePeer(PeerModel):
    """A model that predicts quantiles at some levels: linear in between, constant beyond the outermost.

    Args:
        model: With `fit(X, y)`.
        quantiles: Model, rows -> quantiles (rows, levels); those that cross are sorted.
        levels: Rising, within (0, 1).
        seed: Of the draws.
        rounds: Whether quantiles of a discrete target move to the nearest of its values in training.
    """

    def __init__(
        self,
        model: Any,
        quantiles: Callable[[Any, _Array], _Array],
        levels: tuple[float, ...],
        seed: int,
        rounds: bool = False,
    ) -> None:
        super().__init__(model, seed)
        self.quantiles, self.levels, self.rounds = quantiles, levels, rounds
        self.values: _Array | None = None

    def fit(self, X: _Array, y: _Array) -> Self:
        """Train, and note the values of a discrete target."""
        values = np.unique(y)
        self.values = values if self.rounds and len(values) * _ROWS_PER_VALUE <= len(y) else None
        return super().fit(X, y)

    def sample(self, X: _Array, ensemble_size: int) -> _Array:
        """The quantile function at uniform levels, (ensemble_size, rows)."""
        table = self._table(X)
        draws = np.random.default_rng(self.seed).uniform(size=(len(X), ensemble_size))
        return self._rounded(np.stack([np.interp(u, self.levels, row) for u, row in zip(draws, table, strict=True)], 1))

    def predict_interval(self, X: _Array, coverage: float) -> _Array:
        """Between the quantiles at (1 -+ coverage) / 2."""
        ends = ((1 - coverage) / 2, (1 + coverage) / 2)
        return self._rounded(np.stack([np.interp(ends, self.levels, row) for row in self._table(X)]))

    def _table(self, X: _Array) -> _Array:
        return np.sort(self.quantiles(self.model, X), axis=1)

    def _rounded(self, numbers: _Array) -> _Array:
        if self.values is None:
            return numbers
        return self.values[np.searchsorted((self.values[1:] + self.values[:-1]) / 2, numbers)]


class SamplingPeer(PeerModel):
    """A model that draws by itself; its interval lies between quantiles of draws.

    Args:
        model: With `fit(X, y)`.
        draw: Model, rows, number, seed -> draws (number, rows).
        seed: Of the draws.
    """

    def __init__(self, model: Any, draw: Callable[[Any, _Array, int, int], _Array], seed: int) -> None:
        super().__init__(model, seed)
        self.draw = draw
        self._last: tuple[_Array, _Array] | None = None

    def sample(self, X: _Array, ensemble_size: int) -> _Array:
        """Its own draws, kept for the interval of the same rows."""
        draws = self.draw(self.model, X, ensemble_size, self.seed)
        self._last = (X, draws)
        return draws

    def predict_interval(self, X: _Array, coverage: float) -> _Array:
        """Between Weibull quantiles of 100 draws, or of those that were just made."""
        is_same = self._last is not None and self._last[0] is X
        draws = self._last[1] if self._last is not None and is_same else self.sample(X, 100)
        ends = [(1 - coverage) / 2, (1 + coverage) / 2]
        return np.quantile(draws, ends, axis=0, method="weibull").T


class _LevelByLevel:
    """One model for each level.

    Args:
        make: Level -> a model with `fit` and `predict`.
    """

    def __init__(self, make: Callable[[float], Any]) -> None:
        self.models = [make(level) for level in LEVELS]

    def fit(self, X: _Array, y: _Array) -> None:
        for model in self.models:
            model.fit(X, y)

    def predict(self, X: _Array) -> _Array:
        return np.stack([model.predict(X) for model in self.models], axis=1)


class _Process:
    """A Gaussian process: one length scale per standardised column, and noise; of at most 1000 random rows."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def fit(self, X: _Array, y: _Array) -> None:
        kernels = _package("sklearn.gaussian_process.kernels", "scikit-learn")
        process = _package("sklearn.gaussian_process", "scikit-learn")
        rows = np.random.default_rng(self.seed).permutation(len(y))[:_PROCESS_ROWS]
        self.centre, self.scale = X.mean(0), np.where(X.std(0) > 0, X.std(0), 1.0)
        kernel = kernels.ConstantKernel() * kernels.RBF(np.ones(X.shape[1])) + kernels.WhiteKernel()
        self.process = process.GaussianProcessRegressor(kernel, normalize_y=True, random_state=self.seed)
        self.process.fit(self._standardised(X[rows]), y[rows])

    def moments(self, X: _Array) -> tuple[_Array, _Array]:
        mean, std = self.process.predict(self._standardised(X), return_std=True)
        return mean, std

    def _standardised(self, X: _Array) -> _Array:
        return (X - self.centre) / self.scale


def catboost(seed: int) -> PeerModel:
    """CatBoost with the loss RMSEWithUncertainty: a normal distribution."""
    return GaussianPeer(_catboost("RMSEWithUncertainty", seed), _catboost_moments, seed)


def catboost_quantiles(seed: int) -> PeerModel:
    """CatBoost with the loss MultiQuantile."""
    loss = "MultiQuantile:alpha=" + ",".join(map(str, LEVELS))
    return QuantilePeer(_catboost(loss, seed), lambda model, X: np.asarray(model.predict(X)), LEVELS, seed)


def _catboost(loss: str, seed: int) -> Any:
    options = {"random_seed": seed, "thread_count": 1, "verbose": False, "allow_writing_files": False}
    return _package("catboost").CatBoostRegressor(loss_function=loss, **options)


def _catboost_moments(model: Any, X: _Array) -> tuple[_Array, _Array]:
    mean, variance = np.asarray(model.predict(X)).T
    return mean, np.sqrt(variance)


def ngboost(seed: int) -> PeerModel:
    """NGBoost: 500 trees, normal distribution."""
    return GaussianPeer(_package("ngboost").NGBRegressor(verbose=False, random_state=seed), _ngboost_moments, seed)


def _ngboost_moments(model: Any, X: _Array) -> tuple[_Array, _Array]:
    moments = model.pred_dist(X).params
    return np.asarray(moments["loc"]), np.asarray(moments["scale"])


def lightgbm(seed: int) -> PeerModel:
    """LightGBM with the quantile loss, a model per level."""
    package, options = _package("lightgbm"), {"random_state": seed, "n_jobs": 1, "verbose": -1}
    model = _LevelByLevel(lambda level: package.LGBMRegressor(objective="quantile", alpha=level, **options))
    return QuantilePeer(model, lambda model, X: model.predict(X), LEVELS, seed)


def hist_boosting(seed: int) -> PeerModel:
    """scikit-learn's HistGradientBoostingRegressor with the quantile loss, a model per level."""
    make = _package("sklearn.ensemble", "scikit-learn").HistGradientBoostingRegressor
    model = _LevelByLevel(lambda level: make(loss="quantile", quantile=level, random_state=seed))
    return QuantilePeer(model, lambda model, X: model.predict(X), LEVELS, seed)


def gaussian_process(seed: int) -> PeerModel:
    """scikit-learn's Gaussian process."""
    return GaussianPeer(_Process(seed), lambda model, X: model.moments(X), seed)


def treeffuser(seed: int) -> PeerModel:
    """TreeFFuser."""
    return SamplingPeer(_package("treeffuser").Treeffuser(seed=seed, n_jobs=1), _draws, seed)


def diffgbm(seed: int) -> PeerModel:
    """DiffGBM."""
    return SamplingPeer(_package("diffgbm").DiffGBM(seed=seed, n_jobs=1), _draws, seed)


def _draws(model: Any, X: _Array, number: int, seed: int) -> _Array:
    return np.asarray(model.sample(X, n_samples=number, seed=seed)).reshape(number, len(X))


def _forest(name: str, leaf: int) -> Callable[[int], PeerModel]:
    """A quantile forest of 100 trees that keeps all rows of its leaves; rounded where the target is discrete."""

    def make(seed: int) -> PeerModel:
        options = {"min_samples_leaf": leaf, "max_samples_leaf": None, "random_state": seed, "n_jobs": 1}
        model = getattr(_package("quantile_forest", "quantile-forest"), name)(**options)
        return QuantilePeer(model, _forest_quantiles, _FOREST_LEVELS, seed, rounds=True)

    return make


def _forest_quantiles(model: Any, X: _Array) -> _Array:
    return np.asarray(model.predict(X, quantiles=list(_FOREST_LEVELS)))


def _package(module: str, name: str | None = None) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        name = name or module
        raise ImportError(f"{name} is not installed: `pip install {name}`, or leave it out") from error


MODELS: dict[str, Callable[[int], PeerModel]] = {
    "extra_leaf1": _forest("ExtraTreesQuantileRegressor", 1),
    "extra_leaf5": _forest("ExtraTreesQuantileRegressor", 5),
    "forest_leaf1": _forest("RandomForestQuantileRegressor", 1),
    "forest_leaf5": _forest("RandomForestQuantileRegressor", 5),
    "lightgbm": lightgbm,
    "hist_boosting": hist_boosting,
    "catboost": catboost,
    "catboost_quantiles": catboost_quantiles,
    "ngboost": ngboost,
    "gaussian_process": gaussian_process,
    "treeffuser": treeffuser,
    "diffgbm": diffgbm,
}
"""Name -> a fresh model for a seed."""


def fit_and_draw(name: str, rows: dict[str, _Array], *, ensemble_size: int, seed: int) -> dict[str, Any]:
    """What OUT holds, for the arrays of IN."""
    model, seconds = MODELS[name](seed), {}
    start = _clocks()
    model.fit(rows["train_features"], rows["train_targets"])
    fitted = _clocks()
    features = rows["test_features"]
    samples = model.sample(features, ensemble_size)
    sampled = _clocks()
    for part, since, until in (("fit", start, fitted), ("sample", fitted, sampled)):
        seconds[f"{part}_seconds"], seconds[f"{part}_cpu_seconds"] = until - since
    return {"samples": samples, "interval": model.predict_interval(features, 0.95), **seconds}


def _clocks() -> _Array:
    """Wall and processor time."""
    return np.array([time.perf_counter(), time.process_time()])


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Fit a peer and draw from it, in its own environment.")
    parser.add_argument("model", choices=list(MODELS))
    parser.add_argument("--ensemble_size", type=int, default=100)
    parser.add_argument("--seed", type=int, nargs="+", default=[0], help="of each pair of files")
    parser.add_argument("files", type=Path, nargs="+", help="IN OUT pairs")
    return parser.parse_args()


def main() -> int:
    """The command; an OUT is renamed into place when it is complete."""
    options = _parse()
    for given, output, seed in zip(options.files[::2], options.files[1::2], options.seed, strict=True):
        with np.load(given) as arrays:
            rows = {name: arrays[name] for name in arrays.files}
        found = fit_and_draw(options.model, rows, ensemble_size=options.ensemble_size, seed=seed)
        temporary = output.with_name(f".{output.name}.npz")
        np.savez(temporary, **found)
        os.replace(temporary, output)
        print(output, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
