"""Where files come from: a folder, or an uncompressed tar read by several workers at once."""

import os
import posixpath
import tarfile
from pathlib import Path
from typing import Protocol

from marigold_uq.depth.data.sample import DepthDataError


class Storage(Protocol):
    """Read-only files, addressed by posix paths relative to the data set."""

    root: Path

    def read(self, path: str) -> bytes:
        """The bytes of a file; DepthDataError if it is missing or unreadable."""

    def contains(self, path: str) -> bool:
        """Whether the file exists."""

    def names(self) -> list[str]:
        """All files, sorted."""


def _normalise_path(path: str) -> str:
    """`./a//b.png` and `a/b.png` are the same member."""
    return posixpath.normpath(path.replace("\\", "/"))


class FolderStorage:
    """Files below a folder."""

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root)

    def read(self, path: str) -> bytes:
        """The bytes of `root/path`."""
        try:
            return self._inside(path).read_bytes()
        except FileNotFoundError:
            raise DepthDataError(f"missing file (looked in {self.root})", path) from None
        except OSError as error:
            raise DepthDataError(f"cannot be read: {error}", path) from error

    def contains(self, path: str) -> bool:
        """Whether `root/path` is a file."""
        return self._inside(path).is_file()

    def _inside(self, path: str) -> Path:
        """Lists and indices of strangers name files below the root only; links there are the user's own."""
        normal = _normalise_path(path)
        if normal.startswith(("/", "../")) or normal == ".." or Path(path).is_absolute() or "\0" in path:
            raise DepthDataError(f"is not below the data set's folder {self.root}; give paths relative to it", path)
        return self.root / path

    def names(self) -> list[str]:
        """All files below the folder, sorted, as posix paths relative to it."""
        found = []
        for folder, _, files in os.walk(self.root, followlinks=True):
            relative = Path(folder).relative_to(self.root)
            found += [(relative / name).as_posix() for name in files]
        return sorted(found)


class TarStorage:
    """Members of an uncompressed tar.

    The headers are read once, here; afterwards a member is a byte range. Each read opens the file anew, so no file
    position is shared between forked or spawned workers, or between threads.
    """

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root)
        self._ranges = self._index()

    def _index(self) -> dict[str, tuple[int, int]]:
        """Member name -> (offset, size) of its bytes."""
        try:
            with tarfile.open(self.root, mode="r:") as archive:
                return {_normalise_path(m.name): (m.offset_data, m.size) for m in archive if m.isreg()}
        except tarfile.ReadError as error:
            raise DepthDataError(
                f"not a readable uncompressed tar ({error}); a compressed one has no random access, unpack it first",
                str(self.root),
            ) from error

    def read(self, path: str) -> bytes:
        """The bytes of one member."""
        member = self._ranges.get(_normalise_path(path))
        if member is None:
            raise DepthDataError(f"missing member (looked in {self.root})", path)
        offset, size = member
        try:
            with open(self.root, "rb") as archive:
                archive.seek(offset)
                data = archive.read(size)
        except OSError as error:
            raise DepthDataError(f"cannot be read from {self.root}: {error}", path) from error
        if len(data) != size:
            raise DepthDataError(f"truncated tar: {len(data)} of {size} bytes in {self.root}", path)
        return data

    def contains(self, path: str) -> bool:
        """Whether the tar has this member."""
        return _normalise_path(path) in self._ranges

    def names(self) -> list[str]:
        """All members, sorted, without a leading `./`."""
        return sorted(self._ranges)


def open_storage(root: str | Path) -> FolderStorage | TarStorage:
    """A folder or a tar, whichever `root` is."""
    root = Path(root)
    if root.is_dir():
        return FolderStorage(root)
    if root.is_file():
        return TarStorage(root)
    raise DepthDataError("is neither a folder nor a tar file; give the data set's root", str(root))
