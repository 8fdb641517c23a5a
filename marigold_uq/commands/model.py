"""Loading a depth model for a command: device, dtype and threads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch

if TYPE_CHECKING:
    from marigold_uq.pipelines.depth import MarigoldUQDepthPipeline

Dtype = Literal["float32", "float16", "bfloat16"]


def choose_device(name: str) -> torch.device:
    """`auto` is the first of cuda, mps, cpu that is there; under accelerate, the device of this process."""
    if name != "auto":
        return torch.device(name)
    from accelerate import PartialState

    return torch.device(PartialState().device)


def load_pipeline(
    name: str, *, device: str = "auto", dtype: Dtype = "float32", variant: str | None = None
) -> MarigoldUQDepthPipeline:
    """The pipeline on its device, its own progress bars off: commands show theirs."""
    from marigold_uq.pipelines.depth import MarigoldUQDepthPipeline

    extra = {} if variant is None else {"variant": variant}
    pipeline = MarigoldUQDepthPipeline.from_pretrained(name, dtype=getattr(torch, dtype), **extra)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline.to(choose_device(device))
