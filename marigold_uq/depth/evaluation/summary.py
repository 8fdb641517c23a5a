"""From results of images to results of a data set: means, standard errors, groups."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from marigold_uq.depth.evaluation.records import ImageRecord
from marigold_uq.metrics import Estimate, MeanAccumulator

Estimates = dict[str, Estimate]


@dataclass(frozen=True)
class Summary:
    """Means over a data set.

    Attributes:
        overall: Name -> estimate: over images, or over groups where there are any (every group counts once, however
            many images it has; the standard error then takes groups as the independent units).
        groups: Group -> name -> estimate over its images; empty without groups.
        num_images: Group -> images scored.
    """

    overall: Estimates
    groups: dict[str, Estimates]
    num_images: dict[str, int]

    @property
    def average(self) -> str:
        """How `overall` was averaged."""
        return "mean over groups of the mean over images" if self.groups else "mean over images"


def summarize(records: Sequence[ImageRecord]) -> Summary:
    """Reduce the records of a whole data set. Collective: all processes call it with all records."""
    _check_one_kind(records)
    names = sorted({record.group for record in records})
    if names == [""]:
        return Summary(_accumulate(records).compute(), {}, {})
    groups: dict[str, Estimates] = {}
    overall = MeanAccumulator()
    for name in names:
        members = _accumulate([record for record in records if record.group == name])
        groups[name] = members.compute()
        for key, mean in members.compute({}).items():  # without RMSE and ratios: those are made of means over groups
            overall.update({key: mean.value[None]}, [name], keep=mean.value.ndim)
    counts = {name: sum(record.group == name for record in records) for name in names}
    return Summary(overall.compute(), groups, counts)


def _accumulate(records: Sequence[ImageRecord]) -> MeanAccumulator:
    """One value per image. All processes hold all records; the reducer drops the copies by their ids."""
    accumulator = MeanAccumulator()
    for record in records:
        for key, value in record.statistics.items():
            accumulator.update({key: torch.tensor([value], dtype=torch.float64)}, [record.name])
        for key, values in record.curves.items():
            accumulator.update({key: torch.tensor([values], dtype=torch.float64)}, [record.name], keep=1)
    return accumulator


def _check_one_kind(records: Sequence[ImageRecord]) -> None:
    """Means over images that were scored by different things would compare nothing."""
    examples = {record.kind: record.name for record in records}
    if len(examples) > 1:
        found = "; ".join(f"{kind} ({name})" for kind, name in examples.items())
        raise ValueError(f"the predictions are of different kinds: {found}; score each kind by itself")


def as_json(estimates: Mapping[str, Estimate]) -> dict[str, Any]:
    """Estimates as plain numbers and lists, None for NaN, which JSON does not know."""
    return {name: _without_nan(estimate.to_dict()) for name, estimate in estimates.items()}


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nan(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_without_nan(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
