"""Forecasts that do not fit into memory, written to zarr while they are made."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from marigold_uq.files import atomic_path, make_folder
from marigold_uq.pipelines.field.conventions import CF_VERSION, DIMENSIONS, Convention, variable_attributes
from marigold_uq.pipelines.field.output import FieldForecast
from marigold_uq.pipelines.field.zarr_store import EmptyArray, create_store, finish_store

if TYPE_CHECKING:
    from marigold_uq.calibration import IntervalGrid
    from marigold_uq.pipelines.field.pipeline import FieldForecastPipeline

__all__ = ["ForecastWriter", "write_stream"]


@dataclass(frozen=True)
class ForecastWriter:
    """A store for samples of B forecasts at L lead times, and for statistics of them.

    A chunk is one field. Samples come first, chain by chain; `finish_lead` then reads all of one lead time, applies
    what was calibrated for whole ensembles, and writes the statistics.

    Args:
        shell: A forecast without values: shape, names, coordinates.
        convention: Names of the dimensions.
    """

    shell: FieldForecast
    convention: Convention = "weatherbenchx"

    def create(self, path: Path) -> Any:
        """The store with coordinates and empty arrays; returns its group."""
        names, shell = DIMENSIONS[self.convention], self.shell
        space = [names.get(axis, axis) for axis in shell.coordinates]
        dims, shape = [names["init"], names["lead"], *space], [*shell.samples.shape[1:3], *shell.samples.shape[4:]]
        arrays = {}
        for variable in shell.variables:
            arrays[variable] = _array([names["sample"], *dims], [len(shell.samples), *shape], shell, variable)
            for statistic in self.statistics:
                arrays[f"{variable}_{statistic}"] = _array(dims, shape, shell, variable, statistic)
        coordinates = {name: one for name, one in shell._coordinates(names).items() if name != "quantile"}
        return create_store(path, coordinates, {"Conventions": CF_VERSION, **shell.provenance}, arrays)

    @property
    def statistics(self) -> tuple[str, ...]:
        """What is written beside the samples."""
        if len(self.shell.samples) < 2:
            return ("prediction",)
        return ("prediction", "uncertainty", *(("lower", "upper") if self.shell.coverage is not None else ()))

    def write_samples(self, group: Any, chain: int, lead: int, states: Tensor) -> None:
        """States (C, *space) of a chain; all samples of the first forecast come first."""
        forecast, sample = divmod(chain, len(self.shell.samples))
        for variable, values in zip(self.shell.variables, states, strict=True):
            group[variable][sample, forecast, lead] = values.numpy()

    def finish_lead(self, group: Any, pipeline: FieldForecastPipeline, forecast: int, lead: int) -> None:
        """Calibrate all samples of one forecast at one lead time, and write them and their statistics."""
        place = (slice(None), slice(forecast, forecast + 1), slice(lead, lead + 1))
        raw = torch.stack([torch.from_numpy(group[name][place]) for name in self.shell.variables], 3)
        inits = self.shell.init_times
        time = None if inits is None else inits[forecast : forecast + 1]
        samples = pipeline.calibrate_samples(raw, time, first_lead=lead)
        here = self._at(samples, lead)
        found = {"prediction": here.prediction}
        if len(samples) > 1:
            found["uncertainty"] = here.uncertainty
            if here.interval is not None:
                found["lower"], found["upper"] = here.interval
        changed = not torch.equal(samples.nan_to_num(), raw.nan_to_num())
        for channel, name in enumerate(self.shell.variables):
            if changed:
                group[name][place] = samples[:, :, :, channel].numpy()
            for statistic, values in found.items():
                group[f"{name}_{statistic}"][place[1:]] = values[:, :, channel].numpy()

    def _at(self, samples: Tensor, lead: int) -> FieldForecast:
        """The forecast of one lead time, with its half widths."""
        shell, grid = self.shell, self.shell.interval_grid
        rows = None if grid is None else _of_lead(grid, len(shell.variables), lead)
        return FieldForecast(
            samples=samples,
            lead_times=shell.lead_times[lead : lead + 1],
            variables=shell.variables,
            coordinates=shell.coordinates,
            coverage=shell.coverage,
            interval_grid=rows,
        )


def _array(
    dims: Sequence[str], shape: Sequence[int], shell: FieldForecast, variable: str, statistic: str | None = None
) -> EmptyArray:
    num_axes = len(shell.coordinates)
    chunks = [1] * (len(shape) - num_axes) + list(shape[-num_axes:])
    return EmptyArray(dims, shape, chunks, variable_attributes(variable, shell.units, statistic))


def _of_lead(grid: IntervalGrid, num_variables: int, lead: int) -> IntervalGrid:
    """The half widths of one lead time; the last holds for later ones."""
    count = grid.num_outputs // num_variables
    places = [number * count + min(lead, count - 1) for number in range(num_variables)]
    return type(grid)(grid.coverages, tuple(tuple(row[place] for place in places) for row in grid.scales))


def write_stream(
    pipeline: FieldForecastPipeline,
    path: Path,
    writer: ForecastWriter,
    chains: Iterable[tuple[range, Iterable[Tensor]]],
) -> Path:
    """Write what `chains` give, their numbers and their states lead by lead; the store appears when it is complete."""
    if path.suffix != ".zarr":
        raise ValueError(f"streamed forecasts are written as .zarr; got {path.name}")
    make_folder(path.parent)
    with atomic_path(path) as temporary:
        group = writer.create(temporary)
        for numbers, states_of_leads in chains:
            for lead, states in enumerate(states_of_leads):
                for chain, state in zip(numbers, states, strict=True):
                    writer.write_samples(group, chain, lead, state)
        for forecast in range(writer.shell.samples.shape[1]):
            for lead in range(len(writer.shell.lead_times)):
                writer.finish_lead(group, pipeline, forecast, lead)
        finish_store(temporary)
    return path
