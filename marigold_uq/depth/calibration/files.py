"""Maps made by others: what is learnt on those with a true depth, and intervals for all of them."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from tqdm.auto import tqdm

from marigold_uq.calibration import IntervalGrid
from marigold_uq.depth.calibration.fitting import Before, Ends, Fit, fit
from marigold_uq.depth.calibration.options import REPORTED, DepthCalibration, IntervalOptions
from marigold_uq.depth.calibration.pipelines import own_interval
from marigold_uq.depth.calibration.pixels import Collected, Pixels, collect_pixels, part_indices
from marigold_uq.depth.calibration.spread import SpreadRule, Stated
from marigold_uq.depth.data import DepthDataset
from marigold_uq.depth.evaluation.options import DepthEvaluation
from marigold_uq.depth.evaluation.prediction import Prediction, PredictionError
from marigold_uq.depth.evaluation.predictors import Predictor, build_predictor, read_prediction
from marigold_uq.depth.export import save_npz
from marigold_uq.files import atomic_folder, make_folder
from marigold_uq.results import write_json

CALIBRATION_FILE = "calibration.json"
INTERVAL_FOLDER = "intervals"
_FORMAT = "marigold_uq calibration of maps 1"


@dataclass(frozen=True)
class MapCalibration:
    """How maps of one model get a standard deviation and intervals, in their own units.

    Args:
        rule: From what the maps state to a spread.
        kappa: Its factor.
        interval: Half widths in (stretched) standard deviations.
        num_units: Units behind the intervals.
        note: Where the true depth came from.
    """

    rule: SpreadRule
    kappa: float
    interval: IntervalGrid
    num_units: int
    note: str = ""

    def __post_init__(self) -> None:
        if not (self.kappa > 0 and math.isfinite(self.kappa)):
            raise ValueError(f"kappa must be positive and finite; got {self.kappa}")

    def levels(self, wanted: Sequence[float] | None) -> list[float]:
        """Those asked for, or those of `REPORTED` that can be promised; what cannot is an error if it was asked for."""
        first, last = self.interval.coverages[0], self.interval.coverages[-1]
        missing = [level for level in wanted or () if not first <= level <= last]
        if missing:
            raise ValueError(
                f"{self.num_units} units promise coverages from {first:g} to {last:g}; got "
                f"{', '.join(f'{level:g}' for level in missing)}: calibrate on more images"
            )
        return [level for level in wanted or REPORTED if first <= level <= last]

    def arrays(self, prediction: Prediction, levels: Sequence[float]) -> dict[str, np.ndarray]:
        """mean, std (H, W), coverages (L,), lower and upper (L, H, W); NaN where the map is."""
        stated = Stated.of(prediction)
        std = self.kappa * self.rule.spread(stated)
        scales = torch.tensor([self.interval.scale(level)[0] for level in levels], dtype=torch.float64)
        reach = scales[:, None, None] * std
        maps = {"mean": stated.point, "std": std, "lower": stated.point - reach, "upper": stated.point + reach}
        plain = {name: values.numpy().astype(np.float32) for name, values in maps.items()}
        return {**plain, "coverages": np.asarray(levels)}

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "format": _FORMAT,
            "rule": self.rule.to_dict(),
            "kappa": self.kappa,
            "interval": self.interval.to_dict(),
            "num_units": self.num_units,
            "note": self.note,
        }

    @classmethod
    def read(cls, path: Path) -> Self:
        """From calibration.json, or the folder that holds it."""
        file = path / CALIBRATION_FILE if path.is_dir() else path
        if not file.is_file():
            raise FileNotFoundError(f"there is no calibration at {file}; `marigold-uq calibrate depth` writes one")
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
            if content.pop("format", None) != _FORMAT:
                raise ValueError(f"expected format {_FORMAT!r}")
            rule, interval = SpreadRule.from_dict(content.pop("rule")), IntervalGrid.from_dict(content.pop("interval"))
            return cls(rule=rule, interval=interval, **content)
        except (ValueError, TypeError, AttributeError, KeyError) as error:
            raise ValueError(f"{file} is no calibration of maps: {error}") from error


@dataclass(frozen=True)
class CalibratedFiles:
    """What was chosen, and all that a report needs to say about it."""

    record: MapCalibration
    fit: Fit
    collected: Collected
    predictor: Predictor
    before: Before
    num_written: int
    failures: list[tuple[str, str]]


def calibrate_files(options: DepthCalibration, data: DepthDataset) -> CalibratedFiles:
    """Calibrate, then write calibration.json and intervals for all maps of the folder to `options.output`."""
    if options.output.exists():
        raise FileExistsError(f"{options.output} exists; choose another output, or delete it first")
    halves = part_indices(data, options)
    predictor = build_predictor(DepthEvaluation(predictor="files", files=options.files))
    collected = collect_pixels(predictor, data, sorted([*halves[0], *halves[1]]), options, "maps")
    first, second = ([collected.pixels[i] for i in half if i in collected.pixels] for half in halves)
    if not first or not second:
        reason = f"; the first that failed: {': '.join(collected.failures[0])}" if collected.failures else ""
        raise ValueError(f"{len(first) + len(second)} maps with a true depth are too few to calibrate{reason}")
    found = fit(first, second, metric=predictor.metric)
    note = options.note or f"{options.data.name}: {len(first)} images for kappa, {len(second)} for the intervals"
    record = MapCalibration(found.rule, found.kappa, found.interval, found.num_units, note)
    assert options.files.folder is not None  # the predictor has been built
    make_folder(options.output.parent)
    with atomic_folder(options.output) as folder:
        write_json(folder / CALIBRATION_FILE, record.to_dict())
        written, failures = write_intervals(record, options.files.folder, folder / INTERVAL_FOLDER, record.levels(None))
    return CalibratedFiles(record, found, collected, predictor, stated_interval, written, failures)


def stated_interval(pixels: Pixels, level: float) -> Ends | None:
    """What the maps promise by themselves: members, else a Gaussian with their std, else nothing."""
    if pixels.draws is not None or pixels.stated.std is None:
        return own_interval(pixels, level)
    reach = math.sqrt(2) * float(torch.erfinv(torch.tensor(level, dtype=torch.float64)))
    half_width = reach * abs(pixels.scale) * pixels.stated.std
    return pixels.point - half_width, pixels.point + half_width


def run_new_maps(options: IntervalOptions) -> tuple[int, list[tuple[str, str]]]:
    """Write the intervals of new maps; how many, and which maps failed."""
    record = MapCalibration.read(options.calibration)
    levels = record.levels(options.coverages)
    if options.output.exists():
        raise FileExistsError(f"{options.output} exists; choose another output, or delete it first")
    make_folder(options.output.parent)
    with atomic_folder(options.output) as folder:
        return write_intervals(record, options.folder, folder, levels)


def write_intervals(
    record: MapCalibration, source: Path, target: Path, levels: Sequence[float]
) -> tuple[int, list[tuple[str, str]]]:
    """An npz with intervals for every npz below `source`; how many, and which failed."""
    if not source.is_dir():
        raise FileNotFoundError(f"{source} is not a folder; name that of the npz files")
    paths = sorted(path for path in source.rglob("*.npz") if not path.name.startswith("."))
    if not paths:
        raise FileNotFoundError(f"there are no npz files in {source}")
    failures = []
    for path in tqdm(paths, desc="intervals", unit="map"):
        try:
            arrays = record.arrays(read_prediction(path), levels)
        except PredictionError as error:
            failures.append((str(path.relative_to(source)), str(error)))
            continue
        place = target / path.relative_to(source)
        make_folder(place.parent)
        save_npz(place, overwrite=False, **arrays)
    return len(paths) - len(failures), failures
