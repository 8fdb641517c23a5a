"""The work of `marigold-uq depth`: what is to be done, what is done already, and the rest in batches."""

from __future__ import annotations

import os
import sys
import tempfile
import time
import traceback
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from tqdm.auto import tqdm

import marigold_uq
from marigold_uq.commands.depth import DepthOptions
from marigold_uq.commands.inputs import Input, find_inputs
from marigold_uq.commands.records import OutputRecord, describe_source, identify_model
from marigold_uq.commands.runner import SHOW_TRACEBACK
from marigold_uq.depth.colors import Intrinsics
from marigold_uq.depth.export import FORMATS, DepthRecord, ExportOptions, export, output_paths
from marigold_uq.depth.metric_points import PointsOfPictures, read_metric_points, to_metric
from marigold_uq.depth.model import load_pipeline, process_state
from marigold_uq.files import fingerprint, make_folder
from marigold_uq.picture_files import list_images, read_array
from marigold_uq.pipelines.depth import MarigoldUQDepthPipeline
from marigold_uq.pipelines.depth.call import DepthCall, quickest_mode
from marigold_uq.pipelines.depth.images import ModelInput, picture_for_model
from marigold_uq.pipelines.depth.output import MarigoldUQDepthOutput
from marigold_uq.randomness import member_generators, member_seed
from marigold_uq.terminal import leave_at_once

__all__ = ["Failure", "Plan", "find_work", "run", "sample_pictures"]

Failure = tuple[Path, str]
"""What could not be processed, and why."""
_SMALL_MODEL, _BATCH = 10**8, 8
"""Parameters below which pictures are batched by default, and how many."""
_PENDING_PIXELS = 2**24
"""Pictures that wait for others of their size, together."""
_CONFLICTS_SHOWN = 3


def run(options: DepthOptions) -> int:
    """Process everything; 0 if all went well, 1 if some image failed."""
    work = find_work(options)
    check_output(options.output)
    with leave_at_once():
        pipeline = load_pipeline(
            options.model,
            device=options.device,
            dtype=options.dtype,
            variant=options.variant,
            baseline=options.baseline,
        )
    plan = Plan.of(options, pipeline)
    check_sources(work, plan)
    todo = check_outputs(share_of_process(work), plan)
    failures: list[Failure] = []
    try:
        run_pictures([one for one in todo if not one.is_video], plan, pipeline, failures)
        videos = [one for one in todo if one.is_video]
        if videos:
            from marigold_uq.commands.video import run_videos

            run_videos(videos, plan, pipeline, failures)
    finally:  # also after Ctrl-C, or when the disk is full
        for path, why in failures:
            print(f"failed: {path}: {why}", file=sys.stderr)
    process_state().wait_for_everyone()  # a launcher stops all processes as soon as one ends with an error
    return 1 if failures else 0


# -------------------------------------------------------------------------------------------------------------- plan


