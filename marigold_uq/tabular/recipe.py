"""How a model for a table is made: the published recipe, and ours; each a function of the training data alone."""

from dataclasses import dataclass, fields, replace
from numbers import Integral
from typing import Any, Literal

import numpy as np

from marigold_uq.distributions import family_class
from marigold_uq.schedulers.scheduling_distributional_ddim import DistributionalDDIMScheduler

FAMILIES = ("point", "gaussian", "mixture", "sample")
"""Laws of single numbers; families with correlations between coordinates have nothing to say about one number."""

PRESETS = ("default", "paper")

FEW_ROWS = 500
"""Below, kappa is chosen on validation rows (docs/tabular.md says on what this limit rests)."""


@dataclass(frozen=True)
class Recipe:
    """All choices that turn rows into a model."""

    noise_family: str = "gaussian"
    num_components: int = 3
    score: str | None = None
    """A name of `marigold_uq.scores.SCORES`; None takes the family's own: CRPS, energy score or squared error."""
    num_draws: int = 4
    """Draws per row in training of the family "sample"."""
    num_members: int = 1
    prediction_type: Literal["epsilon", "sample", "v_prediction"] = "epsilon"
    num_timesteps: int = 50
    num_inference_steps: int | None = None
    """Steps of the sampler; None takes all timesteps."""
    baseline: Literal["mlp", "trees", "experts", "none"] = "mlp"
    dropout: float = 0.1
    baseline_epochs: int = 1000
    """At most so many epochs, trees or steps of each part of the baseline."""
    batch_size: int = 32
    max_epochs: int = 5000
    learning_rate: float = 1e-3
    ema_decay: float | None = 0.995
    patience: int | None = None
    """Epochs without progress on the inner validation rows after which a member stops; None: no validation rows."""
    validation_fraction: float = 0.15
    fold_members: bool = False
    """Whether the validation rows of the members are different folds of the table instead of random shares."""
    calibration_fraction: float = 0.0
    kappa_from_validation: bool = False
    """Whether kappa is chosen on what each member says about its own validation rows (`with_kappa_rows`)."""
    scale_residual: bool = False
    """Whether the diffused residual is scaled to unit variance; the paper leaves it in units of the target."""
    snap: bool = False
    """Whether draws of a target that takes few values go to the nearest of them (`known_values`)."""

    def __post_init__(self) -> None:
        if self.noise_family not in FAMILIES:
            family_class(self.noise_family)  # an unknown name lists all the known ones
            raise ValueError(f"noise_family of a table is one of {', '.join(FAMILIES)}; got {self.noise_family!r}")
        if self.baseline not in ("mlp", "trees", "experts", "none"):
            raise ValueError(f"baseline is 'mlp', 'trees', 'experts' or 'none'; got {self.baseline!r}")
        counts = ("num_components", "num_members", "num_timesteps", "batch_size", "max_epochs", "baseline_epochs")
        for name in counts:
            if not (isinstance(getattr(self, name), Integral) and getattr(self, name) >= 1):
                raise ValueError(f"{name} is an integer of at least 1; got {getattr(self, name)!r}")
        for name in ("validation_fraction", "calibration_fraction"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} is a share of the rows within [0, 1); got {getattr(self, name)!r}")
        steps = self.num_inference_steps
        if steps is not None and not (isinstance(steps, Integral) and 1 <= steps <= self.num_timesteps):
            raise ValueError(
                f"num_inference_steps is an integer from 1 to num_timesteps={self.num_timesteps}; got {steps!r}"
            )
        if not self.learning_rate > 0:
            raise ValueError(f"learning_rate is positive; got {self.learning_rate!r}")

    def scheduler(self) -> DistributionalDDIMScheduler:
        """T timesteps, linear betas 0.001..0.35, eta = 1, no clipping."""
        return DistributionalDDIMScheduler(
            num_train_timesteps=self.num_timesteps,
            beta_start=0.001,
            beta_end=0.35,
            clip_sample=False,
            prediction_type=self.prediction_type,
            timestep_spacing="trailing",
            noise_family=self.noise_family,
            num_components=self.num_components if self.noise_family == "mixture" else 1,
            eta=1.0,
        )


@dataclass(frozen=True)
class PaperSettings:
    """What the paper sets per data set."""

    batch_size: int
    max_epochs: int
    dropout: float


