"""What the demo shows of one picture, without a browser: maps, intervals, a cloud that fades, files."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import torch
from PIL import Image

from marigold_uq.calibration import Calibration
from marigold_uq.depth.colors import color_depth, color_uncertainty, colored_points, place
from marigold_uq.depth.export import DepthRecord, ExportOptions, export
from marigold_uq.depth.glb import glb_bytes
from marigold_uq.files import atomic_path
from marigold_uq.metrics import nested_interval
from marigold_uq.pipelines.depth import MarigoldUQDepthPipeline
from marigold_uq.pipelines.depth.call import quickest_mode
from marigold_uq.pipelines.depth.images import load_images, to_uint8

FILE_FORMATS = ("npz", "png16", "ply", "sheet")
_SHOWN_EDGE = 900
"""Longer edge of a picture in the browser."""
_CLOUD_EDGE = 360
"""Longer edge of the grid of points in the browser."""
_FADE = 0.1
"""Over this share of the points opacity falls from full to none."""


@dataclass(frozen=True)
class Shown:
    """A picture with its depth, and all that the page asks about it.

    Args:
        record: The maps at the picture's size.
        calibration: Of the model, for the way to uncertainty that made them.
        members: (E, H, W), where the model has no calibrated intervals.
    """

    record: DepthRecord
    calibration: Calibration
    members: torch.Tensor | None

    @property
    def uncertainty(self) -> np.ndarray:
        """Standard deviation, (H, W)."""
        assert self.record.uncertainty is not None
        return self.record.uncertainty

    @property
    def size(self) -> tuple[int, int]:
        """(H, W) of the maps."""
        height, width = self.record.depth.shape
        return height, width

    def photograph(self) -> np.ndarray:
        """The picture, as large as it is shown."""
        return _for_screen(self.record.image)

    def depth_picture(self) -> np.ndarray:
        """Coloured depth, as large as it is shown."""
        return _for_screen(color_depth(self.record.depth, inverse=self.record.is_disparity))

    def uncertainty_picture(self) -> np.ndarray:
        """Coloured standard deviation, as large as it is shown."""
        return _for_screen(color_uncertainty(self.uncertainty))

    def pixel_of(self, x: int, y: int) -> tuple[int, int]:
        """Row and column of the maps below a point of a shown picture."""
        height, width = self.size
        shown_height, shown_width = _screen_size(self.size)
        row, column = int((y + 0.5) * height / shown_height), int((x + 0.5) * width / shown_width)
        return min(max(row, 0), height - 1), min(max(column, 0), width - 1)

    def interval_at(self, row: int, column: int, level: float) -> tuple[float, float]:
        """Ends of the central interval of one pixel."""
        grid = self.calibration.interval
        if grid is None:
            assert self.members is not None
            lower, upper = nested_interval(self.members[:, row, column], level)
            return float(lower), float(upper)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the page says it itself
            half_width = grid.scale(level)[0] * float(self.uncertainty[row, column])
        centre = float(self.record.depth[row, column])
        return centre - half_width, centre + half_width

    def sentence(self, row: int, column: int, level: float) -> str:
        """What is known of a pixel."""
        depth, std = float(self.record.depth[row, column]), float(self.uncertainty[row, column])
        lower, upper = self.interval_at(row, column, level)
        rank = float((self.uncertainty >= std).mean())
        return (
            f"**Row {row}, column {column}**: {self.noun} {depth:.3f}, standard deviation {std:.3f}, "
            f"**{level:.0%} interval {lower:.3f} to {upper:.3f}**{self._caveat(level)}. "
            f"At least as certain as {rank:.0%} of the picture."
        )

    @property
    def noun(self) -> str:
        """What the numbers are."""
        name = "disparity" if self.record.is_disparity else "depth"
        return f"{name} (0 to 1)" if self.record.units == "relative" else name

    def _caveat(self, level: float) -> str:
        grid = self.calibration.interval
        if grid is None:
            return " (of the members; this model is not calibrated)"
        if not grid.coverages[0] <= level <= grid.coverages[-1]:
            return f" (extrapolated: calibrated from {grid.coverages[0]:.0%} to {grid.coverages[-1]:.0%})"
        return ""

    def cloud(self, share: float) -> tuple[bytes, int]:
        """A GLB file of the `share` of the points that are most certain, and their number; the last tenth fades."""
        near_far = ExportOptions().relative_range if self.record.units == "relative" else None
        step = max(1, -(-max(self.size) // _CLOUD_EDGE))
        depth, std = self.record.depth[::step, ::step], self.uncertainty[::step, ::step]
        z, spread = place(depth, std, inverse=self.record.is_disparity, near_far=near_far)
        assert spread is not None
        points, colors = colored_points(z, self.record.image, field_of_view=ExportOptions().field_of_view)
        valid = np.isfinite(z) & (z > 0)
        alpha = opacity(spread[valid], share)
        visible = alpha > 0
        rgba = np.concatenate([colors[valid], alpha[:, None]], 1)[visible]
        return glb_bytes(points[valid][visible], rgba), int(visible.sum())

    def write_cloud(self, share: float, folder: Path) -> Path:
        """The cloud as a new file in a folder of its own."""
        path = Path(mkdtemp(dir=folder)) / "cloud.glb"
        content, _ = self.cloud(share)
        with atomic_path(path) as temporary:
            temporary.write_bytes(content)
        return path

    def write_files(self, level: float, share: float, folder: Path, stem: str) -> list[Path]:
        """Data, 16-bit pictures, point cloud and sheet, with the interval of the level, in a folder of their own."""
        grid = self.calibration.interval
        changes: dict[str, Any] = {}
        if grid is not None and grid.coverages[0] <= level <= grid.coverages[-1]:
            half_width = grid.scale(level)[0] * self.uncertainty
            ends = np.stack([self.record.depth - half_width, self.record.depth + half_width])
            changes = {"interval": ends, "coverage": level}
        record = DepthRecord(
            self.record.image, self.record.depth, self.record.uncertainty, metadata=self.record.metadata, **changes
        )
        options = ExportOptions(keep_fraction=max(share, 1e-3))
        return export(record, mkdtemp(dir=folder), stem, FILE_FORMATS, options=options)


def opacity(std: np.ndarray, share: float) -> np.ndarray:
    """Opacity (N,) uint8: full for the most certain, none beyond the `share`, falling over a tenth of the points."""
    ranks = np.empty(len(std))
    ranks[np.argsort(std, kind="stable")] = (np.arange(len(std)) + 0.5) / len(std)
    fading = np.clip((share - ranks) / min(_FADE, max(share, 1e-9)), 0, 1) if share < 1 else np.ones(len(std))
    return np.asarray(np.rint(255 * fading).astype(np.uint8))


def predict(
    pipeline: MarigoldUQDepthPipeline,
    path: str | Path,
    *,
    max_pixels: int,
    ensemble_size: int = 10,
    seed: int = 0,
    model: str = "",
) -> Shown:
    """Depth and uncertainty of one picture; ImageError for a file that is none, or too large."""
    (picture,) = load_images(path, max_pixels=max_pixels)
    mode = quickest_mode(pipeline) or "ensemble"
    calibration = pipeline.calibration_for(mode)
    output = pipeline(
        picture,
        uncertainty=mode,
        ensemble_size=ensemble_size,
        output_samples=calibration.interval is None,
        generator=torch.Generator().manual_seed(seed),
    )
    assert not isinstance(output, tuple)  # return_dict is on
    metric = not (pipeline.config.scale_invariant or pipeline.config.shift_invariant)
    metadata = {
        "units": "metric" if metric else "relative",
        "prediction_type": pipeline.config.prediction_type,
        "model": model,
        "uncertainty": mode,
        "ensemble_size": ensemble_size,
        "seed": seed,
    }
    record = DepthRecord(
        to_uint8(picture), output.prediction[0, ..., 0], output.uncertainty[0, ..., 0], metadata=metadata
    )
    members = None if output.samples is None else torch.from_numpy(np.moveaxis(output.samples[0], -1, 0))
    return Shown(record, calibration, members)


def _screen_size(size: tuple[int, int]) -> tuple[int, int]:
    """(H, W) of a map on the screen."""
    factor = min(1.0, _SHOWN_EDGE / max(size))
    return max(1, round(size[0] * factor)), max(1, round(size[1] * factor))


def _for_screen(pixels: np.ndarray) -> np.ndarray:
    height, width = _screen_size((pixels.shape[0], pixels.shape[1]))
    if (height, width) == pixels.shape[:2]:
        return pixels
    return np.asarray(Image.fromarray(pixels).resize((width, height), Image.Resampling.BOX))
