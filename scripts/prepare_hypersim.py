"""Convert Hypersim's HDF5 frames to the prepared PNGs that training reads.

    python scripts/prepare_hypersim.py --root RAW --split-csv metadata_images_split_scene_v1.csv --output PREPARED

Reads   RAW/ai_001_001/images/scene_cam_00_final_hdf5/frame.0000.color.hdf5
        RAW/ai_001_001/images/scene_cam_00_geometry_hdf5/frame.0000.depth_meters.hdf5
        RAW/ai_001_001/images/scene_cam_00_geometry_hdf5/frame.0000.render_entity_id.hdf5
Writes  PREPARED/train/ai_001_001/rgb_cam_00_fr0000.png            tone-mapped, 8 bit
        PREPARED/train/ai_001_001/depth_plane_cam_00_fr0000.png    planar depth, millimetres, 16 bit, 0 = invalid
        PREPARED/filename_list_train.txt                           one line per frame that is there

A frame that is already there is left alone, so an interrupted run is simply started again. A frame whose files are
missing or broken is counted and named at the end, and the exit code is then 1.
Needs h5py. A split can be packed afterwards: `tar -cf hypersim_train.tar -C PREPARED/train .`
"""

import argparse
import os
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

from tqdm import tqdm

from marigold_uq.depth.data import DepthDataError
from marigold_uq.depth.data.hypersim import HypersimFrame, convert_frame, read_split

SPLITS = ("train", "val", "test")
CONVERTED, PRESENT = "converted", "already there"


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, required=True, help="folder with the scenes ai_*/images")
    parser.add_argument("--split-csv", type=Path, required=True, help="metadata_images_split_scene_v1.csv")
    parser.add_argument("--output", type=Path, required=True, help="folder for the PNGs and the lists")
    parser.add_argument("--splits", nargs="+", choices=SPLITS, default=list(SPLITS), help="default: all three")
    parser.add_argument("--workers", type=int, default=1, help="processes (default: 1)")
    parser.add_argument("--overwrite", action="store_true", help="convert frames again that are already there")
    parser.add_argument("--examples", type=int, default=5, help="problems to print (default: 5)")
    return parser.parse_args(arguments)


def convert(frame: HypersimFrame, root: Path, output: Path, overwrite: bool) -> str:
    """Convert one frame; what happened, or the reason why not."""
    try:
        return CONVERTED if convert_frame(frame, root, output, overwrite=overwrite) else PRESENT
    except DepthDataError as error:
        return str(error)


def convert_all(frames: list[HypersimFrame], options: argparse.Namespace) -> Iterator[str]:
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
    temporary = path.with_suffix(".txt.tmp")
    temporary.write_text("".join(f"{frame.image} {frame.depth}\n" for frame in frames), encoding="utf-8")
    os.replace(temporary, path)
    return path


def main(arguments: list[str] | None = None) -> int:
    """Convert, write the lists, report; the exit code."""
    options = parse_arguments(arguments)
    frames = [frame for frame in read_split(options.split_csv) if frame.split in options.splits]
    options.output.mkdir(parents=True, exist_ok=True)
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


if __name__ == "__main__":
    sys.exit(main())
