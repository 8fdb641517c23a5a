"""A forecast with its samples: statistics per lead time, intervals, xarray, and files that other tools read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers.utils import BaseOutput
from torch import Tensor

from marigold_uq.calibration import IntervalGrid, check_coverage
from marigold_uq.files import atomic_path, make_folder
from marigold_uq.metrics import nested_interval
from marigold_uq.metrics import quantiles as sample_quantiles
from marigold_uq.models.field_grid import Floats
from marigold_uq.novelty import Novelty
from marigold_uq.pipelines.field.conventions import (
    CF_VERSION,
    DIMENSIONS,
    Convention,
    coordinate_attributes,
    variable_attributes,
)
from marigold_uq.pipelines.field.states import xarray_module
from marigold_uq.uncertainty import total_std

__all__ = ["FieldForecast", "blend", "damp", "scaled_interval", "stretch"]


PerLead = Sequence[float] | Sequence[Sequence[float]]
"""A number for each lead time, or a row of them for each variable; the last holds for later lead times."""


@dataclass
class FieldForecast(BaseOutput):
    """Samples of the coming states, and statistics of them in physical units.

    Attributes:
        samples: (M, B, L, C, *space): M samples of B forecasts at L lead times, calibrated.
        lead_times: (L,), in the time unit of the model (seconds for dates).
        init_times: (B,) times of the last known states, None where they were not given.
        variables: Names of the C channels.
        coordinates: Spatial axes.
        calendar: Whether times are seconds since 1970.
        epistemic: (B, L, C, *space): the head's own estimate for the step into each lead time, the root of the mean
            over samples and timesteps of U_t = Var[x_0 | x_t] (see `marigold_uq.uncertainty`). Errors of earlier steps
            are in `uncertainty`, not here, and it does not vanish for a perfect model of a random process.
        novelty: How unlike held-out forecasts each of the B is, judged by its first lead time.
        quantile_levels: Those that the call asked for.
        coverage: Of `interval`, as the call asked for it.
        interval_grid: Calibrated half widths, an output for each variable and lead time, all of the first variable
            first; None where none were calibrated.
        units: Variable -> its unit, of those whose unit is known.
        provenance: What made the forecast: model, version, seed, steps.
    """

    samples: Tensor
    lead_times: Floats
    variables: tuple[str, ...]
    coordinates: Mapping[str, Floats]
    calendar: bool = False
    init_times: Floats | None = None
    epistemic: Tensor | None = None
    novelty: Novelty | None = None
    quantile_levels: tuple[float, ...] = field(default=())
    coverage: float | None = None
    interval_grid: IntervalGrid | None = None
    units: Mapping[str, str] = field(default_factory=dict)
    provenance: Mapping[str, Any] = field(default_factory=dict)

    @property
    def prediction(self) -> Tensor:
        """Mean of the samples, (B, L, C, *space)."""
        return self.samples.mean(0)

    @property
    def uncertainty(self) -> Tensor:
        """Standard deviation of the samples, (B, L, C, *space); needs two of them."""
        return total_std(self.samples)

    @property
    def quantiles(self) -> Tensor | None:
        """The call's `quantiles`, (Q, B, L, C, *space), at Weibull's plotting positions; None without any."""
        return self.quantiles_at(self.quantile_levels) if self.quantile_levels else None

    def quantiles_at(self, levels: Sequence[float]) -> Tensor:
        """Quantiles of the samples, (Q, B, L, C, *space)."""
        return sample_quantiles(self.samples, list(levels))

    @property
    def interval(self) -> Tensor | None:
        """Ends of the interval with the call's `coverage`, (2, B, L, C, *space); None where it asked for none."""
        return None if self.coverage is None else self.interval_at(self.coverage)

    def interval_at(self, coverage: float) -> Tensor:
        """Ends of the central interval with any coverage, (2, B, L, C, *space), within those of higher coverage.

        Where intervals were calibrated: prediction -+ scale x uncertainty, with a scale for each variable and lead
        time. Otherwise quantiles of the samples, which promise nothing.
        """
        check_coverage(coverage)
        if self.interval_grid is None:
            return torch.stack(nested_interval(self.samples, coverage))
        scales = np.reshape(self.interval_grid.scale(coverage), (len(self.variables), -1))
        return scaled_interval(self.samples, scales.tolist())

    def to_xarray(self, convention: Convention = "weatherbenchx", *, samples: bool = True) -> Any:
        """A Dataset with a variable per channel, and <variable>_prediction, _uncertainty, ... beside it.

        _epistemic, _lower and _upper, _quantile and novelty_p_value follow where the call asked for them. Dimensions
        have the names of `convention`; times become dates where the model knows dates. Attributes are those of the CF
        conventions, with the unit of each variable; `provenance` and what made the file are the Dataset's own.
        """
        names = DIMENSIONS[convention]
        init, lead = names["init"], names["lead"]
        space = [names.get(axis, axis) for axis in self.coordinates]
        content: dict[str, Any] = {}
        for channel, variable in enumerate(self.variables):
            if samples:
                values = self.samples[:, :, :, channel].cpu().numpy()
                attributes = variable_attributes(variable, self.units)
                content[variable] = ([names["sample"], init, lead, *space], values, attributes)
            for name, statistic in self._statistics().items():
                values = statistic[:, :, channel].cpu().numpy()
                attributes = variable_attributes(variable, self.units, name)
                content[f"{variable}_{name}"] = ([init, lead, *space], values, attributes)
            if self.quantiles is not None:
                levels = self.quantiles[:, :, :, channel].cpu().numpy()
                attributes = variable_attributes(variable, self.units, "quantile")
                content[f"{variable}_quantile"] = (["quantile", init, lead, *space], levels, attributes)
        if self.novelty is not None and self.novelty.reference is not None:
            content["novelty_p_value"] = ([init], self.novelty.p_value, {"long_name": "p-value of the novelty test"})
        used = {dim for dims, *_ in content.values() for dim in dims}
        coordinates = self._coordinates(names)
        kept = {name: one for name, one in coordinates.items() if set(one[0]) <= used}
        return xarray_module().Dataset(content, kept, {"Conventions": CF_VERSION, **self.provenance})

    def _coordinates(self, names: Mapping[str, str]) -> dict[str, tuple[list[str], Any, dict[str, str]]]:
        """Name -> dimensions, values, attributes; the time that is predicted among them where starts have dates."""
        init, lead = names["init"], names["lead"]
        inits = self._as_times(self._inits(), "datetime64[ns]")
        leads = self._as_times(self.lead_times, "timedelta64[ns]")
        values = {
            "sample": np.arange(len(self.samples)),
            "quantile": np.asarray(self.quantile_levels, np.float64),
            "init": inits,
            "lead": leads,
            **self.coordinates,
        }
        found = {
            names.get(role, role): ([names.get(role, role)], one, coordinate_attributes(role))
            for role, one in values.items()
        }
        if self.calendar and self.init_times is not None:
            valid = np.add.outer(inits, leads)
            found["valid_time"] = ([init, lead], valid, coordinate_attributes("valid_time"))
        return found

    def _statistics(self) -> dict[str, Tensor]:
        found = {"prediction": self.prediction}
        if self.epistemic is not None:
            found["epistemic"] = self.epistemic
        if len(self.samples) > 1:
            found["uncertainty"] = self.uncertainty
            if self.interval is not None:
                found["lower"], found["upper"] = self.interval
        return found

    def _inits(self) -> Floats:
        return np.arange(self.samples.shape[1], dtype=np.float64) if self.init_times is None else self.init_times

    def _as_times(self, seconds: Floats, kind: str) -> Any:
        if not self.calendar or (kind.startswith("datetime") and self.init_times is None):
            return np.asarray(seconds)
        unit = kind.split("[")[0]
        return np.round(np.asarray(seconds)).astype(np.int64).astype(f"{unit}[s]").astype(kind)

    def save(self, path: str | Path, convention: Convention = "weatherbenchx", *, samples: bool = True) -> Path:
        """Write zarr (a path that ends in .zarr) or netCDF (.nc); it appears when complete, nothing is replaced."""
        path = Path(path)
        writers: dict[str, Callable[[Any, Path], Any]] = {
            ".zarr": lambda data, target: data.to_zarr(target, zarr_format=2),  # which all readers know
            ".nc": lambda data, target: data.to_netcdf(target),
        }
        if path.suffix not in writers:
            raise ValueError(f"forecasts are written as .zarr or .nc; got {path.name}")
        make_folder(path.parent)
        with atomic_path(path) as temporary:
            writers[path.suffix](self.to_xarray(convention, samples=samples), temporary)
        return path


