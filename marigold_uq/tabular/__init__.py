"""Tables: `DiffusionRegressor`, an sklearn estimator that predicts distributions, and how it is trained and scored."""

from marigold_uq.tabular.recipe import TrainingOptions
from marigold_uq.tabular.regressor import DiffusionRegressor

__all__ = ["DiffusionRegressor", "TrainingOptions"]
