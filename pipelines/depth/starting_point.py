"""What a depth pipeline can start from: the embedded model, and schedulers of other pipelines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from diffusers.schedulers.scheduling_utils import SchedulerMixin

import marigold_uq
from marigold_uq.schedulers.distributional import DistributionalScheduler
from marigold_uq.schedulers.scheduling_distributional_ddim import DistributionalDDIMScheduler
from marigold_uq.schedulers.scheduling_distributional_lcm import DistributionalLCMScheduler

_CONVERTIBLE = ("DDIMScheduler", "DDPMScheduler", "PNDMScheduler")
_HEAD = ("noise_family", "num_components", "rank", "pooled_weights", "tau")
"""What a scheduler knows of the U-Net's output and of its calibration, whatever the schedule."""


def embedded_path() -> Path:
    """Folder of the embedded depth checkpoint; an error that says what to do where this build carries none."""
    path = Path(marigold_uq.__file__).parent / "assets" / "depth"
    if not (path / "model_index.json").is_file():
        raise FileNotFoundError(
            "this build of marigold_uq carries no embedded depth model; name a checkpoint instead, for instance "
            "'prs-eth/marigold-depth-v1-1' or a folder that train/train_depth.py wrote"
        )
    return path


def as_distributional(scheduler: SchedulerMixin, **options: Any) -> DistributionalScheduler:
    """Ours as they are, or a stock scheduler as ours of family "point"; only those of the same diffusion can be.

    `options` replace entries of its config.
    """
    if isinstance(scheduler, DistributionalScheduler) and not options:
        return scheduler
    name = type(scheduler).__name__
    if name in ("LCMScheduler", DistributionalLCMScheduler.__name__):
        return DistributionalLCMScheduler.from_config(scheduler.config, **options)
    if name not in (*_CONVERTIBLE, DistributionalDDIMScheduler.__name__):
        raise ValueError(
            f"cannot turn a {name} into a distributional scheduler: expected one of {', '.join(_CONVERTIBLE)}, "
            "LCMScheduler (a checkpoint made for another one predicts something else)"
        )
    if "clip_sample" not in scheduler.config:
        options.setdefault("clip_sample", False)  # a PNDM never clips, and DDIM's default would
    return DistributionalDDIMScheduler.from_config(scheduler.config, **options)


def replaced_scheduler(scheduler: SchedulerMixin, old: DistributionalScheduler | None) -> DistributionalScheduler:
    """A scheduler given in place of `old`: a stock one goes on reading the U-Net's head, at the calibrated tau."""
    if old is None or isinstance(scheduler, DistributionalScheduler):
        return as_distributional(scheduler)
    return as_distributional(scheduler, **{name: old.config[name] for name in _HEAD})


def zero_snr_options(scheduler: SchedulerMixin) -> dict[str, Any]:
    """Marigold v1-1's schedule: it ends in pure noise, and the timesteps are counted from there."""
    if scheduler.config.get("prediction_type", "epsilon") == "epsilon":
        raise ValueError(
            "this checkpoint predicts epsilon, which says nothing of x_0 at zero terminal SNR: pass "
            "zero_terminal_snr=False, or start from a v-prediction model such as Stable Diffusion 2"
        )
    return {"rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}
