"""`marigold-uq depth`: depth and uncertainty of photographs, folders of them, and videos.

Its options alone are here, so that `--help` needs no torch; `marigold_uq.commands.pictures` does the work.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from marigold_uq.commands.runner import Invocation
from marigold_uq.terminal import leave_at_once

__all__ = ["DepthOptions", "FormatName", "run_depth"]

Mode = Literal["marginal", "trajectory", "ensemble", "none"]
FormatName = Literal["png16", "tiff", "npz", "color", "uncertainty", "sheet", "ply"]


@dataclass(frozen=True)
class DepthOptions:
    """Depth and uncertainty of photographs.

    Args:
        images: Image files, video files, or folders of both.
        output: Folder for the results; it is created. Names mirror those of the files below the folders given.
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
        output_epistemic: Also write the paper's epistemic estimate; by default with ensemble.
        processing_resolution: Longer edge for the network, 0 for the image's own; default: the model's.
        formats: What to write, one or several: 16-bit PNG with its scale, float TIFF, numpy file with all maps,
            coloured depth, coloured uncertainty, both beside the photograph, cloud of the most certain points.
        fov: Degrees across the longer side, for the point cloud; default 60.
        intrinsics: For the point cloud instead, fx fy cx cy in pixels of the picture, the first pixel's centre at 0 0.
        metric_points: Known distances that turn relative depth into them: a CSV file with the columns x, y, depth and
            for several pictures image, or a folder with a COLMAP model, which also gives the intrinsics.
        unit: Name of the unit of metric depth or points; default m.
        seed: The same seed gives the same result for an image, whatever the other images are.
        batch_size: Pictures of one size, or members, per network call; never changes a result beyond rounding. Default:
            8 for models below 100 million parameters, else 1.
        recursive: Look into folders inside folders.
        video: Treat a folder as the frames of a video: latents are carried on, so that depth does not flicker.
        keep_suffix: Keep the suffix in the names of outputs, for folders where a.jpg and a.png lie side by side.
        overwrite: Recompute existing outputs. Without it images finished under the same options are skipped, and
            results of other options are refused.
        max_pixels: Larger pictures are refused with their size; 0 takes all of them.
    """

    images: list[Path] = field(default_factory=list)
    output: Path = Path("out")
    sample: bool = False
    model: str = "embedded"
    baseline: str | None = None
    device: str = "auto"
    dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    variant: str | None = None
    uncertainty: Mode | None = None
    num_inference_steps: int | None = None
    ensemble_size: int = 10
    coverage: float | None = None
    output_epistemic: bool = False
    processing_resolution: int | None = None
    formats: list[FormatName] = field(default_factory=lambda: ["npz", "color", "uncertainty", "sheet"])
    fov: float | None = None
    intrinsics: list[float] | None = None
    metric_points: Path | None = None
    unit: str | None = None
    seed: int = 0
    batch_size: int | None = None
    recursive: bool = False
    video: bool = False
    keep_suffix: bool = False
    overwrite: bool = False
    max_pixels: int = 2**26


def run_depth(options: DepthOptions, invocation: Invocation | None = None) -> int:
    """Process everything; 0 if all went well, 1 if some image failed. What makes all of it impossible is an error."""
    check_options(options)
    with leave_at_once():
        from marigold_uq.commands.pictures import run
    return run(options)


def check_options(options: DepthOptions) -> None:
    """What needs neither model nor pictures to be seen."""
    if options.sample and options.images:
        raise ValueError("give images, or --sample for the pictures in the package, not both")
    if not options.sample and not options.images:
        raise FileNotFoundError("no images given: name files or folders, or use --sample for pictures in the package")
    if options.fov is not None and not 0 < options.fov < 180:
        raise ValueError(f"fov is an angle in degrees between 0 and 180; got {options.fov:g}")
    if options.intrinsics is not None and (len(options.intrinsics) != 4 or min(options.intrinsics[:2]) <= 0):
        raise ValueError(f"intrinsics are fx fy cx cy with positive fx and fy; got {options.intrinsics}")
    if options.fov is not None and options.intrinsics is not None:
        raise ValueError("give fov or intrinsics, not both")
