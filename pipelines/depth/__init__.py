"""Depth with calibrated uncertainty from one photograph; read pipeline, call, images, latents, output in this order."""

from marigold_uq.pipelines.depth.output import MarigoldUQDepthOutput
from marigold_uq.pipelines.depth.pipeline import MarigoldUQDepthPipeline

__all__ = ["MarigoldUQDepthOutput", "MarigoldUQDepthPipeline"]
