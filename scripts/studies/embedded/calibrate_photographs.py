r"""What calibrating on photographs of one's own brings: coverage before and after, source by source left out.

python -m scripts.studies.embedded.calibrate_photographs --data.root data/depth_real --output photographs.md

Every source (group of the index) is left out in turn. Of the others one part chooses kappa and another sets the
conformal intervals; what these cover is counted on the source that was left out. Pictures of other cameras and places
are not exchangeable with those of the calibration. So nothing is promised, and how far the promise carries is measured.
"members" are the model's own intervals without any calibration, "shipped" those of the calibration it comes with. Any
model will do; the way to uncertainty is its quickest unless --mode says otherwise.
"""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, cast

from marigold_uq.commands.runner import Invocation, run_command
from marigold_uq.depth.calibration.fitting import Coverage, covered_before, leave_out
from marigold_uq.depth.calibration.options import REPORTED, DepthCalibration, Mode
from marigold_uq.depth.calibration.pipelines import own_interval, stored_or_own
from marigold_uq.depth.calibration.pixels import Pixels, collect_pixels, unit_of
from marigold_uq.depth.data import DepthDataset
from marigold_uq.depth.evaluation.evaluate import check_dataset, chosen_indices, open_dataset
from marigold_uq.depth.evaluation.options import DataOptions, PipelineOptions
from marigold_uq.depth.evaluation.predictors import PipelinePredictor
from marigold_uq.depth.model import load_pipeline
from marigold_uq.files import atomic_path
from marigold_uq.pipelines.depth import MarigoldUQDepthPipeline
from marigold_uq.pipelines.depth.call import available_modes
from marigold_uq.results import markdown_table


@dataclass(frozen=True)
class PhotographStudy:
    """Coverage of intervals on photographs, before and after a calibration on those of other sources.

    Args:
        data: Photographs with depth, in groups by source.
        model: "embedded", a folder, or a Hub name.
        mode: Way to uncertainty; default: the quickest that the model has.
        output: File for the table; default: printed alone.
        ensemble_size: Members.
        kappa_share: Share of the units that chooses kappa.
        num_pixels: Pixels of each picture that take part.
        batch_size: Members per network call.
        seed: Of members, pixels and parts.
        splits: Every source is left out so many times, with other splits of the rest; coverage is their mean.
        device: Where the network runs.
        overwrite: Replace the table.
    """

    data: DataOptions = field(default_factory=DataOptions)
    model: str = "embedded"
    mode: Mode | None = None
    output: Path | None = None
    ensemble_size: int = 10
    kappa_share: float = 0.25
    num_pixels: int = 1500
    batch_size: int = 10
    seed: int = 1
    splits: int = 3
    device: str = "cpu"
    overwrite: bool = False

    def calibration(self, unit: Literal["group", "image"], seed: int) -> DepthCalibration:
        """The options of one calibration."""
        return DepthCalibration(
            self.model,
            data=self.data,
            ensemble_size=self.ensemble_size,
            num_pixels=self.num_pixels,
            kappa_share=self.kappa_share,
            unit=unit,
            seed=seed,
        )


def study(options: PhotographStudy, invocation: Invocation) -> int:
    """Predict once, calibrate without each source, print the table."""
    data = check_dataset(open_dataset(options.data))
    pipeline = load_pipeline(options.model, device=options.device)
    mode = options.mode or cast(Mode, available_modes(pipeline)[0])
    stored = next((one for one in pipeline.calibrations if one.uncertainty == mode), None)
    pipeline.register_to_config(calibration=None)  # members as the network gives them
    pixels = predicted(pipeline, mode, data, options)
    sources = [unit_of(data, one.index, options.calibration("group", 0)) for one in pixels]
    rows = {"members": covered_before(pixels, own_interval, sources, REPORTED)}
    if stored is not None:
        rows["shipped"] = covered_before(pixels, stored_or_own(stored), sources, REPORTED)
    rows["other sources, unit image"] = left_out(pixels, sources, "image", options)
    rows["other sources, unit source"] = left_out(pixels, sources, "group", options)
    header = f"{len(pixels)} pictures of {len(set(sources))} sources, {mode}, {options.ensemble_size} members"
    text = f"{header}\n\n{table(rows)}\n"
    print(text)
    if options.output is not None:
        with atomic_path(options.output, overwrite=options.overwrite) as temporary:
            temporary.write_text(text, encoding="utf-8")
    return 0


def predicted(
    pipeline: MarigoldUQDepthPipeline, mode: Mode, data: DepthDataset, options: PhotographStudy
) -> list[Pixels]:
    """Some pixels of every picture; a picture that fails is an error."""
    call = PipelineOptions(options.model, mode, options.ensemble_size, batch_size=options.batch_size, seed=options.seed)
    indices = chosen_indices(len(data), options.data.limit)
    calibration = options.calibration("image", options.seed)
    found = collect_pixels(PipelinePredictor(call, pipeline=pipeline), data, indices, calibration, mode)
    if found.failures:
        raise ValueError(f"{len(found.failures)} pictures failed, the first: {': '.join(found.failures[0])}")
    return list(found.pixels.values())


def left_out(
    pixels: Sequence[Pixels], sources: Sequence[str], unit: Literal["group", "image"], options: PhotographStudy
) -> Coverage:
    """On each source by calibrations on the others, averaged over splits; missing where one of them was too small."""
    names = sources if unit == "group" else [str(one.index) for one in pixels]
    named = [replace(one, unit=name) for one, name in zip(pixels, names, strict=True)]
    runs = [
        leave_out(named, options.calibration(unit, options.seed + split), folds=sources, levels=REPORTED)
        for split in range(options.splits)
    ]
    covered = sum((one.covered for one in runs[1:]), runs[0].covered) / len(runs)
    width = sum((one.width for one in runs[1:]), runs[0].width) / len(runs)
    return Coverage.of(REPORTED, covered, width, sources)


def table(rows: dict[str, Coverage]) -> str:
    """Markdown: covered share with its standard error over sources, and mean width, per level."""
    cells = [[name, *(_cell(found, REPORTED.index(level)) for level in REPORTED)] for name, found in rows.items()]
    return markdown_table(["intervals", *(f"{level:.0%}" for level in REPORTED)], cells)


def _cell(found: Coverage, place: int) -> str:
    share, error, width = found.share[place], found.standard_error[place], found.width[place]
    return "too few units" if math.isnan(share) else f"{100 * share:.1f} ± {100 * error:.1f} (width {width:.2f})"


def main(arguments: Sequence[str] | None = None) -> int:
    """0, or 2 for an error that names what to mend."""
    return run_command("scripts.studies.embedded.calibrate_photographs", PhotographStudy, study, arguments)


if __name__ == "__main__":
    sys.exit(main())