@dataclass(frozen=True)
class Plan:
    """Options with the model's defaults filled in and checked, before the first image is touched."""

    options: DepthOptions
    call: DepthCall
    formats: tuple[str, ...]
    multiple: int
    prediction_type: str | None
    units: str
    points: PointsOfPictures | None = None

    @classmethod
    def of(cls, options: DepthOptions, pipeline: MarigoldUQDepthPipeline) -> Plan:
        """Choose the mode the model can do; an option that cannot be served is an error now, not once per image."""
        mode = choose_mode(options, pipeline)
        if mode is None and options.coverage is not None:
            raise ValueError("--coverage needs an uncertainty; choose --uncertainty trajectory or ensemble")
        call = DepthCall(
            pipeline,
            num_inference_steps=options.num_inference_steps,
            ensemble_size=options.ensemble_size if mode else 1,
            processing_resolution=options.processing_resolution,
            batch_size=default_batch(pipeline) if options.batch_size is None else options.batch_size,
            uncertainty=mode,
            coverage=options.coverage,
            output_epistemic=options.output_epistemic,
            output_latent=True,  # a video carries them on
        )
        points = None if options.metric_points is None else read_metric_points(options.metric_points)
        formats = tuple(options.formats)
        if mode is None and options.formats == DepthOptions(sample=True).formats:
            formats = tuple(name for name in formats if name != "uncertainty")
        if not formats:
            raise ValueError(f"no formats given; choose from {', '.join(FORMATS)}")
        units = unit_of_depth(options, pipeline)
        plan = cls(options, call, formats, pipeline.vae_scale_factor, pipeline.config.prediction_type, units, points)
        plan.files("name")
        return plan

    @property
    def layers(self) -> list[str]:
        """Names of the maps that will be there."""
        spread = ["uncertainty"] if self.call.mode else []
        epistemic = ["epistemic"] if self.options.output_epistemic else []
        ends = [] if self.options.coverage is None else ["lower", "upper"]
        return ["depth", *spread, *epistemic, *ends]

    def place(self, name: str) -> tuple[Path, str]:
        """Folder and start of the file names of an input's outputs."""
        whole = self.options.output / name
        return whole.parent, whole.name

    def files(self, name: str) -> list[Path]:
        """What will be written for an image."""
        return list(output_paths(*self.place(name), self.formats, self.layers))

    def record_path(self, name: str) -> Path:
        """Where it is recorded what made these files."""
        folder, stem = self.place(name)
        return folder / f"{stem}.json"

    @cached_property
    def asked(self) -> dict[str, Any]:
        """Everything that the outputs depend on but for the picture: by what it is, not by how it was spelt."""
        options, call = self.options, self.call
        points = options.metric_points
        return {
            "model": identify_model(options.model, options.variant),
            **({} if options.baseline is None else {"baseline": identify_model(options.baseline)}),
            "dtype": options.dtype,
            "uncertainty": call.mode or "none",
            "ensemble_size": call.num_members,
            "num_inference_steps": call.num_steps,
            "processing_resolution": call.resolution,
            "coverage": options.coverage,
            "output_epistemic": options.output_epistemic,
            "seed": options.seed,
            "fov": options.fov,
            "intrinsics": options.intrinsics,
            "metric_points": None if points is None else fingerprint(points.expanduser()),
            "units": self.units,
        }

    def lens(self, own: Intrinsics | None) -> ExportOptions:
        """How the point cloud is made: as the options say, else as the metric points know, else at 60 degrees."""
        if self.options.intrinsics is not None:
            return ExportOptions(intrinsics=cast(Intrinsics, tuple(self.options.intrinsics)))
        if self.options.fov is not None:
            return ExportOptions(field_of_view=self.options.fov)
        return ExportOptions(intrinsics=own)


def choose_mode(options: DepthOptions, pipeline: MarigoldUQDepthPipeline) -> str | None:
    """The mode that was asked for; else the cheapest that gives what was asked for."""
    if options.uncertainty is not None:
        return None if options.uncertainty == "none" else options.uncertainty
    if options.output_epistemic:
        return "ensemble"
    return quickest_mode(pipeline) or (None if options.coverage is None else "ensemble")


def default_batch(pipeline: MarigoldUQDepthPipeline) -> int:
    """Several pictures at once where they surely fit."""
    networks = (pipeline.unet, pipeline.vae, pipeline.image_encoder, pipeline.baseline)
    size = sum(one.numel() for network in networks if network is not None for one in network.parameters())
    return _BATCH if size < _SMALL_MODEL else 1


def unit_of_depth(options: DepthOptions, pipeline: MarigoldUQDepthPipeline) -> str:
    """That of a metric model or of the metric points; "relative" without either."""
    relative = pipeline.config.scale_invariant or pipeline.config.shift_invariant
    if relative and options.metric_points is None:
        if options.unit is not None:
            raise ValueError("--unit names the unit of metric depth: this model's is relative; give --metric_points")
        return "relative"
    return options.unit or ("metric" if options.metric_points is None else "m")


# -------------------------------------------------------------------------------------------------------------- work


def find_work(options: DepthOptions) -> list[Input]:
    """Pictures and videos; nothing to do is an error."""
    given = sample_pictures() if options.sample else options.images
    return find_inputs(
        given,
        options.output,
        recursive=options.recursive,
        as_video=options.video,
        keep_suffix=options.keep_suffix,
    )


def sample_pictures() -> list[Path]:
    """The pictures of our own making that come with the package."""
    return list_images(Path(marigold_uq.__file__).parent / "assets" / "samples")


def check_output(folder: Path) -> None:
    """Create the output folder and make sure that files can be written, before anything expensive happens."""
    make_folder(folder)
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise PermissionError(f"cannot write into the folder {folder}: {error.strerror}") from error


def check_sources(work: Sequence[Input], plan: Plan) -> None:
    """No result may replace one of the images."""
    sources = {one.path.resolve() for one in work}
    for one in work:
        for target in (*plan.files(one.name), plan.record_path(one.name)):
            if target.resolve() in sources:
                raise ValueError(f"{target} is one of the images and would be replaced; choose another -o")


