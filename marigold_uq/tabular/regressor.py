"""`DiffusionRegressor`: an sklearn estimator that predicts the whole law of y given x."""

import warnings
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any, Self, TypeVar

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, RegressorMixin
from sklearn.utils import check_random_state, check_X_y
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data

from marigold_uq.calibration import choose_kappa, conformal_rows, residual_ratio
from marigold_uq.metrics import central_interval, quantiles
from marigold_uq.models.mlp import StackedBaseline, StackedModel
from marigold_uq.pipelines.tabular.columns import TabularEncoder, is_frame
from marigold_uq.pipelines.tabular.pipeline import DRAWS_FOR_KAPPA, TabularOutput, TabularRegressionPipeline
from marigold_uq.tabular.fitting import Table, ValidationRows, fit_stack
from marigold_uq.tabular.known_values import known_values
from marigold_uq.tabular.recipe import Recipe, resolve_recipe, with_early_stopping, with_kappa_rows

Array = NDArray[np.float64]
AnyStack = TypeVar("AnyStack", bound=StackedModel)

LEAST_WEIGHT = 1e-12
"""Rows with a smaller weight, as a share of the largest, are left out: in single precision they would vanish."""
ROWS_FOR_KAPPA = 20
"""With fewer rows to choose it on kappa would be mostly noise and stays 1."""


@dataclass(frozen=True)
class TabularUncertainty:
    """Standard deviations in units of y, each (rows[, outputs]); None where a model has no such estimate.

    The total is calibrated, its parts are before kappa: with a kappa below 1 they may exceed it.
    """

    total: Array
    epistemic: Array | None
    """Between the means of independently trained members; None for a single member."""
    aleatoric: Array | None
    """What remains of the total, before calibration: sqrt(mean member variance)."""
    head: Array | None
    """The paper's epistemic estimate from the head's own law along the trajectory; None for point and sample."""


