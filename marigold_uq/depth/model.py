"""Loading a depth model for a command: where it lies, device and dtype."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch

if TYPE_CHECKING:
    from accelerate import PartialState

    from marigold_uq.models.depth_baseline import DepthBaseline
    from marigold_uq.pipelines.depth import MarigoldUQDepthPipeline

Dtype = Literal["float32", "float16", "bfloat16"]


def process_state() -> PartialState:
    """The place of this process among those of `accelerate launch` or torchrun; alone without them."""
    from accelerate import PartialState

    # However long the others still work, waiting for them at the end is no error.
    return PartialState(cpu=not torch.accelerator.is_available(), timeout=timedelta(days=30))


def choose_device(name: str) -> torch.device:
    """`auto` is the first of cuda, mps, cpu that is there; under accelerate, the device of this process."""
    if name == "auto":
        return torch.device(process_state().device)
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"unknown device {name!r}; choose auto, cpu, cuda, cuda:1 or mps") from error
    available = {"cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available()), "cpu": 1}
    if (device.index or 0) >= available.get(device.type, 1):
        raise ValueError(f"there is no device {name!r} here; `marigold-uq info` lists what there is")
    return device


def check_model_name(name: str) -> None:
    """A folder must be one of a pipeline; what is neither a folder nor looks like a Hub name is a mistyped path."""
    path = Path(name).expanduser()
    if path.is_dir() and not (path / "model_index.json").is_file():
        raise FileNotFoundError(f"{name} is not the folder of a pipeline: it holds no model_index.json")
    if path.exists() and not path.is_dir():
        raise NotADirectoryError(f"{name} is a file; a model is a folder with a model_index.json, or a Hub name")
    looks_like_path = path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1
    if not path.exists() and name != "embedded" and (looks_like_path or "/" not in name):
        raise FileNotFoundError(f"no model {name!r}: no such folder, and Hub names have the form user/name")


def _open_baseline(name: str, model: str) -> DepthBaseline:
    """Another place of the baseline that a model learnt with."""
    from marigold_uq.models.depth_baseline import DepthBaseline

    folder = Path(model) / "baseline"
    if not folder.is_dir():
        raise ValueError(f"{model} has no baseline: train one around {name} with train_depth.py --baseline {name}")
    return DepthBaseline.from_pretrained(folder, name=name)


def load_pipeline(
    name: str,
    *,
    device: str = "auto",
    dtype: Dtype = "float32",
    variant: str | None = None,
    baseline: str | None = None,
) -> MarigoldUQDepthPipeline:
    """The pipeline on its device, its own progress bars off: commands show theirs.

    `baseline` takes the place of the one that the model names, and must have its weights; "embedded" around a baseline
    is that model's map alone.
    """
    from marigold_uq.pipelines.depth import MarigoldUQDepthPipeline

    check_model_name(name)
    target = choose_device(device)
    extra = {} if variant is None else {"variant": variant}
    path = str(Path(name).expanduser())
    options = {"dtype": getattr(torch, dtype), **extra}
    if baseline is None:
        pipeline = MarigoldUQDepthPipeline.from_pretrained(path, **options)
    elif name == "embedded":
        pipeline = MarigoldUQDepthPipeline.from_baseline(baseline, start=name, noise_family="point", **options)
    else:
        found = _open_baseline(baseline, path).to(options["dtype"])
        pipeline = MarigoldUQDepthPipeline.from_pretrained(path, baseline=found, **options)
    pipeline.set_progress_bar_config(disable=True)
    if target.type == "cpu":
        pipeline.vae.to(memory_format=torch.channels_last)  # convolutions of few channels run faster so
    return pipeline.to(target)
