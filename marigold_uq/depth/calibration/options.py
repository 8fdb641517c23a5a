"""What `marigold-uq calibrate depth` and `marigold-uq intervals` can be told."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from marigold_uq.depth.evaluation.options import DataOptions, FileOptions
from marigold_uq.depth.model import Dtype

Mode = Literal["ensemble", "trajectory", "marginal"]
REPORTED = (0.5, 0.8, 0.9, 0.95)
"""Coverages that tables name, and for which intervals are written to files."""


@dataclass(frozen=True)
class DepthCalibration:
    """Calibrate the uncertainty of a depth model, or of maps made by others, on held-out images.

    One part of the images chooses kappa, which stretches the spread. The other part gives conformal intervals. The unit
    of their promise is the image, or the group (a scene, say) where the data set has groups. None of the images may
    have been trained on.

    Args:
        model: "embedded", a folder, or a Hub name. Earlier calibrations of the same modes are replaced.
        output: Folder for the calibrated copy, or for the intervals of maps made by others; it must not exist.
        data: The images and their true depth.
        files: Instead of a model, maps made by others: intervals for all maps of this folder are written, also for
            those without a true depth.
        modes: Ways to uncertainty to calibrate; those that the model does not have are left out.
        ensemble_size: Members per image; the calibration holds for this number.
        num_inference_steps: Denoising steps, for which it holds; default: the model's.
        steps: Numbers of denoising steps to choose from, in place of num_inference_steps: the first part of the images
            takes the fewest within one standard error of the best CRPS, in the first of the modes. They become the
            model's default.
        processing_resolution: Longer edge for the network, 0 for the image's own; default: the model's.
        num_pixels: Pixels of each image that take part, drawn at random.
        batch_size: Members per network call; never changes a result.
        kappa_share: Share of the images (or groups) that chooses kappa; the others set the intervals.
        unit: "group" takes the groups of the data set as units where it has any, "image" always the images. Images of
            one scene are alike, so with them as units the promise is only for further images of the same scenes.
        shuffle: Deal the images to the two parts at random; else the first of them choose kappa.
        report: Also write a page with pictures (HTML) beside the output: coverage before and after on images left out,
            and where the model is unsure. It shows some of the images.
        seed: Of members, pixels and parts.
        device: "auto", "cpu", "cuda", "cuda:1", "mps".
        dtype: float32, float16 or bfloat16.
        note: Stored with the calibration; default: the data set and the number of images.
    """

    model: str | None = None
    output: Path = Path("calibrated")
    data: DataOptions = field(default_factory=DataOptions)
    files: FileOptions = field(default_factory=FileOptions)
    modes: list[Mode] = field(default_factory=lambda: ["ensemble", "trajectory", "marginal"])
    ensemble_size: int = 10
    num_inference_steps: int | None = None
    steps: list[int] | None = None
    processing_resolution: int | None = None
    num_pixels: int = 1500
    batch_size: int = 1
    kappa_share: float = 0.5
    unit: Literal["group", "image"] = "group"
    shuffle: bool = True
    report: bool = True
    seed: int = 1
    device: str = "auto"
    dtype: Dtype = "float32"
    note: str | None = None

    def __post_init__(self) -> None:
        if (self.model is None) == (self.files.folder is None):
            raise ValueError(
                'give either model ("embedded", a folder or a Hub name) or files.folder (maps made by others); got '
                f"model={self.model!r} and files.folder={self.files.folder}"
            )
        if not self.modes:
            raise ValueError("modes must name at least one of ensemble, trajectory and marginal; got none")
        if self.ensemble_size < 3:
            raise ValueError(f"ensemble_size must be at least 3 to choose kappa; got {self.ensemble_size}")
        if self.num_pixels < 1:
            raise ValueError(f"num_pixels must be at least 1; got {self.num_pixels}")
        if not 0 < self.kappa_share < 1:
            raise ValueError(f"kappa_share must lie strictly between 0 and 1; got {self.kappa_share}")
        if self.steps is not None and self.num_inference_steps is not None:
            raise ValueError(
                f"give steps to choose from or num_inference_steps, not both; got {self.steps} and "
                f"{self.num_inference_steps}"
            )

    @property
    def report_path(self) -> Path:
        """Beside a model, which may be published, and not in it: the page shows the user's own pictures."""
        return self.output.with_name(f"{self.output.name}_report.html")


@dataclass(frozen=True)
class IntervalOptions:
    """Intervals for new depth maps made by others, by a calibration that `marigold-uq calibrate depth` stored.

    Args:
        calibration: calibration.json, or the folder that holds it.
        folder: The maps, one npz each, with the same keys and in the same units as those of the calibration.
        output: Folder for the intervals, which must not exist: for each map an npz with mean, std, coverages (L,),
            lower and upper (L, H, W).
        coverages: Of the intervals; default: 0.5, 0.8, 0.9 and 0.95, as far as they were calibrated.
    """

    calibration: Path
    folder: Path
    output: Path = Path("intervals")
    coverages: list[float] | None = None
