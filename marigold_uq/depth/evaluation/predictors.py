"""Where predictions come from, by name: our pipelines, files made by others, and two baselines."""

from __future__ import annotations

import hashlib
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path, PurePosixPath

import torch
from torch import Tensor

from marigold_uq.array_files import npz_names, read_npz
from marigold_uq.depth.data import DepthSample
from marigold_uq.depth.evaluation.options import DepthEvaluation, FileOptions, PipelineOptions, Space
from marigold_uq.depth.evaluation.prediction import Members, Prediction, PredictionError, prediction_from_arrays
from marigold_uq.depth.model import load_pipeline
from marigold_uq.pipelines.depth import MarigoldUQDepthPipeline
from marigold_uq.pipelines.depth.call import quickest_mode
from marigold_uq.randomness import member_seed


class Predictor(ABC):
    """Gives a prediction for an image. A subclass needs only `predict`."""

    space: Space = "depth"
    metric: bool = False

    @abstractmethod
    def predict(self, sample: DepthSample) -> Prediction:
        """The prediction for `sample["image"]`, at its size; PredictionError if there is none for this image."""

    def identity(self, name: str) -> str:
        """Changes when the prediction of sample `name` may have changed, so that no stored result outlives it."""
        return ""

    def describe(self) -> dict[str, object]:
        """For the results: which model this is."""
        return {}


CALIBRATED_LEVELS = (0.5, 0.8, 0.9, 0.95)
"""Coverages at which calibrated intervals are checked, besides the one of `ScoreOptions.level`."""

Builder = Callable[[DepthEvaluation], Predictor]
PREDICTORS: dict[str, Builder] = {}


def register_predictor(name: str) -> Callable[[Builder], Builder]:
    """Decorator that makes `builder(options)` known as `name`."""

    def register(builder: Builder) -> Builder:
        if name in PREDICTORS:
            raise ValueError(f"a predictor called {name!r} is already registered")
        PREDICTORS[name] = builder
        return builder

    return register


def build_predictor(options: DepthEvaluation) -> Predictor:
    """The predictor that `options.predictor` names."""
    if options.predictor not in PREDICTORS:
        raise ValueError(f"unknown predictor {options.predictor!r}; known: {', '.join(sorted(PREDICTORS))}")
    return PREDICTORS[options.predictor](options)


class PipelinePredictor(Predictor):
    """Our pipelines, and every checkpoint they load.

    Args:
        options: Model and call.
        coverages: Calibrated intervals to give with each prediction; none if the model was not calibrated for the mode.
        pipeline: Used instead of loading `options.model`.
    """

    def __init__(
        self,
        options: PipelineOptions,
        coverages: Sequence[float] = (),
        pipeline: MarigoldUQDepthPipeline | None = None,
    ) -> None:
        self.options = options
        self.pipeline = pipeline or load_pipeline(
            options.model, device=options.device, dtype=options.dtype, variant=options.variant
        )
        config = self.pipeline.config
        self.space = "disparity" if config.prediction_type == "disparity" else "depth"
        self.metric = not (config.scale_invariant or config.shift_invariant)
        self.mode = self._mode()
        self._half_widths = self._calibrated_half_widths(coverages)
        self._identity = _folder_digest(Path(options.model))

    def _mode(self) -> str | None:
        if self.options.uncertainty is None:
            return quickest_mode(self.pipeline)
        return None if self.options.uncertainty == "none" else self.options.uncertainty

    def _calibrated_half_widths(self, coverages: Sequence[float]) -> Tensor | None:
        """In standard deviations, (L, 1, 1)."""
        grid = None if self.mode is None else self.pipeline.calibration_for(self.mode).interval
        if grid is None or not coverages:
            return None
        return torch.tensor([grid.scale(one)[0] for one in coverages])[:, None, None]

    @property
    def num_inference_steps(self) -> int:
        """Denoising steps, the model's own where the options say nothing."""
        return int(self.options.num_inference_steps or self.pipeline.config.default_denoising_steps)

    def predict(self, sample: DepthSample) -> Prediction:
        """The members, aligned to each other by the pipeline, from a seed of the image's own."""
        seed = member_seed(self.options.seed, zlib.crc32(sample["name"].encode()))
        try:
            output = self.pipeline(
                sample["image"],
                num_inference_steps=self.options.num_inference_steps,
                ensemble_size=self.options.ensemble_size if self.mode else 1,
                processing_resolution=self.options.processing_resolution,
                batch_size=self.options.batch_size,
                uncertainty=self.mode,
                output_samples=True,
                output_type="pt",
                generator=torch.Generator().manual_seed(seed),
            )
        except ValueError as error:  # a map that is not finite, say
            raise PredictionError(f"the pipeline refuses it: {error}") from error
        assert not isinstance(output, tuple)  # return_dict is on
        bounds, point = None, output.prediction[0, 0]
        if self._half_widths is not None:
            reach = self._half_widths.to(point) * output.uncertainty[0]  # (L, H, W)
            bounds = torch.stack([point - reach, point + reach], 1)
        return Members.of(output.samples[0], point, bounds)

    def identity(self, name: str) -> str:
        """The same for all images: that of the model's files."""
        return self._identity

    def describe(self) -> dict[str, object]:
        """What a table needs to say about the model."""
        scheduler, resolution = self.pipeline.scheduler.config, self.options.processing_resolution
        return {
            "model": self.options.model,
            "noise_family": scheduler.noise_family,
            "uncertainty": self.mode or "none",
            "ensemble_size": self.options.ensemble_size if self.mode else 1,
            "num_inference_steps": self.num_inference_steps,
            "processing_resolution": (
                self.pipeline.config.default_processing_resolution if resolution is None else resolution
            ),
        }


