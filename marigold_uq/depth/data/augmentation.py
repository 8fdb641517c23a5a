"""Augmentation that keeps image and depth registered, deterministic per (seed, epoch, index)."""

from collections.abc import Sized
from dataclasses import dataclass, field
from typing import cast

import torch
from torch.utils.data import Dataset

from marigold_uq.depth.data.base import DepthDataset, Problem
from marigold_uq.depth.data.mixture import SharedEpoch, sample_generator
from marigold_uq.depth.data.photometric import PhotometricTransform
from marigold_uq.depth.data.sample import DepthDataError, DepthSample, resize_sample
from marigold_uq.training.order import epoch_is_shared

_CROP_ATTEMPTS = 10


@dataclass(frozen=True)
class DepthTransform:
    """What is done to a training sample. The defaults are the paper's: a flip half of the time, nothing else.

    Args:
        size: (H, W) of the result, None for the sample's own. A random crop of the same aspect ratio is resized to it,
            depth by nearest-exact.
        crop_scale: smallest and largest side of the crop relative to the largest that fits; (1, 1) is that one.
        flip: probability of a horizontal flip.
        photometric: changes of the colours; by default none.
    """

    size: tuple[int, int] | None = None
    crop_scale: tuple[float, float] = (1.0, 1.0)
    flip: float = 0.5
    photometric: PhotometricTransform = field(default_factory=PhotometricTransform)

    def __post_init__(self) -> None:
        if self.size is not None and min(self.size) < 1:
            raise ValueError(f"size must be positive (H, W), got {self.size}")
        if not 0 < self.crop_scale[0] <= self.crop_scale[1] <= 1:
            raise ValueError(f"crop_scale needs 0 < smallest <= largest <= 1, got {self.crop_scale}")
        if not 0 <= self.flip <= 1:
            raise ValueError(f"flip is a probability, got {self.flip}")

    def __call__(self, sample: DepthSample, generator: torch.Generator) -> DepthSample:
        """Crop and resize, flip, change colours; draws come from `generator` in this order."""
        sample = self._crop(sample, generator)
        if float(torch.rand(1, generator=generator)) < self.flip:
            sample = flip_sample(sample)
        return DepthSample(
            image=self.photometric(sample["image"], generator),
            depth=sample["depth"],
            valid=sample["valid"],
            name=sample["name"],
        )

    def _crop(self, sample: DepthSample, generator: torch.Generator) -> DepthSample:
        """A random crop that has ground truth in it, at the final size."""
        height, width = sample["image"].shape[-2:]
        size = self.size if self.size is not None else (height, width)
        for _ in range(_CROP_ATTEMPTS):
            top, left, crop_height, crop_width = self._draw_box((height, width), size, generator)
            rows, columns = slice(top, top + crop_height), slice(left, left + crop_width)
            cropped = DepthSample(
                image=sample["image"][:, rows, columns],
                depth=sample["depth"][:, rows, columns],
                valid=sample["valid"][:, rows, columns],
                name=sample["name"],
            )
            resized = resize_sample(cropped, size)
            if bool(resized["valid"].any()):
                return _contiguous(resized)
        raise DepthDataError(
            f"no valid depth pixel in {_CROP_ATTEMPTS} random crops resized from {height} x {width} to {size}: "
            "the ground truth is too sparse for this size or crop_scale",
            sample["name"],
        )

    def _draw_box(
        self, available: tuple[int, int], size: tuple[int, int], generator: torch.Generator
    ) -> tuple[int, int, int, int]:
        """(top, left, height, width) of a crop with the aspect ratio of `size`."""
        smallest, largest = self.crop_scale
        scale, vertical, horizontal = torch.rand(3, generator=generator, dtype=torch.float64).tolist()
        zoom = min(available[0] / size[0], available[1] / size[1]) * (smallest + (largest - smallest) * scale)
        height = min(max(round(zoom * size[0]), 1), available[0])
        width = min(max(round(zoom * size[1]), 1), available[1])
        top, left = int(vertical * (available[0] - height + 1)), int(horizontal * (available[1] - width + 1))
        return top, left, height, width


def flip_sample(sample: DepthSample) -> DepthSample:
    """Mirror left and right."""
    return DepthSample(
        image=sample["image"].flip(-1),
        depth=sample["depth"].flip(-1),
        valid=sample["valid"].flip(-1),
        name=sample["name"],
    )


def _contiguous(sample: DepthSample) -> DepthSample:
    """Own memory: a crop is a view, and a view of a large photograph would keep all of it alive."""
    return DepthSample(
        image=sample["image"].clone(memory_format=torch.contiguous_format),
        depth=sample["depth"].clone(memory_format=torch.contiguous_format),
        valid=sample["valid"].clone(memory_format=torch.contiguous_format),
        name=sample["name"],
    )


class AugmentedDataset(DepthDataset):
    """A data set whose sample i is transformed with the generator of (seed, epoch, i).

    Put it around a `MixtureDataset`, so that two visits of the same picture differ.

    Args:
        dataset: any data set of depth samples.
        transform: what to do.
        seed: non-negative.
        on_error: policy for what this step cannot do; by default the inner data set's, else "raise".
    """

    def __init__(
        self, dataset: Dataset[DepthSample], transform: DepthTransform, seed: int, *, on_error: str | None = None
    ) -> None:
        if seed < 0:
            raise ValueError(f"seed must be non-negative, got {seed}")
        inherited: str = getattr(dataset, "on_error", "raise")
        super().__init__(len(cast(Sized, dataset)), inherited if on_error is None else on_error)
        self.dataset, self.transform, self.seed = dataset, transform, seed
        self._epoch = SharedEpoch()

    @property
    def shares_epoch(self) -> bool:
        """Whether workers that are running see `set_epoch`."""
        return epoch_is_shared(self.dataset)

    def set_epoch(self, epoch: int) -> None:
        """Draw anew for this epoch, in this process and in running workers; passed on to the inner data set."""
        self._epoch.set(epoch)
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def name_of(self, index: int) -> str:
        """The inner data set's name of the sample, or its number."""
        name_of = getattr(self.dataset, "name_of", None)
        return name_of(index) if name_of is not None else f"sample {index}"

    def read(self, index: int) -> DepthSample:
        """Transform sample `index`."""
        return self.transform(self.dataset[index], sample_generator(self.seed, self._epoch.get(), index))

    @property
    def problems(self) -> list[Problem]:
        """The inner data set's problems and this step's own."""
        inner = getattr(self.dataset, "problems", [])
        return [*inner, *(problem for problem in super().problems if problem not in inner)]
