"""Means and deviations of states and increments, by the name of the variable, from the training part alone."""

from __future__ import annotations

import json
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from marigold_uq.field.data.sequences import FieldSequences, blocks, masked_of, target_hours_of
from marigold_uq.models.field_grid import FieldDataError, FieldStatistics
from marigold_uq.results import write_json

__all__ = ["observed_share", "statistics_of"]

HOUR = 3600


def statistics_of(train: FieldSequences) -> dict[str, FieldStatistics]:
    """Statistics of every variable over all points, times and sequences of the *training* part, by its name.

    The data are read once, block by block; sums are in float64. Missing values of `masked` variables are left out. Of a
    data set with `target_hours` the increments are those that end at these hours. A record that was prepared with a
    file for them (`statistics_file`) keeps them there, by the name of the variable, and is not read again.
    """
    stored = _StoredStatistics.of(train)
    known = {} if stored is None else stored.read()
    if set(train.variables) <= set(known):
        return {name: known[name] for name in train.variables}
    found = _measured(train)
    if stored is not None:
        stored.write({**known, **found})
    return found


def _measured(train: FieldSequences) -> dict[str, FieldStatistics]:
    states, increments = (_Moments(len(train.variables)) for _ in range(2))
    for sequence, start, overlap, block in blocks(train):
        values = block.double().transpose(0, 1).flatten(2)  # (C, n, points)
        _require_finite(train, values)
        states.add(values[:, overlap:].flatten(1))
        ends = _predicted(train, sequence, start, block.shape[0] - 1, overlap)
        increments.add(values.diff(dim=1)[:, ends].flatten(1))
    columns = zip(states.mean, states.std, increments.mean, increments.std, strict=True)
    found = {
        name: FieldStatistics(*(float(value) for value in column))
        for name, column in zip(train.variables, columns, strict=True)
    }
    for name, one in found.items():
        if not (one.std > 0 and one.increment_std > 0):
            raise FieldDataError(
                f"{train.source}: states or increments of {name} do not vary ({one}); nothing to scale by"
            )
    return found


def _predicted(train: FieldSequences, sequence: int, start: int, count: int, overlap: int) -> Tensor:
    """Which of the `count` increments of a block end at an hour that is forecast."""
    hours = target_hours_of(train)
    if hours is None:
        return torch.ones(count, dtype=torch.bool)
    first = start + 1 - overlap
    times = np.asarray(train.times(sequence))[first : first + count]
    return torch.from_numpy(np.isin(times // HOUR % 24, list(hours)))


def observed_share(train: FieldSequences) -> Tensor:
    """The share of times at which each variable has a value, (C, *space) float32."""
    count, total = 0, torch.zeros(())
    for _, _, overlap, block in blocks(train):
        new = block[overlap:]
        count, total = count + len(new), total + new.isfinite().sum(0)
    return (total / count).float()


def _require_finite(train: FieldSequences, values: Tensor) -> None:
    masked = masked_of(train)
    for name, channel in zip(train.variables, values, strict=True):
        bad = channel.isinf() if name in masked else ~channel.isfinite()
        if bool(bad.any()):
            always = bool(bad.all(0).any())
            raise FieldDataError(
                f"{train.source}: {name} holds NaN or infinity at {int(bad.any(0).sum())} of {bad.shape[1]} points"
                + (" at all times, like the land of an ocean variable: " if always else ": ")
                + "name it in `masked`, fill them, choose a region without them, or leave the variable out"
            )


class _Moments:
    """Count, mean and sum of squared deviations per variable, merged block by block (Chan et al.); NaN is left out."""

    def __init__(self, num_variables: int) -> None:
        self.count, self.mean, self.squares = (torch.zeros(num_variables, dtype=torch.float64) for _ in range(3))

    def add(self, values: Tensor) -> None:
        """Take in values (C, n)."""
        valid = ~values.isnan()
        number = valid.sum(1).double()
        known = number.clamp(min=1)
        mean = values.nansum(1) / known
        squares = (values - mean[:, None]).square().nansum(1)
        gap, total = mean - self.mean, (self.count + number).clamp(min=1)
        self.squares = self.squares + squares + gap.square() * self.count * number / total
        self.mean = self.mean + gap * number / total
        self.count = self.count + number

    @property
    def std(self) -> Tensor:
        """Standard deviation with divisor n - 1."""
        return (self.squares / (self.count - 1).clamp(min=1)).sqrt()


@dataclass(frozen=True)
class _StoredStatistics:
    """Statistics beside a prepared store: key of the part that was measured -> variable -> statistics."""

    path: Path
    key: str

    @classmethod
    def of(cls, train: FieldSequences) -> _StoredStatistics | None:
        """None for data without a place for them."""
        path, identity = getattr(train, "statistics_file", None), getattr(train, "identity", None)
        if path is None or identity is None:
            return None
        part = {
            "identity": identity,
            "times": [float(time) for time in np.asarray(train.times(0))[[0, -1]]],
            "grid": {name: [float(v) for v in values] for name, values in train.coordinates.items()},
            "hours": target_hours_of(train),
            "masked": sorted(masked_of(train)),
        }
        return cls(path, sha256(json.dumps(part, sort_keys=True).encode()).hexdigest()[:16])

    def _all(self) -> dict[str, dict[str, dict[str, float]]]:
        return json.loads(self.path.read_text(encoding="utf-8")) if self.path.exists() else {}

    def read(self) -> dict[str, FieldStatistics]:
        """What is known of this part."""
        return {name: FieldStatistics(**values) for name, values in self._all().get(self.key, {}).items()}

    def write(self, statistics: dict[str, FieldStatistics]) -> None:
        """Keep them beside those of other parts."""
        plain = {name: one.to_dict() for name, one in statistics.items()}
        write_json(self.path, {**self._all(), self.key: plain}, overwrite=True)
