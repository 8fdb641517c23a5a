"""`DiffusionRegressor`: an sklearn estimator that predicts the whole distribution of y given x."""

import json
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from numbers import Integral
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, Self, TypeAlias, TypeVar

import numpy as np
import torch
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, RegressorMixin
from sklearn.utils import check_random_state, check_X_y
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data

from marigold_uq.calibration import (
    Calibration,
    StepsChoice,
    choose_kappa,
    choose_steps,
    interval_grid_rows,
    residual_ratio,
    unit_means,
)
from marigold_uq.distributions import MixtureDistribution
from marigold_uq.hub import check_repo_id, push_to_hub
from marigold_uq.metrics import crps as fair_crps
from marigold_uq.models.mlp import StackedBaseline, StackedModel
from marigold_uq.novelty import Novelty
from marigold_uq.pipelines.tabular.columns import TabularEncoder, is_frame
from marigold_uq.pipelines.tabular.distribution import PredictiveDistribution
from marigold_uq.pipelines.tabular.pipeline import (
    DRAWS_FOR_KAPPA,
    BaselineOutput,
    TabularOutput,
    TabularRegressionPipeline,
    calibrated_ends,
)
from marigold_uq.randomness import member_seed
from marigold_uq.results import write_json
from marigold_uq.tabular.experts.pooling import OutOfFold, fit_pool, fit_values
from marigold_uq.tabular.recipe import Recipe, TrainingOptions, known_values, resolve_recipe, shared_values
from marigold_uq.tabular.report import TableReport, make_report
from marigold_uq.tabular.selection import select_table_family
from marigold_uq.tabular.stack import TrainingRows, ValidationRows, fit_stack
from marigold_uq.training.selection import AUTO, Selection, sample_unit_scores

__all__ = ["DiffusionRegressor", "TabularUncertainty"]

Array = NDArray[np.float64]
_AnyStack = TypeVar("_AnyStack", bound=StackedModel)

_Part: TypeAlias = tuple[TabularRegressionPipeline, NDArray[np.int64], BaselineOutput | None]
"""A model, indices of rows, and what the baseline says about them where it has seen them."""

_LEAST_WEIGHT = 1e-12
"""Rows with a smaller weight, as a share of the largest, are left out: in single precision they would vanish."""
_ROWS_FOR_KAPPA = 20
"""With fewer rows to choose it on kappa would be mostly noise and stays 1."""
_ROWS_FOR_NOVELTY = 40
_ROWS_FOR_POOL, _MOST_ROWS_FOR_POOL = 20, 50_000
"""Out-of-fold rows that a pool is fitted on: with fewer its weights would be noise, and more than these add little."""
_QUANTILES_FOR_KAPPA = 100
_BLOCK = 2**11
"""Rows whose distributions are held at once."""
_OWN_FILE = "regressor.json"
_LARGEST, _SMALLEST = 1e100, 1e-100
"""Between them numbers can be squared and summed."""


@dataclass(frozen=True)
class TabularUncertainty:
    """Standard deviations in units of y, each (rows[, outputs]); None where a model has no such estimate.

    The total is calibrated; its parts are before kappa and may exceed it where kappa is below 1.
    """

    total: Array
    between_models: Array | None
    """Between the means of independently trained models; None for a single model."""
    within_models: Array | None
    """The rest of the total, before calibration: the root of the models' mean variance."""
    epistemic: Array | None
    """The head's own estimate along the trajectory; None for point and sample."""


