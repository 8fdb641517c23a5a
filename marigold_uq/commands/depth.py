"""`marigold-uq depth`: depth and uncertainty of photographs, folders of them, and videos."""

from __future__ import annotations

import sys
import time
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from tqdm.auto import tqdm

from marigold_uq.commands.model import Dtype, load_pipeline
from marigold_uq.export import DepthRecord, export, make_folder, output_paths
from marigold_uq.images import list_images, load_images, to_uint8

if TYPE_CHECKING:
    from marigold_uq.pipelines.depth import MarigoldUQDepthPipeline
    from marigold_uq.pipelines.depth_output import MarigoldUQDepthOutput

Mode = Literal["trajectory", "ensemble", "none"]
VIDEO_SUFFIXES = (".mp4", ".mov", ".avi", ".mkv", ".webm")


@dataclass(frozen=True)
class DepthOptions:
    """Depth and uncertainty of photographs.

    Args:
        images: Image files, folders of images, or video files.
        output: Folder for the results; it is created.
        sample: Use the pictures that come with the package instead of `images`.
        model: "embedded" (inside the package), a folder, or a Hub name such as prs-eth/marigold-depth-v1-1.
        device: "auto", "cpu", "cuda", "cuda:1", "mps".
        dtype: float32, float16 or bfloat16; half precision is for GPUs.
        variant: Weight files of a Hub checkpoint, for instance fp16.
        uncertainty: "trajectory" is quick, "ensemble" runs a whole chain per member, "none" gives depth alone. Default:
            trajectory where the model has a law, else none.
        steps: Denoising steps; default: the model's.
        members: Members that make the uncertainty.
        coverage: Also the central interval that is to hold this share of the truth, for instance 0.9.
        epistemic: Also the paper's epistemic estimate; goes with ensemble.
        resolution: Longer edge for the network, 0 for the image's own; default: the model's.
        formats: png16, tiff, npz, color, uncertainty, sheet, ply.
        seed: The same seed gives the same result, image by image, in whatever company.
        batch_size: Members per network call; never changes a result.
        recursive: Look into folders inside folders.
        video: Treat a folder as the frames of a video: latents are carried on, so that depth does not flicker.
        overwrite: Make again what is there already; without it, finished images are skipped.
    """

    images: list[Path] = field(default_factory=list)
    output: Path = Path("out")
    sample: bool = False
    model: str = "embedded"
    device: str = "auto"
    dtype: Dtype = "float32"
    variant: str | None = None
    uncertainty: Mode | None = None
    steps: int | None = None
    members: int = 10
    coverage: float | None = None
    epistemic: bool = False
    resolution: int | None = None
    formats: list[str] = field(default_factory=lambda: ["npz", "color", "uncertainty", "sheet"])
    seed: int = 0
    batch_size: int = 1
    recursive: bool = False
    video: bool = False
    overwrite: bool = False


def run_depth(options: DepthOptions) -> int:
    """Process everything; 0 if all went well, 1 if some image failed, 2 if nothing could be done."""
    videos, files = find_inputs(options)
    pipeline = load_pipeline(options.model, device=options.device, dtype=options.dtype, variant=options.variant)
    plan = Plan.of(options, pipeline)
    make_folder(options.output)
    failures = run_images(files, plan, pipeline)
    if videos:
        from marigold_uq.commands.video import run_videos

        failures += run_videos(videos, plan, pipeline)
    for name, reason in failures:
        print(f"failed: {name}: {reason}", file=sys.stderr)
    return 1 if failures else 0


@dataclass(frozen=True)
class Plan:
    """Options with the model's defaults filled in."""

    options: DepthOptions
    mode: str | None
    formats: tuple[str, ...]
    levels: tuple[float, ...]

    @classmethod
    def of(cls, options: DepthOptions, pipeline: MarigoldUQDepthPipeline) -> Plan:
        """Choose the mode the model can do, and drop pictures of an uncertainty that will not be there."""
        mode: str | None = options.uncertainty
        if mode is None:
            mode = "trajectory" if pipeline.scheduler.family.has_spread and not options.epistemic else "none"
            mode = "ensemble" if options.epistemic else mode
        if mode == "none":
            mode = None
        default_formats = DepthOptions().formats
        formats = [name for name in options.formats if mode or name != "uncertainty" or name not in default_formats]
        tail = None if options.coverage is None else (1 - options.coverage) / 2
        return cls(options, mode, tuple(formats), () if tail is None else (tail, 1 - tail))

    @property
    def layers(self) -> list[str]:
        """Names of the maps that will be there."""
        spread = ["uncertainty"] if self.mode else []
        epistemic = ["epistemic"] if self.options.epistemic else []
        return ["depth", *spread, *epistemic, *[f"q{level:g}" for level in self.levels]]

    def is_done(self, stem: str) -> bool:
        """Whether every file of this image exists."""
        return all(path.exists() for path in output_paths(self.options.output, stem, self.formats, self.layers))


