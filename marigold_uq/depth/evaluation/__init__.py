"""Evaluation: score any depth model, ours or files made by others, and its uncertainty.

`options` is what can be chosen, `predictors` where predictions come from, `prediction` what they are, `protocol` how
they are aligned and clipped, `panels` what is measured per image, `report` how that is averaged and written.
"""

from marigold_uq.depth.evaluation.evaluate import EvaluationResult, evaluate_depth, run_evaluation
from marigold_uq.depth.evaluation.options import (
    AlignmentOptions,
    DataOptions,
    DepthEvaluation,
    FileOptions,
    PipelineOptions,
    ScoreOptions,
)
from marigold_uq.depth.evaluation.panels import PANELS, image_statistics, register_panel
from marigold_uq.depth.evaluation.prediction import MeanConfidence, MeanStd, Members, Prediction, PredictionError
from marigold_uq.depth.evaluation.predictors import PREDICTORS, Predictor, build_predictor, register_predictor
from marigold_uq.depth.evaluation.protocol import DepthProtocol
from marigold_uq.depth.evaluation.records import ImageRecord
from marigold_uq.depth.evaluation.report import Summary, summarize

__all__ = [
    "PANELS",
    "PREDICTORS",
    "AlignmentOptions",
    "DataOptions",
    "DepthEvaluation",
    "DepthProtocol",
    "EvaluationResult",
    "FileOptions",
    "ImageRecord",
    "MeanConfidence",
    "MeanStd",
    "Members",
    "PipelineOptions",
    "Prediction",
    "PredictionError",
    "Predictor",
    "ScoreOptions",
    "Summary",
    "build_predictor",
    "evaluate_depth",
    "image_statistics",
    "register_panel",
    "register_predictor",
    "run_evaluation",
    "summarize",
]
