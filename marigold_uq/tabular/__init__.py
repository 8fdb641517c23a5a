"""Tables: preprocessing, stacked training of many small networks, and `DiffusionRegressor`, an sklearn estimator."""

from marigold_uq.tabular.regressor import DiffusionRegressor

__all__ = ["DiffusionRegressor"]
