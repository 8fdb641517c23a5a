"""Other people's probabilistic regressors behind the interface that is scored; each package is optional."""

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri

from marigold_uq.tabular.scores import Factory

_Array = NDArray[np.float64]
_Moments = tuple[_Array, _Array]


class GaussianPeer:
    """A model that predicts mean and standard deviation; draws and intervals are those of the normal distribution.

    Args:
        model: With `fit(X, y)`.
        moments: Model, rows -> mean and standard deviation, (rows,) each.
        seed: Of the draws.
    """

    def __init__(self, model: Any, moments: Callable[[Any, _Array], _Moments], seed: int) -> None:
        self.model, self.moments, self.seed = model, moments, seed

    def fit(self, X: _Array, y: _Array) -> Self:
        """Train on rows (n, F) and targets (n,)."""
        self.model.fit(X, y)
        return self

    def sample(self, X: _Array, ensemble_size: int) -> _Array:
        """Draws (ensemble_size, rows)."""
        mean, std = self.moments(self.model, X)
        return mean + std * np.random.default_rng(self.seed).normal(size=(ensemble_size, len(mean)))

    def predict_interval(self, X: _Array, coverage: float) -> _Array:
        """mean -+ z std, (rows, 2)."""
        mean, std = self.moments(self.model, X)
        reach = float(ndtri((1 + coverage) / 2)) * std
        return np.stack([mean - reach, mean + reach], axis=1)


def catboost(seed: int) -> GaussianPeer:
    """CatBoost at its defaults with the loss RMSEWithUncertainty, on one thread."""
    package = _package("catboost")
    options = {"loss_function": "RMSEWithUncertainty", "random_seed": seed, "thread_count": 1, "verbose": False}
    return GaussianPeer(package.CatBoostRegressor(**options, allow_writing_files=False), _catboost_moments, seed)


def _catboost_moments(model: Any, X: _Array) -> _Moments:
    mean, variance = np.asarray(model.predict(X)).T
    return mean, np.sqrt(variance)


def ngboost(seed: int) -> GaussianPeer:
    """NGBoost at its defaults: 500 trees, normal distribution."""
    package = _package("ngboost")
    return GaussianPeer(package.NGBRegressor(verbose=False, random_state=seed), _ngboost_moments, seed)


def _ngboost_moments(model: Any, X: _Array) -> _Moments:
    moments = model.pred_dist(X).params
    return np.asarray(moments["loc"]), np.asarray(moments["scale"])


def _package(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        raise ImportError(f"{name} is not installed: `pip install {name}`, or leave it out") from error


PEERS: dict[str, Factory] = {"catboost": catboost, "ngboost": ngboost}
"""Name -> a fresh model for a seed."""


def is_installed(name: str) -> bool:
    """Whether a peer's package can be imported."""
    return find_spec(name) is not None
