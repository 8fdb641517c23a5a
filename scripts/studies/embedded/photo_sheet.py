"""Draw pictures beside their true depth, the prediction, its standard deviation and its error, one row per source.

python -m scripts.studies.embedded.photo_sheet --data.root data/depth_real --output photos.jpg
python -m scripts.studies.embedded.photo_sheet --data.name scenes --data.root scenes/test --output scenes.jpg
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import cv2
import numpy as np
import torch
from numpy.typing import NDArray
from tqdm.auto import tqdm

from marigold_uq.commands.runner import Invocation, run_command
from marigold_uq.depth.colors import color_depth, color_uncertainty
from marigold_uq.depth.data import DepthDataset
from marigold_uq.depth.evaluation.evaluate import check_dataset, open_dataset
from marigold_uq.depth.evaluation.options import AlignmentOptions, DataOptions, PipelineOptions
from marigold_uq.depth.evaluation.predictors import PipelinePredictor
from marigold_uq.depth.evaluation.protocol import DepthProtocol
from scripts.studies.embedded.contact_sheet import GAP, LABEL, Picture, save

HEADINGS = ("picture", "true depth", "prediction", "standard deviation", "absolute error")
WIDTH = 200  # pixels of a tile


def chosen_rows(dataset: DepthDataset, rows: int | None) -> list[int]:
    """The first picture of every source, or `rows` pictures evenly spaced."""
    if rows is not None:
        return [i * len(dataset) // rows for i in range(min(rows, len(dataset)))]
    groups: dict[str, str] = getattr(dataset, "groups", {})
    first: dict[str, int] = {}
    for index in range(len(dataset)):
        name = dataset.name_of(index)
        first.setdefault(groups.get(name, name), index)
    return list(first.values())


def tiles(predictor: PipelinePredictor, dataset: DepthDataset, index: int) -> list[Picture]:
    """The five pictures of one row; depths share their colours, so do deviation and error."""
    sample = dataset.read(index)
    protocol = DepthProtocol.of(AlignmentOptions(), predictor, dataset, "sheet")
    prediction = predictor.predict(sample)
    aligned = protocol.align(prediction, sample)
    valid = sample["valid"][0].numpy()
    truth = np.where(valid, sample["depth"][0].double().numpy(), np.nan)
    predicted = aligned.scale * prediction.point.double().numpy() + aligned.shift
    assert prediction.uncertainty is not None
    deviation = abs(aligned.scale) * prediction.uncertainty.double().numpy()
    error = np.abs(predicted - truth)
    shared = (float(np.nanpercentile(truth, 1)), float(np.nanpercentile(truth, 99)))
    top = float(np.nanpercentile(error, 95))
    image = np.rint(255 * sample["image"].permute(1, 2, 0).numpy()).astype(np.uint8)
    maps: list[NDArray[np.uint8]] = [
        image,
        color_depth(truth, value_range=shared),
        color_depth(predicted, value_range=shared),
        color_uncertainty(deviation, vmax=top),
        color_uncertainty(error, vmax=top),
    ]
    return [_tile(picture) for picture in maps]


def _tile(picture: NDArray[np.uint8]) -> Picture:
    height = round(picture.shape[0] * WIDTH / picture.shape[1])
    small = cv2.resize(picture[..., ::-1], (WIDTH, height), interpolation=cv2.INTER_AREA)  # OpenCV wants BGR
    return cv2.copyMakeBorder(small, 0, GAP, 0, GAP, cv2.BORDER_CONSTANT, value=(255, 255, 255))


def sheet(predictor: PipelinePredictor, dataset: DepthDataset, rows: int | None) -> Picture:
    """Headings, and one row per picture."""
    label = np.full((LABEL, len(HEADINGS) * (WIDTH + GAP), 3), 255, dtype=np.uint8)
    for number, heading in enumerate(HEADINGS):
        place = (number * (WIDTH + GAP) + 2, LABEL - 5)
        cv2.putText(label, heading, place, cv2.FONT_HERSHEY_SIMPLEX, 0.5, (0, 0, 0), 1, cv2.LINE_AA)
    chosen = tqdm(chosen_rows(dataset, rows), unit="picture")
    return np.vstack([label, *(np.hstack(tiles(predictor, dataset, index)) for index in chosen)])


@dataclass(frozen=True)
class PhotoSheetOptions:
    """Draw pictures beside their true depth, the prediction, its standard deviation and its error.

    Args:
        output: Picture to write, .png or .jpg.
        data: The images and their true depth.
        pipeline: The model and how it is run.
        rows: So many pictures, evenly spaced; default: one of every group.
        overwrite: Replace an existing file.
    """

    output: Path
    data: DataOptions = field(default_factory=DataOptions)
    pipeline: PipelineOptions = field(default_factory=lambda: PipelineOptions(batch_size=10))
    rows: int | None = None
    overwrite: bool = False


@torch.inference_mode()
def draw(options: PhotoSheetOptions, invocation: Invocation) -> int:
    """Predict, arrange, save."""
    dataset = check_dataset(open_dataset(options.data))
    save(sheet(PipelinePredictor(options.pipeline), dataset, options.rows), options.output, options.overwrite)
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """0, or 2 for an error that names what to mend."""
    return run_command("scripts.studies.embedded.photo_sheet", PhotoSheetOptions, draw, arguments)


if __name__ == "__main__":
    sys.exit(main())
