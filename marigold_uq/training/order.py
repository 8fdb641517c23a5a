"""Which samples make up which step: a function of the step, so a resumed run reads on exactly where it stopped."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from torch.utils.data import DataLoader, Dataset

from marigold_uq.training.config import TrainingConfig


class Ordered(Protocol):
    """A data set that is read in order; `set_epoch` (where there is one) draws the order anew."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Any: ...


@dataclass(frozen=True)
class BatchPlan:
    """Effective batch = processes x accumulation x micro batch."""

    micro: int
    accumulation: int
    process: int
    processes: int

    @classmethod
    def of(cls, config: TrainingConfig, process: int, processes: int) -> "BatchPlan":
        """Sizes that multiply to the effective batch; anything else is an error that says so."""
        micro = config.micro_batch_size or max(1, config.batch_size // processes)
        accumulation, rest = divmod(config.batch_size, micro * processes)
        if rest or not accumulation:
            raise ValueError(
                f"batch_size={config.batch_size} is not a multiple of micro_batch_size={micro} x {processes} processes"
            )
        return cls(micro, accumulation, process, processes)

    @property
    def size(self) -> int:
        """The effective batch."""
        return self.micro * self.accumulation * self.processes

    def positions(self, step_in_epoch: int) -> list[list[int]]:
        """Micro batches of this process at a step, as positions in the epoch."""
        first = step_in_epoch * self.size + self.process * self.micro * self.accumulation
        return [
            list(range(start, start + self.micro))
            for start in range(first, first + self.accumulation * self.micro, self.micro)
        ]


class _StepSampler:
    """Batch sampler: the micro batches of steps `first`, `first + 1`, ... of one epoch."""

    def __init__(self, plan: BatchPlan, first: int, last: int) -> None:
        self.plan, self.first, self.last = plan, first, last

    def __iter__(self) -> Iterator[list[int]]:
        for step in range(self.first, self.last):
            yield from self.plan.positions(step)

    def __len__(self) -> int:
        return (self.last - self.first) * self.plan.accumulation


def steps_of_run(
    dataset: Ordered, plan: BatchPlan, *, start_step: int, max_steps: int, num_workers: int, collate: Any = None
) -> Iterator[tuple[int, list[Any]]]:
    """(step, this process's micro batches) from `start_step` to `max_steps`, epoch after epoch."""
    steps_per_epoch = len(dataset) // plan.size
    if steps_per_epoch == 0:
        raise ValueError(f"the data set has {len(dataset)} samples, fewer than one batch of {plan.size}")
    step = start_step
    while step < max_steps:
        epoch, first = divmod(step, steps_per_epoch)
        if hasattr(dataset, "set_epoch"):
            dataset.set_epoch(epoch)
        last = min(steps_per_epoch, first + max_steps - step)
        batches = iter(_loader(dataset, _StepSampler(plan, first, last), num_workers, collate))
        for _ in range(first, last):
            yield step, [next(batches) for _ in range(plan.accumulation)]
            step += 1


def _loader(dataset: Any, sampler: _StepSampler, num_workers: int, collate: Any) -> DataLoader[Any]:
    source: Dataset[Any] = dataset
    return DataLoader(source, batch_sampler=sampler, num_workers=num_workers, collate_fn=collate)  # type: ignore[arg-type]
