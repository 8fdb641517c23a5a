"""Means and deviations of states and increments, by the name of the variable, from the training part alone."""

import torch
from torch import Tensor

from marigold_uq.field.data.sequences import FieldSequences, blocks
from marigold_uq.models.field_grid import FieldDataError, FieldStatistics

__all__ = ["statistics_of"]


def statistics_of(train: FieldSequences) -> dict[str, FieldStatistics]:
    """Statistics of every variable over all points, times and sequences of the *training* part, by its name.

    The data are read once, block by block; sums are in float64.
    """
    states, increments = _Moments(), _Moments()
    for overlap, block in blocks(train):
        values = block.double().transpose(0, 1).flatten(2)  # (C, n, points)
        _require_finite(train, values)
        states.add(values[:, overlap:].flatten(1))
        increments.add(values.diff(dim=1).flatten(1))
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


def _require_finite(train: FieldSequences, values: Tensor) -> None:
    for name, channel in zip(train.variables, values, strict=True):
        bad = ~channel.isfinite()
        if bool(bad.any()):
            always = bool(bad.all(0).any())
            raise FieldDataError(
                f"{train.source}: {name} holds NaN or infinity at {int(bad.any(0).sum())} of {bad.shape[1]} points"
                + (" at all times, like the land of an ocean variable: " if always else ": ")
                + "fill them, choose a region without them, or leave the variable out"
            )


class _Moments:
    """Count, mean and sum of squared deviations per variable, merged block by block (Chan et al.)."""

    def __init__(self) -> None:
        self.count = 0
        self.mean = torch.zeros(0, dtype=torch.float64)
        self.squares = torch.zeros(0, dtype=torch.float64)

    def add(self, values: Tensor) -> None:
        """Take in values (C, n)."""
        number = values.shape[1]
        if number == 0:
            return
        mean = values.mean(1)
        squares = (values - mean[:, None]).square().sum(1)
        if self.count:
            gap, total = mean - self.mean, self.count + number
            squares = self.squares + squares + gap.square() * self.count * number / total
            mean = self.mean + gap * number / total
        self.count, self.mean, self.squares = self.count + number, mean, squares

    @property
    def std(self) -> Tensor:
        """Standard deviation with divisor n - 1."""
        return (self.squares / max(1, self.count - 1)).sqrt()
