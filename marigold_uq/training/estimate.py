"""What a run will need, said before its first step: memory from what is there, hours from one rehearsed micro batch."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from marigold_uq.training.config import TrainingConfig
from marigold_uq.training.order import BatchPlan

__all__ = ["Estimate", "Memory", "Rehearsal", "free_space", "gigabytes", "memory_of", "peak_memory", "rehearse"]

GB = 2**30


@dataclass(frozen=True)
class Memory:
    """Bytes that a process holds besides activations."""

    weights: int
    gradients: int
    optimizer: int
    average: int
    frozen: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.gradients + self.optimizer + self.average + self.frozen

    @property
    def checkpoint(self) -> int:
        """On disk."""
        return self.weights + self.optimizer + self.average

    def __str__(self) -> str:
        parts = {
            "weights": self.weights,
            "gradients": self.gradients,
            "Adam": self.optimizer,
            "average": self.average,
            "frozen networks": self.frozen,
        }
        return ", ".join(f"{name} {gigabytes(value)}" for name, value in parts.items() if value)


def memory_of(network: nn.Module, config: TrainingConfig, frozen: Iterable[nn.Module] = ()) -> Memory:
    """From the sizes of the weights: Adam keeps two more copies of what learns, or two of 8 bits."""
    learning = _bytes(parameter for parameter in network.parameters() if parameter.requires_grad)
    copies = 2.0 if config.optimizer.kind == "adamw" else 0.5
    return Memory(
        weights=_bytes(network.parameters()),
        gradients=learning,
        optimizer=int(copies * learning),
        average=learning if config.ema_decay else 0,
        frozen=sum(_bytes(part.parameters()) for part in frozen),
    )


def _bytes(tensors: Iterable[Tensor]) -> int:
    """What this process holds of them; of sharded ones its part."""
    local = (tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors)
    return sum(tensor.numel() * tensor.element_size() for tensor in local)


def peak_memory(device: torch.device) -> int:
    """Bytes: what the GPU has held at most, or this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if sys.platform == "win32":
        return 0  # not known without a further package
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


@dataclass(frozen=True)
class Rehearsal:
    """Seconds of one micro batch."""

    samples: int
    reading: float
    computing: float


def rehearse(task: Any, network: nn.Module, plan: BatchPlan, accelerator: Any, seed: int = 0) -> Rehearsal | None:
    """Read a micro batch and go forth and back through the network, twice, of which the second counts.

    Nothing is changed: gradients are thrown away, and no stream of random numbers moves. None for a task that cannot
    rehearse.
    """
    if not task.can_rehearse or len(task.dataset) < plan.size:  # too small a data set is the loop's to refuse
        return None
    if hasattr(task.dataset, "set_epoch"):
        task.dataset.set_epoch(0)
    started = time.perf_counter()
    batch = task.collate([task.dataset[position] for position in plan.positions(0)[0]])
    reading = time.perf_counter() - started
    device = accelerator.device
    computing = 0.0
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        for _ in range(2):  # the first also loads kernels, and compiles
            generators = [torch.Generator().manual_seed(seed) for _ in range(plan.micro)]
            _synchronise(device)
            started = time.perf_counter()
            accelerator.backward(task.rehearse(network, batch, generators).mean())
            _synchronise(device)
            computing = time.perf_counter() - started
    for parameter in network.parameters():
        parameter.grad = None
    return Rehearsal(plan.micro, reading, computing)


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass(frozen=True)
class Estimate:
    """What the rest of a run needs."""

    memory: Memory
    peak: int
    rehearsal: Rehearsal | None
    plan: BatchPlan
    steps: int
    workers: int
    config: TrainingConfig

    @property
    def seconds_per_step(self) -> float | None:
        """Workers read while the network computes: the slower of the two sets the pace."""
        if self.rehearsal is None:
            return None
        own = self.rehearsal
        reading = own.reading / max(self.workers, 1)
        together = max(reading, own.computing) if self.workers else reading + own.computing
        return together * self.plan.accumulation

    def lines(self) -> list[str]:
        """For the terminal."""
        found = [f"memory of each process: {self.memory}: {gigabytes(self.memory.total)} before activations"]
        if self.rehearsal is not None:
            found[0] += f", {gigabytes(self.peak)} at most in a rehearsed micro batch of {self.plan.micro}"
        seconds = self.seconds_per_step
        if seconds is not None and self.rehearsal is not None:
            pace = (
                f"reading {self.rehearsal.reading:.2f} s by {self.workers or 'no'} workers, network "
                f"{self.rehearsal.computing:.2f} s"
            )
            found.append(
                f"{self.steps} steps of {self.plan.accumulation} micro batches ({pace}): about "
                f"{self.steps * seconds / 3600:.1f} h, without validation and checkpoints"
            )
        disk = (self.config.checkpoint_limit + 1) * self.memory.checkpoint
        free = free_space(self.config.output)
        found.append(f"checkpoints: up to {gigabytes(disk)}; {gigabytes(free)} free at {self.config.output}")
        if disk > free:
            found[-1] += ": NOT ENOUGH"
        return found


def free_space(folder: Path | str) -> int:
    """Bytes free where a folder is, or will be."""
    existing = next(path for path in (Path(folder), *Path(folder).absolute().parents) if path.exists())
    return shutil.disk_usage(existing).free


def gigabytes(size: int) -> str:
    """A size for the eye."""
    return f"{size / GB:.2f} GB" if size >= GB / 100 else f"{size / 2**20:.1f} MB"
