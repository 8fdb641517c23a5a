r"""How well depth edges are met: F-score of depth boundaries on rendered scenes, whose depth is exact.

python -m scripts.studies.embedded.edges --model runs/embedded/calibrated \
    --scenes runs/embedded/scenes/validation --limit 100 --output runs/embedded/edges.json

Two neighbouring pixels have a boundary between them where their depths differ by more than a ratio; precision and
recall allow one pixel of displacement, and the F-score is the mean over the ratios (as Bochkovskii et al., Depth Pro,
2024, do it with a weighted mean). The prediction is aligned to the true depth by least squares first.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm.auto import tqdm

from marigold_uq.alignment import apply_alignment, least_squares_alignment
from marigold_uq.commands.runner import Invocation, run_command
from marigold_uq.depth.data import RenderedScenes
from marigold_uq.depth.evaluation.options import PipelineOptions
from marigold_uq.depth.evaluation.predictors import PipelinePredictor
from marigold_uq.files import atomic_path

RATIOS = (1.05, 1.1, 1.15, 1.2, 1.25)


def boundaries(depth: Tensor, valid: Tensor, ratio: float) -> Tensor:
    """(2, H, W): whether there is a boundary to the right and to the lower neighbour, False at invalid pixels."""
    logarithm = depth.clamp(min=1e-3).log()
    found = torch.zeros(2, *depth.shape, dtype=torch.bool)
    for axis, dim in enumerate((1, 0)):
        size = depth.shape[dim] - 1
        step = logarithm.diff(dim=dim).abs() > np.log(ratio)
        both = valid.narrow(dim, 0, size) & valid.narrow(dim, 1, size)
        found[axis].narrow(dim, 0, size).copy_(step & both)
    return found


def f_score(said: Tensor, true: Tensor) -> float:
    """Harmonic mean of precision and recall, each with a pixel of slack; 1 where there is nothing to find or to say."""
    if not bool(said.any()) and not bool(true.any()):
        return 1.0
    wide = [F.max_pool2d(own.float()[None], 3, stride=1, padding=1)[0] > 0 for own in (said, true)]
    precision = float((said & wide[1]).sum()) / max(1, int(said.sum()))
    recall = float((true & wide[0]).sum()) / max(1, int(true.sum()))
    return 2 * precision * recall / max(1e-9, precision + recall)


@torch.inference_mode()
def scores(predictor: PipelinePredictor, scenes: RenderedScenes, limit: int | None) -> list[float]:
    """One number per scene."""
    found = []
    for index in tqdm(range(min(limit or len(scenes), len(scenes))), unit="scene"):
        sample = scenes.read(index)
        point = predictor.predict(sample).point.double()
        target, valid = sample["depth"][0].double(), sample["valid"][0]
        low, high = 0.5 * target[valid].min(), 2 * target[valid].max()
        aligned = apply_alignment(point, *least_squares_alignment(point, target, valid)).clamp(low, high)
        pairs = [(boundaries(aligned, valid, r), boundaries(target, valid, r)) for r in RATIOS]
        found.append(float(np.mean([f_score(said, true) for said, true in pairs])))
    return found


@dataclass(frozen=True)
class EdgeOptions:
    """Score the depth edges of a model on rendered scenes.

    Args:
        scenes: Folder of rendered scenes.
        output: JSON file to write; an existing one is replaced.
        model: "embedded", a folder, or a Hub name.
        limit: Only the first so many scenes.
    """

    scenes: Path
    output: Path
    model: str = "embedded"
    limit: int | None = None


def measure(options: EdgeOptions, invocation: Invocation) -> int:
    """Measure and write."""
    predictor = PipelinePredictor(PipelineOptions(options.model, uncertainty="none"))
    values = scores(predictor, RenderedScenes(options.scenes), options.limit)
    error = float(np.std(values, ddof=1) / np.sqrt(len(values))) if len(values) > 1 else None
    result = {"boundary_f_score": float(np.mean(values)), "standard_error": error, "scenes": len(values)}
    print(result)
    with atomic_path(options.output, overwrite=True) as temporary:
        text = json.dumps({**result, "model": options.model, "ratios": RATIOS}, indent=2)
        temporary.write_text(text, encoding="utf-8")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """0, or 2 for an error that names what to mend."""
    return run_command("scripts.studies.embedded.edges", EdgeOptions, measure, arguments)


if __name__ == "__main__":
    sys.exit(main())
