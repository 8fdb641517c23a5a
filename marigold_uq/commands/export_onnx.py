"""`marigold-uq export-onnx`: a depth model as one ONNX file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from marigold_uq.commands.runner import Invocation

__all__ = ["ExportOnnxOptions", "run_export_onnx"]


@dataclass(frozen=True)
class ExportOnnxOptions:
    """Write a depth model as one ONNX file: depth, standard deviation and intervals of pictures of any size.

    Args:
        output: The file to write.
        model: "embedded" (inside the package), a folder, or a Hub name; family gaussian, at most 2 GB.
        coverages: Of the calibrated intervals in the graph, for instance 0.5 0.9; default: 0.9 for a calibrated model.
        ensemble_size: Quantiles or draws behind the standard deviation; the calibration must be for as many.
        seed: Of the random numbers that are stored in the file.
        overwrite: Replace an existing file.
    """

    output: Path = Path("depth.onnx")
    model: str = "embedded"
    coverages: list[float] | None = None
    ensemble_size: int = 10
    seed: int = 0
    overwrite: bool = False


def run_export_onnx(options: ExportOnnxOptions, invocation: Invocation | None = None) -> int:
    """Load, export, compare with torch."""
    if options.output.exists() and not options.overwrite:
        raise FileExistsError(f"{options.output} exists; choose another -o, or --overwrite")
    from marigold_uq.depth.model import load_pipeline
    from marigold_uq.depth.onnx_export import export_onnx

    pipeline = load_pipeline(options.model, device="cpu")
    found = export_onnx(
        pipeline,
        options.output,
        coverages=options.coverages,
        ensemble_size=options.ensemble_size,
        seed=options.seed,
        model=options.model,
        overwrite=options.overwrite,
    )
    levels = ", ".join(f"{level:.0%}" for level in found.coverages)
    print(f"{found.path}: {found.num_bytes / 1e6:.1f} MB, {f'intervals of {levels}' if levels else 'no intervals'}")
    print(f"largest difference from torch: {found.difference:.1g}, on pictures of four sizes")
    return 0