class DiffusionRegressor(RegressorMixin, BaseEstimator):
    """Probabilistic regression: a diffusion model of what a baseline leaves unexplained.

    `preset="paper"` is the published recipe. `preset="default"` has a baseline of several experts (trees, networks, a
    Gaussian process) combined out-of-fold, an ensemble with early stopping, and keeps to the values of a target that
    takes few. Arguments that are None take the preset's choice, which depends on the training data alone.

    In one denoising step, the choice of `default`, the predictive distribution is a mixture in closed form: means,
    quantiles, intervals and scores are exact and nothing is drawn but in `sample`.

    Args:
        preset: "default" or "paper".
        noise_family: "point", "gaussian", "mixture", "sample", or "auto": the simplest within one standard error of the
            best CRPS, on rows held out for the choice; all rows then train the model.
        num_models: Independently trained models.
        baseline: "mlp", "trees", "experts" or "none".
        max_epochs: Of the denoiser.
        num_inference_steps: Denoising steps of a prediction; "auto" takes the fewest within one standard error of the
            best CRPS on the validation rows of training, or where there are none on half of the rows set aside. With
            None `default` trains for one step and takes it, where the family has a density.
        calibration_fraction: Share of the rows that is set aside for kappa (20 rows or more), conformal intervals
            and `predict_novelty` (40 or more); 0 for none. Where a target takes few values none are set aside.
        training_options: Everything else, see `TrainingOptions`.
        ensemble_size: Draws per row of `sample`; of several steps also behind predictions, quantiles and intervals.
        inference_dtype: "float64", or "float32", which draws twice as fast; a row's prediction then depends on the
            other rows in the sixth digit.
        random_state: Seed; the same seed and data give the same model and the same predictions.
        verbose: 1 shows progress bars.

    Attributes:
        pipeline_: The fitted `TabularRegressionPipeline` with its calibration (`pipeline_.save_pretrained(folder)`).
        recipe_: All choices that were made.
        n_epochs_: Epochs that each model was trained for.
        selection_: What noise_family "auto" compared; None with a family that was named.
        steps_choice_: What num_inference_steps "auto" compared; None otherwise.
        n_features_in_, feature_names_in_: As everywhere in sklearn.
    """

    _columns: TabularEncoder

    def __init__(
        self,
        preset: str = "default",
        *,
        noise_family: str | None = None,
        num_models: int | None = None,
        baseline: str | None = None,
        max_epochs: int | None = None,
        num_inference_steps: int | Literal["auto"] | None = None,
        calibration_fraction: float | None = None,
        training_options: TrainingOptions | None = None,
        ensemble_size: int = 100,
        inference_dtype: str = "float64",
        random_state: int | np.random.RandomState | None = None,
        verbose: int = 0,
    ) -> None:
        self.preset = preset
        self.noise_family = noise_family
        self.num_models = num_models
        self.baseline = baseline
        self.max_epochs = max_epochs
        self.num_inference_steps = num_inference_steps
        self.calibration_fraction = calibration_fraction
        self.training_options = training_options
        self.ensemble_size = ensemble_size
        self.inference_dtype = inference_dtype
        self.random_state = random_state
        self.verbose = verbose

    def fit(self, X: Any, y: ArrayLike, sample_weight: ArrayLike | None = None) -> Self:
        """Train on rows X (rows, features) and targets y (rows,) or (rows, outputs).

        Rows that weigh less than 1e-12 of the heaviest are left out. Weights count in training and for kappa; the
        rows that conformal intervals come from count alike.
        """
        features, targets = self._check_training_data(X, y)
        _check_scale(targets, "y")
        _check_scale(features, "X")
        weights = _check_weights(sample_weight, features)
        self._is_flat = targets.ndim == 1
        targets = targets.reshape(len(targets), -1).astype(np.float64)
        used = weights > _LEAST_WEIGHT * weights.max()
        features, targets, weights = features[used], targets[used], weights[used]
        self.recipe_ = self._resolve(len(features))
        if self.inference_dtype not in ("float32", "float64"):
            raise ValueError(f"inference_dtype must be 'float64' or 'float32'; got {self.inference_dtype!r}")
        dtype = torch.float32 if self.inference_dtype == "float32" else torch.float64
        random = check_random_state(self.random_state)
        self.seed_ = int(random.randint(2**31 - 1))
        values = known_values(targets) if self.recipe_.snap else None
        if values is not None:
            self._give_up_calibration()
        train, held_out = _set_aside(len(features), self.recipe_.calibration_fraction, random)
        whole = TrainingRows(features[train], targets[train], weights[train])
        shared = self._shared_values(whole.targets) if values is None else []
        table = _without_values(whole, shared)
        self.selection_: Selection | None = None
        self.steps_choice_: StepsChoice | None = None
        if self.recipe_.noise_family == AUTO:
            self.selection_ = select_table_family(table, self.recipe_, self.seed_, verbose=bool(self.verbose))
            self.recipe_ = self._resolve_chosen(len(features), self.selection_.chosen.noise_family)
        stack = fit_stack([table], self.recipe_, [self.seed_], verbose=bool(self.verbose))
        self.n_epochs_ = stack.epochs
        self.pipeline_ = TabularRegressionPipeline(
            _in_dtype(stack.network, dtype),
            stack.scheduler,
            _in_dtype(stack.baseline, dtype) if isinstance(stack.baseline, StackedBaseline) else stack.baseline,
            columns=self._columns.to_config(),
            default_denoising_steps=self.recipe_.num_inference_steps,
            values=values,
            only_one_step=self.recipe_.one_step,
        )
        self.pipeline_.set_progress_bar_config(disable=not self.verbose)
        if self.num_inference_steps == AUTO:
            if stack.validation is not None:
                self._choose_steps(*self._by_model(table, stack.validation))
            else:
                choosing, held_out = held_out[::2], held_out[1::2]
                rows = TrainingRows(features[choosing], targets[choosing], weights[choosing])
                self._choose_steps(rows, [(self.pipeline_, np.arange(len(choosing)), None)])
        if shared:
            self._fit_shared(whole, shared)
        if self.recipe_.pool and self.pipeline_.has_closed_form() and stack.validation is not None:
            self._pool(table, stack.validation)
        if len(held_out):
            self._calibrate(TrainingRows(features[held_out], targets[held_out], weights[held_out]))
        elif self.recipe_.kappa_from_validation and stack.validation is not None:
            self._kappa_from_validation(table, stack.validation)
        return self

    def predict(self, X: Any, return_std: bool = False) -> Array | tuple[Array, Array]:
        """Mean of the predictive distribution, (rows[, outputs]); with `return_std` also its standard deviation."""
        mean, std = map(self._shaped, self._moments(self._features(X)))
        return (mean, std) if return_std else mean

    def sample(self, X: Any, ensemble_size: int | None = None) -> Array:
        """Draws from the predictive distribution, (ensemble_size, rows[, outputs])."""
        return self._shaped(self._draw(self._features(X), ensemble_size).samples)

    def predict_quantiles(self, X: Any, quantiles: float | ArrayLike) -> Array:
        """Quantiles of the predictive distribution at these levels, (rows, levels[, outputs])."""
        levels = [float(level) for level in np.atleast_1d(np.asarray(quantiles, dtype=np.float64))]
        features = self._features(X)
        if self.pipeline_.has_closed_form():
            return self._shaped(self._exactly(features, lambda law: law.quantile(levels)))
        values = self._draw(features, quantiles=levels).quantiles
        assert values is not None
        return self._shaped(np.moveaxis(values, 0, 1))

    def predict_interval(self, X: Any, coverage: float = 0.95) -> Array:
        """Central interval, (rows, 2[, outputs]); an interval lies within those of higher coverage.

        With rows set aside in `fit` it is prediction -+ scale x uncertainty. At the calibrated coverages (.1 to .995,
        as far as the number n of these rows allows: n / (n + 1)) it is split-conformal: it contains a new exchangeable
        row with at least this probability, each output by itself. In between it is interpolated. Beyond it is
        extrapolated, with a warning. Without such rows it lies between quantiles and promises nothing.
        """
        features = self._features(X)
        if not self.pipeline_.has_closed_form():
            ends = self._draw(features, coverage=coverage).interval
            assert ends is not None
            return self._shaped(np.moveaxis(ends, 0, 1))
        grid = self.pipeline_.calibration_for(num_inference_steps=1).interval
        if grid is None:
            return self._shaped(self._exactly(features, lambda law: law.interval(coverage)))
        return self._shaped(np.moveaxis(calibrated_ends(*self._moments(features), grid, coverage), 0, 1))

    def predict_distribution(self, X: Any) -> PredictiveDistribution:
        """The predictive distribution of one denoising step in closed form, without a draw.

        It has `mean`, `std`, `cdf`, `pdf`, `log_prob`, `quantile` (`ppf`), `interval`, `crps` and `sample`, in units of
        y. About 5 kB per row are held; the other methods work in blocks. Draws in several steps have another
        distribution; how far off it is depends on the model, and their CRPS tells.
        """
        return self.pipeline_.predictive_distribution(self._features(X), is_flat=self._is_flat)

    def crps(self, X: Any, y: ArrayLike, sample_weight: ArrayLike | None = None) -> float:
        """Mean CRPS of the predictions for rows X where y was true, over rows and outputs: the lower the better.

        `score` is R^2 of the means, as everywhere in sklearn. Of several steps it is the fair CRPS of the draws.
        """
        features, truth = self._features(X), np.asarray(y, dtype=np.float64)
        truth = truth.reshape(len(truth), -1)
        if self.pipeline_.has_closed_form():
            scores = self._exactly(features, PredictiveDistribution.crps, truth)
        else:
            scores = fair_crps(torch.from_numpy(self._draw(features).samples), torch.from_numpy(truth)).numpy()
        return float(np.average(scores.mean(1), weights=None if sample_weight is None else np.asarray(sample_weight)))

    def report(self, X: Any, y: ArrayLike, **options: Any) -> TableReport:
        """How good the model is on rows it has not seen: calibration, intervals, importance; `save` writes a page.

        `options` are those of `marigold_uq.tabular.report.make_report`.
        """
        check_is_fitted(self)
        return make_report(self, X, y, **options)

    def predict_uncertainty(self, X: Any) -> TabularUncertainty:
        """Total uncertainty of each row, and where it comes from; all are standard deviations."""
        check_is_fitted(self)
        output = self._draw(self._features(X), output_epistemic=self.pipeline_.scheduler.family.has_spread)
        parts = (output.between_models, output.within_models, output.epistemic)
        return TabularUncertainty(
            self._shaped(output.uncertainty), *(None if part is None else self._shaped(part) for part in parts)
        )

    def predict_novelty(self, X: Any) -> Novelty:
        """How unlike the training rows each row is: `p_value`, `is_novel` and the signs behind them.

        It compares what the models say about the row with what they say about the rows set aside in `fit`, so it needs
        `calibration_fraction` and 40 such rows. A row in an unusual place where the models agree goes unnoticed.
        """
        check_is_fitted(self)
        if self.pipeline_.calibration_for().novelty is None:
            raise ValueError(
                f"there is nothing to compare with: set calibration_fraction so that {_ROWS_FOR_NOVELTY} rows are set "
                "aside in fit, or run pipeline_.fit_novelty(...) on other rows like those"
            )
        novelty = self._draw(self._features(X), output_novelty=True).novelty
        assert novelty is not None
        return novelty

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the pipeline with everything that was chosen or calibrated, and what this class knows beside it."""
        check_is_fitted(self)
        self.pipeline_.save_pretrained(folder)
        write_json(Path(folder) / _OWN_FILE, self._own_facts(), overwrite=True)

    def push_to_hub(self, repo_id: str, *, token: str | None = None, private: bool | None = None) -> str:
        """Upload what `save_pretrained` writes, with a model card; returns the address of the commit."""
        check_repo_id(repo_id)
        with TemporaryDirectory() as folder:
            model = Path(folder) / repo_id.split("/")[-1]
            self.save_pretrained(model)
            return push_to_hub(model, repo_id, token=token, private=private)

    @classmethod
    def from_pretrained(cls, name: str | Path, **options: Any) -> Self:
        """A fitted model from a folder or a name on the Hub; `options` are those of the pipeline's `from_pretrained`.

        A folder with a pipeline alone will do: names of features are then known where it was trained on a DataFrame.
        """
        pipeline = TabularRegressionPipeline.from_pretrained(name, **options)
        facts = _read_own_facts(name, options)
        details = facts.get("params", {}).pop("training_options", None)
        model = cls(**facts.get("params", {}), training_options=None if details is None else TrainingOptions(**details))
        model._restore(pipeline, facts)
        return model

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        tags.input_tags.allow_nan = True
        return tags

    def _own_facts(self) -> dict[str, Any]:
        """What `from_pretrained` needs beside the pipeline; a random state that is no seed is left out."""
        params = self.get_params(deep=False)
        params["training_options"] = None if self.training_options is None else vars(self.training_options)
        if not isinstance(self.random_state, Integral | None):
            params["random_state"] = None
        facts = {"params": params, "seed": self.seed_, "is_flat": self._is_flat, "epochs": self.n_epochs_}
        return {**facts, "recipe": self.recipe_, "n_features": self.n_features_in_}

    def _restore(self, pipeline: TabularRegressionPipeline, facts: Mapping[str, Any]) -> None:
        """The attributes that `fit` would have left."""
        columns = pipeline.config.columns
        self.pipeline_, self.seed_ = pipeline, int(facts.get("seed", 0))
        self._columns = TabularEncoder.restore(columns, pipeline.network.config.num_features)
        self._is_flat = bool(facts.get("is_flat", pipeline.network.config.num_targets == 1))
        self.n_features_in_ = int(facts.get("n_features", pipeline.network.config.num_features))
        if self._columns.has_names:
            self.feature_names_in_ = np.array([column.name for column in self._columns.columns], dtype=object)
        self.n_epochs_ = list(facts.get("epochs", []))
        self.selection_, self.steps_choice_ = None, None
        if "recipe" in facts:
            stored: Any = facts["recipe"].items()
            fields: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in stored}
            self.recipe_ = Recipe(**fields)
        pipeline.set_progress_bar_config(disable=not self.verbose)

    def _resolve_chosen(self, num_rows: int, family: str) -> Recipe:
        """As if the family had been named, but for what was given up."""
        kept = {name: getattr(self.recipe_, name) for name in ("calibration_fraction", "kappa_from_validation")}
        return replace(self._resolve(num_rows, noise_family=family), **kept)

    def _resolve(self, num_rows: int, **known: Any) -> Recipe:
        if not isinstance(self.training_options, TrainingOptions | None):
            raise TypeError(f"training_options must be TrainingOptions(...) or None; got {self.training_options!r}")
        names = [name for name in self.get_params(deep=False) if name in Recipe.__dataclass_fields__]
        changes = {**{name: getattr(self, name) for name in names}, **known}
        chooses_steps = self.num_inference_steps == AUTO
        recipe = resolve_recipe(self.preset, num_rows, options=self.training_options, **changes)
        if chooses_steps and not recipe.calibration_fraction and (recipe.patience is None or recipe.baseline == "mlp"):
            raise ValueError(
                "num_inference_steps='auto' needs rows that the model has not seen: set calibration_fraction, or take "
                f"early stopping with another baseline than 'mlp'; got baseline={recipe.baseline!r}, "
                f"patience={recipe.patience}, calibration_fraction={recipe.calibration_fraction:g}"
            )
        return recipe

    @property
    def _wants_kappa(self) -> bool:
        """Whether kappa from validation rows was asked for, not only the preset's choice."""
        return bool(self.training_options and self.training_options.kappa_from_validation)

    def _give_up_calibration(self) -> None:
        """Draws of few values often all agree: a spread of 0 can be neither stretched nor divided by."""
        if self.recipe_.calibration_fraction or self._wants_kappa:
            warnings.warn(
                "a target takes few values: no rows are set aside for calibration, and there is no kappa"
                " (snap=False changes that)",
                stacklevel=3,
            )
        self.recipe_ = replace(self.recipe_, calibration_fraction=0.0, kappa_from_validation=False)

    def _check_training_data(self, X: Any, y: ArrayLike) -> tuple[Array, NDArray[Any]]:
        if is_frame(X):
            validate_data(self, X, skip_check_array=True, reset=True)
        else:
            X = validate_data(self, X, dtype=np.float64, ensure_all_finite="allow-nan")
        self._columns = TabularEncoder.fit(X)
        checks = {"dtype": np.float64, "multi_output": True, "y_numeric": True, "ensure_min_samples": 2}
        encoded, targets = check_X_y(self._columns.transform(X), y, **checks)
        return encoded, targets

    def _features(self, X: Any) -> Array:
        check_is_fitted(self)
        if is_frame(X):
            validate_data(self, X, skip_check_array=True, reset=False)
        else:
            X = validate_data(self, X, dtype=np.float64, reset=False, ensure_all_finite="allow-nan")
        return self._columns.transform(X)

    def _draw(self, features: Array, ensemble_size: int | None = None, **options: Any) -> TabularOutput:
        count = self.ensemble_size if ensemble_size is None else ensemble_size
        if not isinstance(count, Integral) or count < (2 if ensemble_size is None else 1):
            raise ValueError(f"ensemble_size must be an integer of at least 2 (1 in `sample`); got {count!r}")
        return self.pipeline_(features, int(count), generator=self._generator(), **options)

    def _exactly(self, features: Array, part: Callable[..., Array], *targets: Array) -> Array:
        """Something of the distribution of each row (with its targets), in blocks of rows, so that memory is bounded.

        Args:
            features: (rows, F).
            part: Distribution of a block, and its rows of `targets` -> (rows, ..., C).
            targets: (rows, C) each.
        """
        starts = range(0, max(1, len(features)), _BLOCK)
        found = []
        for i in self.pipeline_.progress_bar(starts) if len(starts) > 1 else starts:
            law = self.pipeline_.predictive_distribution(features[i : i + _BLOCK])
            found.append(part(law, *(target[i : i + _BLOCK] for target in targets)))
        return np.concatenate(found)

    def _moments(self, features: Array) -> tuple[Array, Array]:
        """Mean and standard deviation, (rows, C) each."""
        if self.pipeline_.has_closed_form():
            both = self._exactly(features, lambda law: np.stack([law.mean, law.std], 1))  # (rows, 2, C)
            return both[:, 0], both[:, 1]
        output = self._draw(features)
        return output.prediction, output.uncertainty

    def _generator(self) -> torch.Generator:
        """The same stream for every call."""
        return torch.Generator().manual_seed(self.seed_)

    def _pool(self, table: TrainingRows, validation: ValidationRows) -> None:
        """Pool the models with other distributions of the baseline's errors, by what they say of unseen rows."""
        rows = self._out_of_fold(table, validation)
        if len(rows.weights) >= _ROWS_FOR_POOL:
            pool = fit_pool(rows, member_seed(self.seed_, 1) % 2**32)
            self.pipeline_.register_modules(residuals=pool)

    def _shared_values(self, targets: Array) -> list[float]:
        """Values with a probability of their own, where predictions have a closed form that can tell it."""
        return shared_values(targets) if self.recipe_.snap and self.recipe_.one_step else []

    def _fit_shared(self, table: TrainingRows, values: list[float]) -> None:
        """Add the probabilities of single values; all else was trained on the other rows."""
        network = self.pipeline_.network
        mean, scale = (part[0].numpy() for part in (network.feature_mean, network.feature_scale))
        is_value = table.targets == np.array(values)  # (n, V)
        seed = member_seed(self.seed_, 2) % 2**32
        forest = fit_values((table.features - mean) / scale, is_value, table.weights, seed)
        self.pipeline_.register_modules(shared=forest)
        self.pipeline_.register_to_config(shared_values=values)

    def _out_of_fold(self, table: TrainingRows, validation: ValidationRows) -> OutOfFold:
        """Validation rows of all models, each once, at most so many as a pool needs."""
        most = max(1, _MOST_ROWS_FOR_POOL // self.recipe_.num_models)
        seen, parts = np.zeros(len(table.targets), dtype=bool), list[OutOfFold]()
        for pipeline, index, given in self._by_model(table, validation)[1]:
            new = np.flatnonzero(~seen[index])[:most]
            seen[index[new]] = True
            if len(new) and given is not None:
                known = given[0][new], None if given[1] is None else given[1][new]
                parts.append(_unseen_rows(pipeline, table, index[new], known))
        return OutOfFold.join(parts)

    def _calibrate(self, table: TrainingRows) -> None:
        """kappa by the CRPS, and intervals; mean -+ q std does not change with kappa, so the rows serve both."""
        if self.pipeline_.shared is None:  # a single value cannot be stretched
            self._choose_kappa(self._representatives(table.features), table.targets, table.weights)
        parts = (*self._moments(table.features), table.targets)
        scores = residual_ratio(*(torch.from_numpy(part) for part in parts))  # (rows, C)
        record = Calibration(
            kappa=self.pipeline_.calibration_for().kappa,
            interval=interval_grid_rows(scores),
            num_inference_steps=self.recipe_.num_inference_steps or self.recipe_.num_timesteps,
            ensemble_size=None if self.pipeline_.has_closed_form() else self.ensemble_size,
            num_calibration=len(scores),
            note="rows set aside in fit",
        )
        self.pipeline_.calibrate(record)
        if len(scores) >= _ROWS_FOR_NOVELTY and self.pipeline_.scheduler.family.has_spread and self.ensemble_size > 1:
            self.pipeline_.fit_novelty(table.features, ensemble_size=self.ensemble_size, generator=self._generator())

    def _representatives(self, features: Array) -> Array:
        """What kappa is chosen for, (n, rows, C): quantiles at even levels in closed form, else draws."""
        if not self.pipeline_.has_closed_form():
            return self.pipeline_(features, self._draws_for_kappa, generator=self._generator()).samples
        levels = (np.arange(_QUANTILES_FOR_KAPPA) + 0.5) / _QUANTILES_FOR_KAPPA
        return np.moveaxis(self._exactly(features, lambda law: law.quantile(levels)), 1, 0)

    def _kappa_from_validation(self, table: TrainingRows, validation: ValidationRows) -> None:
        """kappa from the validation rows of all models, around out-of-fold predictions of the baseline.

        Neither was fitted on these rows; the model's stopping, the experts' weights, the process's hyper-parameters
        and the scales of the columns did use them.
        """
        parts = self._by_model(table, validation)[1]
        samples = [self._draw_part(table, part, self._draws_for_kappa) for part in parts]
        rows = torch.cat(validation.rows).numpy()
        self._choose_kappa(np.concatenate(samples, 1), table.targets[rows], table.weights[rows])

    def _by_model(self, table: TrainingRows, validation: ValidationRows) -> tuple[TrainingRows, list[_Part]]:
        """Each model with its own validation rows and what the baseline says about them out-of-fold."""
        parts: list[_Part] = []
        for model, index in enumerate(validation.rows):
            extras = None if validation.extras is None else validation.extras[model]
            parts.append((self.pipeline_.select(model), index.numpy(), (validation.predictions[model], extras)))
        return table, parts

    def _draw_part(self, table: TrainingRows, part: _Part, ensemble_size: int, steps: int | None = None) -> Array:
        """(ensemble_size, rows, C)."""
        pipeline, rows, given = part
        return pipeline(
            table.features[rows],
            ensemble_size,
            num_inference_steps=steps,
            generator=self._generator(),
            baseline_output=given,
        ).samples

    def _choose_steps(self, table: TrainingRows, parts: list[_Part]) -> None:
        """Store the fewest steps within one standard error of the best CRPS, targets in units of their deviation."""
        spread = table.targets.std(0)
        unit = np.where(spread > 0, spread, 1.0)
        rows = np.concatenate([index for _, index, _ in parts])
        target = torch.from_numpy(table.targets[rows] / unit)

        def scores(steps: int) -> torch.Tensor:
            draws = np.concatenate([self._draw_part(table, part, self.ensemble_size, steps) for part in parts], 1)
            return unit_means(sample_unit_scores(torch.from_numpy(draws / unit), target, "crps"), rows.tolist())

        own = self.recipe_.num_inference_steps or self.recipe_.num_timesteps
        last = self.recipe_.num_timesteps
        self.steps_choice_ = choose_steps([min(number, last) for number in (*self.recipe_.steps, own)], scores)
        chosen = self.steps_choice_.num_inference_steps
        self.recipe_ = replace(self.recipe_, num_inference_steps=chosen)
        self.pipeline_.register_to_config(default_denoising_steps=chosen)

    @property
    def _draws_for_kappa(self) -> int:
        """As many as are drawn once there is a kappa: with fewer it would also make up for their noisy mean."""
        return max(self.ensemble_size, DRAWS_FOR_KAPPA * self.recipe_.num_models)

    def _choose_kappa(self, samples: Array, targets: Array, weights: Array) -> None:
        """Store the factors of best CRPS, one per target, for draws (n, rows, C)."""
        if len(targets) < _ROWS_FOR_KAPPA:
            if self._wants_kappa:
                warnings.warn(
                    f"there is no kappa: it needs {_ROWS_FOR_KAPPA} held-out rows, there are {len(targets)}",
                    stacklevel=4,
                )
            return
        draws, truth, weight = torch.from_numpy(samples), torch.from_numpy(targets), torch.from_numpy(weights)
        kappa = tuple(choose_kappa(draws[..., c], truth[:, c], weights=weight).kappa for c in range(truth.shape[1]))
        steps = self.recipe_.num_inference_steps or self.recipe_.num_timesteps
        note = "validation rows of training" if self.recipe_.kappa_from_validation else "rows set aside in fit"
        self.pipeline_.calibrate(Calibration(kappa=kappa, num_inference_steps=steps, note=note))

    def _shaped(self, values: Array) -> Array:
        """Without the axis of outputs if y had none."""
        return values[..., 0] if self._is_flat else values


def _without_values(table: TrainingRows, values: list[float]) -> TrainingRows:
    """The rows whose target is none of these values."""
    if not values:
        return table
    other = ~np.isin(table.targets[:, 0], values)
    return TrainingRows(table.features[other], table.targets[other], table.weights[other])


def _unseen_rows(
    pipeline: TabularRegressionPipeline, table: TrainingRows, rows: NDArray[np.int64], given: BaselineOutput
) -> OutOfFold:
    """What one model says of rows that it has not seen, in units of the standardised target."""
    network, features = pipeline.network, table.features[rows]
    unit, mean = network.target_scale[0], network.target_mean[0]
    baseline = given[0].double()
    law = pipeline.one_step_distribution(features, baseline_output=given)
    head = MixtureDistribution.pool([law.to(torch.float64)]).affine(1 / unit, -(mean / unit + baseline))
    standardised = (torch.from_numpy(features) - network.feature_mean[0]) / network.feature_scale[0]
    inputs = torch.cat([standardised, *([] if given[1] is None else [given[1].double()]), baseline], 1)
    residuals = (torch.from_numpy(table.targets[rows]) - mean) / unit - baseline
    return OutOfFold(inputs, residuals, torch.from_numpy(table.weights[rows]), head)


def _read_own_facts(name: str | Path, options: Mapping[str, Any]) -> dict[str, Any]:
    """What `save_pretrained` wrote beside the pipeline; empty where it was saved without."""
    path = Path(name) / _OWN_FILE
    if not Path(name).is_dir():
        chosen = {key: options[key] for key in ("cache_dir", "revision", "token", "local_files_only") if key in options}
        try:
            path = Path(hf_hub_download(str(name), _OWN_FILE, **chosen))
        except EntryNotFoundError:
            return {}
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def _in_dtype(model: _AnyStack, dtype: torch.dtype) -> _AnyStack:
    """Parameters in `dtype`; statistics are buffers and stay in float64."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def _check_scale(values: NDArray[Any], name: str) -> None:
    """Refuse numbers whose squares overflow, or whose differences from the mean vanish when they are squared."""
    columns = np.asarray(values, dtype=np.float64).reshape(len(values), -1)
    largest = np.abs(columns).max(0, initial=0.0)
    spread = columns.max(0, initial=-np.inf) - columns.min(0, initial=np.inf)
    bad = np.flatnonzero((largest > _LARGEST) | ((spread > 0) & (spread < _SMALLEST)))
    if len(bad):
        number = int(bad[0])
        raise ValueError(
            f"column {number} of {name} reaches {largest[number]:.3g} with a spread of {spread[number]:.3g}; squares "
            f"of numbers above {_LARGEST:g} and of differences below {_SMALLEST:g} are lost: choose another unit"
        )


def _check_weights(sample_weight: ArrayLike | None, features: Array) -> Array:
    weights: Array = _check_sample_weight(sample_weight, features, dtype=np.float64, ensure_non_negative=True)
    if int((weights > _LEAST_WEIGHT * weights.max()).sum()) < 2:
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
