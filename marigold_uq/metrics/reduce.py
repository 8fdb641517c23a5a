"""The one place where statistics become numbers: means, standard errors and ratios, over one process or many.

Statistics arrive per sample (image, row, forecast) and per coordinate. Each is averaged over the coordinates of its
sample at once, with mask and weights, in float64; only these few numbers per sample are kept. `compute` gathers them
from all processes, drops the samples a distributed sampler repeated, sorts by id and averages, so the result does not
depend on the number of processes, the batch size or the order.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from marigold_uq.metrics.checks import as_mask
from marigold_uq.precision import accumulator_dtype

SampleId = int | str
Average = Literal["samples", "coordinates"]


@dataclass(frozen=True)
class DerivedQuantity:
    """A function of means, such as the RMSE: `formula` takes the means of `inputs`, in this order, elementwise."""

    inputs: tuple[str, ...]
    formula: Callable[..., Tensor]


DERIVED: Mapping[str, DerivedQuantity] = MappingProxyType(
    {
        "rmse": DerivedQuantity(("squared_error",), torch.sqrt),
        "spread": DerivedQuantity(("variance",), torch.sqrt),
        "spread_skill_ratio": DerivedQuantity(
            ("predicted_squared_error", "squared_error"), lambda predicted, actual: (predicted / actual).sqrt()
        ),
    }
)
"""Everything that is not a plain mean. A quantity is reported when all its inputs were accumulated."""


@dataclass(frozen=True)
class Estimate:
    """A mean or derived quantity over samples; tensors have the statistic's kept shape, () for a single number.

    Attributes:
        value: float64.
        standard_error: float64, over samples as independent units; NaN for fewer than two.
        num_samples: int64, samples with any valid coordinate.
    """

    value: Tensor
    standard_error: Tensor
    num_samples: Tensor

    def to_dict(self) -> dict[str, Any]:
        """Plain floats, ints and lists, ready for JSON."""
        return {
            "value": self.value.tolist(),
            "standard_error": self.standard_error.tolist(),
            "num_samples": self.num_samples.tolist(),
        }


@dataclass(frozen=True)
class SampleTable:
    """One statistic of every sample: N ids in ascending order, mean over coordinates and total weight (N, *kept).

    A sample without valid coordinates has weight 0 and value NaN.
    """

    ids: tuple[SampleId, ...]
    values: Tensor
    weights: Tensor


class MeanAccumulator:
    """Averages statistics over samples, with masks and weights, across processes.

    Args:
        average: `samples`, every image or row counts once, however many valid pixels it has (Marigold's convention);
            `coordinates`, all valid coordinates are pooled, so a sample counts by its total weight. Equal where no mask
            varies between samples.
        duplicate_tolerance: a repeated id is a padded sample and is dropped; if its value differs from the first by
            more than this share of the largest value of the statistic, two samples share an id, which is an error.

    Example:
        >>> accumulator = MeanAccumulator()
        >>> for ids, samples, target, valid in loader:  # target (B, H, W)
        ...     accumulator.update({"crps": crps(samples, target), **spread_skill(samples, target)}, ids, mask=valid)
        >>> accumulator.compute()["rmse"].value
    """

    def __init__(self, average: Average = "samples", *, duplicate_tolerance: float = 1e-3) -> None:
        if average not in get_args(Average):
            raise ValueError(f"average is {average!r}; expected one of {get_args(Average)}.")
        self.average = average
        self.duplicate_tolerance = duplicate_tolerance
        self._batches: dict[str, list[SampleTable]] = {}

    def update(
        self,
        statistics: Mapping[str, Tensor],
        ids: Sequence[SampleId] | Tensor,
        *,
        mask: Tensor | None = None,
        weight: Tensor | None = None,
        keep: int = 0,
    ) -> None:
        """Add a batch of B samples.

        Args:
            statistics: name -> (B, *kept, *coordinates); values may be anything, NaN too, where the mask is False.
            ids: B ids, unique over the whole data set and the same in every process (index or file name).
            mask: broadcastable to every statistic, True where valid.
            weight: broadcastable to every statistic, >= 0, such as cos(latitude) as (H, 1).
            keep: axes after the first that stay (lead times, nominal levels, histogram bins); the rest is averaged.
        """
        names = _as_ids(ids)
        for name, statistic in statistics.items():
            _check_statistic(name, statistic, len(names), keep)
            values, weights = _mean_over_coordinates(name, statistic.detach(), mask, weight, keep)
            self._batches.setdefault(name, []).append(SampleTable(names, values.cpu(), weights.cpu()))

    def samples(self) -> dict[str, SampleTable]:
        """Name -> every sample's own value, from all processes. Collective: all processes call it, all get the same."""
        gathered = _gather(self._batches)
        names = sorted({name for batches in gathered for name in batches})
        return {name: self._merge(name, [t for batches in gathered for t in batches.get(name, [])]) for name in names}

    def compute(self, derived: Mapping[str, DerivedQuantity] = DERIVED) -> dict[str, Estimate]:
        """Name -> `Estimate`, for every statistic and every derived quantity whose inputs are there. Collective."""
        tables = self.samples()
        quantities = {name: DerivedQuantity((name,), lambda mean: mean) for name in tables}
        quantities |= {name: q for name, q in derived.items() if all(i in tables for i in q.inputs)}
        return {
            name: self._estimate(name, [tables[i] for i in quantity.inputs], quantity.formula)
            for name, quantity in quantities.items()
        }

    def _merge(self, name: str, tables: Sequence[SampleTable]) -> SampleTable:
        """One table, sorted by id, every id once."""
        shapes = {tuple(table.values.shape[1:]) for table in tables}
        if len(shapes) > 1:
            raise ValueError(f"{name!r} came with different kept shapes {sorted(shapes)}; use one name per shape.")
        ids = [i for table in tables for i in table.ids]
        if len({type(i) for i in ids}) > 1:
            raise TypeError(f"{name!r} was given both integer and string ids; use one kind.")
        values, weights = torch.cat([t.values for t in tables]), torch.cat([t.weights for t in tables])
        first: dict[SampleId, int] = {}
        for position, sample_id in enumerate(ids):
            first.setdefault(sample_id, position)
        self._check_duplicates(name, ids, values, first)
        order = sorted(first)
        rows = torch.tensor([first[i] for i in order], dtype=torch.long)
        return SampleTable(tuple(order), values[rows], weights[rows])

    def _check_duplicates(
        self, name: str, ids: Sequence[SampleId], values: Tensor, first: Mapping[SampleId, int]
    ) -> None:
        """A repeated id must bring the same value, or it is a second sample and dropping it would lose data."""
        if len(first) == len(ids):
            return
        difference = (values - values[[first[i] for i in ids]]).abs().nan_to_num(nan=0.0)
        finite = values[values.isfinite()]
        scale = float(finite.abs().max()) if finite.numel() else 0.0
        wrong = (difference > self.duplicate_tolerance * scale).reshape(len(ids), -1).any(dim=1)
        if wrong.any():
            sample_id = ids[int(wrong.nonzero()[0, 0])]
            raise ValueError(
                f"{name!r}: id {sample_id!r} came more than once with different values (off by up to"
                f" {float(difference.max()):.3g}). A sample padded by a distributed sampler repeats its value; give"
                " every sample its own id (its index in the data set, not in the batch), or raise duplicate_tolerance."
            )

    def _estimate(self, name: str, tables: Sequence[SampleTable], formula: Callable[..., Tensor]) -> Estimate:
        """`formula` of the means, with its jackknife standard error (s / sqrt(n) when it is a plain mean)."""
        if any(t.ids != tables[0].ids or not torch.equal(t.weights, tables[0].weights) for t in tables):
            raise ValueError(f"{name!r} combines statistics of different samples or weights; update them together.")
        weights = tables[0].weights
        valid = weights > 0  # (N, *kept)
        counted = weights if self.average == "coordinates" else valid.to(weights.dtype)
        count = valid.sum(dim=0, dtype=torch.float64)
        sums = [torch.where(valid, t.values * counted, 0.0) for t in tables]
        value = formula(*(s.sum(dim=0) / counted.sum(dim=0) for s in sums))
        # Leave one sample out, for all samples at once.
        without = formula(*((s.sum(dim=0) - s) / (counted.sum(dim=0) - counted) for s in sums))
        center = torch.where(valid, without, 0.0).sum(dim=0) / count
        deviation = torch.where(valid, without - center, 0.0).square().sum(dim=0)
        error = ((count - 1) / count * deviation).sqrt()
        return Estimate(value, torch.where(count > 1, error, torch.nan), count.long())


def _as_ids(ids: Sequence[SampleId] | Tensor) -> tuple[SampleId, ...]:
    """Ids as Python integers or strings."""
    values = ids.tolist() if isinstance(ids, Tensor) else list(ids)
    names = tuple(i if isinstance(i, str) else int(i) for i in values)
    if any(not isinstance(i, str) and i != n for i, n in zip(values, names, strict=True)):
        raise TypeError(f"ids are {values[:5]} ...; expected integers or strings.")
    return names


def _check_statistic(name: str, statistic: Tensor, num_ids: int, keep: int) -> None:
    if statistic.ndim == 0 or statistic.shape[0] != num_ids:
        raise ValueError(
            f"{name!r} has shape {tuple(statistic.shape)} for {num_ids} ids; expected (B, ...) with one row per id."
            " Statistics come unreduced, samples first."
        )
    if not 0 <= keep <= statistic.ndim - 1:
        raise ValueError(f"keep is {keep}; {name!r} {tuple(statistic.shape)} has {statistic.ndim - 1} axes to keep.")


def _mean_over_coordinates(
    name: str, statistic: Tensor, mask: Tensor | None, weight: Tensor | None, keep: int
) -> tuple[Tensor, Tensor]:
    """Weighted mean over the coordinate axes and total weight, both float64 (B, *kept)."""
    dtype = accumulator_dtype(statistic.device)
    weights = _expanded_weight(name, weight, statistic).to(dtype)
    valid = as_mask(mask, statistic.shape)
    if valid is not None:
        weights = torch.where(valid.to(statistic.device), weights, 0.0)
    total = torch.where(weights > 0, statistic.to(dtype) * weights, 0.0)  # no 0 * NaN from invalid coordinates
    if coordinates := tuple(range(1 + keep, statistic.ndim)):
        total, weights = total.sum(dim=coordinates), weights.sum(dim=coordinates)
    return (total / weights).double(), weights.double()


def _expanded_weight(name: str, weight: Tensor | None, statistic: Tensor) -> Tensor:
    """Weights of the statistic's shape; ones without any."""
    if weight is None:
        return torch.ones((), device=statistic.device).expand(statistic.shape)
    if not bool(((weight >= 0) & weight.isfinite()).all()):
        raise ValueError("weight has negative or non-finite entries; expected finite weights >= 0.")
    try:
        return weight.to(statistic.device).expand(statistic.shape)
    except RuntimeError:
        raise ValueError(
            f"weight {tuple(weight.shape)} does not broadcast to {name!r} {tuple(statistic.shape)}: give it the same"
            " axes (size 1 to repeat), and per-sample statistics an update of their own."
        ) from None


def _gather(batches: dict[str, list[SampleTable]]) -> list[dict[str, list[SampleTable]]]:
    """The batches of every process, in order of rank; just ours when there is one process."""
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return [batches]
    gathered: list[dict[str, list[SampleTable]]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(gathered, batches)
    return gathered
