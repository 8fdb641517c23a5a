"""Convert Hypersim's HDF5 frames to the prepared PNGs that training reads.

    python scripts/prepare_hypersim.py --root RAW --split_csv metadata_images_split_scene_v1.csv --output PREPARED

Reads   RAW/ai_001_001/images/scene_cam_00_final_hdf5/frame.0000.color.hdf5
        RAW/ai_001_001/images/scene_cam_00_geometry_hdf5/frame.0000.depth_meters.hdf5
        RAW/ai_001_001/images/scene_cam_00_geometry_hdf5/frame.0000.render_entity_id.hdf5
Writes  PREPARED/train/ai_001_001/rgb_cam_00_fr0000.png            tone-mapped, 8 bit
        PREPARED/train/ai_001_001/depth_plane_cam_00_fr0000.png    planar depth, millimetres, 16 bit, 0 = invalid
        PREPARED/filename_list_train.txt                           one line per frame that is there

Existing frames are left alone, so the same command resumes an interrupted run. A frame whose files are
missing or broken is counted and named at the end, and the exit code is then 1.
Needs h5py. A split can be packed afterwards: `tar -cf hypersim_train.tar -C PREPARED/train .`
"""

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

from tqdm import tqdm

from marigold_uq.commands.runner import Invocation, run_command
from marigold_uq.depth.data import DepthDataError
from marigold_uq.depth.data.hypersim import HypersimFrame, convert_frame, read_split
from marigold_uq.files import atomic_path, make_folder

Split = Literal["train", "val", "test"]
SPLITS: tuple[Split, ...] = ("train", "val", "test")
CONVERTED, PRESENT = "converted", "already there"


@dataclass(frozen=True)
class HypersimOptions:
    """Convert Hypersim's HDF5 frames to PNGs.

    Args:
        root: Folder with the scenes ai_*/images.
        split_csv: metadata_images_split_scene_v1.csv.
        output: Folder for the PNGs and the lists.
        splits: Those to convert.
        workers: Processes.
        overwrite: Recompute existing frames.
        examples: Problems to print.
    """

    root: Path
    split_csv: Path
    output: Path
    splits: list[Split] = field(default_factory=lambda: list(SPLITS))
    workers: int = 1
    overwrite: bool = False
    examples: int = 5


def convert(frame: HypersimFrame, root: Path, output: Path, overwrite: bool) -> str:
    """Convert one frame; what happened, or the reason why not."""
    try:
        return CONVERTED if convert_frame(frame, root, output, overwrite=overwrite) else PRESENT
    except DepthDataError as error:
        return str(error)


def convert_all(frames: list[HypersimFrame], options: HypersimOptions) -> Iterator[str]:
    """The outcome of every frame, in order."""
    one = partial(convert, root=options.root, output=options.output, overwrite=options.overwrite)
    if options.workers <= 1:
        yield from map(one, frames)
        return
    with ProcessPoolExecutor(options.workers) as pool:
        yield from pool.map(one, frames, chunksize=4)


def write_list(split: str, frames: list[HypersimFrame], output: Path) -> Path:
    """The filename list of the frames that are there, complete or not at all; replacing an older one is said."""
    path = output / f"filename_list_{split}.txt"
    if path.is_file():
        print(f"{path}: replaces a list of {len(path.read_text(encoding='utf-8').splitlines())} frames")
    with atomic_path(path, overwrite=True) as temporary:
        temporary.write_text("".join(f"{frame.image} {frame.depth}\n" for frame in frames), encoding="utf-8")
    return path


def run(options: HypersimOptions, invocation: Invocation) -> int:
    """Convert, write the lists, report; 1 if a frame failed."""
    frames = [frame for frame in read_split(options.split_csv) if frame.split in options.splits]
    make_folder(options.output)
    outcomes = list(tqdm(convert_all(frames, options), total=len(frames), unit="frame", disable=None))
    good = [frame for frame, outcome in zip(frames, outcomes, strict=True) if outcome in (CONVERTED, PRESENT)]
    for split in options.splits:
        members = [frame for frame in good if frame.split == split]
        print(f"{write_list(split, members, options.output)}: {len(members)} frames")
    counts = Counter(outcomes)
    problems = [outcome for outcome in outcomes if outcome not in (CONVERTED, PRESENT)]
    print(f"{counts[CONVERTED]} converted, {counts[PRESENT]} already there, {len(problems)} of {len(frames)} failed")
    for problem in problems[: options.examples]:
        print(f"  {problem}")
    if len(problems) > options.examples:
        print(f"  ... and {len(problems) - options.examples} more")
    return 1 if problems or not frames else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """0, 1 if a frame failed, 2 for an error that names what to mend."""
    return run_command("scripts/prepare_hypersim.py", HypersimOptions, run, arguments)


if __name__ == "__main__":
    sys.exit(main())
