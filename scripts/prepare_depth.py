"""Describe the layout of each depth data set, and check a copy of it: what is missing, what is broken, where to get it.

    python scripts/prepare_depth.py describe                     # all data sets
    python scripts/prepare_depth.py describe kitti_eigen
    python scripts/prepare_depth.py check nyu --root data/nyu.tar --filenames lists/nyu_test.txt
    python scripts/prepare_depth.py check folder --root data/mine --depth-scale 1000 --decode all

The exit code is 0 if everything needed is there, 1 otherwise. Nothing is written.
"""

import argparse
import sys
from collections.abc import Iterable

from tqdm import tqdm

from marigold_uq.depth.data import (
    SPECS,
    DepthDataError,
    ImageDepthFolder,
    LayoutReport,
    check_layout,
    check_samples,
    describe,
)

FOLDER = (
    "folder: your own images and depth\n"
    "  rgb/NAME.jpg and depth/NAME.png (16 bit, --depth-scale), .npy, .npz, .exr or .tif (float);\n"
    "  or index.csv / index.json with the columns image and depth (or name),\n"
    "  and optionally depth_scale, kind (depth_m | disparity_px), group"
)


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    names = [*SPECS, "folder"]
    describing = commands.add_parser("describe", help="print the layout, the ranges and where to download")
    describing.add_argument("name", nargs="?", choices=names, help="one data set; all by default")
    checking = commands.add_parser("check", help="look for every file and decode some samples")
    checking.add_argument("name", choices=names)
    checking.add_argument("--root", required=True, help="the data set's folder, or an uncompressed tar of it")
    checking.add_argument("--filenames", help="filename list (folder: the index file); by default what is found")
    checking.add_argument("--decode", type=number_or_all, default=8, help="samples to decode, or 'all' (default: 8)")
    checking.add_argument("--examples", type=int, default=5, help="examples per kind of problem (default: 5)")
    checking.add_argument("--depth-scale", type=float, help="folder only: depth = stored value / depth_scale")
    return parser.parse_args(arguments)


def number_or_all(text: str) -> int | None:
    """A count, or None for 'all'."""
    if text == "all":
        return None
    count = int(text)
    if count < 0:
        raise ValueError(f"expected a count or 'all', got {text}")
    return count


def progress(indices: Iterable[int]) -> Iterable[int]:
    """A bar on standard error, if somebody is looking."""
    return tqdm(indices, desc="decoding", unit="sample", disable=None)


def check(options: argparse.Namespace) -> LayoutReport:
    """Run the check that belongs to the data set."""
    if options.name != "folder":
        return check_layout(options.name, options.root, options.filenames, num_decode=options.decode, progress=progress)
    try:
        dataset = ImageDepthFolder(options.root, options.filenames, depth_scale=options.depth_scale)
    except DepthDataError as error:
        return LayoutReport("image and depth folder", options.root, fatal=str(error))
    return check_samples(dataset, "image and depth folder", options.root, num_decode=options.decode, progress=progress)


def explain(name: str) -> str:
    """The expected layout of one data set."""
    return FOLDER if name == "folder" else describe(SPECS[name])


def main(arguments: list[str] | None = None) -> int:
    """Describe or check; the exit code."""
    options = parse_arguments(arguments)
    if options.command == "describe":
        print("\n\n".join(explain(name) for name in ([options.name] if options.name else [*SPECS, "folder"])))
        return 0
    report = check(options)
    print(report.text(options.examples))
    if not report.ok:
        print("\nExpected:\n" + explain(options.name))
    return 0 if report.ok else 1


if __name__ == "__main__":
    sys.exit(main())
