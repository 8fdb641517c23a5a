"""Draw pictures beside their true depth, the prediction, its standard deviation and its error, one row per source.

python scripts/photo_sheet.py --root data/depth_real --output photos.jpg
python scripts/photo_sheet.py --name scenes --root runs/embedded/scenes/test --rows 12 --output scenes.jpg
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import cv2
import numpy as np
import torch
from contact_sheet import GAP, LABEL, Picture, save
from numpy.typing import NDArray
from tqdm.auto import tqdm

from marigold_uq.colors import color_depth, color_uncertainty
from marigold_uq.data.depth import DepthDataset, build_dataset
from marigold_uq.evaluation.options import AlignmentOptions, DataOptions, PipelineOptions
from marigold_uq.evaluation.predictors import PipelinePredictor
from marigold_uq.evaluation.protocol import DepthProtocol
from marigold_uq.pipelines.depth_call import MODES

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
    said = aligned.scale * prediction.point.double().numpy() + aligned.shift
    assert prediction.uncertainty is not None
    deviation = abs(aligned.scale) * prediction.uncertainty.double().numpy()
    error = np.abs(said - truth)
    shared = (float(np.nanpercentile(truth, 1)), float(np.nanpercentile(truth, 99)))
    top = float(np.nanpercentile(error, 95))
    image = np.rint(255 * sample["image"].permute(1, 2, 0).numpy()).astype(np.uint8)
    maps: list[NDArray[np.uint8]] = [
        image,
        color_depth(truth, value_range=shared),
        color_depth(said, value_range=shared),
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


@torch.inference_mode()
def main(arguments: Sequence[str] | None = None) -> None:
    """Predict, arrange, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="picture to write, .png or .jpg")
    parser.add_argument("--name", default=DataOptions().name, help="data set reader (%(default)s)")
    parser.add_argument("--root", required=True, help="folder of the data set")
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--mode", default=None, choices=MODES)
    parser.add_argument("--members", type=int, default=10)
    parser.add_argument("--rows", type=int, default=None, help="so many pictures; default: one of every source")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing file")
    args = parser.parse_args(arguments)
    dataset = build_dataset(args.name, args.root, on_error="raise")
    assert isinstance(dataset, DepthDataset)
    predictor = PipelinePredictor(PipelineOptions(args.model, args.mode, args.members, batch_size=args.members))
    save(sheet(predictor, dataset, args.rows), args.output, args.overwrite)


if __name__ == "__main__":
    main()