class DiffusionRegressor(RegressorMixin, BaseEstimator):
    """Probabilistic regression: a diffusion model of what a baseline leaves unexplained.

    `preset="paper"` is the published recipe; `preset="default"` has a baseline of several experts (trees, networks, a
    Gaussian process) combined out-of-fold, an ensemble with early stopping, and keeps to the values of a target that
    takes few. All other arguments at None take the preset's choice, which depends on the training data alone.

    Args:
        preset: "default" or "paper".
        noise_family: "point", "gaussian", "mixture" or "sample".
        num_components: Components of the mixture.
        num_members: Independently trained models.
        num_draws: Draws per row in training of the family "sample".
        baseline: "mlp", "trees", "experts" or "none".
        baseline_epochs: At most so many epochs, trees or steps of each part of the baseline.
        dropout: Of the MLP baseline.
        batch_size, max_epochs, learning_rate: Of the denoiser.
        early_stopping: Stop each member on an inner split of the training rows; False trains `max_epochs`.
        patience: Epochs without progress.
        prediction_type: What the law is put on: "epsilon", "v_prediction" or "sample" (x_0).
        num_timesteps, num_inference_steps: Of the diffusion and of the sampler.
        calibration_fraction: Share of the rows that is set aside for kappa (20 rows or more) and conformal intervals; 0
            for none. Where a target takes few values none are set aside.
        kappa_from_validation: Choose kappa on what each member says about the rows that it stopped on, around
            out-of-fold predictions of the baseline (20 rows or more); not where a target takes few values. The preset
            "default" does so for tables of fewer than 500 rows.
        snap: Whether draws of a target that takes few values go to the nearest of them.
        n_samples: Draws per row behind `predict`, quantiles and intervals; an interval between quantiles needs 39 of
            them for 95 %, with fewer it is that between the outermost draws.
        inference_dtype: "float64", or "float32", which draws twice as fast; a row's prediction then depends on the
            other rows in the sixth digit.
        random_state: Seed; the same seed and data give the same model and the same predictions.
        verbose: 1 shows progress bars.

    Attributes:
        pipeline_: The fitted `TabularRegressionPipeline` (`pipeline_.save_pretrained(folder)`).
        recipe_: All choices that were made.
        conformal_scores_: |y - mean| / std of the rows set aside, (rows, outputs), or None.
        n_features_in_, feature_names_in_: As everywhere in sklearn.
    """

    def __init__(
        self,
        preset: str = "default",
        *,
        noise_family: str | None = None,
        num_components: int | None = None,
        num_members: int | None = None,
        num_draws: int | None = None,
        baseline: str | None = None,
        baseline_epochs: int | None = None,
        dropout: float | None = None,
        batch_size: int | None = None,
        max_epochs: int | None = None,
        learning_rate: float | None = None,
        early_stopping: bool | None = None,
        patience: int | None = None,
        prediction_type: str | None = None,
        num_timesteps: int | None = None,
        num_inference_steps: int | None = None,
        calibration_fraction: float | None = None,
        kappa_from_validation: bool | None = None,
        snap: bool | None = None,
        n_samples: int = 100,
        inference_dtype: str = "float64",
        random_state: int | np.random.RandomState | None = None,
        verbose: int = 0,
    ) -> None:
        self.preset = preset
        self.noise_family = noise_family
        self.num_components = num_components
        self.num_members = num_members
        self.num_draws = num_draws
        self.baseline = baseline
        self.baseline_epochs = baseline_epochs
        self.dropout = dropout
        self.batch_size = batch_size
        self.max_epochs = max_epochs
        self.learning_rate = learning_rate
        self.early_stopping = early_stopping
        self.patience = patience
        self.prediction_type = prediction_type
        self.num_timesteps = num_timesteps
        self.num_inference_steps = num_inference_steps
        self.calibration_fraction = calibration_fraction
        self.kappa_from_validation = kappa_from_validation
        self.snap = snap
        self.n_samples = n_samples
        self.inference_dtype = inference_dtype
        self.random_state = random_state
        self.verbose = verbose

    def fit(self, X: Any, y: ArrayLike, sample_weight: ArrayLike | None = None) -> Self:
        """Train on rows X (rows, features) and targets y (rows,) or (rows, outputs).

        Rows that weigh less than 1e-12 of the heaviest are left out. Weights count in training and for kappa;
        rows that conformal intervals come from count alike.
        """
        features, targets = self._check_training_data(X, y)
        weights = _check_weights(sample_weight, features)
        self._is_flat = targets.ndim == 1
        targets = targets.reshape(len(targets), -1).astype(np.float64)
        used = weights > LEAST_WEIGHT * weights.max()
        features, targets, weights = features[used], targets[used], weights[used]
        self.recipe_ = self._resolve(len(features))
        dtype = _inference_dtype(self.inference_dtype)
        random = check_random_state(self.random_state)
        self.seed_ = int(random.randint(2**31 - 1))
        values = known_values(targets) if self.recipe_.snap else None
        if values is not None:
            # draws of few values often all agree: a spread of 0 can be neither stretched nor divided by
            if self.recipe_.calibration_fraction or self.kappa_from_validation:
                warnings.warn(
                    "a target takes few values: no rows are set aside for calibration, and there is no kappa"
                    " (snap=False changes that)",
                    stacklevel=2,
                )
            self.recipe_ = replace(self.recipe_, calibration_fraction=0.0, kappa_from_validation=False)
        train, held_out = _set_aside(len(features), self.recipe_.calibration_fraction, random)
        table = Table(features[train], targets[train], weights[train])
        stack = fit_stack([table], self.recipe_, [self.seed_], verbose=bool(self.verbose))
        self.n_epochs_ = stack.epochs
        self.pipeline_ = TabularRegressionPipeline(
            in_dtype(stack.network, dtype),
            stack.scheduler,
            in_dtype(stack.baseline, dtype) if isinstance(stack.baseline, StackedBaseline) else stack.baseline,
            columns=None if self._columns is None else self._columns.to_config(),
            default_num_inference_steps=self.recipe_.num_inference_steps,
            values=values,
        )
        self.pipeline_.set_progress_bar_config(disable=not self.verbose)
        self.conformal_scores_: Array | None = None
        if len(held_out):
            self._calibrate(Table(features[held_out], targets[held_out], weights[held_out]))
        elif self.recipe_.kappa_from_validation and stack.validation is not None:
            self._kappa_from_validation(table, stack.validation)
        return self

    def predict(self, X: Any, return_std: bool = False) -> Array | tuple[Array, Array]:
        """Mean of the predictive law, (rows[, outputs]); with `return_std` also its standard deviation (total)."""
        output = self._draw(X)
        mean = self._shaped(output.mean)
        return (mean, self._shaped(output.std)) if return_std else mean

    def sample(self, X: Any, n_samples: int | None = None) -> Array:
        """Draws from the predictive law, (n_samples, rows[, outputs])."""
        return self._shaped(self._draw(X, n_samples).samples)

    def predict_quantiles(self, X: Any, q: float | ArrayLike) -> Array:
        """Quantiles of the predictive law at levels q, (rows, len(q)[, outputs])."""
        levels = [float(level) for level in np.atleast_1d(np.asarray(q, dtype=np.float64))]
        values = quantiles(torch.from_numpy(self._draw(X).samples), levels)  # (Q, rows, C)
        return self._shaped(values.transpose(0, 1).numpy())

    def predict_interval(self, X: Any, coverage: float = 0.95) -> Array:
        """Central interval, (rows, 2[, outputs]).

        With rows set aside in `fit` it is split-conformal, mean +- q std, and covers a new exchangeable row with at
        least this probability (each output by itself); infinite if too few rows were set aside for `coverage`.
        Without, it is between quantiles of the draws.
        """
        if not 0 < coverage < 1:
            raise ValueError(f"coverage lies strictly between 0 and 1; got {coverage}")
        output = self._draw(X)
        if self.conformal_scores_ is None:
            lower, upper = (end.numpy() for end in central_interval(torch.from_numpy(output.samples), coverage))
        else:
            # rounded, so that 1 - 0.9 is the 1/10 that was meant
            alpha = round(1 - coverage, 12)
            factor = conformal_rows(torch.from_numpy(self.conformal_scores_), alpha, too_few="inf").numpy()  # (C,)
            lower, upper = output.mean - factor * output.std, output.mean + factor * output.std
        return self._shaped(np.stack([lower, upper], axis=1))

    def predict_uncertainty(self, X: Any) -> TabularUncertainty:
        """Total uncertainty of each row, and where it comes from; all are standard deviations."""
        check_is_fitted(self)
        has_head = self.pipeline_.scheduler.family.has_spread
        output = self._draw(X, head_epistemic=has_head)
        between = within = None
        if output.member_samples.shape[0] > 1 and output.member_samples.shape[1] > 1:
            between = self._shaped(output.ensemble_epistemic)
            within = self._shaped(np.sqrt(output.member_samples.var(1, ddof=1).mean(0)))
        head = None if output.head_epistemic is None else self._shaped(output.head_epistemic)
        return TabularUncertainty(self._shaped(output.std), between, within, head)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags

    def _resolve(self, num_rows: int) -> Recipe:
        names = [name for name in self.get_params(deep=False) if name in Recipe.__dataclass_fields__]
        if self.early_stopping is False and self.patience is not None:
            raise ValueError(f"patience={self.patience} needs early stopping, but early_stopping is False")
        recipe = resolve_recipe(self.preset, num_rows, **{name: getattr(self, name) for name in names})
        return with_kappa_rows(with_early_stopping(recipe, self.early_stopping), self.kappa_from_validation)

    def _check_training_data(self, X: Any, y: ArrayLike) -> tuple[Array, NDArray[Any]]:
        self._columns = TabularEncoder.fit(X) if is_frame(X) else None
        self._encoder = self._columns if self._columns is not None and self._columns.has_categories else None
        if self._encoder is not None:
            validate_data(self, X, skip_check_array=True, reset=True)
            checks = {"dtype": np.float64, "multi_output": True, "y_numeric": True, "ensure_min_samples": 2}
            encoded, targets = check_X_y(self._encoder.transform(X), y, **checks)
            return encoded, targets
        features, targets = validate_data(
            self, X, y, dtype=np.float64, multi_output=True, y_numeric=True, ensure_min_samples=2
        )
        return features, targets

    def _features(self, X: Any) -> Array:
        check_is_fitted(self)
        if self._encoder is None:
            return validate_data(self, X, dtype=np.float64, reset=False)
        if not is_frame(X):
            raise ValueError(
                f"the model was fitted on a DataFrame with categories; got {type(X).__name__}. Pass a DataFrame with "
                f"the columns {[column.name for column in self._encoder.columns]}."
            )
        validate_data(self, X, skip_check_array=True, reset=False)
        return self._encoder.transform(X)

    def _draw(self, X: Any, n_samples: int | None = None, head_epistemic: bool = False) -> TabularOutput:
        count = self.n_samples if n_samples is None else n_samples
        if not isinstance(count, Integral) or count < (2 if n_samples is None else 1):
            raise ValueError(f"n_samples is an integer of at least 2 (1 in `sample`); got {count!r}")
        features = self._features(X)
        return self.pipeline_(features, int(count), seed=self.seed_, head_epistemic=head_epistemic)

    def _calibrate(self, table: Table) -> None:
        """kappa by the CRPS, and conformal scores; mean +- q std does not change with kappa, so the rows serve both."""
        count = self._draws_for_kappa
        self._choose_kappa(self.pipeline_(table.features, count, seed=self.seed_).samples, table.targets, table.weights)
        output = self.pipeline_(table.features, count, seed=self.seed_)
        mean, std = torch.from_numpy(output.mean), torch.from_numpy(output.std)
        self.conformal_scores_ = residual_ratio(mean, std, torch.from_numpy(table.targets)).numpy()

    def _kappa_from_validation(self, table: Table, validation: ValidationRows) -> None:
        """kappa from the validation rows of all members, around what the baseline said out-of-fold.

        Neither was fitted on these rows; the member's stopping, the experts' weights, the process's hyper-parameters
        and the scales of the columns did use them.
        """
        samples, rows = [], torch.cat(validation.rows).numpy()
        for member, index in enumerate(validation.rows):
            extras = None if validation.extras is None else validation.extras[member]
            output = self.pipeline_.select(member)(
                table.features[index.numpy()],
                self._draws_for_kappa,
                seed=self.seed_,
                baseline_output=(validation.predictions[member], extras),
            )
            samples.append(output.samples)
        self._choose_kappa(np.concatenate(samples, 1), table.targets[rows], table.weights[rows])

    @property
    def _draws_for_kappa(self) -> int:
        """As many as are drawn once there is a kappa: with fewer it would also make up for their noisy mean."""
        return max(self.n_samples, DRAWS_FOR_KAPPA * self.recipe_.num_members)

    def _choose_kappa(self, samples: Array, targets: Array, weights: Array) -> None:
        """The factors of best CRPS, one per target, for draws (n, rows, C)."""
        if len(targets) < ROWS_FOR_KAPPA:
            if self.kappa_from_validation:
                warnings.warn(
                    f"there is no kappa: it needs {ROWS_FOR_KAPPA} held-out rows, there are {len(targets)}",
                    stacklevel=4,
                )
            return
        draws, truth, weight = torch.from_numpy(samples), torch.from_numpy(targets), torch.from_numpy(weights)
        kappa = [choose_kappa(draws[..., c], truth[:, c], weights=weight).kappa for c in range(truth.shape[1])]
        self.pipeline_.register_to_config(kappa=kappa)

    def _shaped(self, values: Array) -> Array:
        """Without the axis of outputs if y had none."""
        return values[..., 0] if self._is_flat else values


