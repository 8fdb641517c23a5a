"""Fit a model to a table: from a config to a folder with a trained `TabularRegressionPipeline`."""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4

import numpy as np

from marigold_uq.commands.runner import Invocation
from marigold_uq.files import atomic_folder, make_folder
from marigold_uq.results import versions, write_json
from marigold_uq.tabular.data import TableSource, read_table
from marigold_uq.tabular.recipe import TrainingOptions
from marigold_uq.tabular.regressor import DiffusionRegressor
from marigold_uq.tabular.scores import timed
from marigold_uq.training.selection import write_selection

_FORMAT = "marigold_uq tabular run 2"


@dataclass(frozen=True)
class ModelOptions:
    """Arguments of `DiffusionRegressor` that configs and flags may set; None takes the preset's choice.

    Args:
        preset: "default" or "paper".
        noise_family: "point", "gaussian", "mixture", "sample", or "auto", which lets held-out rows choose.
        num_models: Independently trained models.
        baseline: "mlp", "trees", "experts" or "none".
        max_epochs: Of the denoiser.
        num_inference_steps: Denoising steps of a prediction; "auto" lets held-out rows choose.
        calibration_fraction: Share of the rows set aside for kappa and conformal intervals.
        training_options: Everything else.
        inference_dtype: "float64" or "float32".
    """

    preset: str = "default"
    noise_family: str | None = None
    num_models: int | None = None
    baseline: str | None = None
    max_epochs: int | None = None
    num_inference_steps: int | Literal["auto"] | None = None
    calibration_fraction: float | None = None
    training_options: TrainingOptions = field(default_factory=TrainingOptions)
    inference_dtype: str = "float64"

    def estimator(self, *, seed: int, ensemble_size: int = 100, verbose: int = 0) -> DiffusionRegressor:
        """The model, not fitted."""
        return DiffusionRegressor(**vars(self), ensemble_size=ensemble_size, random_state=seed, verbose=verbose)

    def changes(self) -> dict[str, Any]:
        """What was set, as JSON has it."""
        flat = {**asdict(self), **asdict(self.training_options), "training_options": None}
        return {name: value for name, value in flat.items() if value is not None}


@dataclass(frozen=True)
class TrainTabular:
    """Fit a probabilistic model to a table and save it.

    Args:
        data: Rows to fit.
        output: Folder of the run; must not exist.
        model: How it is trained.
        ensemble_size: Draws per row that intervals are calibrated for.
        seed: The same seed and data give the same model.
        verbose: 1 shows progress bars.
    """

    data: TableSource
    output: Path
    model: ModelOptions = field(default_factory=ModelOptions)
    ensemble_size: int = 100
    seed: int = 0
    verbose: int = 0


def run_training(options: TrainTabular, invocation: Invocation) -> int:
    """The command of `train/train_tabular.py`."""
    model = options.model.estimator(seed=options.seed, ensemble_size=options.ensemble_size, verbose=options.verbose)
    print(f"written to {train_tabular(options.data, model, options.output, invocation.config)}")
    return 0


def train_tabular(source: TableSource, model: DiffusionRegressor, output: Path, config_text: str = "") -> Path:
    """Fit a model and write OUTPUT/model (the pipeline with its calibration), config.yaml and run.json.

    With noise_family "auto" what was compared is in selection.json and selection.md beside them.

    The folder appears when everything is in it. One that exists is refused; if it appears during training, the result
    is kept beside it.
    """
    output = Path(output)
    if output.exists():
        raise FileExistsError(f"{output} exists; choose another output, nothing is overwritten")
    table, seconds = read_table(source), dict[str, Any]()
    with timed(seconds, "fit"):
        model.fit(table.features, table.targets, table.weights)
    make_folder(output.parent)
    final = output.with_name(f"{output.name}-{uuid4().hex[:8]}") if output.exists() else output
    with atomic_folder(final) as temporary:
        model.pipeline_.save_pretrained(temporary / "model")
        (temporary / "config.yaml").write_text(config_text, encoding="utf-8")
        facts = {
            "format": _FORMAT,
            "data": str(source.path),
            "num_rows": len(table.targets),
            "feature_names": table.feature_names,
            "target_names": table.target_names,
            "target_scale": np.atleast_1d(table.targets.std(0)),
            "recipe": model.recipe_,
            "epochs": model.n_epochs_,
            "seed": model.seed_,
            "ensemble_size": model.ensemble_size,
            "steps_choice": model.steps_choice_,
            "versions": versions(),
        }
        if model.selection_ is not None:
            write_selection(temporary, model.selection_, {"candidates": model.recipe_.candidates})
        write_json(temporary / "run.json", {**facts, **seconds})
    if final != output:
        raise FileExistsError(f"{output} was made by another process meanwhile; this result is kept in {final}")
    return output
