"""The policy for broken files, shared by all depth data sets."""

import logging
from abc import abstractmethod
from collections.abc import Iterable

import torch
from torch.utils.data import Dataset

from marigold_uq.depth.data.sample import DepthDataError, DepthSample

logger = logging.getLogger(__name__)

_ON_ERROR = ("raise", "skip")
Problem = tuple[str, str]  # (sample name, reason)


class DepthDataset(Dataset[DepthSample]):
    """Indexed depth samples; a broken one either stops with its name or is replaced by the next good one.

    `on_error="raise"` raises `DepthDataError`. `on_error="skip"` returns the next readable sample instead (cyclically),
    which depends on nothing but the files: the same index gives the same sample in every epoch, worker and resumed run.
    Either way the broken sample is listed in `problems`.

    Subclasses implement `name_of` and `read`, which raises `DepthDataError`.
    """

    def __init__(self, length: int, on_error: str = "raise") -> None:
        if on_error not in _ON_ERROR:
            raise ValueError(f"on_error must be one of {', '.join(_ON_ERROR)}, got {on_error!r}")
        self.on_error = on_error
        self._length = length
        # One shared byte per sample: a worker's finding is seen by the main process, whose own list it cannot reach.
        self._broken = torch.zeros(max(length, 1), dtype=torch.uint8).share_memory_()
        self._reasons: dict[int, str] = {}

    @abstractmethod
    def name_of(self, index: int) -> str:
        """The name of sample `index`, without reading it."""

    @abstractmethod
    def read(self, index: int) -> DepthSample:
        """Sample `index` itself, or `DepthDataError`."""

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> DepthSample:
        if not -self._length <= index < self._length:
            raise IndexError(f"index {index} of a data set with {self._length} samples")
        for step in range(self._length):
            candidate = (index + step) % self._length
            try:
                return self.read(candidate)
            except DepthDataError as error:
                self._note(candidate, error)
                if self.on_error == "raise":
                    raise
        raise DepthDataError(f"none of the {self._length} samples is usable; the first: {self.problems[0]}")

    def _note(self, index: int, error: DepthDataError) -> None:
        if not self._broken[index]:
            self._broken[index] = 1
            logger.warning("unusable depth sample %s: %s", self.name_of(index), error)
        self._reasons[index] = str(error)

    @property
    def problems(self) -> list[Problem]:
        """(name, reason) of every broken sample met so far, by this process or its workers, in index order."""
        return [(self.name_of(i), self._reason(i)) for i in torch.nonzero(self._broken).flatten().tolist()]

    def _reason(self, index: int) -> str:
        """Why `index` is broken; if only a worker knows, find out again."""
        if index not in self._reasons:
            try:
                self.read(index)
                self._reasons[index] = "failed in a worker, readable now"
            except DepthDataError as error:
                self._reasons[index] = str(error)
        return self._reasons[index]

    def scan(self, indices: Iterable[int] | None = None) -> list[Problem]:
        """Read every sample (or those of `indices`) and return all problems found so far."""
        for index in range(self._length) if indices is None else indices:
            try:
                self.read(index)
            except DepthDataError as error:
                self._note(index, error)
        return self.problems