def _inference_dtype(name: str) -> torch.dtype:
    if name not in ("float32", "float64"):
        raise ValueError(f"inference_dtype is 'float64' or 'float32'; got {name!r}")
    return torch.float32 if name == "float32" else torch.float64


def in_dtype(model: AnyStack, dtype: torch.dtype) -> AnyStack:
    """Parameters in `dtype`; statistics are buffers and stay in float64."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def _check_weights(sample_weight: ArrayLike | None, features: Array) -> Array:
    weights: Array = _check_sample_weight(sample_weight, features, dtype=np.float64, ensure_non_negative=True)
    if int((weights > LEAST_WEIGHT * weights.max()).sum()) < 2:
        raise ValueError("sample_weight leaves fewer than 2 rows with more than 1e-12 of the heaviest weight")
    return weights


def _set_aside(
    num_rows: int, fraction: float, random: np.random.RandomState
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Indices of training rows and of rows set aside for calibration (none for fraction 0); both ascending."""
    count = min(num_rows - 2, round(fraction * num_rows)) if fraction else 0
    if fraction and count < 1:
        raise ValueError(f"calibration_fraction={fraction:g} sets none of {num_rows} rows aside; take more rows, or 0")
    order = random.permutation(num_rows)
    return np.sort(order[count:]), np.sort(order[:count])