def stretch(samples: Tensor, kappas: PerLead) -> Tensor:
    """Ybar + kappa_l (x - ybar) at lead time l (and variable, with a row for each), samples (M, B, L, C, *space)."""
    mean = samples.mean(0, keepdim=True)
    return mean + _per_lead(kappas, samples) * (samples - mean)


def blend(samples: Tensor, kappas: PerLead, shares: PerLead, season: Tensor) -> Tensor:
    """Stretch each point's spread s to sqrt(kappa_l^2 s^2 + share_l^2 season^2), `season` (B, L, C, *space).

    The mean and the ranks of the samples stay. The variance of a forecast without skill becomes that of the season.
    """
    if len(samples) < 2:
        return samples
    mean, variance = samples.mean(0, keepdim=True), samples.var(0, keepdim=True)
    wanted = _per_lead(kappas, samples).square() * variance + _per_lead(shares, samples).square() * season.square()
    factor = torch.where(variance > 0, wanted / variance, 0).sqrt()  # samples that agree stay as they are
    return mean + factor * (samples - mean)


def damp(samples: Tensor, dampings: PerLead, expected: Tensor) -> Tensor:
    """Move the mean ybar to e + d_l (ybar - e) at lead time l, where `expected` e is (B, L, C, *space).

    The spread stays. What is left of a forecast long after its start is the season's mean: d falls from 1 to 0.
    """
    mean = samples.mean(0, keepdim=True)
    return samples + (1 - _per_lead(dampings, samples)) * (expected - mean)


def scaled_interval(samples: Tensor, scales: PerLead) -> Tensor:
    """ybar -+ q_l s at lead time l, (2, B, L, C, *space), of samples (M, B, L, C, *space); the last q holds on."""
    mean, half = samples.mean(0), _per_lead(scales, samples) * total_std(samples)
    return torch.stack([mean - half, mean + half])


def _per_lead(values: PerLead, samples: Tensor) -> Tensor:
    """One number per lead time and variable, shaped for (M, B, L, C, *space); the last holds for later lead times."""
    rows = torch.atleast_2d(torch.as_tensor(values, dtype=torch.float64))  # (1 or C, lead times)
    if rows.shape[0] not in (1, samples.shape[3]):
        raise ValueError(f"expected one row of numbers per lead time, or {samples.shape[3]}; got {rows.shape[0]}")
    leads = torch.arange(samples.shape[2]).clamp(max=rows.shape[1] - 1)
    return rows[:, leads].T.to(samples).reshape(samples.shape[2], -1, *[1] * (samples.ndim - 4))
