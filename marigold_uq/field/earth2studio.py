"""A trained weather pipeline as a prognostic model of earth2studio: the methods it calls, no import of it."""

from __future__ import annotations

import itertools
import warnings
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from marigold_uq.field.data.weather import AXES
from marigold_uq.models.field_grid import FieldDataError, require_grid
from marigold_uq.pipelines.field import FieldForecastPipeline
from marigold_uq.randomness import member_seed

__all__ = ["Earth2StudioPrognostic"]


Coordinates = OrderedDict[str, np.ndarray]
"""earth2studio's CoordSystem: dimension -> values, in the order of the tensor's axes."""
NAMES = {"latitude": "lat", "longitude": "lon"}
TAIL = ("lead_time", "variable", "lat", "lon")


class Earth2StudioPrognostic:
    """`__call__`, `create_iterator`, `input_coords`, `output_coords` and `to`, as `earth2studio.run` expects them.

    Every entry of the leading dimensions (ensemble, time, ...) is one member that draws from its own stream, which
    follows from the seed, the value of the ensemble coordinate, the date and the lead time alone: an ensemble needs no
    perturbation of the initial state, and may be cut into mini-batches. Samples are those of the sampler: kappa and
    damping, which stretch and move a whole ensemble, are not applied.

    Args:
        pipeline: A pipeline on latitude and longitude that predicts all its variables.
        seed: Of all streams.
        variable_names: earth2studio's name of each variable where it differs, for instance {"2m_temperature": "t2m"}.
        num_inference_steps: Denoising steps per lead time; None takes the pipeline's own number.
    """

    def __init__(
        self,
        pipeline: FieldForecastPipeline,
        *,
        seed: int = 0,
        variable_names: dict[str, str] | None = None,
        num_inference_steps: int | None = None,
    ) -> None:
        config = pipeline.encoder.config
        if tuple(pipeline.encoder.coordinates) != AXES or not config.calendar:
            raise ValueError("earth2studio's models live on latitude, longitude and dates; this pipeline does not")
        if list(config.targets) != list(config.variables):
            raise ValueError(f"a prognostic model predicts all it needs; this one only {list(config.targets)}")
        kappas = list(pipeline.calibration_for().kappas)
        dampings, shares = pipeline.config.lead_dampings or [], pipeline.config.lead_season_shares or []
        if any(factor != 1 for factor in [*kappas, *dampings]) or any(shares):
            warnings.warn(
                f"samples come one by one, so what was calibrated for whole ensembles is not applied (kappas "
                f"{kappas}, dampings {dampings}, shares of the season's spread {shares}): give the finished "
                "ensemble, without its initial state, to pipeline.calibrate_samples",
                stacklevel=2,
            )
        self.pipeline, self.seed, self.num_inference_steps = pipeline, seed, num_inference_steps
        names = variable_names or {}
        self.variables = np.array([names.get(name, name) for name in config.variables])
        self.step = np.timedelta64(round(config.time_step), "s").astype("timedelta64[ns]")

    def to(self, device: Any) -> Self:
        """Move the network."""
        self.pipeline.to(device)
        return self

    def input_coords(self) -> Coordinates:
        """What the model takes: its last states, its variables, its grid."""
        encoder = self.pipeline.encoder
        past = np.arange(1 - encoder.config.num_history, 1) * self.step
        grid = {NAMES[axis]: values for axis, values in encoder.coordinates.items()}
        return OrderedDict({"batch": np.empty(0), "lead_time": past, "variable": self.variables, **grid})

    def output_coords(self, input_coords: Coordinates) -> Coordinates:
        """The coordinates after one step; ValueError where the input does not fit."""
        expected = self.input_coords()
        missing = [name for name in TAIL if name not in input_coords]
        if missing or tuple(input_coords)[-4:] != TAIL:
            raise ValueError(f"coordinates must end in {TAIL}; got {tuple(input_coords)}")
        if list(input_coords["variable"]) != list(self.variables):
            raise ValueError(
                f"variables are {list(self.variables)}, in this order; got {list(input_coords['variable'])}"
            )
        lead = np.asarray(input_coords["lead_time"]).astype("timedelta64[ns]")
        if len(lead) != len(expected["lead_time"]) or (np.diff(lead) != self.step).any():
            raise ValueError(f"lead_time holds {len(expected['lead_time'])} times, {self.step} apart; got {lead}")
        names = ("lat", "lon")
        require_grid(
            "earth2studio input", {name: input_coords[name] for name in names}, {name: expected[name] for name in names}
        )
        return OrderedDict({**input_coords, "lead_time": lead[-1:] + self.step})

    def __call__(self, x: Tensor, coords: Coordinates) -> tuple[Tensor, Coordinates]:
        """One step: x (..., num_history, variables, lat, lon) -> (..., 1, variables, lat, lon)."""
        output = self.output_coords(coords)
        history = x.flatten(0, -5) if x.ndim > 4 else x.unsqueeze(0)
        new = self._advance(history, self._times(x, coords), self._streams(x, coords))
        return new.reshape(*x.shape[:-4], 1, *x.shape[-3:]), output

    def create_iterator(self, x: Tensor, coords: Coordinates) -> Iterator[tuple[Tensor, Coordinates]]:
        """The last state first, then one step after the other, without end."""
        self.output_coords(coords)
        yield x[..., -1:, :, :, :], OrderedDict({**coords, "lead_time": np.asarray(coords["lead_time"])[-1:]})
        history = x.flatten(0, -5) if x.ndim > 4 else x.unsqueeze(0)
        while True:
            output = self.output_coords(coords)
            new = self._advance(history, self._times(x, coords), self._streams(x, coords))
            yield new.reshape(*x.shape[:-4], 1, *x.shape[-3:]), output
            history = torch.cat([history[:, 1:], new.unsqueeze(1)], 1)
            coords = OrderedDict({**coords, "lead_time": np.asarray(coords["lead_time"]) + self.step})

    def _advance(self, history: Tensor, time: Tensor | None, streams: list[torch.Generator]) -> Tensor:
        self.pipeline.encoder.check_history(history)
        self.pipeline.encoder.check_hours(None if time is None else time.numpy(), 1)
        scheduler = self.pipeline.chain_scheduler(self.num_inference_steps)
        return self.pipeline.advance(history.float(), time, streams, scheduler).to(history)

    def _streams(self, x: Tensor, coords: Coordinates) -> list[torch.Generator]:
        """A stream for this step of every member, by its coordinates and not by its place in the batch."""
        lead = int(np.asarray(coords["lead_time"])[-1].astype("timedelta64[s]").astype(np.int64))
        keys = [
            _stream_keys(name, np.asarray(coords[name]), size) for name, size in zip(coords, x.shape[:-4], strict=False)
        ]
        seeds = [member_seed(self.seed, *place, lead % 2**32) for place in itertools.product(*keys)]
        return [torch.Generator().manual_seed(seed) for seed in seeds]

    def _times(self, x: Tensor, coords: Coordinates) -> Tensor | None:
        """Seconds since 1970 of the last state of every member, (n,)."""
        if "time" not in coords:
            if self.pipeline.encoder.needs_time:
                raise FieldDataError("this model knows the time: the coordinates need `time`")
            return None
        axis = list(coords).index("time")
        lead = np.asarray(coords["lead_time"])[-1].astype("timedelta64[s]").astype(np.float64)
        seconds = np.asarray(coords["time"]).astype("datetime64[s]").astype(np.float64) + lead
        shape = [len(seconds) if position == axis else 1 for position in range(x.ndim - 4)]
        return torch.from_numpy(np.broadcast_to(seconds.reshape(shape), x.shape[:-4]).flatten())


def _stream_keys(name: str, values: np.ndarray, size: int) -> list[int]:
    """A number >= 0 for each entry of a leading dimension: its value, seconds for dates, or its place where unnamed."""
    if len(values) != size:  # earth2studio's `batch` has no values
        return list(range(size))
    if np.issubdtype(values.dtype, np.datetime64):
        return [int(value) % 2**63 for value in values.astype("datetime64[s]").astype(np.int64)]
    if not np.issubdtype(values.dtype, np.integer):
        raise ValueError(f"members are told apart by whole numbers and dates; {name} holds {values.dtype}")
    return [int(value) % 2**63 for value in values]
