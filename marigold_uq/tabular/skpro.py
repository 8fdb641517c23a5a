"""`DiffusionRegressor` for skpro: distributions, intervals and quantiles as its metrics, tuners and pipelines expect.

skpro is optional: `pip install marigold_uq[skpro]`.
"""

from typing import Any, Self

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from sklearn.base import clone
from skpro.distributions.base import BaseDistribution
from skpro.distributions.empirical import Empirical
from skpro.distributions.normal_mixture import NormalMixture
from skpro.regression.base import BaseProbaRegressor

from marigold_uq.pipelines.tabular.distribution import PredictiveDistribution
from marigold_uq.scores.crps import absolute_moment, mixture_crps
from marigold_uq.tabular import DiffusionRegressor, TrainingOptions

__all__ = ["ExactNormalMixture", "SkproDiffusionRegressor", "as_skpro"]


class ExactNormalMixture(NormalMixture):  # type: ignore[misc]
    """skpro's `NormalMixture` with an exact E|X - X'|, and so an exact CRPS.

    That of skpro 2.16 holds only where all components have the same mean.
    """

    def _energy_self(self) -> NDArray[np.float64]:
        """(rows, 1)."""
        loc, scale = torch.from_numpy(self._mu), torch.from_numpy(self._sigma)  # (rows, K, outputs)
        weights = torch.from_numpy(self._pi).unsqueeze(-1).expand_as(loc)
        mean = (weights * loc).sum(1)
        to_mean = (weights * absolute_moment(mean.unsqueeze(1) - loc, scale)).sum(1)
        between = to_mean - mixture_crps(loc, scale, weights, mean)
        return 2 * between.sum(1, keepdim=True).numpy()

    def _iloc(self, rowidx: Any = None, colidx: Any = None) -> NormalMixture:
        """Some rows and columns; scores ask for one column at a time."""
        part = super()._iloc(rowidx, colidx)
        if part.ndim == 0:
            return part
        return type(self)(part.pi, part.mu, part.sigma, index=part.index, columns=part.columns)


def as_skpro(law: PredictiveDistribution, index: pd.Index | None = None, columns: pd.Index | None = None) -> Any:
    """A predictive distribution without masses, of one output, as a `NormalMixture` of skpro: the same, exactly."""
    if len(law.outputs) != 1 or law.outputs[0].mixture is None or len(law.outputs[0].values):
        raise ValueError("skpro's NormalMixture has one output and no masses on single values; take draws of this one")
    mixture = law.outputs[0].mixture
    parts = [part.unsqueeze(-1).numpy() for part in (mixture.loc, mixture.scale)]
    rows = pd.RangeIndex(len(law)) if index is None else index
    names = pd.RangeIndex(1) if columns is None else columns
    return ExactNormalMixture(mixture.weights.numpy(), *parts, index=rows, columns=names)


