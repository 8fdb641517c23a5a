"""Numbers and validation pictures to TensorBoard or Weights & Biases, through accelerate's trackers."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
from accelerate import Accelerator
from accelerate.tracking import get_available_trackers
from PIL import Image

__all__ = ["installed_tracker", "log_numbers", "log_pictures", "start_trackers"]

_PROJECT = "marigold_uq"
_INSTALL = {"tensorboard": "pip install 'marigold_uq[tracking]'", "wandb": "pip install wandb"}


def installed_tracker(name: str) -> str | None:
    """The tracker to hand to accelerate; None for "none", and with a warning for one that is not installed."""
    if name == "none":
        return None
    if name in {str(tracker) for tracker in get_available_trackers()}:
        return name
    warnings.warn(
        f"tracker {name!r} is not installed ({_INSTALL[name]}); this run writes metrics.jsonl and pictures only",
        stacklevel=2,
    )
    return None


def start_trackers(accelerator: Accelerator, output: Path, first_step: int) -> None:
    """Open the trackers; TensorBoard hides what an interrupted run wrote at or after `first_step`."""
    if accelerator.log_with:
        options = {"tensorboard": {"purge_step": first_step}, "wandb": {"name": output.name, "dir": str(output)}}
        accelerator.init_trackers(_PROJECT, init_kwargs=options)


def log_numbers(accelerator: Accelerator, record: dict[str, Any]) -> None:
    """All numbers of a record at its step."""
    accelerator.log({name: value for name, value in record.items() if name != "step"}, step=record["step"])


def log_pictures(accelerator: Accelerator, folder: Path, step: int) -> None:
    """Every PNG of a folder, under its name, so that a picture can be followed over the steps."""
    for path in sorted(folder.glob("*.png")):
        with Image.open(path) as picture:
            pixels = np.asarray(picture.convert("RGB"))[None]  # (1, H, W, 3)
        for tracker in accelerator.trackers:
            options = {"dataformats": "NHWC"} if tracker.name == "tensorboard" else {}
            tracker.log_images({f"validation/{path.stem}": pixels}, step=step, **options)
