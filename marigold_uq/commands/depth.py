"""`marigold-uq depth`: depth and uncertainty of photographs, folders of them, and videos."""

from __future__ import annotations

import os
import sys
import tempfile
import time
import traceback
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from tqdm.auto import tqdm

from marigold_uq.commands.runner import SHOW_TRACEBACK, Invocation
from marigold_uq.depth.export import FORMATS, DepthRecord, export, output_paths
from marigold_uq.depth.model import Dtype, load_pipeline, process_state
from marigold_uq.files import make_folder
from marigold_uq.pipelines.depth.call import DepthCall, quickest_mode
from marigold_uq.pipelines.depth.images import MAX_PIXELS, list_images, load_images, to_uint8

if TYPE_CHECKING:
    from marigold_uq.pipelines.depth import MarigoldUQDepthPipeline
    from marigold_uq.pipelines.depth.output import MarigoldUQDepthOutput

Mode = Literal["marginal", "trajectory", "ensemble", "none"]
FormatName = Literal["png16", "tiff", "npz", "color", "uncertainty", "sheet", "ply"]
Failure = tuple[Path, str]
"""What could not be processed, and why."""
VIDEO_SUFFIXES = (".mp4", ".mov", ".avi", ".mkv", ".webm")


@dataclass(frozen=True)
class DepthOptions:
    """Depth and uncertainty of photographs.

    Args:
        images: Image files, folders of images, or video files.
        output: Folder for the results; it is created.
        sample: Use the pictures that come with the package instead of `images`.
        model: "embedded" (inside the package), a folder, or a Hub name such as prs-eth/marigold-depth-v1-1.
        baseline: A depth model of others: a folder or Hub name of a depth model of transformers, or the name of a
            registered function (see --import). A model that learnt what it leaves over takes it in place of the one it
            names, which must have the same weights; with "embedded" it is that model's depth, without uncertainty.
        device: "auto", "cpu", "cuda", "cuda:1", "mps".
        dtype: float32, float16 or bfloat16; half precision is for GPUs.
        variant: Weight files of a Hub checkpoint, for instance fp16.
        uncertainty: "marginal" (models with an image encoder) and "trajectory" are quick, "ensemble" runs a whole chain
            per member, "none" gives depth alone. Default: the first of the quick ones that the model has, else none.
        num_inference_steps: Denoising steps; default: the model's.
        ensemble_size: Members that make the uncertainty.
        coverage: Also write the central interval with this coverage, for instance 0.9.
        output_epistemic: Also write the paper's epistemic estimate; goes with ensemble.
        processing_resolution: Longer edge for the network, 0 for the image's own; default: the model's.
        formats: What to write, one or several: 16-bit PNG with its scale, float TIFF, numpy file with all maps,
            coloured depth, coloured uncertainty, both beside the photograph, cloud of the most certain points.
        seed: The same seed gives the same result for an image, whatever the other images are.
        batch_size: Members per network call; never changes a result.
        recursive: Look into folders inside folders.
        video: Treat a folder as the frames of a video: latents are carried on, so that depth does not flicker.
        overwrite: Recompute existing outputs; without it, finished images are skipped.
        max_pixels: Larger pictures are refused with their size; 0 takes all of them.
    """

    images: list[Path] = field(default_factory=list)
    output: Path = Path("out")
    sample: bool = False
    model: str = "embedded"
    baseline: str | None = None
    device: str = "auto"
    dtype: Dtype = "float32"
    variant: str | None = None
    uncertainty: Mode | None = None
    num_inference_steps: int | None = None
    ensemble_size: int = 10
    coverage: float | None = None
    output_epistemic: bool = False
    processing_resolution: int | None = None
    formats: list[FormatName] = field(default_factory=lambda: ["npz", "color", "uncertainty", "sheet"])
    seed: int = 0
    batch_size: int = 1
    recursive: bool = False
    video: bool = False
    overwrite: bool = False
    max_pixels: int = MAX_PIXELS


