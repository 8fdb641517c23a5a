"""Tables: preprocessing, stacked training of many small networks, and `DiffusionRegressor`, an sklearn estimator."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from marigold_uq.tabular.regressor import DiffusionRegressor

__all__ = ["DiffusionRegressor"]


def __getattr__(name: str) -> Any:
    """Import the estimator when it is asked for: its pipeline needs modules of this package, and may come first."""
    if name == "DiffusionRegressor":
        from marigold_uq.tabular.regressor import DiffusionRegressor

        return DiffusionRegressor
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
