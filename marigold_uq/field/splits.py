"""From a data config to training, validation and test sequences."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from marigold_uq.field.config import FieldData, FieldTrainConfig, PdeData, WeatherData
from marigold_uq.field.data import (
    FieldSequences,
    RandomTransitions,
    Transitions,
    WindowedTransitions,
    as_plane,
    open_weather,
    read_trajectories,
)

__all__ = ["FieldSplit", "open_split", "target_hours", "training_samples"]


class FieldSplit(NamedTuple):
    """Parts that share nothing."""

    train: FieldSequences
    validation: FieldSequences
    test: FieldSequences


def open_split(data: FieldData) -> FieldSplit:
    """The three parts of the data, which every model that is compared shares."""
    if data.pde is not None:
        return _open_pde(data.pde)
    assert data.weather is not None  # FieldData checks it
    return _open_weather(data.weather)


def _open_pde(data: PdeData) -> FieldSplit:
    trajectories = read_trajectories(
        data.path,
        states=slice(0, data.num_states, data.state_stride),
        points=slice(None, None, data.point_stride),
        thin_again=data.thin_again,
    )
    split = as_plane(trajectories).split(data.split_seed, test=data.test, validation=data.validation)
    return FieldSplit(split.train, split.validation, split.test)


def _open_weather(data: WeatherData) -> FieldSplit:
    record = open_weather(
        data.path,
        data.variables,
        static=data.static,
        latitude=data.latitude,
        longitude=data.longitude,
        masked=data.masked,
        target_hours=data.target_hours,
        storage_options=data.storage_options or None,
    )
    parts = [record.between(*period) for period in (data.train, data.validation, data.test)]
    _require_apart(parts)
    return FieldSplit(*(part.load() for part in parts)) if data.in_memory else FieldSplit(*parts)


def _require_apart(parts: Sequence[FieldSequences]) -> None:
    """Periods must not overlap: the states of one are not seen by another."""
    for earlier, later in pairwise(sorted(parts, key=lambda part: float(part.times(0)[0]))):
        if not earlier.times(0)[-1] < later.times(0)[0]:
            raise ValueError(f"{earlier.source}: train, validation and test overlap; give periods that do not")


def training_samples(config: FieldTrainConfig, train: FieldSequences) -> Transitions:
    """All transitions, window by window where the data say so, or one random time of every sequence per epoch."""
    history, weather = config.model.num_history, config.data.weather
    if weather is not None and weather.window and not config.one_time_per_epoch:
        return WindowedTransitions(
            train, window=weather.window, num_open=weather.open_windows, num_history=history, seed=config.training.seed
        )
    if config.one_time_per_epoch:
        return RandomTransitions(train, num_history=history, seed=config.training.seed)
    return Transitions(train, num_history=history, target_hours=target_hours(config.data))


def target_hours(data: FieldData) -> Sequence[int] | None:
    """UTC hours that are forecast, where the data have dates."""
    return None if data.weather is None else data.weather.target_hours