def run_depth(options: DepthOptions, invocation: Invocation | None = None) -> int:
    """Process everything; 0 if all went well, 1 if some image failed. What makes all of it impossible is an error."""
    videos, files = find_inputs(options)
    check_output(options.output)
    pipeline = load_pipeline(
        options.model, device=options.device, dtype=options.dtype, variant=options.variant, baseline=options.baseline
    )
    plan = Plan.of(options, pipeline)
    check_sources(files, plan)
    failures: list[Failure] = []
    try:
        run_images(files, plan, pipeline, failures)
        if videos:
            from marigold_uq.commands.video import run_videos

            run_videos(videos, plan, pipeline, failures)
    finally:  # also after Ctrl-C, or when the disk is full
        for path, reason in failures:
            print(f"failed: {path}: {reason}", file=sys.stderr)
    process_state().wait_for_everyone()  # a launcher stops all processes as soon as one ends with an error
    return 1 if failures else 0


@dataclass(frozen=True)
class Plan:
    """Options with the model's defaults filled in and checked, before the first image is touched."""

    options: DepthOptions
    call: DepthCall
    formats: tuple[str, ...]

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
            batch_size=options.batch_size,
            uncertainty=mode,
            coverage=options.coverage,
            output_epistemic=options.output_epistemic,
            output_latent=True,  # a video carries them on
        )
        plan = cls(options, call, tuple(options.formats))
        if mode is None and options.formats == DepthOptions().formats:
            plan = replace(plan, formats=tuple(name for name in plan.formats if name != "uncertainty"))
        if not plan.formats:
            raise ValueError(f"no formats given; choose from {', '.join(FORMATS)}")
        plan.files("name")
        return plan

    @property
    def layers(self) -> list[str]:
        """Names of the maps that will be there."""
        spread = ["uncertainty"] if self.call.mode else []
        epistemic = ["epistemic"] if self.options.output_epistemic else []
        ends = [] if self.options.coverage is None else ["lower", "upper"]
        return ["depth", *spread, *epistemic, *ends]

    def files(self, stem: str) -> list[Path]:
        """What will be written for an image."""
        return list(output_paths(self.options.output, stem, self.formats, self.layers))


def choose_mode(options: DepthOptions, pipeline: MarigoldUQDepthPipeline) -> str | None:
    """The mode that was asked for; else the cheapest that gives what was asked for."""
    if options.uncertainty is not None:
        return None if options.uncertainty == "none" else options.uncertainty
    if options.output_epistemic:
        return "ensemble"
    return quickest_mode(pipeline) or (None if options.coverage is None else "ensemble")


def check_output(folder: Path) -> None:
    """Create the output folder and make sure that files can be written, before anything expensive happens."""
    make_folder(folder)
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise PermissionError(f"cannot write into the folder {folder}: {error.strerror}") from error


def find_inputs(options: DepthOptions) -> tuple[list[Path], list[Path]]:
    """Videos and images; nothing to do is an error."""
    if options.sample:
        return [], sample_pictures()
    if not options.images:
        raise FileNotFoundError("no images given: name files or folders, or use --sample for pictures in the package")
    videos = [path for path in options.images if path.suffix.lower() in VIDEO_SUFFIXES]
    rest = [path for path in options.images if path not in videos]
    if options.video:
        return [*videos, *rest], []
    return videos, outside_output(rest, options) if rest else []


def outside_output(paths: list[Path], options: DepthOptions) -> list[Path]:
    """The images below `paths`, without earlier results; a folder that is both input and output is an error."""
    output = options.output.resolve()
    if any(path.is_dir() and path.resolve() == output for path in paths):
        raise ValueError(
            f"{options.output} is both input and output: results would be taken for photographs; choose another -o"
        )
    files = list_images(paths, recursive=options.recursive)
    return [file for file in files if file in paths or output not in file.resolve().parents]


def check_sources(files: Sequence[Path], plan: Plan) -> None:
    """No result may replace one of the images."""
    sources = {file.resolve() for file in files}
    for stem in unique_stems(files):
        for target in plan.files(stem):
            if target.resolve() in sources:
                raise ValueError(f"{target} is one of the images and would be replaced; choose another -o")


def sample_pictures() -> list[Path]:
    """The pictures of our own making that come with the package."""
    import marigold_uq

    return list_images(Path(marigold_uq.__file__).parent / "assets" / "samples")


