"""A forecast with its members: statistics per lead time, xarray, and files that other tools read."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4

import numpy as np
import torch
from diffusers.utils import BaseOutput
from torch import Tensor

from marigold_uq.field.data.equation import Floats
from marigold_uq.field.data.weather import xarray_module
from marigold_uq.metrics.intervals import quantiles as member_quantiles
from marigold_uq.uncertainty import total_std

Convention = Literal["weatherbenchx", "weatherbench2", "earth2studio"]
DIMENSIONS: dict[str, dict[str, str]] = {
    "weatherbenchx": {"member": "number", "init": "init_time", "lead": "lead_time"},
    "weatherbench2": {"member": "realization", "init": "time", "lead": "prediction_timedelta"},
    "earth2studio": {
        "member": "ensemble",
        "init": "time",
        "lead": "lead_time",
        "latitude": "lat",
        "longitude": "lon",
    },
}
"""What each tool calls the axes. WeatherBench-X reads WeatherBench 2's names too, and renames them."""


@dataclass
class FieldForecast(BaseOutput):
    """Members and what they say. Everything called spread or epistemic is a standard deviation in physical units.

    Attributes:
        members: (M, B, L, C, *space): M members of B forecasts at L lead times; kappa is in them.
        lead_times: (L,), in the time unit of the model (seconds for dates).
        init_times: (B,) times of the last known states, None where they were not given.
        variables: Names of the C channels.
        coordinates: Spatial axes.
        calendar: Whether times are seconds since 1970.
        epistemic: (B, L, C, *space): the paper's estimate for the step into each lead time: the root of the mean, over
            members and used timesteps, of U_t = Var[x_0 | x_t], the variance of the head's law given that member's own
            state (see `marigold_uq.uncertainty`). Errors of earlier steps are not in it (they are in the spread), and
            it does not vanish for a perfect model of a random process.
        interval_scales: (L,) half widths of the calibrated interval in spreads; None where none was calibrated, or for
            other steps, fewer members or fewer lead times than this forecast has.
        interval_coverage: What that interval promises: the expected share of all points and variables inside, at each
            lead time.
    """

    members: Tensor
    lead_times: Floats
    variables: tuple[str, ...]
    coordinates: Mapping[str, Floats]
    calendar: bool = False
    init_times: Floats | None = None
    epistemic: Tensor | None = None
    quantile_levels: tuple[float, ...] = field(default=())
    interval_scales: tuple[float, ...] | None = None
    interval_coverage: float | None = None

    @property
    def mean(self) -> Tensor:
        """(B, L, C, *space)."""
        return self.members.mean(0)

    @property
    def spread(self) -> Tensor:
        """Total uncertainty, (B, L, C, *space); needs two members."""
        return total_std(self.members)

    @property
    def quantiles(self) -> Tensor:
        """`quantile_levels` of the call, (Q, B, L, C, *space), at Weibull's plotting positions."""
        return self.quantile(self.quantile_levels)

    def quantile(self, levels: Sequence[float]) -> Tensor:
        """Quantiles of the members at each lead time, (Q, B, L, C, *space)."""
        if not levels:
            raise ValueError("no quantile levels: give `quantiles=` in the call, or call quantile(levels)")
        return member_quantiles(self.members, list(levels))

    @property
    def interval(self) -> tuple[Tensor, Tensor]:
        """Ends of the calibrated interval, each (B, L, C, *space): mean -+ scale_l spread at lead time l."""
        if self.interval_scales is None:
            raise ValueError(
                "there is no calibrated interval for this forecast: one holds for the calibrated lead times and number "
                "of denoising steps, and for at least as many members. Use quantile(levels), or calibrate the model"
            )
        return scaled_interval(self.members, self.interval_scales)

    def to_xarray(self, convention: Convention = "weatherbenchx", *, members: bool = True) -> Any:
        """A Dataset with a variable per channel, and <variable>_mean, _spread, _epistemic and _quantile beside it.

        Where intervals are calibrated, <variable>_lower and _upper are their ends.
        Dimensions have the names of `convention`. Times become dates where the model knows dates.
        """
        names = DIMENSIONS[convention]
        init, lead = names["init"], names["lead"]
        space = [names.get(axis, axis) for axis in self.coordinates]
        content: dict[str, Any] = {}
        for channel, variable in enumerate(self.variables):
            statistics = {"mean": self.mean, "epistemic": self.epistemic}
            if len(self.members) > 1:
                statistics["spread"] = self.spread
                if self.interval_scales is not None:
                    statistics["lower"], statistics["upper"] = self.interval
            if members:
                content[variable] = (
                    [names["member"], init, lead, *space],
                    self.members[:, :, :, channel].cpu().numpy(),
                )
            for name, values in statistics.items():
                if values is not None:
                    content[f"{variable}_{name}"] = ([init, lead, *space], values[:, :, channel].cpu().numpy())
            if self.quantile_levels:
                levels = self.quantiles[:, :, :, channel].cpu().numpy()
                content[f"{variable}_quantile"] = (["quantile", init, lead, *space], levels)
        coordinates = {
            names["member"]: np.arange(len(self.members)),
            "quantile": np.asarray(self.quantile_levels, np.float64),
            init: self._as_times(self._inits(), "datetime64[ns]"),
            lead: self._as_times(self.lead_times, "timedelta64[ns]"),
            **dict(zip(space, self.coordinates.values(), strict=True)),
        }
        used = {dim for dims, _ in content.values() for dim in dims}
        return xarray_module().Dataset(content, {name: v for name, v in coordinates.items() if name in used})

    def _inits(self) -> Floats:
        return np.arange(self.members.shape[1], dtype=np.float64) if self.init_times is None else self.init_times

    def _as_times(self, seconds: Floats, kind: str) -> Any:
        if not self.calendar or (kind.startswith("datetime") and self.init_times is None):
            return np.asarray(seconds)
        unit = kind.split("[")[0]
        return np.round(np.asarray(seconds)).astype(np.int64).astype(f"{unit}[s]").astype(kind)

    def save(self, path: str | Path, convention: Convention = "weatherbenchx", *, members: bool = True) -> Path:
        """Write zarr (a path that ends in .zarr) or netCDF (.nc); it appears when complete, nothing is replaced."""
        path = Path(path)
        writers: dict[str, Callable[[Any, Path], Any]] = {
            ".zarr": lambda data, target: data.to_zarr(target, zarr_format=2),  # which all readers know
            ".nc": lambda data, target: data.to_netcdf(target),
        }
        if path.suffix not in writers:
            raise ValueError(f"forecasts are written as .zarr or .nc; got {path.name}")
        if path.exists():
            raise FileExistsError(f"{path} exists: remove it or choose another name")
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{uuid4().hex}{path.suffix}")
        try:
            writers[path.suffix](self.to_xarray(convention, members=members), temporary)
            os.replace(temporary, path)
        finally:
            if temporary.is_dir():
                shutil.rmtree(temporary)
            temporary.unlink(missing_ok=True)
        return path