class _FilePredictor(Predictor):
    """One npz per image, found by the sample's name."""

    def __init__(self, options: FileOptions) -> None:
        if options.folder is None or not options.folder.is_dir():
            raise FileNotFoundError(
                f"files.folder is {options.folder}, which is not a folder; name that of the npz files"
            )
        self.folder, self.space, self.metric = options.folder, options.space, options.metric

    def predict(self, sample: DepthSample) -> Prediction:
        """Read FOLDER/NAME.npz."""
        path = prediction_path(self.folder, sample["name"])
        if not path.is_file():
            raise PredictionError(f"no prediction: {path} does not exist")
        return read_prediction(path)

    def identity(self, name: str) -> str:
        """Size and time of the file."""
        path = prediction_path(self.folder, name)
        return _stamp(path) if path.is_file() else "missing"

    def describe(self) -> dict[str, object]:
        """The folder."""
        return {"model": str(self.folder)}


class _MapPredictor(Predictor):
    """A baseline that never looks at the picture: a fixed map for every size."""

    def __init__(self, name: str, make: Callable[[int, int], Tensor]) -> None:
        self.name, self.make = name, make

    def predict(self, sample: DepthSample) -> Prediction:
        """The map at the image's size, as a single member."""
        height, width = sample["image"].shape[-2:]
        return Members.of(self.make(height, width)[None])

    def describe(self) -> dict[str, object]:
        """The baseline's name."""
        return {"model": self.name}


def _constant_map(height: int, width: int) -> Tensor:
    """The same depth everywhere; after alignment it is the mean of the true depth. (H, W)."""
    return torch.zeros(height, width)


def _ramp_map(height: int, width: int) -> Tensor:
    """Minus the row index: the top is far, the bottom is near. (H, W)."""
    return -torch.arange(height, dtype=torch.float32)[:, None].expand(height, width)


register_predictor("pipeline")(
    lambda options: PipelinePredictor(options.pipeline, (options.score.level, *CALIBRATED_LEVELS))
)
register_predictor("files")(lambda options: _FilePredictor(options.files))
register_predictor("constant")(lambda options: _MapPredictor("constant", _constant_map))
register_predictor("ramp")(lambda options: _MapPredictor("ramp", _ramp_map))


def read_prediction(path: Path) -> Prediction:
    """The prediction in an npz made by others; what is no number in it is left alone."""
    try:
        found = read_npz(path, str(path), npz_names(path, str(path)))
    except (OSError, ValueError) as error:
        raise PredictionError(f"{path} is no readable npz: {error}") from error
    arrays = {key: array for key, array in found.items() if array.dtype.kind in "fiu"}
    return prediction_from_arrays(arrays, str(path))


def prediction_path(folder: Path, name: str) -> Path:
    """FOLDER/NAME.npz; a name that leads out of the folder is refused."""
    parts = PurePosixPath(name).parts
    if not parts or PurePosixPath(name).is_absolute() or ".." in parts:
        raise PredictionError(f"the sample name {name!r} is no path inside a folder")
    return folder.joinpath(*parts[:-1], f"{parts[-1]}.npz")


def _stamp(path: Path) -> str:
    status = path.stat()
    return f"{status.st_size}-{status.st_mtime_ns}"


def _folder_digest(folder: Path) -> str:
    """Of names, sizes and times of all files of a local model; a name on the Hub stands for itself."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")) if folder.is_dir() else []:
        if path.is_file():
            digest.update(f"{path.relative_to(folder)} {_stamp(path)}\n".encode())
    return digest.hexdigest()
