r"""How much the uncertainty of a model says: does it follow the errors, is it sharp, is it free of speckle.

python -m scripts.studies.embedded.readable --data.root data/depth_real --output readable.json

For every picture, after alignment: the rank correlation of the standard deviation with the error, beside what costs
nothing (the aligned depth itself, and how far up a pixel lies), and the share of pixels whose interval holds the whole
range of predictions. Over pairs of pictures: the correlation of what their standard deviations have besides their
smooth part. Pictures share nothing, so whatever correlates is noise of the method. Means are over groups of data sets
that have groups.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from scipy.ndimage import gaussian_filter
from torch import Tensor
from tqdm.auto import tqdm

from marigold_uq.commands.runner import Invocation, run_command
from marigold_uq.depth.data import DepthDataset, DepthSample
from marigold_uq.depth.evaluation.evaluate import check_dataset, chosen_indices, open_dataset
from marigold_uq.depth.evaluation.options import AlignmentOptions, DataOptions, PipelineOptions
from marigold_uq.depth.evaluation.predictors import PipelinePredictor
from marigold_uq.depth.evaluation.protocol import DepthProtocol
from marigold_uq.depth.metrics import spearman
from marigold_uq.files import atomic_path

COMMON = (192, 256)
"""Size to which standard deviations are brought before they are compared."""
SMOOTH = 6.0
"""Standard deviation in pixels, at COMMON, of the blur that takes the smooth part."""
SIGNS = ("uncertainty", "depth", "row")


@dataclass(frozen=True)
class ReadableOptions:
    """Measure how much the uncertainty of a model says.

    Args:
        output: JSON file to write; an existing one is replaced.
        data: Pictures with depth.
        pipeline: The model and its call.
        coverage: Of the interval.
    """

    output: Path
    data: DataOptions = field(default_factory=DataOptions)
    pipeline: PipelineOptions = field(default_factory=PipelineOptions)
    coverage: float = 0.9


def signs_of_error(uncertainty: Tensor, depth: Tensor, valid: Tensor) -> dict[str, Tensor]:
    """What may tell where errors are, each (1, N): larger where the error should be."""
    rows = torch.arange(valid.shape[0], 0, -1.0, dtype=torch.float64)[:, None].expand(valid.shape)
    return {"uncertainty": uncertainty, "depth": depth, "row": rows[valid][None]}


def texture(deviation: Tensor) -> Tensor:
    """What a map of standard deviations (H, W) has besides its smooth part, at the common size, as a vector."""
    small = F.interpolate(deviation[None, None].float(), COMMON, mode="area")[0, 0].clamp(min=1e-6).numpy()
    return torch.from_numpy(np.log(small / gaussian_filter(small, SMOOTH))).flatten()


def mean_correlation(textures: Sequence[Tensor]) -> float:
    """Over all pairs of pictures."""
    correlation = torch.corrcoef(torch.stack(list(textures)))
    pairs = list(combinations(range(len(textures)), 2))
    return float(torch.stack([correlation[i, j] for i, j in pairs]).mean())


def measured(
    predictor: PipelinePredictor, protocol: DepthProtocol, sample: DepthSample
) -> tuple[dict[str, float], Tensor]:
    """The numbers of one picture, and the texture of its standard deviation."""
    raw = predictor.predict(sample)
    uncertainty, bounds = raw.uncertainty, getattr(raw, "bounds", None)
    if uncertainty is None or bounds is None:
        raise ValueError("the model must be calibrated for a mode with uncertainty; see marigold-uq calibrate depth")
    aligned = protocol.align(raw, sample)
    prediction = aligned.prediction
    error = (prediction.point - aligned.target).abs()
    assert prediction.uncertainty is not None
    signs = signs_of_error(prediction.uncertainty, prediction.point, sample["valid"][0])
    numbers = {f"spearman of {name}": float(spearman(signs[name].double(), error)) for name in SIGNS}
    low, high = bounds[0]
    numbers["whole range"] = float(((low <= 0) & (high >= 1)).double().mean())
    return numbers, texture(uncertainty)


def grouped(rows: Sequence[dict[str, float]], groups: Sequence[str]) -> dict[str, dict[str, float]]:
    """Mean over groups of the means within them, with the standard error over groups."""
    found = {}
    for name in rows[0]:
        values = [
            np.nanmean([row[name] for row, own in zip(rows, groups, strict=True) if own == group])
            for group in sorted(set(groups))
        ]
        error = float(np.std(values, ddof=1) / np.sqrt(len(values))) if len(values) > 1 else float("nan")
        found[name] = {"value": float(np.mean(values)), "standard_error": error}
    return found


def group_of(data: DepthDataset, index: int) -> str:
    """The group of a picture; its own name where the data set has no groups."""
    name = data.name_of(index)
    return str(getattr(data, "groups", {}).get(name) or name)


@torch.inference_mode()
def measure(options: ReadableOptions, invocation: Invocation) -> int:
    """Predict every picture, print and write the numbers."""
    data = check_dataset(open_dataset(options.data))
    predictor = PipelinePredictor(options.pipeline, (options.coverage,))
    protocol = DepthProtocol.of(AlignmentOptions(), predictor, data, options.data.name)
    rows, textures, groups = [], [], []
    for index in tqdm(chosen_indices(len(data), options.data.limit), unit="picture"):
        numbers, own = measured(predictor, protocol, data.read(index))
        rows.append(numbers)
        textures.append(own)
        groups.append(group_of(data, index))
    result = {"pictures": len(rows), "mode": predictor.mode, "coverage": options.coverage, **grouped(rows, groups)}
    result["correlation of textures"] = mean_correlation(textures)
    print(json.dumps(result, indent=2))
    with atomic_path(options.output, overwrite=True) as temporary:
        temporary.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """0, or 2 for an error that names what to mend."""
    return run_command("scripts.studies.embedded.readable", ReadableOptions, measure, arguments)


if __name__ == "__main__":
    sys.exit(main())
