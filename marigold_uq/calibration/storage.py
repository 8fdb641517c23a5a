"""What was chosen on held-out data, as one record that every pipeline keeps in its config."""

from __future__ import annotations

import math
import operator
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

from torch import Tensor

from marigold_uq.calibration.intervals import IntervalGrid
from marigold_uq.novelty import NoveltyReference

CONDITIONS = ("num_inference_steps", "ensemble_size")
"""What a choice may depend on besides the way to uncertainty."""
_OLD_NAMES = {"num_steps": "num_inference_steps", "num_members": "ensemble_size"}
_OLD_KEYS = ("conformal_scale", "conformal_margin", "coverage")


@dataclass(frozen=True)
class Calibration:
    """Values chosen on held-out data, and the calls that they were chosen for.

    Args:
        tau: Multiplies the covariance of the reverse distribution; lives in the scheduler.
        kappa: Stretches samples around their mean, after sampling; one number, or one per output (targets of a table,
            lead times of a forecast, where the last holds for later ones).
        interval: Half widths of intervals around the prediction, in (stretched) standard deviations.
        uncertainty: The way to uncertainty it belongs to, where a pipeline has several ("ensemble", "trajectory").
        num_inference_steps: Denoising steps that it holds for; None: any.
        ensemble_size: Samples per prediction that it holds for; None: any.
        num_calibration: Calibration units (rows, images, scenes or trajectories) behind the interval.
        note: Where the held-out data came from, for whoever reads the config.
        novelty: What held-out data in distribution look like to the model; see `pipeline.fit_novelty`.
    """

    tau: float = 1.0
    kappa: float | tuple[float, ...] = 1.0
    interval: IntervalGrid | None = None
    uncertainty: str | None = None
    num_inference_steps: int | None = None
    ensemble_size: int | None = None
    num_calibration: int = 0
    note: str = ""
    novelty: NoveltyReference | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "kappa", _as_numbers(self.kappa))
        for name, values in (("tau", (self.tau,)), ("kappa", self.kappas)):
            if not values or not all(v > 0 and math.isfinite(v) for v in values):
                raise ValueError(f"{name} must be positive and finite; got {getattr(self, name)}")
        if not isinstance(self.interval, IntervalGrid | None):
            raise TypeError(f"interval must be an IntervalGrid or None; got {self.interval!r}")
        if not isinstance(self.novelty, NoveltyReference | None):
            raise TypeError(f"novelty must be a NoveltyReference or None; got {self.novelty!r}")
        for name in CONDITIONS:
            if getattr(self, name) is not None:
                object.__setattr__(self, name, _as_count(name, getattr(self, name), 1))
        object.__setattr__(self, "num_calibration", _as_count("num_calibration", self.num_calibration, 0))

    @property
    def kappas(self) -> tuple[float, ...]:
        """One factor per output; a single one holds for all."""
        return self.kappa if isinstance(self.kappa, tuple) else (self.kappa,)

    def mismatches(self, **call: int | None) -> list[str]:
        """How a call differs from the conditions, as sentences; empty if the calibration holds for it."""
        pairs = [(name, getattr(self, name), call.get(name)) for name in CONDITIONS]
        return [
            f"calibrated with {name}={chosen}, called with {used}"
            for name, chosen, used in pairs
            if chosen is not None and used is not None and chosen != used
        ]

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, strings and lists, as JSON has them."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        values["kappa"] = list(self.kappa) if isinstance(self.kappa, tuple) else self.kappa
        values["interval"] = None if self.interval is None else self.interval.to_dict()
        if self.novelty is None:
            del values["novelty"]  # most models have none
        else:
            values["novelty"] = self.novelty.to_dict()
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Undo `to_dict`, and read what versions before the first release wrote; an unknown key is an error."""
        known = {_OLD_NAMES.get(key, key): value for key, value in values.items() if key not in _OLD_KEYS}
        unknown = set(known) - {field.name for field in fields(cls)}
        if unknown:
            raise ValueError(f"unknown calibration keys {sorted(unknown)}; made by a newer version of marigold_uq?")
        if values.get("conformal_margin") is not None:
            warnings.warn(
                "the stored conformal_margin (a margin around quantiles) is no longer supported and is left out: "
                "calibrate again to get calibrated intervals",
                stacklevel=2,
            )
        stored = known.pop("interval", None)
        interval = _old_interval(values) if stored is None else IntervalGrid.from_dict(stored)
        reference = known.pop("novelty", None)
        return cls(**known, interval=interval, novelty=reference and NoveltyReference.from_dict(reference))


def read_calibrations(stored: Any) -> tuple[Calibration, ...]:
    """A pipeline's config entry `calibration` as records: a list of them, or what older versions wrote."""
    if not stored:
        return ()
    if not isinstance(stored, Mapping):
        return tuple(Calibration.from_dict(one) for one in stored)
    if "tau" in stored:  # one record
        return (Calibration.from_dict(stored),)
    if not all(isinstance(values, Mapping) for values in stored.values()):
        raise ValueError(f"a pipeline's calibration is a list of records; got the keys {sorted(stored)}")
    return tuple(Calibration.from_dict({**values, "uncertainty": mode}) for mode, values in stored.items())


def with_calibration(stored: Iterable[Calibration], new: Calibration) -> list[Calibration]:
    """The records with `new` in place of the one for the same way to uncertainty; all share the scheduler's tau."""
    kept = [one for one in stored if one.uncertainty != new.uncertainty]
    others = sorted({one.tau for one in kept if one.tau != new.tau})
    if others:
        raise ValueError(
            f"tau must be the same for all ways to uncertainty, because it lives in the one scheduler; got {new.tau} "
            f"beside {others}"
        )
    return [*kept, new]


def _old_interval(values: Mapping[str, Any]) -> IntervalGrid | None:
    """One coverage and its half widths, as they were stored before there was a grid; infinite ones promise nothing."""
    scale, coverage = values.get("conformal_scale"), values.get("coverage")
    if scale is None or coverage is None:
        return None
    numbers = _as_numbers(scale)
    row = numbers if isinstance(numbers, tuple) else (numbers,)
    return IntervalGrid((coverage,), (row,)) if all(math.isfinite(one) for one in row) else None


def _as_count(name: str, value: Any, least: int) -> int:
    """A whole number of at least `least`, also from numpy."""
    try:
        count = operator.index(value)
    except TypeError as error:
        raise TypeError(f"{name} must be a whole number; got {value!r}") from error
    if count < least:
        raise ValueError(f"{name} must be at least {least}; got {count}")
    return count


def _as_numbers(value: float | Sequence[float] | Tensor) -> float | tuple[float, ...]:
    """Tensors, arrays and lists become a float or a tuple of floats."""
    plain = value.tolist() if hasattr(value, "tolist") else value
    return float(plain) if isinstance(plain, int | float) else tuple(float(v) for v in plain)