def run_images(files: Sequence[Path], plan: Plan, pipeline: MarigoldUQDepthPipeline, failures: list[Failure]) -> None:
    """Predict and export this process's share of the files; a broken one is noted and the rest is done."""
    mine = share_of_process(list(zip(files, unique_stems(files), strict=True)))
    for path, stem in tqdm(mine, desc="depth", unit="image", disable=len(mine) < 2):
        targets = plan.files(stem)
        if not plan.options.overwrite and all(target.exists() for target in targets):
            tqdm.write(f"{path.name}: done before, skipped (--overwrite recomputes it)")
            continue
        started = time.perf_counter()
        try:
            record = predict_file(path, plan, pipeline)
        except Exception as error:  # whatever one image does, the others are made
            failures.append((path, reason(error)))
            continue
        try:
            # `overwrite`: an image is made anew as a whole, also where a stopped run left some of its files. A full
            # disk concerns all images: that OSError ends the run.
            export(record, plan.options.output, stem, plan.formats, overwrite=True)
        except OSError:
            raise
        except Exception as error:
            failures.append((path, reason(error)))
            continue
        tqdm.write(summary_line(path, record, len(targets), time.perf_counter() - started))


def reason(error: Exception) -> str:
    """Why a file failed; an error that nobody foresaw tells its kind too."""
    if os.environ.get(SHOW_TRACEBACK):
        traceback.print_exception(error)
    return str(error) if isinstance(error, OSError | ValueError | RuntimeError) else f"{type(error).__name__}: {error}"


def share_of_process(items: list[Any]) -> list[Any]:
    """Every n-th item, under `accelerate launch` or torchrun with n processes; all of them otherwise."""
    state = process_state()
    mine = items[state.process_index :: state.num_processes]
    if state.num_processes > 1:
        print(f"process {state.process_index + 1} of {state.num_processes}: {len(mine)} of {len(items)} inputs")
    return mine


def unique_stems(files: Sequence[Path]) -> list[str]:
    """Names for the outputs: the file's, with its folder's before it where two files share one."""
    counts = Counter(path.stem for path in files)
    stems = [path.stem if counts[path.stem] == 1 else f"{path.parent.name}_{path.stem}" for path in files]
    again = Counter(stems)
    return [
        stem if again[stem] == 1 else f"{stem}_{zlib.crc32(str(path).encode()):08x}"
        for stem, path in zip(stems, files, strict=True)
    ]


def predict_file(path: Path, plan: Plan, pipeline: MarigoldUQDepthPipeline) -> DepthRecord:
    """Read one image and predict it."""
    (picture,) = load_images(path, max_pixels=plan.options.max_pixels or None)
    return make_record(picture, predict(picture, plan, pipeline), plan, pipeline)


def summary_line(path: Path, record: DepthRecord, num_files: int, seconds: float) -> str:
    """Size, time and mean uncertainty of a finished image."""
    spread = "" if record.uncertainty is None else f", mean uncertainty {float(record.uncertainty.mean()):.3f}"
    height, width = record.image.shape[:2]
    return f"{path.name}: {width} x {height}, {seconds:.1f} s{spread}, {num_files} files"


def predict(
    picture: torch.Tensor, plan: Plan, pipeline: MarigoldUQDepthPipeline, latents: torch.Tensor | None = None
) -> MarigoldUQDepthOutput:
    """One call of the pipeline with the command's options; the seed makes it the same in any company."""
    generator = torch.Generator().manual_seed(plan.options.seed)
    return pipeline.predict([picture], plan.call, latents=latents, generator=generator)


def make_record(
    picture: torch.Tensor, output: MarigoldUQDepthOutput, plan: Plan, pipeline: MarigoldUQDepthPipeline
) -> DepthRecord:
    """The pipeline's output for one image, with what made it."""

    def layer(value: Any) -> np.ndarray | None:
        return None if value is None else np.asarray(value)[0, ..., 0]

    metric = not (pipeline.config.scale_invariant or pipeline.config.shift_invariant)
    depth = layer(output.prediction)
    assert depth is not None
    interval = None if output.interval is None else np.moveaxis(np.asarray(output.interval)[0], -1, 0)
    return DepthRecord(
        image=to_uint8(picture),
        depth=depth,
        uncertainty=layer(output.uncertainty),
        epistemic=layer(output.epistemic),
        interval=interval,
        coverage=plan.options.coverage,
        metadata={
            "units": "metric" if metric else "relative",
            "prediction_type": pipeline.config.prediction_type,
            "model": plan.options.model,
            **({} if pipeline.baseline is None else {"baseline": pipeline.baseline.config.name}),
            "uncertainty": plan.call.mode or "none",
            "ensemble_size": plan.call.num_members,
            "num_inference_steps": plan.call.num_steps,
            "processing_resolution": plan.call.resolution,
            "seed": plan.options.seed,
        },
    )
