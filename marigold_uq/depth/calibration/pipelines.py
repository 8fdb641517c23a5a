"""A model of ours, calibrated: kappa by the CRPS, then conformal intervals for every coverage, in a copy of it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from marigold_uq.calibration import Calibration, choose_steps, unit_means
from marigold_uq.depth.calibration.fitting import Before, Ends, Fit, fit
from marigold_uq.depth.calibration.options import DepthCalibration, Mode
from marigold_uq.depth.calibration.pixels import Collected, Pixels, collect_pixels, part_indices
from marigold_uq.depth.data import DepthDataset
from marigold_uq.depth.evaluation.evaluate import check_dataset, open_dataset
from marigold_uq.depth.evaluation.options import PipelineOptions
from marigold_uq.depth.evaluation.predictors import PipelinePredictor
from marigold_uq.depth.model import load_pipeline
from marigold_uq.files import atomic_folder, make_folder
from marigold_uq.metrics import crps, nested_interval
from marigold_uq.pipelines.depth import MarigoldUQDepthPipeline
from marigold_uq.pipelines.depth.call import available_modes
from marigold_uq.pipelines.depth.starting_point import embedded_path


@dataclass(frozen=True)
class CalibratedMode:
    """One way to uncertainty of a model, and all that a report needs to say about it.

    Args:
        record: What is stored.
        fit: The same, as the report uses it.
        collected: The pixels of all images.
        predictor: Makes the maps again.
        before: The intervals that the model had.
    """

    record: Calibration
    fit: Fit
    collected: Collected
    predictor: PipelinePredictor
    before: Before


def calibrate_depth(options: DepthCalibration, *, dataset: Any = None) -> dict[str, Calibration]:
    """Write a calibrated copy of the model to `options.output`; what was chosen, by mode.

    Args:
        options: Everything; see the dataclass.
        dataset: Used instead of `options.data`.
    """
    data = check_dataset(open_dataset(options.data) if dataset is None else dataset)
    return {mode: found.record for mode, found in calibrate_modes(options, data).items()}


def calibrate_modes(options: DepthCalibration, data: DepthDataset) -> dict[str, CalibratedMode]:
    """As `calibrate_depth`, with what a report needs."""
    if options.model is None:
        raise ValueError("give a model to calibrate; maps made by others are calibrated by calibrate_files")
    if options.output.exists():
        raise FileExistsError(f"{options.output} exists; choose another output, or delete it first")
    halves = part_indices(data, options)
    pipeline = load_pipeline(options.model, device=options.device, dtype=options.dtype)
    modes = [one for one in options.modes if one in available_modes(pipeline)]
    if not modes:
        raise ValueError(
            f"{' or '.join(options.modes)} needs a variance head (marginal also DepthCells), which this model has "
            f"not; choose among {', '.join(available_modes(pipeline))}"
        )
    before = {one.uncertainty: one for one in pipeline.calibrations}
    kept = [one.to_dict() for one in pipeline.calibrations if one.uncertainty not in modes]
    pipeline.register_to_config(calibration=kept or None)
    if options.steps is not None:
        options = replace(
            options, steps=None, num_inference_steps=_best_steps(pipeline, modes[0], data, halves, options)
        )
        pipeline.register_to_config(default_denoising_steps=options.num_inference_steps)
    chosen: dict[str, CalibratedMode] = {}
    for mode in modes:
        chosen[mode] = _calibrate_mode(pipeline, mode, data, halves, options, before.get(mode))
    for found in chosen.values():
        pipeline.calibrate(found.record)
    _write_copy(pipeline, options)
    pipeline.register_to_config(calibration=kept or None)  # the report makes maps again, as they were calibrated
    return chosen


def _best_steps(
    pipeline: MarigoldUQDepthPipeline,
    mode: Mode,
    data: DepthDataset,
    halves: tuple[list[int], list[int]],
    options: DepthCalibration,
) -> int:
    """The fewest of `options.steps` within one standard error of the best, by the images that also choose kappa."""
    units: list[str] = []

    def scores(steps: int) -> Tensor:
        predictor = _predictor(pipeline, mode, replace(options, steps=None, num_inference_steps=steps))
        found = list(_collect(predictor, data, halves[0], options).pixels.values())
        units[:] = [one.unit for one in found]
        if len(set(units)) < 2:
            raise ValueError(f"a choice of steps needs 2 images or groups in the first part; got {len(set(units))}")
        return unit_means(torch.stack([_score(one) for one in found]), units)

    choice = choose_steps(options.steps or [], scores)
    print(
        f"{choice.num_inference_steps} denoising steps of {', '.join(map(str, choice.steps))}, by {len(units)} images"
    )
    return choice.num_inference_steps


def _score(pixels: Pixels) -> Tensor:
    """The CRPS of an image's members."""
    assert pixels.draws is not None
    return crps(pixels.draws, pixels.truth).mean()


