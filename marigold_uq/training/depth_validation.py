"""Scores and pictures of held-out samples while a depth model trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator

from marigold_uq.alignment import least_squares_alignment
from marigold_uq.export import DepthRecord, export
from marigold_uq.images import to_uint8
from marigold_uq.metrics import crps, depth_statistics
from marigold_uq.pipelines.depth import MarigoldUQDepthPipeline
from marigold_uq.pipelines.depth_output import MarigoldUQDepthOutput
from marigold_uq.training.depth_config import ValidationConfig


class DepthValidation:
    """AbsRel, delta1 and CRPS after least-squares alignment, and sheets; the same samples and seeds every time."""

    def __init__(self, dataset: Any, config: ValidationConfig, accelerator: Accelerator) -> None:
        self.dataset, self.config, self.accelerator = dataset, config, accelerator

    def __call__(self, pipeline: MarigoldUQDepthPipeline, step: int, pictures: Path) -> dict[str, float]:
        """Mean scores over the samples; other processes wait."""
        scores: list[dict[str, float]] = []
        if self.accelerator.is_main_process:
            pipeline.set_progress_bar_config(disable=True)
            for index in range(min(self.config.num_samples, len(self.dataset))):
                sample = self.dataset[index]
                output = self._predict(pipeline, sample)
                scores.append(score_sample(output, sample))
                if index < self.config.num_pictures:
                    self._draw(output, sample, pictures, f"{index:03d}_step{step:07d}")
        self.accelerator.wait_for_everyone()
        return {
            f"validation/{name}": float(np.mean([s[name] for s in scores])) for name in (scores[0] if scores else {})
        }

    def _predict(self, pipeline: MarigoldUQDepthPipeline, sample: dict[str, Any]) -> MarigoldUQDepthOutput:
        mode = self.config.mode
        output = pipeline(
            sample["image"],
            num_inference_steps=self.config.num_steps,
            processing_resolution=0,
            ensemble_size=self.config.num_members if mode else 1,
            uncertainty=mode,
            output_samples=True,
            output_type="pt",
            generator=torch.Generator().manual_seed(0),
        )
        assert isinstance(output, MarigoldUQDepthOutput)
        return output

    def _draw(self, output: MarigoldUQDepthOutput, sample: dict[str, Any], folder: Path, stem: str) -> None:
        spread = None if output.uncertainty is None else output.uncertainty[0, 0].cpu().numpy()
        record = DepthRecord(to_uint8(sample["image"]), output.prediction[0, 0].cpu().numpy(), spread)
        export(record, folder, stem, ["sheet"], overwrite=True)


def score_sample(output: MarigoldUQDepthOutput, sample: dict[str, Any]) -> dict[str, float]:
    """Depth metrics of the prediction and CRPS of the members, aligned by the prediction's scale and shift."""
    target, valid = sample["depth"][0].double(), sample["valid"][0]
    prediction = output.prediction[0, 0].cpu().double()
    scale, shift = least_squares_alignment(prediction, target, valid)
    low, high = 0.5 * target[valid].min(), 2 * target[valid].max()
    aligned = (scale * prediction + shift).clamp(low, high)
    statistics = depth_statistics(aligned, target, valid)
    scores = {"abs_rel": statistics["abs_relative_difference"], "delta1": statistics["delta1"]}
    members = (scale * output.samples[0].cpu().double() + shift)[:, valid]
    scores["relative_crps"] = (crps(members, target[valid]) / target[valid]).mean()
    return {name: float(value) for name, value in scores.items()}
