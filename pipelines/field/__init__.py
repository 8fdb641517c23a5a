"""Ensemble forecasts of fields on a grid."""

from marigold_uq.pipelines.field.output import FieldForecast
from marigold_uq.pipelines.field.pipeline import FieldForecastPipeline

__all__ = ["FieldForecast", "FieldForecastPipeline"]
