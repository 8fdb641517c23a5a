"""Calibrate a depth model on held-out images: kappa by the CRPS, then conformal intervals for every coverage."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from tqdm.auto import tqdm

from marigold_uq.calibration import (
    Calibration,
    choose_kappa,
    choose_steps,
    interval_grid_images,
    residual_ratio,
    unit_means,
)
from marigold_uq.commands.runner import Invocation
from marigold_uq.depth.data import DepthDataset
from marigold_uq.depth.evaluation.evaluate import check_dataset, chosen_indices, open_dataset
from marigold_uq.depth.evaluation.options import AlignmentOptions, DataOptions, PipelineOptions
from marigold_uq.depth.evaluation.prediction import Members
from marigold_uq.depth.evaluation.predictors import PipelinePredictor
from marigold_uq.depth.evaluation.protocol import DepthProtocol
from marigold_uq.depth.model import Dtype, load_pipeline
from marigold_uq.files import atomic_folder, make_folder
from marigold_uq.metrics import crps
from marigold_uq.pipelines.depth import MarigoldUQDepthPipeline
from marigold_uq.pipelines.depth.call import available_modes
from marigold_uq.pipelines.depth.starting_point import embedded_path

__all__ = ["DepthCalibration", "calibrate_depth", "run_calibration"]

Mode = Literal["ensemble", "trajectory", "marginal"]
REPORTED = (0.5, 0.8, 0.9, 0.95)


@dataclass(frozen=True)
class DepthCalibration:
    """Calibrate the uncertainty of a depth model on held-out images.

    Half of the images choose kappa, which stretches the members around their mean. The other half give conformal
    intervals. The unit of their promise is the image, or the group (a scene, say) where the data set has groups. None
    of the images may have been trained on.

    Args:
        model: "embedded", a folder, or a Hub name. Earlier calibrations of the same modes are replaced.
        output: Folder for the calibrated copy; it must not exist.
        data: The images and their true depth.
        modes: Ways to uncertainty to calibrate; those that the model does not have are left out.
        ensemble_size: Members per image; the calibration holds for this number.
        num_inference_steps: Denoising steps, for which it holds; default: the model's.
        steps: Numbers of denoising steps to choose from, in place of num_inference_steps: the first half of the images
            takes the fewest within one standard error of the best CRPS, in the first of the modes. They become the
            model's default.
        processing_resolution: Longer edge for the network, 0 for the image's own; default: the model's.
        num_pixels: Pixels of each image that take part, drawn at random.
        batch_size: Members per network call; never changes a result.
        shuffle: Deal the images to the two halves at random; else the first half chooses kappa.
        seed: Of members, pixels and halves.
        device: "auto", "cpu", "cuda", "cuda:1", "mps".
        dtype: float32, float16 or bfloat16.
        note: Stored with the calibration; default: the data set and the number of images.
    """

    model: str
    output: Path
    data: DataOptions = field(default_factory=DataOptions)
    modes: list[Mode] = field(default_factory=lambda: ["ensemble", "trajectory", "marginal"])
    ensemble_size: int = 10
    num_inference_steps: int | None = None
    steps: list[int] | None = None
    processing_resolution: int | None = None
    num_pixels: int = 1500
    batch_size: int = 1
    shuffle: bool = True
    seed: int = 1
    device: str = "auto"
    dtype: Dtype = "float32"
    note: str | None = None

    def __post_init__(self) -> None:
        if not self.modes:
            raise ValueError("modes must name at least one of ensemble, trajectory and marginal; got none")
        if self.ensemble_size < 3:
            raise ValueError(f"ensemble_size must be at least 3 to choose kappa; got {self.ensemble_size}")
        if self.num_pixels < 1:
            raise ValueError(f"num_pixels must be at least 1; got {self.num_pixels}")
        if self.steps is not None and self.num_inference_steps is not None:
            raise ValueError(
                f"give steps to choose from or num_inference_steps, not both; got {self.steps} and "
                f"{self.num_inference_steps}"
            )


@dataclass(frozen=True)
class _Pixels:
    """N pixels of an image, in units of the standard deviation of the truth, so that all images weigh the same."""

    members: Tensor  # (E, N)
    point: Tensor  # (N,), the centre of the pipeline's interval
    truth: Tensor  # (N,)


def run_calibration(options: DepthCalibration, invocation: Invocation) -> int:
    """The command `eval/calibrate_depth.py`."""
    for mode, one in calibrate_depth(options).items():
        assert one.interval is not None
        widths = ", ".join(f"{c:.0%}: {one.interval.scale(c)[0]:.2f}" for c in REPORTED if _is_inside(one, c))
        print(f"{mode}: kappa {one.kappas[0]:.3f}; half widths in standard deviations {widths}")
        reach = f"{one.num_calibration} units promise coverages up to {one.interval.coverages[-1]:.1%}"
        print(f"{mode}: {reach}; beyond, intervals are extrapolated with a warning")
    print(f"written to {options.output}")
    return 0


def calibrate_depth(options: DepthCalibration, *, dataset: Any = None) -> dict[str, Calibration]:
    """Write a calibrated copy of the model to `options.output`; what was chosen, by mode.

    Args:
        options: Everything; see the dataclass.
        dataset: Used instead of `options.data`.
    """
    if options.output.exists():
        raise FileExistsError(f"{options.output} exists; choose another output, or delete it first")
    data = check_dataset(open_dataset(options.data) if dataset is None else dataset)
    halves = _halves(data, options)
    pipeline = load_pipeline(options.model, device=options.device, dtype=options.dtype)
    modes = [one for one in options.modes if one in available_modes(pipeline)]
    if not modes:
        raise ValueError(
            f"{' or '.join(options.modes)} needs a variance head (marginal also DepthCells), which this model has "
            f"not; choose among {', '.join(available_modes(pipeline))}"
        )
    kept = [one.to_dict() for one in pipeline.calibrations if one.uncertainty not in modes]
    pipeline.register_to_config(calibration=kept or None)
    if options.steps is not None:
        options = replace(
            options, steps=None, num_inference_steps=_best_steps(pipeline, modes[0], data, halves, options)
        )
        pipeline.register_to_config(default_denoising_steps=options.num_inference_steps)
    chosen: dict[str, Calibration] = {}
    for mode in modes:
        chosen[mode] = _calibrate_mode(pipeline, mode, data, halves, options)
    for calibration in chosen.values():
        pipeline.calibrate(calibration)
    _write_copy(pipeline, options)
    return chosen


def _best_steps(
    pipeline: MarigoldUQDepthPipeline,
    mode: Mode,
    data: DepthDataset,
    halves: tuple[list[int], list[int]],
    options: DepthCalibration,
) -> int:
    """The fewest of `options.steps` within one standard error of the best, by the images that also choose kappa."""
    units = [_unit_of(data, index) for index in halves[0]]
    if len(set(units)) < 2:
        raise ValueError(f"a choice of steps needs 2 images or groups in the first half; got {len(set(units))}")

    def scores(steps: int) -> Tensor:
        predictor = _predictor(pipeline, mode, replace(options, steps=None, num_inference_steps=steps))
        found = _predicted_pixels(predictor, data, halves[0], options)
        return unit_means(torch.stack([crps(one.members, one.truth).mean() for _, one in found]), units)

    choice = choose_steps(options.steps or [], scores)
    print(
        f"{choice.num_inference_steps} denoising steps of {', '.join(map(str, choice.steps))}, by {len(units)} images"
    )
    return choice.num_inference_steps


def _predictor(pipeline: MarigoldUQDepthPipeline, mode: Mode, options: DepthCalibration) -> PipelinePredictor:
    call = PipelineOptions(
        options.model,
        mode,
        options.ensemble_size,
        num_inference_steps=options.num_inference_steps,
        processing_resolution=options.processing_resolution,
        batch_size=options.batch_size,
        seed=options.seed,
    )
    return PipelinePredictor(call, pipeline=pipeline)


def _calibrate_mode(
    pipeline: MarigoldUQDepthPipeline,
    mode: Mode,
    data: DepthDataset,
    halves: tuple[list[int], list[int]],
    options: DepthCalibration,
) -> Calibration:
    """Kappa from the first half of the images, intervals from the second."""
    predictor = _predictor(pipeline, mode, options)
    found = dict(_predicted_pixels(predictor, data, sorted([*halves[0], *halves[1]]), options))
    first, second = ([found[i] for i in half] for half in halves)
    members, truth = torch.cat([one.members for one in first], -1), torch.cat([one.truth for one in first])
    kappa = choose_kappa(members, truth).kappa
    ratios = [residual_ratio(one.point, kappa * one.members.std(0, correction=1), one.truth) for one in second]
    units = [_unit_of(data, i) for i in halves[1]]
    grid = interval_grid_images(ratios, groups=units)
    assert grid is not None  # even one unit promises 10 %
    start = data.name_of(min(*halves[0], *halves[1]))
    count = f"{len(first)} images for kappa, {len(second)} others of {len(set(units))} units for the intervals"
    return Calibration(
        tau=float(pipeline.scheduler.config.tau),
        kappa=kappa,
        interval=grid,
        uncertainty=mode,
        num_inference_steps=predictor.num_inference_steps,
        ensemble_size=options.ensemble_size,
        num_calibration=len(set(units)),
        note=options.note or f"{options.data.name}, {start} and so on: {count}",
    )


@torch.inference_mode()
def _predicted_pixels(
    predictor: PipelinePredictor, data: DepthDataset, indices: Sequence[int], options: DepthCalibration
) -> list[tuple[int, _Pixels]]:
    """What was predicted and what is true at some pixels of every image, in the space of the prediction."""
    protocol = DepthProtocol.of(AlignmentOptions(clip="target"), predictor, data, options.data.name)
    generator = torch.Generator().manual_seed(options.seed - 1)
    found = []
    for index in tqdm(indices, desc=str(predictor.mode), unit="image"):
        sample = data.read(index)
        prediction = predictor.predict(sample)
        assert isinstance(prediction, Members)
        aligned = protocol.align(prediction, sample)
        valid = torch.nonzero(sample["valid"][0].flatten()).flatten()
        drawn = torch.randint(len(valid), (options.num_pixels,), generator=generator)
        places = valid[drawn]
        truth = aligned.target[0] if predictor.space == "depth" else aligned.target[0].reciprocal()
        unit = truth.std()
        maps = (prediction.samples.flatten(1)[:, places], prediction.point.flatten()[places])
        members, point = ((aligned.scale * values.double() + aligned.shift) / unit for values in maps)
        found.append((index, _Pixels(members, point, truth[drawn] / unit)))
    return found


def _halves(data: DepthDataset, options: DepthCalibration) -> tuple[list[int], list[int]]:
    """Indices for kappa and for the intervals; a group is in one of them only."""
    units: dict[str, list[int]] = {}
    for index in chosen_indices(len(data), options.data.limit):
        units.setdefault(_unit_of(data, index), []).append(index)
    names = list(units)
    if len(names) < 2:
        raise ValueError(f"calibration needs at least 2 images or groups, in practice 40 or more; got {len(names)}")
    if options.shuffle:
        random.Random(options.seed).shuffle(names)
    half = len(names) // 2
    first, second = (sorted(i for name in part for i in units[name]) for part in (names[:half], names[half:]))
    return first, second


def _unit_of(data: DepthDataset, index: int) -> str:
    """The group of an image, or the image itself."""
    name = data.name_of(index)
    groups: dict[str, str] = getattr(data, "groups", {})
    return groups.get(name, name)


def _is_inside(calibration: Calibration, coverage: float) -> bool:
    grid = calibration.interval
    return grid is not None and grid.coverages[0] <= coverage <= grid.coverages[-1]


def _write_copy(pipeline: MarigoldUQDepthPipeline, options: DepthCalibration) -> None:
    """A local model keeps its files to the byte, but for two entries of its config; one from the Hub is saved anew."""
    make_folder(options.output.parent)
    source = embedded_path() if options.model == "embedded" else Path(options.model).expanduser()
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
