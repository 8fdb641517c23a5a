"""How a model for a table is made: the published recipe, ours, and what users may change in them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from numbers import Integral
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from marigold_uq.distributions import family_class
from marigold_uq.schedulers import FRAMEWORKS, UNIT_DATA, DistributionalScheduler
from marigold_uq.training.selection import AUTO

TABLE_FAMILIES = ("point", "gaussian", "mixture", "sample")
"""Distributions of single numbers; the other families add correlations between coordinates."""

PRESETS = ("default", "paper")

_ROWS_PER_VALUE = 20
"""A target takes few values if each is seen so often on average: new rows then hold no new value, as a rule."""


_SHARE_OF_VALUE, _ROWS_BESIDE_VALUES = 0.05, 50
"""What makes a value one that gets a probability of its own (`shared_values`)."""


@dataclass(frozen=True)
class TrainingOptions:
    """Details of training, for `DiffusionRegressor(training_options=...)`; None takes the preset's choice.

    Args:
        num_components: Components of the mixture.
        num_draws: Draws per row in training of the family "sample".
        baseline_epochs: At most this many epochs, trees or steps of each part of the baseline.
        dropout: Of the MLP baseline.
        batch_size, learning_rate: Of the denoiser.
        early_stopping: Stop each model on an inner split of the training rows; False trains `max_epochs`.
        patience: Epochs without progress.
        framework: "ddim", "edm" or "flow" (matching).
        prediction_type: What the distribution describes under ddim: "epsilon", "v_prediction" or "sample" (x_0).
        num_timesteps: Of the diffusion; under edm and flow the noise levels that the network has gates of its own for.
        kappa_from_validation: Choose kappa on the rows that each model stopped on, around out-of-fold predictions of
            the baseline (20 rows or more), instead of `pool`; not where a target takes few values.
        snap: Whether the distribution of a target that takes few values moves to the nearest of them, and values that
            many rows share (a single target's zeros, say) get probabilities of their own.
        pool: Whether a quantile forest and a kernel of out-of-fold errors are pooled with the models' distribution, by
            weights of least CRPS; for one denoising step of a family with a density. The preset "default" does so.
        candidates: Families that noise_family "auto" compares; None takes point, gaussian and mixture.
        steps: Numbers of steps that num_inference_steps "auto" compares; None takes 1, 2, 5 and 10.
    """

    num_components: int | None = None
    num_draws: int | None = None
    baseline_epochs: int | None = None
    dropout: float | None = None
    batch_size: int | None = None
    learning_rate: float | None = None
    early_stopping: bool | None = None
    patience: int | None = None
    framework: str | None = None
    prediction_type: str | None = None
    num_timesteps: int | None = None
    kappa_from_validation: bool | None = None
    snap: bool | None = None
    pool: bool | None = None
    candidates: list[str] | None = None
    steps: list[int] | None = None


@dataclass(frozen=True)
class Recipe:
    """All choices that turn rows into a model."""

    noise_family: str = "gaussian"
    num_components: int = 3
    num_draws: int = 4
    """Draws per row in training of the family "sample"."""
    num_models: int = 1
    framework: str = "ddim"
    prediction_type: Literal["epsilon", "sample", "v_prediction"] = "epsilon"
    num_timesteps: int = 50
    num_inference_steps: int | None = None
    """Steps of the sampler; None takes all timesteps."""
    baseline: Literal["mlp", "trees", "experts", "none"] = "mlp"
    dropout: float = 0.1
    baseline_epochs: int = 1000
    """At most this many epochs, trees or steps of each part of the baseline."""
    batch_size: int = 32
    max_epochs: int = 5000
    learning_rate: float = 1e-3
    ema_decay: float | None = 0.995
    patience: int | None = None
    """Epochs without progress on the inner validation rows after which a model stops; None: no validation rows."""
    validation_fraction: float = 0.15
    validation_folds: bool = False
    """Whether the validation rows of the models are different folds of the table instead of random shares."""
    calibration_fraction: float = 0.0
    kappa_from_validation: bool = False
    """Whether kappa is chosen on each model's predictions for its own validation rows (`resolve_recipe`)."""
    one_step: bool = False
    """Whether the models learn the one timestep from which a single denoising step starts, and no other: the predictive
    distribution is then known in closed form (`resolve_recipe`)."""
    pool: bool = False
    """Whether other distributions of the baseline's out-of-fold errors are pooled with the models' in one step."""
    scale_residual: bool = False
    """Whether the diffused residual is scaled to unit variance; the paper leaves it in units of the target."""
    snap: bool = False
    """Whether draws of a target that takes few values move to the nearest of them (`known_values`)."""
    candidates: Sequence[str] = ("point", "gaussian", "mixture")
    """Families that noise_family "auto" compares."""
    steps: Sequence[int] = (1, 2, 5, 10)
    """Numbers of steps that num_inference_steps "auto" compares."""

    def __post_init__(self) -> None:
        for family in {self.noise_family, *self.candidates} - {*TABLE_FAMILIES, AUTO}:
            family_class(family)  # an unknown name lists all the known ones
            raise ValueError(f"noise_family of a table must be one of {', '.join(TABLE_FAMILIES)}; got {family!r}")
        if AUTO in self.candidates or len(set(self.candidates)) < 2:
            raise ValueError(f"candidates must name at least 2 families; got {list(self.candidates)}")
        if not self.steps or not all(isinstance(number, Integral) and number >= 1 for number in self.steps):
            raise ValueError(f"steps must be integers of at least 1; got {list(self.steps)}")
        if self.framework not in FRAMEWORKS:
            raise ValueError(f"framework must be one of {', '.join(FRAMEWORKS)}; got {self.framework!r}")
        if self.baseline not in ("mlp", "trees", "experts", "none"):
            raise ValueError(f"baseline must be 'mlp', 'trees', 'experts' or 'none'; got {self.baseline!r}")
        counts = ("num_components", "num_models", "num_timesteps", "batch_size", "max_epochs", "baseline_epochs")
        for name in counts:
            if not (isinstance(getattr(self, name), Integral) and getattr(self, name) >= 1):
                raise ValueError(f"{name} must be an integer of at least 1; got {getattr(self, name)!r}")
        for name in ("validation_fraction", "calibration_fraction"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must be a share of the rows within [0, 1); got {getattr(self, name)!r}")
        steps = self.num_inference_steps
        if steps is not None and not (isinstance(steps, Integral) and 1 <= steps <= self.num_timesteps):
            raise ValueError(
                f"num_inference_steps must be an integer from 1 to num_timesteps={self.num_timesteps}; got {steps!r}"
            )
        if not self.learning_rate > 0:
            raise ValueError(f"learning_rate must be positive; got {self.learning_rate!r}")

    def scheduler(self) -> DistributionalScheduler:
        """Of the framework, eta = 1; for ddim linear betas 0.001..0.35 and no clipping."""
        options: dict[str, Any] = {
            "num_train_timesteps": self.num_timesteps,
            "noise_family": self.noise_family,
            "num_components": self.num_components if self.noise_family == "mixture" else 1,
            "eta": 1.0,
        }
        if self.framework == "ddim":
            options |= {
                "beta_start": 0.001,
                "beta_end": 0.35,
                "clip_sample": False,
                "prediction_type": self.prediction_type,
                "timestep_spacing": "trailing",
            }
        scheduler: DistributionalScheduler = FRAMEWORKS[self.framework](**UNIT_DATA[self.framework], **options)
        return scheduler


@dataclass(frozen=True)
class _PaperSettings:
    """What the paper sets per data set."""

    batch_size: int
    max_epochs: int
    dropout: float


PAPER_SETTINGS = {
    "concrete": _PaperSettings(32, 5000, 0.1),
    "energy": _PaperSettings(32, 5000, 0.05),
    "kin8nm": _PaperSettings(64, 1000, 0.1),
    "naval": _PaperSettings(64, 5000, 0.0),
    "power": _PaperSettings(64, 5000, 0.1),
    "protein": _PaperSettings(256, 2000, 0.1),
    "wine": _PaperSettings(32, 5000, 0.2),
    "yacht": _PaperSettings(32, 10000, 0.2),
}
"""Batch size, epochs and dropout of the baseline, from the paper and its published code."""


def paper_recipe(num_rows: int, dataset: str | None = None) -> Recipe:
    """The published recipe: of one of its eight data sets, or for any other table by its number of rows."""
    if dataset is not None:
        if dataset not in PAPER_SETTINGS:
            raise ValueError(f"the paper has no data set {dataset!r}; it has {', '.join(PAPER_SETTINGS)}")
        settings = PAPER_SETTINGS[dataset]
    elif num_rows < 2000:
        settings = _PaperSettings(32, 5000, 0.1)
    else:
        settings = _PaperSettings(64, 5000, 0.1) if num_rows < 20000 else _PaperSettings(256, 2000, 0.1)
    return Recipe(batch_size=settings.batch_size, max_epochs=settings.max_epochs, dropout=settings.dropout)


def default_recipe(num_rows: int) -> Recipe:
    """Ours: experts out-of-fold, an ensemble whose models stop early on different folds, targets of few values kept.

    One denoising step, so that the distribution is known in closed form; 1500 or 3000 training steps at most, in
    batches that grow with the table.
    """
    batch_size = 64 if num_rows < 2000 else 128 if num_rows < 20000 else 256
    steps_per_epoch = max(1, num_rows // batch_size)
    max_epochs = min(400, max(10, (1500 if num_rows < 2000 else 3000) // steps_per_epoch))
    return Recipe(
        noise_family="mixture",
        num_models=5,
        prediction_type="v_prediction",  # epsilon multiplies the head's error by 1 / sqrt(abar_T), about 200
        num_inference_steps=10,  # where one step does not do, see `_in_one_step`
        one_step=True,
        pool=True,
        baseline="experts",
        baseline_epochs=1000,
        batch_size=batch_size,
        max_epochs=max_epochs,
        learning_rate=2e-3,
        ema_decay=0.99,
        patience=max(10, max_epochs // 8) if num_rows >= 40 else None,
        validation_folds=True,
        scale_residual=True,
        snap=True,
    )


def resolve_recipe(preset: str, num_rows: int, *, options: TrainingOptions | None = None, **changes: Any) -> Recipe:
    """The preset's recipe for a table of `num_rows` rows; changes that are None leave the preset's choice."""
    if preset not in PRESETS:
        raise ValueError(f"preset must be one of {', '.join(PRESETS)}; got {preset!r}")
    recipe = paper_recipe(num_rows) if preset == "paper" else default_recipe(num_rows)
    details = vars(options or TrainingOptions())
    given = {
        name: value.item() if isinstance(value, np.generic) else value  # numpy's numbers cannot be saved as JSON
        for name, value in {**changes, **details}.items()
        if value is not None
    }
    framework, output = given.get("framework", "ddim"), given.get("prediction_type")
    if framework != "ddim" and output is not None:
        raise ValueError(f"prediction_type={output!r} is ddim's; framework {framework!r} has one of its own")
    chooses_steps = given.get("num_inference_steps") == AUTO
    if chooses_steps:
        del given["num_inference_steps"]
    early_stopping = given.pop("early_stopping", None)
    if early_stopping is False and "patience" in given:
        raise ValueError(f"patience={given['patience']} needs early stopping, but early_stopping is False")
    if given.get("kappa_from_validation"):
        given.setdefault("pool", False)  # both make up for the models' spread on the same rows
    unknown = set(given) - {field.name for field in fields(Recipe)}
    if unknown:
        raise ValueError(f"a recipe has no {', '.join(sorted(unknown))}")
    changed = replace(recipe, **{"num_inference_steps": None, **given})
    if "num_inference_steps" not in given and recipe.num_inference_steps is not None:
        changed = replace(changed, num_inference_steps=min(recipe.num_inference_steps, changed.num_timesteps))
    changed = _in_one_step(changed, given, chooses_steps)
    if early_stopping is False:
        changed = replace(changed, patience=None)
    elif early_stopping and changed.patience is None:
        changed = replace(changed, patience=max(10, changed.max_epochs // 8))
    _check_kappa_rows(changed)
    return changed


def _in_one_step(recipe: Recipe, given: Mapping[str, Any], chooses_steps: bool) -> Recipe:
    """One step where the recipe asks for it and nothing speaks against it; else as many as given, and more training.

    One step of a family without a density has no closed form, and steps that are compared must be trained.
    """
    has_density = recipe.noise_family != AUTO and family_class(recipe.noise_family).has_density
    if recipe.one_step and has_density and not chooses_steps and given.get("num_inference_steps", 1) == 1:
        return replace(recipe, num_inference_steps=1)
    if recipe.one_step and "max_epochs" not in given:
        recipe = replace(recipe, max_epochs=3 * recipe.max_epochs)
    return replace(recipe, one_step=False)


def _check_kappa_rows(recipe: Recipe) -> None:
    """kappa from validation rows needs such rows, and ones that the baseline has not seen."""
    obstacle = None
    if recipe.patience is None:
        obstacle = "early stopping is off, so there are no validation rows"
    elif recipe.baseline == "mlp":
        obstacle = "the MLP baseline is fitted on all rows, so its errors on validation rows are too small"
    elif recipe.calibration_fraction:
        obstacle = "calibration_fraction sets rows aside for kappa"
    if obstacle is not None and recipe.kappa_from_validation:
        raise ValueError(f"kappa_from_validation cannot be True: {obstacle}")


def shared_values(targets: NDArray[np.float64]) -> list[float]:
    """Values of a single target (n, 1) that many rows share, and others do not: a share of 5 % each and 20 rows."""
    if targets.shape[1] != 1:
        return []
    values, counts = np.unique(targets, return_counts=True)
    many = counts >= max(_ROWS_PER_VALUE, _SHARE_OF_VALUE * len(targets))
    left = int(counts[~many].sum())
    return values[many].tolist() if left >= _ROWS_BESIDE_VALUES else []


def known_values(targets: NDArray[np.float64]) -> list[list[float] | None] | None:
    """For each column of (n, C) its values, rising, if there are few, else None; None if no column has few."""
    values = [np.unique(column) for column in targets.T]
    few = [v.tolist() if len(v) * _ROWS_PER_VALUE <= len(targets) else None for v in values]
    return few if any(v is not None for v in few) else None