def check_outputs(work: Sequence[Input], plan: Plan) -> list[Input]:
    """What is left to do. Results of other settings stop the run before its first image."""
    left, conflicts = [], []
    for one in work:
        found = None if plan.options.overwrite else OutputRecord.read(plan.record_path(one.name))
        targets = plan.files(one.name) if not one.is_video else [video_path(plan, one)]
        if plan.options.overwrite:
            left.append(one)
        elif found is None:
            strangers = [str(target) for target in targets if target.exists()]
            left.append(one)
            conflicts += [f"{strangers[0]} exists, and nothing beside it says what made it"] if strangers else []
        elif different := found.conflicts(one.path, plan.asked):
            conflicts.append(f"{one.name} was made with other settings: {'; '.join(different)}")
        elif found.complete and all(target.exists() and target.name in found.files for target in targets):
            print(f"{one.path.name}: done before, skipped (--overwrite recomputes it)")
        else:
            left.append(one)
    if conflicts:
        rest = len(conflicts) - _CONFLICTS_SHOWN
        raise FileExistsError(
            f"{plan.options.output} holds other results; --overwrite replaces them, another -o keeps them: "
            + ". ".join(conflicts[:_CONFLICTS_SHOWN]) + (f". And {rest} more" if rest > 0 else "")
        )  # fmt: skip
    return left


def video_path(plan: Plan, video: Input) -> Path:
    """Where the video of a video goes."""
    folder, stem = plan.place(video.name)
    return folder / f"{stem}_depth.mp4"


def share_of_process(items: list[Any]) -> list[Any]:
    """Every n-th item, under `accelerate launch` or torchrun with n processes; all of them otherwise."""
    state = process_state()
    mine = items[state.process_index :: state.num_processes]
    if state.num_processes > 1:
        print(f"process {state.process_index + 1} of {state.num_processes}: {len(mine)} of {len(items)} inputs")
    return mine


# ---------------------------------------------------------------------------------------------------------- pictures


@dataclass(frozen=True)
class Loaded:
    """A picture that waits for its batch."""

    source: Input
    picture: np.ndarray  # (H, W, 3) uint8
    given: ModelInput
    started: float


def run_pictures(work: Sequence[Input], plan: Plan, pipeline: MarigoldUQDepthPipeline, failures: list[Failure]) -> None:
    """Predict and export; a broken picture is noted and the rest is done."""
    quiet = {"disable": True} if len(work) < 2 else {}
    with tqdm(total=len(work), desc="depth", unit="image", **quiet) as bar:
        for batch in batches(work, plan, failures, bar):
            for one, record in predict_batch(batch, plan, pipeline, failures):
                finish(one, record, plan, failures)
            bar.update(len(batch))


