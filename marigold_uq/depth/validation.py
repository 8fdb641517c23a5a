"""Scores and pictures of held-out samples while a depth model trains."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor

from marigold_uq.alignment import apply_alignment, least_squares_alignment
from marigold_uq.calibration import unit_means
from marigold_uq.depth.config import ValidationConfig
from marigold_uq.depth.export import DepthRecord, export
from marigold_uq.depth.metrics import depth_statistics
from marigold_uq.metrics import crps
from marigold_uq.pipelines.depth import MarigoldUQDepthPipeline
from marigold_uq.pipelines.depth.images import to_uint8
from marigold_uq.pipelines.depth.output import MarigoldUQDepthOutput
from marigold_uq.training.selection import SelectionConfig, sample_unit_scores
from marigold_uq.training.sharding import is_sharded

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
        if is_sharded(self.accelerator):
            own = everyone
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
        return _score_sample(output, sample, _space(pipeline))

    def _predict(self, pipeline: MarigoldUQDepthPipeline, sample: dict[str, Any]) -> MarigoldUQDepthOutput:
        mode = self.config.uncertainty
        return _predict_picture(
            pipeline,
            sample,
            num_inference_steps=self.config.num_inference_steps,
            ensemble_size=self.config.ensemble_size if mode else 1,
            uncertainty=mode,
        )


def picture_scores(pipeline: MarigoldUQDepthPipeline, dataset: Any, config: SelectionConfig, seed: int) -> Tensor:
    """How well ensembles fit the first pictures of a data set: one score per group (scene), or per picture.

    Depths count in units of the picture's standard deviation, so that all pictures weigh alike.
    """
    pipeline.set_progress_bar_config(disable=True)
    scores, units = [], []
    groups: dict[str, str] = getattr(dataset, "groups", {})
    for index in range(min(config.num_units, len(dataset))):
        sample = dataset[index]
        output = _predict_picture(
            pipeline,
            sample,
            num_inference_steps=config.num_inference_steps,
            ensemble_size=config.ensemble_size,
            uncertainty="ensemble",
            seed=seed,
        )
        target, valid = sample["depth"][0].double(), sample["valid"][0]
        members = _aligned_members(output, sample, _space(pipeline))
        unit = target[valid].std()
        scores.append(sample_unit_scores((members / unit).unsqueeze(1), (target[valid] / unit)[None], config.score)[0])
        name = str(sample["name"])
        units.append(groups.get(name, name))
    return unit_means(torch.stack(scores), units)


def _predict_picture(
    pipeline: MarigoldUQDepthPipeline, sample: dict[str, Any], *, seed: int = 0, **options: Any
) -> MarigoldUQDepthOutput:
    output = pipeline(
        sample["image"],
        processing_resolution=0,
        output_samples=True,
        output_type="pt",
        generator=torch.Generator().manual_seed(seed),
        **options,
    )
    assert isinstance(output, MarigoldUQDepthOutput)
    return output


def _space(pipeline: MarigoldUQDepthPipeline) -> Any:
    """Where predictions are fitted to the truth; None for metres, which are not."""
    return pipeline.config.prediction_type if pipeline.config.scale_invariant else None


def _fit(output: MarigoldUQDepthOutput, sample: dict[str, Any], space: Any) -> Callable[[Tensor], Tensor]:
    """What brings maps into the target's units: the prediction's scale and shift."""
    if space is None:
        return lambda maps: maps
    target, valid = sample["depth"][0].double(), sample["valid"][0]
    scale, shift = least_squares_alignment(output.prediction[0, 0].cpu().double(), target, valid, space=space)
    return partial(apply_alignment, scale=scale, shift=shift, space=space)


def _aligned_members(output: MarigoldUQDepthOutput, sample: dict[str, Any], space: Any) -> Tensor:
    """The members at valid pixels, (M, N), moved by the prediction's scale and shift."""
    return _fit(output, sample, space)(output.samples[0].cpu().double())[:, sample["valid"][0]]


def _score_sample(output: MarigoldUQDepthOutput, sample: dict[str, Any], space: Any = "depth") -> Scores:
    """Depth metrics of the prediction and CRPS of the members, aligned by the prediction's scale and shift."""
    target, valid = sample["depth"][0].double(), sample["valid"][0]
    prediction = output.prediction[0, 0].cpu().double()
    low, high = 0.5 * target[valid].min(), 2 * target[valid].max()
    aligned = _fit(output, sample, space)(prediction).clamp(low, high)
    statistics = depth_statistics(aligned, target, valid)
    scores = {"abs_rel": statistics["abs_relative_difference"], "delta1": statistics["delta1"]}
    members = _aligned_members(output, sample, space)
    scores["relative_crps"] = (crps(members, target[valid]) / target[valid]).mean()
    return {name: float(value) for name, value in scores.items()}
