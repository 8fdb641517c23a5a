"""Everything `eval/eval_depth.py` can be told, as frozen dataclasses."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal

from marigold_uq.depth.model import Dtype
from marigold_uq.metrics.intervals import IntervalMethod

Space = Literal["depth", "disparity"]


@dataclass(frozen=True)
class DataOptions:
    """The images and their true depth.

    Args:
        name: nyu, kitti_eigen, eth3d, scannet, diode, hypersim, vkitti2, scenes, procedural, folder, huggingface, or
            what `register_dataset` added (see --import).
        root: Its folder or tar; for huggingface the name on the Hub.
        filenames: Its filename list, or the index file of a folder.
        options: What else its class takes, for instance {mask: kitti_garg} or {depth_scale: 1000}.
        limit: Only so many images, evenly spaced.
        hub_id: Its name on the Hub, for the model card; the root for huggingface.
    """

    name: str = "folder"
    root: str | None = None
    filenames: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    limit: int | None = None
    hub_id: str | None = None


@dataclass(frozen=True)
class PipelineOptions:
    """Our pipelines.

    Args:
        model: "embedded", a folder, or a Hub name.
        uncertainty: "ensemble" runs a chain per member, "trajectory" draws members from the first step's distribution,
            "marginal" takes its quantiles, "none" gives one depth map. Default: the quickest of the last three that the
            model has.
        ensemble_size: Members that make the uncertainty.
        num_inference_steps: Denoising steps; default: the model's.
        processing_resolution: Longer edge for the network, 0 for the image's own; default: the model's.
        batch_size: Members per network call; never changes a result.
        seed: The same seed gives the same result for an image, whatever the other images are.
        device: "auto", "cpu", "cuda", "cuda:1", "mps".
        dtype: float32, float16 or bfloat16.
        variant: Weight files of a Hub checkpoint, for instance fp16.
    """

    model: str = "embedded"
    uncertainty: Literal["ensemble", "trajectory", "marginal", "none"] | None = None
    ensemble_size: int = 10
    num_inference_steps: int | None = None
    processing_resolution: int | None = None
    batch_size: int = 1
    seed: int = 0
    device: str = "auto"
    dtype: Dtype = "float32"
    variant: str | None = None


@dataclass(frozen=True)
class FileOptions:
    """Predictions made by others: one npz per image, at the image's size.

    Args:
        folder: FOLDER/NAME.npz for the sample NAME, with `samples` (E, H, W), or `mean` and `std`, or `mean` and
            `confidence` (H, W), or `mean` alone.
        space: What the numbers are: "depth" (larger is farther) or "disparity".
        metric: They are metres: no alignment.
    """

    folder: Path | None = None
    space: Space = "depth"
    metric: bool = False


@dataclass(frozen=True)
class AlignmentOptions:
    """How a prediction is brought into the target's units.

    Args:
        method: "least_squares": scale and shift of the point prediction, fitted on the valid pixels and applied to
            every member; "none" for metric predictions; "auto": none for metric models, else least_squares.
        mutual: First align the members to each other; for files of members that nobody aligned.
        max_resolution: Fit on maps thinned to this longer edge; default: 1024 for ETH3D, all pixels otherwise.
        clip: After the alignment: "dataset" clips to the data set's depth range, "target" to [0.5 min, 2 max] of the
            image's true depth; "auto": dataset where it declares a smallest depth, else target.
    """

    method: Literal["auto", "least_squares", "none"] = "auto"
    mutual: bool = False
    max_resolution: int | None = None
    clip: Literal["auto", "dataset", "target"] = "auto"


@dataclass(frozen=True)
class ScoreOptions:
    """What is measured.

    Args:
        metrics: Panels out of depth, probabilistic, calibrated, energy_score, ranking, reliability, pit.
        level: Nominal coverage of the central interval.
        interval: How the interval is made from members: weibull, linear, minmax, gaussian or student_t.
        min_scale: Smallest standard deviation in the Gaussian NLL, as a share of the image's median depth.
        num_bins: Bins of the PIT histogram.
        seed: Breaks ties in the PIT.
    """

    metrics: tuple[str, ...] = ("depth", "probabilistic", "calibrated", "energy_score", "ranking", "reliability", "pit")
    level: float = 0.95
    interval: IntervalMethod = "weibull"
    min_scale: float = 1e-3
    num_bins: int = 20
    seed: int = 0


@dataclass(frozen=True)
class DepthEvaluation:
    """Score depth and its uncertainty against ground truth.

    Args:
        predictor: pipeline, files, constant or ramp.
        pipeline: Our pipelines.
        files: Predictions made by others.
        data: The images and their true depth.
        alignment: How a prediction is brought into the target's units.
        score: What is measured.
        output: Folder for metrics.json, per_image.csv, config.yaml, the figures and the finished images' results.
        overwrite: Replace a finished evaluation, or one with other options; an unfinished one resumes without it.
        save_predictions: Also write the predictions to this folder, as `files` reads them.
        figures: Draw reliability, sparsification, PIT and groups.
    """

    predictor: str = "pipeline"
    pipeline: PipelineOptions = field(default_factory=PipelineOptions)
    files: FileOptions = field(default_factory=FileOptions)
    data: DataOptions = field(default_factory=DataOptions)
    alignment: AlignmentOptions = field(default_factory=AlignmentOptions)
    score: ScoreOptions = field(default_factory=ScoreOptions)
    output: Path = Path("evaluation")
    overwrite: bool = False
    save_predictions: Path | None = None
    figures: bool = True


_INERT = (
    ("output",), ("overwrite",), ("save_predictions",), ("figures",), ("data", "limit"), ("data", "hub_id"),
    ("pipeline", "batch_size"), ("pipeline", "device"),
)  # fmt: skip
"""Options that change no image's result."""


def plain(value: Any) -> Any:
    """Dataclasses, paths and tuples as the dicts, strings and lists that YAML and JSON know."""
    if is_dataclass(value):
        return {entry.name: plain(getattr(value, entry.name)) for entry in fields(value)}
    if isinstance(value, dict):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    return str(value) if isinstance(value, Path) else value


def decisive(config: dict[str, Any]) -> dict[str, Any]:
    """The part of a plain config that decides an image's result; what two runs must share to share results."""
    kept = {key: dict(value) if isinstance(value, dict) else value for key, value in config.items()}
    for *parents, name in _INERT:
        part = kept
        for parent in parents:
            part = part.get(parent, {})
        part.pop(name, None)
    return kept
