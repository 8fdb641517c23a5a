"""The pixels behind a calibration: what was predicted and what is true, and which image belongs to which part."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from tqdm.auto import tqdm

from marigold_uq.depth.calibration.options import DepthCalibration
from marigold_uq.depth.calibration.spread import Stated
from marigold_uq.depth.data import DepthDataError, DepthDataset, DepthSample
from marigold_uq.depth.evaluation.evaluate import chosen_indices
from marigold_uq.depth.evaluation.options import AlignmentOptions
from marigold_uq.depth.evaluation.prediction import Members, Prediction, PredictionError
from marigold_uq.depth.evaluation.predictors import Predictor
from marigold_uq.depth.evaluation.protocol import DepthProtocol


@dataclass(frozen=True)
class Pixels:
    """N pixels of an image in the space of its prediction, in units of the standard deviation of the truth.

    All images weigh the same so.

    Args:
        index: Of the image in its data set.
        unit: What is independent: the image's name, or its group.
        stated: The model's words, in its own units.
        scale: From those units to these; the sign is that of the alignment.
        shift: Likewise.
        truth: (N,).
        members: (E, N) in the model's own units, where it has any.
    """

    index: int
    unit: str
    stated: Stated
    scale: float
    shift: float
    truth: Tensor
    members: Tensor | None = None

    @property
    def point(self) -> Tensor:
        """The centre of the intervals, (N,)."""
        return self.scale * self.stated.point + self.shift

    @property
    def draws(self) -> Tensor | None:
        """The members, (E, N), in units of the truth."""
        return None if self.members is None else self.scale * self.members + self.shift


@dataclass(frozen=True)
class Collected:
    """The pixels of a data set, and the images that could not take part."""

    pixels: dict[int, Pixels]
    failures: list[tuple[str, str]]


@torch.inference_mode()
def collect_pixels(
    predictor: Predictor, data: DepthDataset, indices: Sequence[int], options: DepthCalibration, title: str
) -> Collected:
    """Some pixels of every image; what cannot be read or predicted is left out and named."""
    protocol = DepthProtocol.of(AlignmentOptions(clip="target"), predictor, data, options.data.name)
    generator = torch.Generator().manual_seed(options.seed - 1)
    found, failures = {}, []
    for index in tqdm(indices, desc=title, unit="image"):
        try:
            sample = data.read(index)
            prediction = predictor.predict(sample)
            found[index] = _draw(index, prediction, sample, protocol, unit_of(data, index, options), options, generator)
        except (DepthDataError, PredictionError) as error:
            failures.append((data.name_of(index), str(error)))
    return Collected(found, failures)


def _draw(
    index: int,
    prediction: Prediction,
    sample: DepthSample,
    protocol: DepthProtocol,
    unit: str,
    options: DepthCalibration,
    generator: torch.Generator,
) -> Pixels:
    """The pixels of one image."""
    whole = prediction if isinstance(prediction, Members) else Members.of(prediction.point[None])
    aligned = protocol.align(whole, sample)
    valid = torch.nonzero(sample["valid"][0].flatten()).flatten()
    drawn = torch.randint(len(valid), (options.num_pixels,), generator=generator)
    places = valid[drawn]
    truth = aligned.target[0] if protocol.space == "depth" else aligned.target[0].reciprocal()
    size = truth.std()
    if not float(size) > 0:
        raise PredictionError("the true depth is the same everywhere: nothing can be calibrated on it")
    stated = Stated.of(prediction).at(places)
    for name in ("std", "confidence"):
        values = getattr(stated, name)
        if values is not None and not bool(values.isfinite().all()):
            raise PredictionError(f"{name} is NaN or infinite where there is a true depth")
    members = whole.samples.flatten(1)[:, places].double() if whole.has_law else None
    scale, shift = aligned.scale / float(size), aligned.shift / float(size)
    return Pixels(index, unit, stated, scale, shift, truth[drawn] / size, members)


def unit_of(data: DepthDataset, index: int, options: DepthCalibration) -> str:
    """The group of an image, or the image itself."""
    name = data.name_of(index)
    groups: dict[str, str] = getattr(data, "groups", {})
    return groups.get(name) or name if options.unit == "group" else name


def part_indices(data: DepthDataset, options: DepthCalibration) -> tuple[list[int], list[int]]:
    """Indices for kappa and for the intervals; a group is in one of them only."""
    indices = chosen_indices(len(data), options.data.limit)
    first, second = split_units([unit_of(data, index, options) for index in indices], options)
    return [indices[i] for i in first], [indices[i] for i in second]


def split_units(units: Sequence[str], options: DepthCalibration) -> tuple[list[int], list[int]]:
    """Places of the images for kappa and for the intervals, whole units each."""
    names = list(dict.fromkeys(units))
    if len(names) < 2:
        raise ValueError(f"calibration needs at least 2 images or groups, in practice 40 or more; got {len(names)}")
    if options.shuffle:
        random.Random(options.seed).shuffle(names)
    first = set(names[: max(1, int(options.kappa_share * len(names)))])
    places = range(len(units))
    return [i for i in places if units[i] in first], [i for i in places if units[i] not in first]
