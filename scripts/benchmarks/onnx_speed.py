"""Seconds per picture of an exported graph beside torch, on one thread, and how far their maps are apart.

python scripts/benchmarks/onnx_speed.py --model embedded

Rows: the pipeline's own call (quickest mode, one step), the same without its loops (`OneStepDepth`), onnxruntime with
the exported file. Each from picture to maps at the picture's size; median of all turns after one that warms up. Times
are of the processor, so that other programs count less. Prints Markdown.
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from marigold_uq.commands.pictures import sample_pictures
from marigold_uq.commands.runner import Invocation, run_command
from marigold_uq.depth.model import load_pipeline
from marigold_uq.depth.onnx_export import OneStepDepth, export_onnx, one_step_mode
from marigold_uq.depth.onnx_model import OnnxDepth


@dataclass(frozen=True)
class OnnxBenchmark:
    """Measure an exported depth model beside torch.

    Args:
        model: "embedded", a folder, or a Hub name.
        ensemble_size: Quantiles or draws behind the standard deviation.
        turns: Measurements of each picture after one that warms up.
    """

    model: str = "embedded"
    ensemble_size: int = 10
    turns: int = 5


def seconds(call: Callable[[Any], Any], inputs: Sequence[Any], turns: int) -> float:
    """Median processor seconds of a call."""
    found = []
    for turn in range(turns + 1):
        for one in inputs:
            start = time.process_time()
            call(one)
            if turn:
                found.append(time.process_time() - start)
    return statistics.median(found)


def run(options: OnnxBenchmark, invocation: Invocation) -> int:
    """Export, time, compare, print."""
    torch.set_num_threads(1)
    pipeline = load_pipeline(options.model, device="cpu")
    mode, members = one_step_mode(pipeline), options.ensemble_size
    pictures = [Image.open(path).convert("RGB") for path in sample_pictures()]
    with tempfile.TemporaryDirectory() as folder:
        start = time.process_time()
        found = export_onnx(pipeline, Path(folder) / "m.onnx", ensemble_size=members)
        took = time.process_time() - start
        start = time.process_time()
        model = OnnxDepth(found.path, num_threads=1)
        loaded = time.process_time() - start
    module = OneStepDepth(pipeline, num_members=members, kappa=model.facts["kappa"]).eval()

    def call(picture: Image.Image) -> Any:
        generator = torch.Generator().manual_seed(0)
        return pipeline(
            picture, uncertainty=mode, num_inference_steps=1, ensemble_size=members, batch_size=members + 1,
            generator=generator,
        )  # fmt: skip

    small = [_network_input(picture, model.facts["processing_resolution"]) for picture in pictures]
    with torch.inference_mode():
        times = {
            f"torch, the pipeline ({mode})": seconds(call, pictures, options.turns),
            "torch, one step without loops": seconds(module, small, options.turns),
            "onnxruntime": seconds(model, pictures, options.turns),
        }
    slowest = next(iter(times.values()))
    print(f"{options.model}: file {found.num_bytes / 1e6:.1f} MB, exported in {took:.0f} s, loaded in {loaded:.1f} s")
    print(f"graph against the same in torch: {found.difference:.1g}\n")
    print("| | seconds per picture | times faster |\n|---|---|---|")
    for name, value in times.items():
        print(f"| {name} | {value:.3f} | {slowest / value:.1f} |")
    depth, spread = zip(*(_distances(call(one), model(one)) for one in pictures), strict=True)
    print(f"\nfrom the pipeline with other random numbers: depth {np.mean(depth):.3f}, deviation {np.mean(spread):.1%}")
    return 0


def _network_input(picture: Image.Image, edge: int) -> torch.Tensor:
    """(1, 3, h, w) in [0, 1] at the model's resolution."""
    scale = edge / max(picture.size) if edge else 1.0
    small = picture.resize([max(1, int(scale * side)) for side in picture.size], Image.Resampling.BILINEAR)
    return torch.from_numpy(np.array(small)).permute(2, 0, 1)[None] / 255


def _distances(output: Any, maps: Any) -> tuple[float, float]:
    """Mean absolute difference of depth, and relative one of mean deviations."""
    std = output.uncertainty[0, ..., 0]
    depth = float(np.abs(output.prediction[0, ..., 0] - maps.prediction).mean())
    return depth, float(maps.uncertainty.mean() / std.mean() - 1)


def main(arguments: Sequence[str] | None = None) -> int:
    """0, or 2 for an error that names what to mend."""
    return run_command("scripts/benchmarks/onnx_speed.py", OnnxBenchmark, run, arguments)


if __name__ == "__main__":
    sys.exit(main())
