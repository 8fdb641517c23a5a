"""What `marigold-uq depth` is to work on, and the name that each picture and video has among the outputs.

A name mirrors where a file lies below the folder that was given. It depends neither on how that folder was spelt nor on
which other files were given, so that a later run finds what an earlier one made.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from marigold_uq.picture_files import IMAGE_SUFFIXES, files_in

__all__ = ["VIDEO_SUFFIXES", "Input", "find_inputs"]

VIDEO_SUFFIXES = (".mp4", ".mov", ".avi", ".mkv", ".webm")


@dataclass(frozen=True)
class Input:
    """A picture or a video (or a folder of its frames), and the start of the names of its outputs."""

    path: Path
    name: str
    """Below the output folder, folders parted by "/"."""
    is_video: bool = False


def find_inputs(
    given: Sequence[Path], output: Path, *, recursive: bool = False, as_video: bool = False, keep_suffix: bool = False
) -> list[Input]:
    """Pictures and videos named by files and folders, in the order given, without earlier results.

    Args:
        given: Files and folders.
        output: Where results go: what lies there is not read, unless it is named itself.
        recursive: Look into folders inside folders.
        as_video: A folder is a video, and its pictures are the frames.
        keep_suffix: Names keep the suffix of the file.

    Raises:
        FileNotFoundError: A path does not exist, or there is nothing to do.
        ValueError: A folder is both input and output, or two files would have the same outputs.
    """
    found: dict[str, Input] = {}
    for path in (one.expanduser() for one in given):
        if path.is_dir() and path.resolve() == output.resolve():
            raise ValueError(
                f"{output} is both input and output: results would be taken for photographs; choose another -o"
            )
        for one in _inputs_of(path, output, recursive, as_video, keep_suffix):
            other = found.setdefault(one.name, one)
            if other.path.resolve() != one.path.resolve():
                raise ValueError(
                    f"{other.path} and {one.path} would both be written as {one.name}: give the folder above them with "
                    "--recursive, choose another -o for one of them, or --keep_suffix where the suffix differs"
                )
    if not found:
        where = ", ".join(map(str, given))
        kinds = " ".join((*IMAGE_SUFFIXES, *VIDEO_SUFFIXES))
        raise FileNotFoundError(f"no image found in {where}, nor a video; looked for files ending in {kinds}")
    return list(found.values())


def _inputs_of(path: Path, output: Path, recursive: bool, as_video: bool, keep_suffix: bool) -> Iterator[Input]:
    if not path.exists():
        raise FileNotFoundError(f"no such file or folder: {path}")
    if path.is_dir() and as_video:
        yield Input(path, path.resolve().name, is_video=True)
    elif path.is_dir():
        for file in files_in(path, (*IMAGE_SUFFIXES, *VIDEO_SUFFIXES), recursive=recursive):
            if output.resolve() not in file.resolve().parents:
                yield _input(file, file.relative_to(path), keep_suffix)
    else:
        yield _input(path, Path(path.name), keep_suffix)


def _input(file: Path, below: Path, keep_suffix: bool) -> Input:
    is_video = below.suffix.lower() in VIDEO_SUFFIXES
    return Input(file, (below if keep_suffix else below.with_suffix("")).as_posix(), is_video)