def stretch(members: Tensor, kappas: Sequence[float]) -> Tensor:
    """Ybar + kappa_l (x - ybar) at lead time l, members (M, B, L, C, *space); the last kappa holds for later ones."""
    mean = members.mean(0, keepdim=True)
    return mean + _per_lead(kappas, members) * (members - mean)


def blend(members: Tensor, kappas: Sequence[float], shares: Sequence[float], season: Tensor) -> Tensor:
    """Stretch each point's spread s to sqrt(kappa_l^2 s^2 + share_l^2 season^2), `season` (B, L, C, *space).

    The mean stays, and who of the members is higher than who. The variance of a forecast that has lost its skill
    becomes that of the season.
    """
    if len(members) < 2:
        return members
    mean, variance = members.mean(0, keepdim=True), members.var(0, keepdim=True)
    wanted = _per_lead(kappas, members).square() * variance + _per_lead(shares, members).square() * season.square()
    factor = torch.where(variance > 0, wanted / variance, 0).sqrt()  # where all members agree, they go on agreeing
    return mean + factor * (members - mean)


def scaled_interval(members: Tensor, scales: Sequence[float]) -> tuple[Tensor, Tensor]:
    """ybar -+ q_l s at lead time l, each (B, L, C, *space), of members (M, B, L, C, *space); the last q holds on."""
    mean, half = members.mean(0), _per_lead(scales, members) * total_std(members)
    return mean - half, mean + half


def damp(members: Tensor, dampings: Sequence[float], expected: Tensor) -> Tensor:
    """Move the mean ybar to e + d_l (ybar - e) at lead time l, where `expected` e is (B, L, C, *space).

    The spread stays. What is left of a forecast long after its start is the season's mean: d falls from 1 to 0.
    """
    mean = members.mean(0, keepdim=True)
    return members + (1 - _per_lead(dampings, members)) * (expected - mean)


def _per_lead(values: Sequence[float], members: Tensor) -> Tensor:
    """One number per lead time, shaped for (M, B, L, C, *space); the last holds for later ones."""
    chosen = [values[min(lead, len(values) - 1)] for lead in range(members.shape[2])]
    return torch.tensor(chosen).to(members).reshape(-1, *[1] * (members.ndim - 3))
