"""Per-sample randomness that survives workers and resuming: everything follows from (seed, epoch, index)."""

import numpy as np
import torch

from marigold_uq.randomness import member_seed

# One stream per purpose, so that the choice of a sample and its augmentation are independent.
MIXTURE_STREAM, PERMUTATION_STREAM, AUGMENTATION_STREAM = 1, 2, 3


class SharedEpoch:
    """An epoch number in shared memory: set in the main process, seen by workers that are already running."""

    def __init__(self) -> None:
        self._value = torch.zeros(1, dtype=torch.int64).share_memory_()

    def get(self) -> int:
        """The current epoch."""
        return int(self._value[0])

    def set(self, epoch: int) -> None:
        """Start epoch `epoch`, counted from 0."""
        if epoch < 0:
            raise ValueError(f"epoch counts from 0, got {epoch}")
        self._value[0] = epoch


def sample_generator(seed: int, epoch: int, index: int) -> torch.Generator:
    """The generator that augments sample `index` in `epoch`."""
    return torch.Generator().manual_seed(member_seed(seed, AUGMENTATION_STREAM, epoch, index))


def stream(seed: int, *key: int) -> np.random.Generator:
    """A numpy generator for (seed, key)."""
    return np.random.default_rng(member_seed(seed, *key))
