r"""Describe the layout of each depth data set, and check a copy: what is missing, what is broken, where to get it.

    python scripts/prepare_depth.py                              # describe all data sets
    python scripts/prepare_depth.py --name kitti_eigen
    python scripts/prepare_depth.py --name nyu --root data/nyu.tar --filenames lists/nyu_test.txt      # check a copy
    python scripts/prepare_depth.py --name folder --root data/mine --depth_scale 1000 --decode all

    python scripts/prepare_depth.py --name vkitti2 --root data/vkitti2 --match "rgb/Scene(01|02|06|18)/" \
        --write_list data/vkitti2/filename_list_train.txt

The exit code is 0 if everything needed is there, 1 otherwise. Nothing but a list that is asked for is written.
"""

import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tqdm import tqdm

from marigold_uq.commands.runner import Invocation, run_command
from marigold_uq.depth.data import (
    SPECS,
    DepthDataError,
    ImageDepthFolder,
    LayoutReport,
    ListedDepth,
    check_layout,
    check_samples,
    describe,
)
from marigold_uq.files import atomic_path

FOLDER = (
    "folder: your own images and depth\n"
    "  rgb/NAME.jpg and depth/NAME.png (16 bit, --depth-scale), .npy, .npz, .exr or .tif (float);\n"
    "  or index.csv / index.json with the columns image and depth (or name),\n"
    "  and optionally depth_scale, kind (depth_m | disparity_px), group"
)


@dataclass(frozen=True)
class PrepareOptions:
    """Describe the layout of depth data sets, or check a copy of one.

    Args:
        name: One data set, or folder for your own; default: describe all.
        root: The data set's folder, or an uncompressed tar of it; given, it is checked.
        filenames: Filename list (folder: the index file); default: what is found.
        decode: Samples to decode, or all.
        examples: Examples to print for each kind of problem.
        depth_scale: For folder only: depth = stored value / depth_scale.
        write_list: Filename list to write: of the samples whose files are there.
        match: Only samples whose image path holds this regular expression come into the list.
    """

    name: str | None = None
    root: str | None = None
    filenames: str | None = None
    decode: int | Literal["all"] = 8
    examples: int = 5
    depth_scale: float | None = None
    write_list: Path | None = None
    match: str = ""

    def __post_init__(self) -> None:
        if self.name is not None and self.name not in (*SPECS, "folder"):
            raise ValueError(f"unknown data set {self.name!r}; known: {', '.join(SPECS)}, folder")
        if self.root is not None and self.name is None:
            raise ValueError("a copy is checked by name: give --name beside --root")
        if self.write_list is not None and (self.root is None or self.name == "folder"):
            raise ValueError("a list is written of a data set's copy: give --name (not folder) and --root beside it")


def check(name: str, root: str, options: PrepareOptions) -> LayoutReport:
    """Run the check that belongs to the data set."""

    def progress(items: Iterable[int]) -> Iterable[int]:
        return tqdm(items, desc="decoding", unit="sample", disable=None)

    count = None if options.decode == "all" else options.decode
    if name != "folder":
        return check_layout(name, root, options.filenames, num_decode=count, progress=progress)
    try:
        dataset = ImageDepthFolder(root, options.filenames, depth_scale=options.depth_scale)
    except DepthDataError as error:
        return LayoutReport("image and depth folder", root, fatal=str(error))
    return check_samples(dataset, "image and depth folder", root, num_decode=count, progress=progress)


def write_list(options: PrepareOptions) -> int:
    """A filename list of the samples that are whole and match; 1 if there are none."""
    assert options.name is not None
    assert options.root is not None
    assert options.write_list is not None
    data = ListedDepth(SPECS[options.name], options.root, options.filenames)
    chosen = [
        [path for _, path in entry.files()]
        for entry in data.entries
        if re.search(options.match, entry.image) and all(data.storage.contains(path) for _, path in entry.files())
    ]
    print(f"{options.write_list}: {len(chosen)} of {len(data.entries)} samples")
    if not chosen:
        return 1
    with atomic_path(options.write_list) as temporary:
        temporary.write_text("".join(" ".join(files) + "\n" for files in chosen), encoding="utf-8")
    return 0


def explain(name: str) -> str:
    """The expected layout of one data set."""
    return FOLDER if name == "folder" else describe(SPECS[name])


def run(options: PrepareOptions, invocation: Invocation) -> int:
    """Describe, or check and say what is wrong."""
    if options.root is None or options.name is None:
        print("\n\n".join(explain(name) for name in ([options.name] if options.name else [*SPECS, "folder"])))
        return 0
    if options.write_list is not None:
        return write_list(options)
    report = check(options.name, options.root, options)
    print(report.text(options.examples))
    if not report.ok:
        print("\nExpected:\n" + explain(options.name))
    return 0 if report.ok else 1


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if everything needed is there, 1 otherwise, 2 for an error that names what to mend."""
    return run_command("scripts/prepare_depth.py", PrepareOptions, run, arguments)


if __name__ == "__main__":
    sys.exit(main())
