"""Predictive samples for the rows of a table."""

from marigold_uq.pipelines.tabular.pipeline import TabularOutput, TabularRegressionPipeline

__all__ = ["TabularOutput", "TabularRegressionPipeline"]