def _predictor(pipeline: MarigoldUQDepthPipeline, mode: Mode, options: DepthCalibration) -> PipelinePredictor:
    call = PipelineOptions(
        str(options.model),
        mode,
        options.ensemble_size,
        num_inference_steps=options.num_inference_steps,
        processing_resolution=options.processing_resolution,
        batch_size=options.batch_size,
        seed=options.seed,
    )
    return PipelinePredictor(call, pipeline=pipeline)


def _collect(
    predictor: PipelinePredictor, data: DepthDataset, indices: Sequence[int], options: DepthCalibration
) -> Collected:
    return collect_pixels(predictor, data, indices, options, str(predictor.mode))


def _calibrate_mode(
    pipeline: MarigoldUQDepthPipeline,
    mode: Mode,
    data: DepthDataset,
    halves: tuple[list[int], list[int]],
    options: DepthCalibration,
    before: Calibration | None,
) -> CalibratedMode:
    """Kappa from the first part of the images, intervals from the second."""
    predictor = _predictor(pipeline, mode, options)
    collected = _collect(predictor, data, sorted([*halves[0], *halves[1]]), options)
    first, second = ([collected.pixels[i] for i in half if i in collected.pixels] for half in halves)
    if not first or not second:
        raise ValueError(f"too few images could be used; the first failure: {collected.failures[0]}")
    found = fit(first, second)
    start = data.name_of(min(*halves[0], *halves[1]))
    count = f"{len(first)} images for kappa, {len(second)} others of {found.num_units} units for the intervals"
    record = Calibration(
        tau=float(pipeline.scheduler.config.tau),
        kappa=found.kappa,
        interval=found.interval,
        uncertainty=mode,
        num_inference_steps=predictor.num_inference_steps,
        ensemble_size=options.ensemble_size,
        num_calibration=found.num_units,
        note=options.note or f"{options.data.name}, {start} and so on: {count}",
    )
    return CalibratedMode(record, found, collected, predictor, stored_or_own(before))


def stored_or_own(stored: Calibration | None) -> Before:
    """The intervals of an earlier calibration; without one those of the members themselves."""
    grid = None if stored is None else stored.interval

    def ends(pixels: Pixels, level: float) -> Ends | None:
        if stored is None or grid is None:
            return own_interval(pixels, level)
        if not grid.coverages[0] <= level <= grid.coverages[-1]:
            return None  # it was not promised
        assert pixels.stated.std is not None
        half_width = grid.scale(level)[0] * stored.kappas[0] * abs(pixels.scale) * pixels.stated.std
        return pixels.point - half_width, pixels.point + half_width

    return ends


def own_interval(pixels: Pixels, level: float) -> Ends | None:
    """Of the members as they are."""
    return None if pixels.draws is None else nested_interval(pixels.draws, level)


def _write_copy(pipeline: MarigoldUQDepthPipeline, options: DepthCalibration) -> None:
    """A local model keeps its files to the byte, but for two entries of its config; one from the Hub is saved anew."""
    make_folder(options.output.parent)
    source = embedded_path() if options.model == "embedded" else Path(str(options.model)).expanduser()
    with atomic_folder(options.output) as temporary:
        if not source.is_dir():
            pipeline.save_pretrained(temporary)
            return
        shutil.copytree(source, temporary, dirs_exist_ok=True)
        index = temporary / pipeline.config_name
        entries = json.loads(index.read_text(encoding="utf-8"))
        for name in ("calibration", "default_denoising_steps"):
            entries[name] = pipeline.config[name]
        index.write_text(json.dumps(entries, indent=2, sort_keys=True) + "\n", encoding="utf-8")
