"""Videos: frame after frame, with common noise and latents carried on, so that depth does not flicker."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from tqdm.auto import tqdm

from marigold_uq.commands.depth import Failure, Plan, make_record, predict, reason, share_of_process, unique_stems
from marigold_uq.depth.colors import color_depth, color_uncertainty, saturation
from marigold_uq.depth.export import DepthRecord, export
from marigold_uq.depth.video import Frames, carry_latents, read_frames, write_video
from marigold_uq.pipelines.depth.call import ONE_STEP_MODES
from marigold_uq.pipelines.depth.images import load_images
from marigold_uq.pipelines.depth.latents import chain_generators
from marigold_uq.randomness import randn

if TYPE_CHECKING:
    from marigold_uq.pipelines.depth import MarigoldUQDepthPipeline

DATA_FORMATS = ("npz", "png16", "tiff", "ply")


def run_videos(paths: list[Path], plan: Plan, pipeline: MarigoldUQDepthPipeline, failures: list[Failure]) -> None:
    """Each video gives one with photograph, depth and uncertainty side by side, and a folder of data per frame."""
    named = [path.resolve() for path in paths]  # the folder "." has a name of its own
    for path, stem in share_of_process(list(zip(paths, unique_stems(named), strict=True))):
        try:
            print(process_video(path, stem, plan, pipeline))
        except Exception as error:
            failures.append((path, reason(error)))


def process_video(path: Path, stem: str, plan: Plan, pipeline: MarigoldUQDepthPipeline) -> str:
    """Predict all frames of one video, frame by frame in constant memory, and write the results."""
    target = plan.options.output / f"{stem}_depth.mp4"
    if target.exists() and not plan.options.overwrite:
        return f"{path.name}: done before, skipped"
    frames = read_frames(path)
    records = predict_frames(frames, plan.options.output / stem, plan, pipeline)
    write_video(target, paint_frames(records), frames.fps, overwrite=plan.options.overwrite)
    return f"{path.name}: {len(frames)} frames, {target.name}"


def predict_frames(
    frames: Frames, folder: Path, plan: Plan, pipeline: MarigoldUQDepthPipeline
) -> Iterator[DepthRecord]:
    """Depth of each frame. All frames share their noise; an ensemble's chains also start from the frame before."""
    formats = [name for name in plan.formats if name in DATA_FORMATS]
    previous: Tensor | None = None
    size = torch.Size()
    for name, picture in tqdm(frames, desc=frames.path.name, unit="frame", total=len(frames)):
        (image,) = load_images(picture)
        latents = None
        if previous is not None and image.shape == size:
            latents = carry_latents(previous, common_noise(previous, plan.options.seed))
        output, size = predict(image, plan, pipeline, latents), image.shape
        if plan.call.mode not in ONE_STEP_MODES:  # there the start says nothing of the result
            assert isinstance(output.latent, Tensor)
            previous = output.latent
        record = make_record(image, output, plan, pipeline)
        if formats:
            export(record, folder, name, formats, overwrite=True)  # a stopped run left frames, not a video
        yield record


def common_noise(like: Tensor, seed: int) -> Tensor:
    """The numbers with which the first frame started, from the same stream per member."""
    streams = chain_generators(torch.Generator().manual_seed(seed), 1, len(like))
    return randn((), like.shape, like=like, generator=streams)


def paint_frames(records: Iterator[DepthRecord]) -> Iterator[np.ndarray]:
    """Photograph, depth and uncertainty side by side; colours keep the meaning they have in the first frame."""
    depth_range: tuple[float, float] | None = None
    top: float | None = None
    for record in records:
        if depth_range is None:
            relative = record.units == "relative"
            depth_range = (0.0, 1.0) if relative else (float(record.depth.min()), float(record.depth.max()))
            top = None if record.uncertainty is None else saturation(record.uncertainty)
        panels = [record.image, color_depth(record.depth, value_range=depth_range, inverse=record.is_disparity)]
        if record.uncertainty is not None:
            panels.append(color_uncertainty(record.uncertainty, vmax=top))
        yield np.concatenate(panels, 1)
