"""What was chosen on held-out data, kept with the model: in the scheduler's and the pipeline's config."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from inspect import signature
from typing import Any, Self

import torch
from torch import Tensor

from marigold_uq.schedulers.scheduling_distributional_ddim import DistributionalDDIMScheduler


@dataclass(frozen=True)
class Calibration:
    """Values chosen on held-out data. They hold for the steps and the members that they were chosen with.

    Args:
        tau: Multiplies the covariance of the reverse law; lives in the scheduler.
        kappa: Stretches samples around their mean, after sampling.
        conformal_scale: Half width of the interval in standard deviations; one number, or one per output (of a
            forecast: per lead time).
        conformal_margin: Added to both ends of a quantile interval (CQR) instead; one number, or one per output.
        coverage: What the conformal interval promises, 1 - alpha.
        num_calibration: Calibration units (rows, images, scenes or trajectories) behind the conformal number.
        num_steps: Denoising steps, if the choice depends on them.
        num_members: Samples per prediction, if the choice depends on them.
        note: Where the held-out data came from, for whoever reads the config.
    """

    tau: float = 1.0
    kappa: float = 1.0
    conformal_scale: float | tuple[float, ...] | None = None
    conformal_margin: float | tuple[float, ...] | None = None
    coverage: float | None = None
    num_calibration: int = 0
    num_steps: int | None = None
    num_members: int | None = None
    note: str = ""

    def __post_init__(self) -> None:
        for name in ("tau", "kappa"):
            value = getattr(self, name)
            if not (value > 0 and math.isfinite(value)):
                raise ValueError(f"{name} must be positive and finite; got {value}")
        for name in ("conformal_scale", "conformal_margin"):
            object.__setattr__(self, name, _as_numbers(name, getattr(self, name)))
        if self.conformal_scale is not None and min(_numbers(self.conformal_scale)) < 0:
            raise ValueError(f"conformal_scale is a half width and not negative; got {self.conformal_scale}")
        conformal = self.conformal_scale is not None or self.conformal_margin is not None
        if conformal != (self.coverage is not None):
            raise ValueError("coverage and a conformal number belong together: give both or neither")
        if self.coverage is not None and not 0 < self.coverage < 1:
            raise ValueError(f"coverage is a share within (0, 1), 0.95 for 95 %; got {self.coverage}")

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, strings and lists, as JSON has them."""
        return {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Undo `to_dict`; an unknown key is an error."""
        unknown = set(values) - {field.name for field in fields(cls)}
        if unknown:
            raise ValueError(f"unknown calibration keys {sorted(unknown)}; made by a newer version of marigold_uq?")
        return cls(**values)

    def interval(self, mean: Tensor, std: Tensor) -> tuple[Tensor, Tensor]:
        """Mean -+ conformal_scale std, the outputs on the last axis if there is one scale per output."""
        if self.conformal_scale is None:
            raise ValueError("there is no conformal_scale in this calibration: run conformal_rows or conformal_images")
        half = torch.as_tensor(self.conformal_scale, dtype=std.dtype, device=std.device) * std
        return mean - half, mean + half


def store_calibration(target: Any, calibration: Calibration) -> None:
    """Keep a calibration in a pipeline, or its tau in a scheduler, so that it survives save and load.

    A pipeline class takes part by having a `calibration: dict | None = None` argument that its `__init__` registers in
    the config. A scheduler alone can only hold tau; giving it more is an error.
    """
    if isinstance(target, DistributionalDDIMScheduler):
        if calibration.kappa != 1 or calibration.coverage is not None:
            raise ValueError("a scheduler holds only tau; store kappa and conformal numbers in its pipeline")
        target.calibrate(calibration.tau)
        return
    _refuse_own_storage(target)
    if not hasattr(target, "register_to_config") or "calibration" not in signature(type(target).__init__).parameters:
        raise TypeError(
            f"{type(target).__name__} would lose the calibration on loading: its __init__ needs an argument "
            "`calibration: dict | None = None` that goes to register_to_config"
        )
    _scheduler_of(target).calibrate(calibration.tau)
    target.register_to_config(calibration=calibration.to_dict())


def read_calibration(target: Any) -> Calibration:
    """The calibration of a pipeline or scheduler; tau = kappa = 1 and nothing conformal if none was stored.

    A pipeline whose scheduler has another tau than the stored one is refused: its intervals would promise what was
    never calibrated.
    """
    if isinstance(target, DistributionalDDIMScheduler):
        return Calibration(tau=target.config.tau)
    _refuse_own_storage(target)
    stored, tau = target.config.get("calibration"), float(_scheduler_of(target).config.tau)
    if stored is None:
        return Calibration(tau=tau)
    calibration = Calibration.from_dict(stored)
    if calibration.tau != tau:
        raise ValueError(
            f"the stored calibration was made with tau = {calibration.tau}, but the scheduler has tau = {tau}: set it "
            "back with scheduler.calibrate(...), or store a new calibration"
        )
    return calibration


def _refuse_own_storage(pipeline: Any) -> None:
    """A pipeline with a `calibrate` method keeps several calibrations (one per mode) and writes them itself."""
    if callable(getattr(pipeline, "calibrate", None)):
        raise TypeError(
            f"{type(pipeline).__name__} keeps its own calibrations: store with pipeline.calibrate(...) and read "
            "pipeline.config.calibration"
        )


def _scheduler_of(pipeline: Any) -> DistributionalDDIMScheduler:
    scheduler = getattr(pipeline, "scheduler", None)
    if not isinstance(scheduler, DistributionalDDIMScheduler):
        raise TypeError(
            f"{type(pipeline).__name__} has {type(scheduler).__name__} as its scheduler; a calibration needs a "
            "DistributionalDDIMScheduler, which can hold tau"
        )
    return scheduler


def _as_numbers(name: str, value: Any) -> float | tuple[float, ...] | None:
    """Tensors, arrays and lists become a float or a tuple of floats; infinity is not a calibration."""
    if value is None:
        return None
    plain = value.tolist() if hasattr(value, "tolist") else value
    numbers = float(plain) if isinstance(plain, int | float) else tuple(float(v) for v in plain)
    if not all(math.isfinite(v) for v in _numbers(numbers)):
        raise ValueError(f"{name} must be finite; got {value} (too few calibration units?)")
    return numbers


def _numbers(value: float | tuple[float, ...]) -> tuple[float, ...]:
    return value if isinstance(value, tuple) else (value,)
