"""Videos: frame after frame, with common noise and latents carried on, so that depth does not flicker."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from torch import Tensor
from tqdm.auto import tqdm

from marigold_uq.commands.inputs import Input
from marigold_uq.commands.pictures import (
    Failure,
    Plan,
    begin,
    complete,
    in_units,
    make_record,
    predict,
    reason,
    video_path,
)
from marigold_uq.depth.colors import color_depth, color_uncertainty, saturation
from marigold_uq.depth.export import DepthRecord, export
from marigold_uq.depth.video import Frames, carry_latents, describe_codec, read_frames, write_video
from marigold_uq.files import make_folder
from marigold_uq.pipelines.depth import MarigoldUQDepthPipeline
from marigold_uq.pipelines.depth.call import ONE_STEP_MODES
from marigold_uq.pipelines.depth.images import picture_for_model
from marigold_uq.randomness import member_generators, randn

DATA_FORMATS = ("npz", "png16", "tiff", "ply")


def run_videos(work: Sequence[Input], plan: Plan, pipeline: MarigoldUQDepthPipeline, failures: list[Failure]) -> None:
    """Each video gives one with photograph, depth and uncertainty side by side, and a folder of data per frame."""
    for one in work:
        try:
            print(process_video(one, plan, pipeline))
        except KeyboardInterrupt:
            tqdm.write(f"{one.path.name}: stopped; a video that is not finished starts over")
            raise
        except Exception as error:
            failures.append((one.path, reason(error)))


def process_video(one: Input, plan: Plan, pipeline: MarigoldUQDepthPipeline) -> str:
    """Predict all frames of one video, frame by frame in constant memory, and write the results."""
    target, frames = video_path(plan, one), read_frames(one.path)
    make_folder(target.parent)
    note = begin(one, plan, [target.name])
    records = predict_frames(frames, one, plan, pipeline)
    # `overwrite`: other results were refused before, or are to be replaced; a stopped run left frames and no video.
    write_video(target, paint_frames(records), frames.fps, overwrite=True)
    complete(note)
    return f"{one.path.name}: {len(frames)} frames, {target.name} ({describe_codec()})"


def predict_frames(frames: Frames, one: Input, plan: Plan, pipeline: MarigoldUQDepthPipeline) -> Iterator[DepthRecord]:
    """Depth of each frame. All frames share their noise; an ensemble's chains also start from the frame before."""
    formats = [name for name in plan.formats if name in DATA_FORMATS]
    folder = plan.options.output / one.name
    previous: Tensor | None = None
    size: tuple[int, ...] = ()
    sizing: dict[str, Any] = {"resolution": plan.call.resolution, "multiple": plan.multiple}
    for name, frame in tqdm(frames, desc=frames.path.name, unit="frame", total=len(frames)):
        picture, given = picture_for_model(frame, name, **sizing)
        latents = None
        if previous is not None and picture.shape == size:
            latents = carry_latents(previous, common_noise(previous, plan.options.seed))
        output, size = predict([given], plan, pipeline, [plan.options.seed], latents), picture.shape
        if plan.call.mode not in ONE_STEP_MODES:  # there the start says nothing of the result
            assert isinstance(output.latent, Tensor)
            previous = output.latent
        record, options = in_units(one, make_record(picture, output, plan), plan)
        if formats:
            export(record, folder, name, formats, overwrite=True, options=options)
        yield record


def common_noise(like: Tensor, seed: int) -> Tensor:
    """The numbers with which the chains of the first frame started."""
    return randn((), like.shape, like=like, generator=member_generators(seed, len(like)))


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