def find_inputs(options: DepthOptions) -> tuple[list[Path], list[Path]]:
    """Videos and images; nothing to do is an error."""
    if options.sample:
        return [], sample_pictures()
    if not options.images:
        raise FileNotFoundError("no images given: name files or folders, or use --sample for the pictures we bring")
    videos = [path for path in options.images if path.suffix.lower() in VIDEO_SUFFIXES]
    rest = [path for path in options.images if path not in videos]
    if options.video:
        return [*videos, *rest], []
    return videos, list_images(rest, recursive=options.recursive) if rest else []


def sample_pictures() -> list[Path]:
    """The pictures of our own making that come with the package."""
    import marigold_uq

    return list_images(Path(marigold_uq.__file__).parent / "assets" / "samples")


def run_images(files: Sequence[Path], plan: Plan, pipeline: MarigoldUQDepthPipeline) -> list[tuple[str, str]]:
    """Predict and export this process's share of the files; a broken one is noted and the rest goes on."""
    failures = []
    stems = unique_stems(files)
    mine = share_of_process(list(zip(files, stems, strict=True)))
    for path, stem in tqdm(mine, desc="depth", unit="image", disable=len(mine) < 2):
        if not plan.options.overwrite and plan.is_done(stem):
            tqdm.write(f"{path.name}: done before, skipped")
            continue
        try:
            tqdm.write(process_image(path, stem, plan, pipeline))
        except (OSError, ValueError) as error:
            failures.append((str(path), str(error)))
    return failures


def share_of_process(items: list[Any]) -> list[Any]:
    """Every n-th item, under `accelerate launch` or torchrun with n processes; all of them otherwise."""
    from accelerate import PartialState

    state = PartialState()
    return items[state.process_index :: state.num_processes]


def unique_stems(files: Sequence[Path]) -> list[str]:
    """Names for the outputs: the file's, with its folder's before it where two files share one."""
    counts = Counter(path.stem for path in files)
    stems = [path.stem if counts[path.stem] == 1 else f"{path.parent.name}_{path.stem}" for path in files]
    again = Counter(stems)
    return [
        stem if again[stem] == 1 else f"{stem}_{zlib.crc32(str(path).encode()):08x}"
        for stem, path in zip(stems, files, strict=True)
    ]


def process_image(path: Path, stem: str, plan: Plan, pipeline: MarigoldUQDepthPipeline) -> str:
    """Predict one image, write its files, and say so in a line."""
    started = time.perf_counter()
    (picture,) = load_images(path)
    output = predict(picture, plan, pipeline)
    record = make_record(picture, output, plan, pipeline)
    # `overwrite`: an image is made anew as a whole, also where a stopped run left some of its files
    files = export(record, plan.options.output, stem, plan.formats, overwrite=True)
    seconds = time.perf_counter() - started
    spread = "" if record.uncertainty is None else f", mean uncertainty {float(record.uncertainty.mean()):.3f}"
    height, width = picture.shape[-2:]
    return f"{path.name}: {width} x {height}, {seconds:.1f} s{spread}, {len(files)} files"


def predict(
    picture: torch.Tensor, plan: Plan, pipeline: MarigoldUQDepthPipeline, **extra: Any
) -> MarigoldUQDepthOutput:
    """One call of the pipeline with the command's options; the seed makes it the same in any company."""
    options = plan.options
    return pipeline(
        picture,
        num_inference_steps=options.steps,
        ensemble_size=options.members if plan.mode else 1,
        processing_resolution=options.resolution,
        batch_size=options.batch_size,
        uncertainty=plan.mode,
        coverage=options.coverage,
        output_epistemic=options.epistemic,
        generator=torch.Generator().manual_seed(options.seed),
        **extra,
    )


def make_record(
    picture: torch.Tensor, output: MarigoldUQDepthOutput, plan: Plan, pipeline: MarigoldUQDepthPipeline
) -> DepthRecord:
    """The pipeline's output for one image, with what made it."""

    def layer(value: Any) -> np.ndarray | None:
        return None if value is None else np.asarray(value)[0, ..., 0]

    metric = not (pipeline.config.scale_invariant or pipeline.config.shift_invariant)
    depth = layer(output.prediction)
    assert depth is not None
    quantiles = None if output.quantiles is None else np.moveaxis(np.asarray(output.quantiles)[0], -1, 0)
    return DepthRecord(
        image=to_uint8(picture),
        depth=depth,
        uncertainty=layer(output.uncertainty),
        epistemic=layer(output.epistemic),
        quantiles=quantiles,
        quantile_levels=plan.levels,
        metadata={
            "units": "m" if metric else "relative",
            "prediction_type": pipeline.config.prediction_type,
            "model": plan.options.model,
            "uncertainty": plan.mode or "none",
            "members": plan.options.members if plan.mode else 1,
            "seed": plan.options.seed,
        },
    )
