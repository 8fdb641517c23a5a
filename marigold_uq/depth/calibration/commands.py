"""`marigold-uq calibrate depth` and `marigold-uq intervals`."""

from __future__ import annotations

import sys
from typing import Any

from marigold_uq.commands.runner import Invocation
from marigold_uq.depth.calibration.files import CalibratedFiles, calibrate_files, run_new_maps
from marigold_uq.depth.calibration.fitting import FEW_UNITS, Fit, missing_units
from marigold_uq.depth.calibration.options import REPORTED, DepthCalibration, IntervalOptions
from marigold_uq.depth.calibration.pipelines import CalibratedMode, calibrate_modes
from marigold_uq.depth.calibration.report import Subject, write_report
from marigold_uq.depth.data import DepthDataset
from marigold_uq.depth.evaluation.evaluate import check_dataset, open_dataset


def run_calibration(options: DepthCalibration, invocation: Invocation, *, dataset: Any = None) -> int:
    """Calibrate, say what can be promised, draw the report; 1 if some images could not take part."""
    for path in (options.output, *([options.report_path] if options.report else [])):
        if path.exists():
            raise FileExistsError(f"{path} exists; choose another output, or delete it first")
    data = check_dataset(open_dataset(options.data) if dataset is None else dataset)
    subjects, failures = _calibrate(options, data)
    for subject in subjects:
        for line in promises(subject.title, subject.fit):
            print(line)
        for line in warnings_of(subject.title, subject.fit):
            print(line, file=sys.stderr)
    print(f"written to {options.output}")
    if options.report:
        write_report(subjects, data, options, invocation.command)
        print(f"report: {options.report_path}")
    for name, reason in failures:
        print(f"failed: {name}: {reason}", file=sys.stderr)
    return 1 if failures else 0


def run_intervals(options: IntervalOptions, invocation: Invocation) -> int:
    """Write the intervals of new maps; 1 if some failed."""
    written, failures = run_new_maps(options)
    print(f"intervals of {written} maps written to {options.output}")
    for name, reason in failures:
        print(f"failed: {name}: {reason}", file=sys.stderr)
    return 1 if failures else 0


def _calibrate(options: DepthCalibration, data: DepthDataset) -> tuple[list[Subject], list[tuple[str, str]]]:
    """What was calibrated, and the images that could not take part."""
    if options.files.folder is not None:
        found = calibrate_files(options, data)
        print(f"intervals of {found.num_written} maps")
        return [_subject("maps", found)], list(dict([*found.collected.failures, *found.failures]).items())
    modes = calibrate_modes(options, data)
    failures = dict(pair for found in modes.values() for pair in found.collected.failures)
    return [_subject(mode, found) for mode, found in modes.items()], list(failures.items())


def _subject(title: str, found: CalibratedMode | CalibratedFiles) -> Subject:
    return Subject(title, found.fit, tuple(found.collected.pixels.values()), found.predictor, found.before)


def promises(title: str, fit: Fit) -> list[str]:
    """What was chosen, in words."""
    grid = fit.interval
    widths = ", ".join(f"{c:.0%}: {grid.scale(c)[0]:.2f}" for c in REPORTED if fit.promises(c))
    reach = f"{fit.num_units} units promise coverages up to {grid.coverages[-1]:.1%}"
    return [
        f"{title}: kappa {fit.kappa:.3f}; half widths in standard deviations {widths}",
        f"{title}: {reach}; beyond, intervals are extrapolated with a warning",
    ]


def warnings_of(title: str, fit: Fit) -> list[str]:
    """Which coverages are refused for want of units, and that few units make wide intervals."""
    lines = []
    for level, need in missing_units(fit, REPORTED):
        lines.append(f"warning: {title}: no {level:.0%} interval: it needs {need} units, and {fit.num_units} set them")
    if fit.num_units < FEW_UNITS:
        lines.append(
            f"warning: {title}: only {fit.num_units} units set the intervals, so they are wide and vary with the "
            "choice of images; take 40 or more, or a smaller --kappa_share"
        )
    return lines
