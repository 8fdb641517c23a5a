"""Depth with calibrated uncertainty from one photograph: call -> latents -> members -> output."""

from marigold_uq.pipelines.depth.output import MarigoldUQDepthOutput
from marigold_uq.pipelines.depth.pipeline import MarigoldUQDepthPipeline

__all__ = ["MarigoldUQDepthOutput", "MarigoldUQDepthPipeline"]
