"""Which samples make up which step: a function of the step, so a resumed run reads on exactly where it stopped."""

import signal
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from marigold_uq.randomness import member_seed
from marigold_uq.training.config import TrainingConfig

__all__ = ["BatchPlan", "Collate", "Ordered", "epoch_is_shared", "steps_of_run"]

Collate = Callable[[list[Any]], Any]


class Ordered(Protocol):
    """A data set. One with `set_epoch` draws its own order and is read from front to back; others are shuffled here.

    With `shares_epoch = True` it promises that workers which are running see the epoch too.

    An epoch is cut into whole batches: the rest, fewer samples than one batch, waits for another epoch's order.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Any: ...


def epoch_is_shared(dataset: object) -> bool:
    """Whether running workers see the data set's epoch, or it has none."""
    return not hasattr(dataset, "set_epoch") or bool(getattr(dataset, "shares_epoch", False))


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
                f"batch_size={config.batch_size} is not a multiple of micro_batch_size={micro} x {processes} "
                f"processes = {micro * processes}; change one of the three"
            )
        return cls(micro, accumulation, process, processes)

    @property
    def size(self) -> int:
        """The effective batch."""
        return self.micro * self.accumulation * self.processes

    @property
    def share(self) -> range:
        """Places of this process in the effective batch."""
        length = self.micro * self.accumulation
        return range(self.process * length, (self.process + 1) * length)

    def positions(self, step_in_epoch: int) -> list[list[int]]:
        """Micro batches of this process at a step, as positions in the epoch."""
        places = [step_in_epoch * self.size + place for place in self.share]
        return [places[first : first + self.micro] for first in range(0, len(places), self.micro)]


class _StepSampler:
    """Batch sampler: the micro batches of `steps` of one epoch, which are set anew for each."""

    def __init__(self, plan: BatchPlan) -> None:
        self.plan, self.steps = plan, range(0)
        self.order: list[int] | None = None

    def __iter__(self) -> Iterator[list[int]]:
        for step in self.steps:
            for positions in self.plan.positions(step):
                yield positions if self.order is None else [self.order[position] for position in positions]

    def __len__(self) -> int:
        return len(self.steps) * self.plan.accumulation


def steps_of_run(
    dataset: Ordered,
    plan: BatchPlan,
    *,
    start_step: int,
    max_steps: int,
    num_workers: int,
    seed: int = 0,
    collate: Collate | None = None,
    pin_memory: bool = False,
) -> Generator[tuple[int, list[Any]], None, None]:
    """(step, this process's micro batches) from `start_step` to `max_steps`, epoch after epoch.

    Workers stay from epoch to epoch, where the data set's epoch reaches them (`shares_epoch`) or it has none.
    """
    steps_per_epoch = len(dataset) // plan.size
    if steps_per_epoch == 0:
        raise ValueError(
            f"the data set has {len(dataset)} samples per epoch, fewer than one batch of {plan.size}: lower batch_size"
        )
    sampler = _StepSampler(plan)
    loader = _loader(dataset, sampler, num_workers, collate, pin_memory)
    step = start_step
    while step < max_steps:
        epoch, first = divmod(step, steps_per_epoch)
        sampler.steps = range(first, min(steps_per_epoch, first + max_steps - step))
        sampler.order = _order_of_epoch(dataset, epoch, seed)
        assert loader.generator is not None
        loader.generator.manual_seed(member_seed(seed, epoch))
        batches = iter(loader)
        for _ in sampler.steps:
            yield step, [next(batches) for _ in range(plan.accumulation)]
            step += 1


def _order_of_epoch(dataset: Ordered, epoch: int, seed: int) -> list[int] | None:
    """A permutation that follows from (seed, epoch); None where the data set orders itself."""
    if hasattr(dataset, "set_epoch"):
        dataset.set_epoch(epoch)
        return None
    return np.random.default_rng(member_seed(seed, epoch)).permutation(len(dataset)).tolist()


def _loader(
    dataset: Any, sampler: _StepSampler, num_workers: int, collate: Collate | None, pin_memory: bool
) -> DataLoader[Any]:
    """A loader with its own generator: otherwise each start draws from the global stream, which dropout uses."""
    source: Dataset[Any] = dataset
    return DataLoader(
        source,
        batch_sampler=sampler,  # type: ignore[arg-type]
        num_workers=num_workers,
        collate_fn=collate,
        worker_init_fn=_ignore_interrupts,
        generator=torch.Generator(),
        pin_memory=pin_memory,
        persistent_workers=num_workers > 0 and epoch_is_shared(dataset),
    )


def _ignore_interrupts(worker: int) -> None:
    """A signal may reach the whole process group; the main process finishes its step and needs its workers for that."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
