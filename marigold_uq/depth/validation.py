"""Scores and pictures of held-out samples while a depth model trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from marigold_uq.alignment import apply_alignment, least_squares_alignment
from marigold_uq.depth.config import ValidationConfig
from marigold_uq.depth.export import DepthRecord, export
from marigold_uq.depth.metrics import depth_statistics
from marigold_uq.metrics import crps
from marigold_uq.pipelines.depth import MarigoldUQDepthPipeline
from marigold_uq.pipelines.depth.images import to_uint8
from marigold_uq.pipelines.depth.output import MarigoldUQDepthOutput

Scores = dict[str, float]


class DepthValidation:
    """AbsRel, delta1 and CRPS after least-squares alignment, and sheets; the same samples and seeds every time."""

    def __init__(self, dataset: Any, config: ValidationConfig, accelerator: Accelerator) -> None:
        self.dataset, self.config, self.accelerator = dataset, config, accelerator

    def __call__(self, pipeline: MarigoldUQDepthPipeline, step: int, pictures: Path) -> Scores:
        """Mean scores over the samples, which the processes share out; the same for any number of them."""
        pipeline.set_progress_bar_config(disable=True)
        everyone = range(min(self.config.num_samples, len(self.dataset)))
        own = everyone[self.accelerator.process_index :: self.accelerator.num_processes]
        scored = dict(gather_object([(index, self._score(pipeline, index, pictures)) for index in own]))
        return {f"validation/{name}": float(np.mean([scored[i][name] for i in everyone])) for name in scored[0]}

    def _score(self, pipeline: MarigoldUQDepthPipeline, index: int, pictures: Path) -> Scores:
        sample = self.dataset[index]
        output = self._predict(pipeline, sample)
        kind = pipeline.config.prediction_type
        if index < self.config.num_pictures:
            spread = None if output.uncertainty is None else output.uncertainty[0, 0].cpu().numpy()
            depth = output.prediction[0, 0].cpu().numpy()
            record = DepthRecord(to_uint8(sample["image"]), depth, spread, metadata={"prediction_type": kind})
            export(record, pictures, f"{index:03d}", ["sheet"], overwrite=True)
        return _score_sample(output, sample, kind)

    def _predict(self, pipeline: MarigoldUQDepthPipeline, sample: dict[str, Any]) -> MarigoldUQDepthOutput:
        mode = self.config.uncertainty
        output = pipeline(
            sample["image"],
            num_inference_steps=self.config.num_inference_steps,
            processing_resolution=0,
            ensemble_size=self.config.ensemble_size if mode else 1,
            uncertainty=mode,
            output_samples=True,
            output_type="pt",
            generator=torch.Generator().manual_seed(0),
        )
        assert isinstance(output, MarigoldUQDepthOutput)
        return output


def _score_sample(output: MarigoldUQDepthOutput, sample: dict[str, Any], space: Any = "depth") -> Scores:
    """Depth metrics of the prediction and CRPS of the members, aligned by the prediction's scale and shift."""
    target, valid = sample["depth"][0].double(), sample["valid"][0]
    prediction = output.prediction[0, 0].cpu().double()
    scale, shift = least_squares_alignment(prediction, target, valid, space=space)
    low, high = 0.5 * target[valid].min(), 2 * target[valid].max()
    aligned = apply_alignment(prediction, scale, shift, space=space).clamp(low, high)
    statistics = depth_statistics(aligned, target, valid)
    scores = {"abs_rel": statistics["abs_relative_difference"], "delta1": statistics["delta1"]}
    members = apply_alignment(output.samples[0].cpu().double(), scale, shift, space=space)[:, valid]
    scores["relative_crps"] = (crps(members, target[valid]) / target[valid]).mean()
    return {name: float(value) for name, value in scores.items()}
