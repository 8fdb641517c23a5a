"""Several data sets as one, mixed by probability; all randomness follows from (seed, epoch, index)."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset

from marigold_uq.depth.data.base import Problem
from marigold_uq.depth.data.sample import DepthSample
from marigold_uq.randomness import member_seed
from marigold_uq.training.order import epoch_is_shared

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


class MixtureDataset(Dataset[DepthSample]):
    """`length` samples per epoch; each comes from data set k with probability `probabilities[k]`.

    Which sample stands at position i follows from (seed, epoch, i) alone: not from workers, from what was read before
    or from `length`. So read it in order (no shuffling sampler): a run that resumes at position i continues exactly.
    Within an epoch a data set is walked through in random order, and again in a new order once it is used up, so no
    sample comes twice before all others of its set came once.

    Args:
        datasets: the parts.
        probabilities: one per part, summing to 1 (paper: Hypersim .9, Virtual KITTI 2 .1).
        length: samples per epoch.
        seed: non-negative.
        block_size: this many neighbours come from the same part; the batch size, if the parts differ in image size.
    """

    @property
    def shares_epoch(self) -> bool:
        """Whether workers that are running see `set_epoch`."""
        return all(epoch_is_shared(dataset) for dataset in self.datasets)

    def __init__(
        self,
        datasets: Sequence[Dataset[DepthSample]],
        probabilities: Sequence[float],
        length: int,
        seed: int,
        *,
        block_size: int = 1,
    ) -> None:
        self.datasets = list(datasets)
        self.probabilities = _checked(probabilities, len(self.datasets))
        self._sizes = [_size(dataset) for dataset in self.datasets]
        if length < 1 or block_size < 1 or seed < 0:
            raise ValueError(
                "need length >= 1, block_size >= 1 and seed >= 0, "
                f"got length={length}, block_size={block_size}, seed={seed}"
            )
        self._length, self.seed, self.block_size = length, seed, block_size
        self._epoch = SharedEpoch()
        self._plan: tuple[int, NDArray[np.int64], NDArray[np.int64]] | None = None

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> DepthSample:
        part, position = self.source_of(index)
        return self.datasets[part][position]

    def set_epoch(self, epoch: int) -> None:
        """Draw anew for this epoch, in this process and in running workers; passed on to the parts."""
        self._epoch.set(epoch)
        for dataset in self.datasets:
            if hasattr(dataset, "set_epoch"):
                dataset.set_epoch(epoch)

    def source_of(self, index: int) -> tuple[int, int]:
        """(number of the part, index in it) of position `index` in the current epoch."""
        if not -self._length <= index < self._length:
            raise IndexError(f"index {index} of a mixture of length {self._length}")
        epoch = self._epoch.get()
        if self._plan is None or self._plan[0] != epoch:
            parts = self._draw_parts(epoch)
            self._plan = (epoch, parts, self._draw_positions(epoch, parts))
        _, parts, positions = self._plan
        return int(parts[index]), int(positions[index])

    def name_of(self, index: int) -> str:
        """The part's name of the sample at position `index` in the current epoch."""
        part, position = self.source_of(index)
        name_of = getattr(self.datasets[part], "name_of", None)
        return name_of(position) if name_of is not None else f"sample {position} of part {part}"

    def _draw_parts(self, epoch: int) -> NDArray[np.int64]:
        """(length,) number of the part at each position."""
        num_blocks = -(-self._length // self.block_size)
        uniform = stream(self.seed, MIXTURE_STREAM, epoch).random(num_blocks)
        edges = np.cumsum(self.probabilities)[:-1]
        blocks = np.searchsorted(edges, uniform, side="right")
        return np.repeat(blocks, self.block_size)[: self._length]

    def _draw_positions(self, epoch: int, parts: NDArray[np.int64]) -> NDArray[np.int64]:
        """(length,) index within the part: the n-th draw of a part is the n-th of its permutations, laid end to end."""
        positions = np.zeros(self._length, dtype=np.int64)
        for part, size in enumerate(self._sizes):
            places = np.flatnonzero(parts == part)
            num_passes = -(-len(places) // size)
            passes = np.tile(np.arange(size), (num_passes, 1))  # each row is shuffled in turn, so more rows only append
            order = stream(self.seed, PERMUTATION_STREAM, epoch, part).permuted(passes, axis=1)
            positions[places] = order.ravel()[: len(places)]
        return positions

    @property
    def problems(self) -> list[Problem]:
        """The problems of all parts."""
        return [problem for dataset in self.datasets for problem in getattr(dataset, "problems", [])]


def _checked(probabilities: Sequence[float], num_datasets: int) -> NDArray[np.float64]:
    values = np.asarray(probabilities, dtype=np.float64)
    if num_datasets == 0 or values.shape != (num_datasets,):
        raise ValueError(f"need one probability per data set, got {values.shape} for {num_datasets} data sets")
    if not np.all(values >= 0) or not np.isclose(values.sum(), 1.0, rtol=0, atol=1e-6):
        raise ValueError(f"probabilities must be non-negative and sum to 1, got {values.tolist()}")
    return values / values.sum()


def _size(dataset: Dataset[DepthSample]) -> int:
    size = len(dataset)  # type: ignore[arg-type]
    if size == 0:
        raise ValueError(f"{type(dataset).__name__} is empty; a mixture needs samples in every part")
    return size