class SkproDiffusionRegressor(BaseProbaRegressor):
    """A `DiffusionRegressor` with skpro's interface.

    `predict_proba` is a mixture of Gaussians where the distribution of one target is known in closed form and has no
    masses, else the empirical distribution of `estimator.ensemble_size` draws. `predict_interval` and
    `predict_quantiles` are the estimator's own, so that intervals are calibrated where rows were set aside for it.

    Args:
        estimator: The model; it is cloned, never changed. None takes `DiffusionRegressor(random_state=0)`.

    Example:
        >>> from sklearn.datasets import load_diabetes
        >>> from marigold_uq.tabular import DiffusionRegressor
        >>> from marigold_uq.tabular.skpro import SkproDiffusionRegressor
        >>> X, y = load_diabetes(return_X_y=True, as_frame=True)
        >>> model = SkproDiffusionRegressor(DiffusionRegressor(baseline="none", max_epochs=2, random_state=0))
        >>> model.fit(X[:100], y[:100]).predict_interval(X[100:103], coverage=0.9).shape
        (3, 2)
    """

    _tags = {  # noqa: RUF012, skpro reads a dict
        "authors": ["marigold_uq"],
        "python_dependencies": ["marigold_uq"],
        "capability:multioutput": True,
        "capability:missing": False,
        "X_inner_mtype": "pd_DataFrame_Table",
        "y_inner_mtype": "pd_DataFrame_Table",
    }

    def __init__(self, estimator: DiffusionRegressor | None = None) -> None:
        self.estimator = estimator
        super().__init__()

    def _fit(self, X: pd.DataFrame, y: pd.DataFrame) -> Self:
        """Fit a clone of the estimator."""
        template = DiffusionRegressor(random_state=0) if self.estimator is None else self.estimator
        self.estimator_ = clone(template).fit(_named(X), y.to_numpy())
        self._outputs = y.columns
        return self

    def _predict(self, X: pd.DataFrame) -> pd.DataFrame:
        """Mean, a column per target."""
        return pd.DataFrame(_columns(self.estimator_.predict(_named(X))), index=X.index, columns=self._outputs)

    def _predict_var(self, X: pd.DataFrame) -> pd.DataFrame:
        """Variance, a column per target."""
        _, std = self.estimator_.predict(_named(X), return_std=True)
        return pd.DataFrame(_columns(std) ** 2, index=X.index, columns=self._outputs)

    def _predict_proba(self, X: pd.DataFrame) -> BaseDistribution:
        """The distribution of each row."""
        if self.estimator_.pipeline_.has_closed_form():
            law = self.estimator_.predict_distribution(_named(X))
            if len(law.outputs) == 1 and not len(law.outputs[0].values):
                return as_skpro(law, X.index, self._outputs)
        draws = self.estimator_.sample(_named(X))  # (n, rows[, outputs])
        draws = draws.reshape(*draws.shape[:2], -1)
        samples = [pd.DataFrame(one, index=X.index, columns=self._outputs) for one in draws]
        table = pd.concat(samples, keys=range(len(samples)), names=["sample"])
        return Empirical(table, time_indep=False, index=X.index, columns=self._outputs)

    def _predict_quantiles(self, X: pd.DataFrame, alpha: list[float]) -> pd.DataFrame:
        """Columns (target, level)."""
        values = self.estimator_.predict_quantiles(_named(X), alpha)  # (rows, Q[, outputs])
        values = values.reshape(*values.shape[:2], -1).swapaxes(1, 2)  # (rows, outputs, Q)
        columns = pd.MultiIndex.from_product([self._get_varnames(), alpha])
        return pd.DataFrame(values.reshape(len(X), -1), index=X.index, columns=columns)

    def _predict_interval(self, X: pd.DataFrame, coverage: list[float]) -> pd.DataFrame:
        """Columns (target, coverage, "lower" or "upper")."""
        ends = [self.estimator_.predict_interval(_named(X), level) for level in coverage]  # (rows, 2[, outputs]) each
        values = np.stack([one.reshape(len(X), 2, -1) for one in ends], axis=1)  # (rows, levels, 2, outputs)
        columns = pd.MultiIndex.from_product([self._get_varnames(), coverage, ["lower", "upper"]])
        return pd.DataFrame(np.moveaxis(values, 3, 1).reshape(len(X), -1), index=X.index, columns=columns)

    @classmethod
    def get_test_params(cls, parameter_set: str = "default") -> list[dict[str, Any]]:
        """Small models for skpro's checks."""
        tiny: dict[str, Any] = {"max_epochs": 2, "num_models": 1, "num_inference_steps": 2, "ensemble_size": 20}
        tiny |= {"calibration_fraction": 0.0, "random_state": 0}
        options = TrainingOptions(baseline_epochs=10, num_timesteps=10, batch_size=16)
        published = {**tiny, "preset": "paper", "noise_family": "gaussian"}
        exact = {**tiny, "num_models": 2, "num_inference_steps": 1}
        models = (tiny, published, exact)
        return [{"estimator": DiffusionRegressor(**one, training_options=options)} for one in models]


def _named(X: pd.DataFrame) -> pd.DataFrame:
    """The same rows with column names that are text, as sklearn wants them."""
    return X.set_axis(X.columns.astype(str), axis=1)


def _columns(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """(rows, outputs), also of one target."""
    return values.reshape(len(values), -1)