PAPER_SETTINGS = {
    "concrete": PaperSettings(32, 5000, 0.1),
    "energy": PaperSettings(32, 5000, 0.05),
    "kin8nm": PaperSettings(64, 1000, 0.1),
    "naval": PaperSettings(64, 5000, 0.0),
    "power": PaperSettings(64, 5000, 0.1),
    "protein": PaperSettings(256, 2000, 0.1),
    "wine": PaperSettings(32, 5000, 0.2),
    "yacht": PaperSettings(32, 10000, 0.2),
}
"""Batch size, epochs and dropout of the baseline, from the paper and its published code."""


def paper_recipe(num_rows: int, dataset: str | None = None) -> Recipe:
    """The published recipe: of one of its eight data sets, or for any other table by its number of rows."""
    if dataset is not None:
        if dataset not in PAPER_SETTINGS:
            raise ValueError(f"the paper has no data set {dataset!r}; it has {', '.join(PAPER_SETTINGS)}")
        settings = PAPER_SETTINGS[dataset]
    elif num_rows < 2000:
        settings = PaperSettings(32, 5000, 0.1)
    else:
        settings = PaperSettings(64, 5000, 0.1) if num_rows < 20000 else PaperSettings(256, 2000, 0.1)
    return Recipe(batch_size=settings.batch_size, max_epochs=settings.max_epochs, dropout=settings.dropout)


def default_recipe(num_rows: int) -> Recipe:
    """Ours: experts out-of-fold, an ensemble whose members stop early on different folds, targets of few values kept.

    About 6000 steps at most, in batches that grow with the table.
    """
    batch_size = 32 if num_rows < 2000 else 128 if num_rows < 20000 else 256
    steps_per_epoch = max(1, num_rows // batch_size)
    max_epochs = min(400, max(20, 6000 // steps_per_epoch))
    return Recipe(
        noise_family="mixture",
        num_members=5,
        prediction_type="v_prediction",  # epsilon multiplies the head's error by 1 / sqrt(abar_T), about 200
        num_inference_steps=10,
        baseline="experts",
        baseline_epochs=1000,
        batch_size=batch_size,
        max_epochs=max_epochs,
        ema_decay=0.99,
        patience=max(10, max_epochs // 8) if num_rows >= 40 else None,
        fold_members=True,
        kappa_from_validation=num_rows < FEW_ROWS,
        scale_residual=True,
        snap=True,
    )


def with_early_stopping(recipe: Recipe, early_stopping: bool | None) -> Recipe:
    """Turn early stopping on (an eighth of the epochs without progress) or off; None leaves it as it is."""
    if early_stopping is False:
        return replace(recipe, patience=None)
    if early_stopping and recipe.patience is None:
        return replace(recipe, patience=max(10, recipe.max_epochs // 8))
    return recipe


def with_kappa_rows(recipe: Recipe, asked: bool | None) -> Recipe:
    """Keep `kappa_from_validation` only where members have validation rows that the baseline has not seen.

    If it was asked for and cannot be, that is an error; as a preset's choice it is dropped.
    """
    obstacle = None
    if recipe.patience is None:
        obstacle = "early stopping is off, so there are no validation rows"
    elif recipe.baseline == "mlp":
        obstacle = "the MLP baseline is fitted on all rows, its errors on validation rows are too small"
    elif recipe.calibration_fraction:
        obstacle = "calibration_fraction sets rows aside for kappa"
    if obstacle is None or not recipe.kappa_from_validation:
        return recipe
    if asked:
        raise ValueError(f"kappa_from_validation cannot be True: {obstacle}")
    return replace(recipe, kappa_from_validation=False)


def resolve_recipe(preset: str, num_rows: int, **changes: Any) -> Recipe:
    """The preset's recipe for a table of `num_rows` rows; changes that are None leave the preset's choice."""
    if preset not in PRESETS:
        raise ValueError(f"preset is one of {', '.join(PRESETS)}; got {preset!r}")
    recipe = paper_recipe(num_rows) if preset == "paper" else default_recipe(num_rows)
    given = {
        name: value.item() if isinstance(value, np.generic) else value  # numpy's numbers cannot be saved as JSON
        for name, value in changes.items()
        if value is not None
    }
    unknown = set(given) - {field.name for field in fields(Recipe)}
    if unknown:
        raise ValueError(f"a recipe has no {', '.join(sorted(unknown))}")
    changed = replace(recipe, **{"num_inference_steps": None, **given})
    if "num_inference_steps" in given or recipe.num_inference_steps is None:
        return changed
    return replace(changed, num_inference_steps=min(recipe.num_inference_steps, changed.num_timesteps))