def batches(work: Sequence[Input], plan: Plan, failures: list[Failure], bar: Any) -> Iterator[list[Loaded]]:
    """Pictures of one size in the network, up to a batch of them, soon after they were read."""
    waiting: dict[tuple[int, ...], list[Loaded]] = {}
    for one in work:
        try:
            loaded = load(one, plan)
        except Exception as error:  # whatever one image does, the others are made
            failures.append((one.path, reason(error)))
            bar.update()
            continue
        group = waiting.setdefault(tuple(loaded.given.pixels.shape), [])
        group.append(loaded)
        pixels = sum(entry.picture.size // 3 for own in waiting.values() for entry in own)
        if len(group) == plan.call.batch_size or pixels > _PENDING_PIXELS:
            yield waiting.pop(tuple(loaded.given.pixels.shape))
    yield from waiting.values()


def load(one: Input, plan: Plan) -> Loaded:
    """Read a picture and bring it to the network's size."""
    started = time.perf_counter()
    array = read_array(one.path, plan.options.max_pixels or None)
    picture, given = picture_for_model(array, str(one.path), resolution=plan.call.resolution, multiple=plan.multiple)
    return Loaded(one, picture, given, started)


def predict_batch(
    batch: list[Loaded], plan: Plan, pipeline: MarigoldUQDepthPipeline, failures: list[Failure]
) -> Iterator[tuple[Loaded, DepthRecord]]:
    """One call for all of them; if that fails, one by one, to find the one that does."""
    try:
        outputs = split_output(predict([one.given for one in batch], plan, pipeline, seeds(batch, plan)), len(batch))
    except Exception as error:
        if len(batch) == 1:
            failures.append((batch[0].source.path, reason(error)))
            return
        for one in batch:
            yield from predict_batch([one], plan, pipeline, failures)
        return
    for one, output in zip(batch, outputs, strict=True):
        yield one, make_record(one.picture, output, plan)


def seeds(batch: Sequence[Loaded], plan: Plan) -> list[int]:
    """Of each picture, by its content: the same in any company, and no pattern that all pictures share."""
    return [member_seed(plan.options.seed, zlib.crc32(np.ascontiguousarray(one.picture).data)) for one in batch]


def predict(
    given: list[ModelInput],
    plan: Plan,
    pipeline: MarigoldUQDepthPipeline,
    seeds: Sequence[int],
    latents: torch.Tensor | None = None,
) -> MarigoldUQDepthOutput:
    """One call of the pipeline with the command's options."""
    streams = [one for seed in seeds for one in member_generators(seed, plan.call.num_chains)]
    return pipeline.predict_inputs(given, plan.call, latents=latents, generator=streams)


def split_output(output: MarigoldUQDepthOutput, count: int) -> list[MarigoldUQDepthOutput]:
    """The maps of each picture by themselves."""
    names = ("prediction", "uncertainty", "epistemic", "interval")
    return [
        MarigoldUQDepthOutput(
            **{name: value[i : i + 1] for name in names if (value := getattr(output, name)) is not None}
        )
        for i in range(count)
    ]


def make_record(picture: np.ndarray, output: MarigoldUQDepthOutput, plan: Plan) -> DepthRecord:
    """The pipeline's output for one image, with what made it."""

    def layer(value: Any) -> np.ndarray | None:
        return None if value is None else np.asarray(value[0])[..., 0]

    depth = layer(output.prediction)
    assert depth is not None
    interval = None if output.interval is None else np.moveaxis(np.asarray(output.interval[0]), -1, 0)
    return DepthRecord(
        image=picture,
        depth=depth,
        uncertainty=layer(output.uncertainty),
        epistemic=layer(output.epistemic),
        interval=interval,
        coverage=plan.options.coverage,
        metadata={
            **plan.asked,
            "units": plan.units if plan.points is None else "relative",
            "prediction_type": plan.prediction_type or "depth",
            "model": plan.options.model,
        },
    )


def finish(one: Loaded, record: DepthRecord, plan: Plan, failures: list[Failure]) -> None:
    """Write a picture's files, and say so. A full disk concerns all images: that OSError ends the run."""
    try:
        record, options = in_units(one.source, record, plan)
        num_files = write(one.source, record, plan, options)
    except OSError:
        raise
    except Exception as error:
        failures.append((one.source.path, reason(error)))
        return
    tqdm.write(summary_line(one.source.path, record, num_files, time.perf_counter() - one.started))


def in_units(source: Input, record: DepthRecord, plan: Plan) -> tuple[DepthRecord, ExportOptions]:
    """In the unit asked for, and with the lens that is known."""
    if plan.points is None:
        return record, plan.lens(None)
    points = plan.points.of(source.path)
    height, width = record.depth.shape
    return to_metric(record, points, plan.units), plan.lens(points.at_size(width, height).intrinsics)


def write(source: Input, record: DepthRecord, plan: Plan, options: ExportOptions) -> int:
    """Export, between two states of the record; the number of files."""
    folder, stem = plan.place(source.name)
    targets = plan.files(source.name)
    note = begin(source, plan, [target.name for target in targets])
    # `overwrite`: an image is made anew as a whole, also where a stopped run left some of its files.
    export(record, folder, stem, plan.formats, overwrite=True, options=options)
    complete(note)
    return len(targets)


def begin(source: Input, plan: Plan, names: list[str]) -> OutputRecord:
    """Record that outputs are being made; what other settings made, and these do not, goes away."""
    path = plan.record_path(source.name)
    make_folder(path.parent)
    old, described = OutputRecord.read(path), describe_source(source.path)
    kept: list[str] = []
    if old is not None and old.conflicts(source.path, plan.asked):
        old.remove_files(keep=names)
    elif old is not None:
        kept = [name for name in old.files if (path.parent / Path(name).name).exists()]
    note = OutputRecord(path, described, plan.asked, sorted({*names, *kept}))
    note.write()
    return note


def complete(note: OutputRecord) -> None:
    """Record that all of them are there."""
    replace(note, complete=True).write()


def reason(error: Exception) -> str:
    """Why a file failed; an error that nobody foresaw tells its kind too."""
    if os.environ.get(SHOW_TRACEBACK):
        traceback.print_exception(error)
    return str(error) if isinstance(error, OSError | ValueError | RuntimeError) else f"{type(error).__name__}: {error}"


def summary_line(path: Path, record: DepthRecord, num_files: int, seconds: float) -> str:
    """Size, time and mean uncertainty of a finished image."""
    unit = "" if record.units in ("relative", "metric") else f" {record.units}"
    spread = "" if record.uncertainty is None else f", mean uncertainty {float(record.uncertainty.mean()):.3f}{unit}"
    height, width = record.image.shape[:2]
    return f"{path.name}: {width} x {height}, {seconds:.1f} s{spread}, {num_files} files"
