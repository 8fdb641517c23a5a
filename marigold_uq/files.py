"""Files and folders that are complete or absent, whatever moment a process dies or the power fails.

Everything is written under a temporary name, forced to the disk, renamed, and the rename is forced to the disk too.
What is replaced or deleted is moved away first, as a whole. What dead processes left is removed by the next one that
writes there. Also here: hashes of contents, and checks of the settings behind them. `marigold_uq.folder_lock` keeps
all but one process out of a folder.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import json
import os
import platform
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from numbers import Number
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np

__all__ = [
    "TEMPORARY",
    "atomic_folder",
    "atomic_path",
    "clear_leftovers",
    "differences",
    "discard",
    "fingerprint",
    "make_folder",
    "put_in_place",
    "remove",
    "require_same",
    "sync",
]

TEMPORARY = ".marigold-uq-"
"""How names of unfinished files and folders begin."""
_LEFTOVER = re.compile(re.escape(TEMPORARY) + r"(?P<place>[0-9a-f]{8})-(?P<process>\d+)-[0-9a-f]{16}(?P<rest>.*)", re.S)
_MOVED_AWAY = ".old."
"""Comes before the own name of what was moved away to make place."""
_FORGOTTEN_SECONDS = 7 * 24 * 3600
"""When what a process of another machine left counts as left behind."""
_AT_CURRENT_FOLDER, _EXCHANGE = -100, 2
"""AT_FDCWD and RENAME_EXCHANGE of Linux."""


@contextmanager
def atomic_path(path: str | Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Give a temporary path beside `path` to write to; rename it to `path` if the block succeeds, else remove it.

    A writer may also make it a folder, as zarr does.

    Raises:
        FileExistsError: `path` exists and `overwrite` is not set; nothing is written.
        FileNotFoundError, NotADirectoryError: the folder of `path` is missing, or is a file.
        PermissionError: `path` cannot be written.
    """
    path = Path(path)
    temporary = path.with_name(_temporary_name(path.suffix))  # the suffix tells writers the format
    try:
        with _explaining(path):
            _check_target(path, overwrite)
        _clear_once(path.parent, os.getpid())
        with _explaining(path, temporary):
            yield temporary
        with _explaining(path):
            sync(temporary)
            _check_target(path, overwrite)  # another process may have been faster
            os.replace(temporary, path)
            _sync_entries(path.parent)
    finally:
        remove(temporary)


@contextmanager
def atomic_folder(path: str | Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Give a temporary folder beside `path` to fill; let it take the place of `path` if the block succeeds.

    With `overwrite` the old folder is moved away before it is deleted: at every moment one of the two is complete.
    A link stays, and the folder that it names is written.
    """
    path = Path(os.path.realpath(path)) if Path(path).is_symlink() else Path(path)
    temporary = path.with_name(_temporary_name())
    try:
        with _explaining(path):
            _check_target(path, overwrite)
            _clear_once(path.parent, os.getpid())
            temporary.mkdir()
        with _explaining(path, temporary):
            yield temporary
        with _explaining(path):
            _check_target(path, overwrite)
            put_in_place(temporary, path)
    finally:
        remove(temporary)


def put_in_place(new: Path, path: Path) -> None:
    """Let a complete folder take the place of `path`, which may exist; what was there is moved away, then deleted.

    Linux swaps the two names in one step. Elsewhere there is a moment without `path`: if the process dies then, the old
    folder comes back at the next write beside it, or by `clear_leftovers`.
    """
    sync(new)
    if not path.exists():
        os.replace(new, path)
    elif _exchange(new, path):
        _sync_entries(path.parent)
        remove(new)  # by now the old one
    else:
        old = path.with_name(_temporary_name(_MOVED_AWAY + path.name))
        os.replace(path, old)
        try:
            os.replace(new, path)
        except OSError:
            os.replace(old, path)
            raise
        _sync_entries(path.parent)
        remove(old)
    _sync_entries(path.parent)


def discard(path: Path) -> None:
    """Delete a file or a folder that exists, out of sight: under its name it is complete or absent."""
    away = path.with_name(_temporary_name())
    os.replace(path, away)
    _sync_entries(path.parent)
    remove(away)


def remove(path: Path) -> None:
    """Delete a file or a folder, as far as that is possible."""
    with suppress(OSError):  # in a folder we may not enter, an earlier error is the one to report
        shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Force a file, or a folder and all that is in it, to the disk."""
    if not path.is_dir():
        _force(path)
        return
    for folder, _, names in os.walk(path):
        for name in names:
            file = Path(folder, name)
            if file.is_file() and not file.is_symlink():
                _force(file)
        _sync_entries(Path(folder))


def _sync_entries(folder: Path) -> None:
    """Force the names in a folder to the disk, on systems and disks that know how."""
    if os.name != "posix":
        return
    try:
        _force(folder)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EACCES, errno.EPERM):
            raise


def _force(path: Path) -> None:
    number = os.open(path, os.O_RDONLY if os.name == "posix" else os.O_RDWR)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def _exchange(first: Path, second: Path) -> bool:
    """Swap two names in one step, where the system can."""
    rename = getattr(ctypes.CDLL(None), "renameat2", None) if platform.system() == "Linux" else None
    names = os.fsencode(first), os.fsencode(second)
    return rename is not None and not rename(
        _AT_CURRENT_FOLDER, names[0], _AT_CURRENT_FOLDER, names[1], ctypes.c_uint(_EXCHANGE)
    )


def clear_leftovers(folder: Path, *, alone: bool = False) -> None:
    """Remove what dead processes left in a folder.

    What was moved away for a successor that never came gets its name back. Names of running processes stay, and for a
    week those of other machines that share the disk; not those where a lock says that nobody else is there (`alone`).
    """
    for path in folder.glob(f"{TEMPORARY}*"):
        match = _LEFTOVER.fullmatch(path.name)
        is_of_here = match is not None and match["place"] == _place()
        if not (_is_left_behind(path, match) or (alone and not is_of_here)):
            continue
        name = match["rest"] if match else ""
        if name.startswith(_MOVED_AWAY) and not (before := path.with_name(name.removeprefix(_MOVED_AWAY))).exists():
            with suppress(OSError):  # another process does the same
                os.replace(path, before)
        else:
            remove(path)


@cache
def _clear_once(folder: Path, process: int) -> None:
    """Clear a folder when a process writes there for the first time: later there is nothing new of dead ones."""
    if folder.is_dir():
        clear_leftovers(folder)


def _is_left_behind(path: Path, match: re.Match[str] | None) -> bool:
    if match is not None and match["place"] == _place():
        return not _is_running(int(match["process"]))
    with suppress(OSError):
        return time.time() - path.lstat().st_mtime > _FORGOTTEN_SECONDS
    return False


def _is_running(process: int) -> bool:
    """Whether there is such a process; where that cannot be asked, there is."""
    if os.name != "posix":
        return True
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def _temporary_name(rest: str = "") -> str:
    """A new name that says which process will be to blame for it."""
    return f"{TEMPORARY}{_place()}-{os.getpid()}-{uuid4().hex[:16]}{rest}"


@cache
def _place() -> str:
    """Where the number of a process means something: this machine, and on it this container."""
    try:
        numbering = os.readlink("/proc/self/ns/pid")
    except OSError:
        numbering = ""
    return hashlib.blake2b(f"{platform.node()} {numbering}".encode(), digest_size=4).hexdigest()


def fingerprint(*parts: Any) -> str:
    """A hash of everything that a result depends on.

    Arrays count with shape, type and bytes, files (`Path`) with their content, folders with the relative names and
    contents of all their files, mappings in the order of their keys, lists and tuples alike; texts, numbers and None by
    their `repr`. Anything else is a TypeError: its `repr` may be shortened, or differ from run to run.
    """
    digest = hashlib.blake2b(digest_size=16)
    for part in _flattened(parts):
        digest.update(f"{len(part)}:".encode() + part)
    return digest.hexdigest()


def _flattened(part: Any) -> Iterator[bytes]:
    """The bytes of a part, piece by piece, with brackets around what belongs together."""
    if isinstance(part, Path):
        files = sorted(file for file in part.rglob("*") if file.is_file()) if part.is_dir() else [part]
        for file in files:
            yield str(file.relative_to(part)).encode()
            with file.open("rb") as content:
                yield hashlib.file_digest(content, "blake2b").digest()
    elif isinstance(part, np.ndarray):
        yield repr((part.shape, str(part.dtype))).encode()
        if part.dtype.hasobject:
            yield from _flattened(part.tolist())
        else:
            yield part.tobytes()
    elif isinstance(part, Mapping | list | tuple):
        items = sorted(part.items(), key=repr) if isinstance(part, Mapping) else part
        yield b"["
        for item in items:
            yield from _flattened(item)
        yield b"]"
    elif isinstance(part, str | bytes | Number | np.bool_ | None):
        yield repr(part).encode()
    else:
        raise TypeError(f"cannot hash a {type(part).__name__}: pass numpy arrays, paths, mappings, lists or numbers")


def require_same(path: str | Path, found: Mapping[str, Any], asked: Mapping[str, Any]) -> None:
    """Refuse what lies at `path` if it was made with other settings, and name them; nothing is replaced silently.

    Settings are compared as JSON holds them: a tuple equals a list, a path its text.
    """
    different = differences(found, asked)
    if different:
        raise ValueError(
            f"{path} was made with other settings: {'; '.join(different)}. Choose another output, or delete it first"
        )


def differences(found: Mapping[str, Any], asked: Mapping[str, Any]) -> list[str]:
    """What was asked for otherwise, one phrase per setting; settings are compared as JSON holds them."""
    found, asked = (json.loads(json.dumps(dict(settings), default=str)) for settings in (found, asked))
    return [
        f"{key} was {found.get(key)!r}, now {asked.get(key)!r}"
        for key in sorted(set(found) | set(asked))
        if found.get(key) != asked.get(key)
    ]


def _check_target(path: Path, overwrite: bool) -> None:
    if path.exists() and not overwrite:
        raise FileExistsError(f"{path} exists; pass overwrite=True to replace it")
    if path.parent.exists() and not path.parent.is_dir():
        raise NotADirectoryError(f"cannot write {path}: {path.parent} is a file, not a folder")
    if not path.parent.exists():
        raise FileNotFoundError(f"cannot write {path}: the folder {path.parent} does not exist; create it first")


@contextmanager
def _explaining(path: Path, temporary: Path | None = None) -> Iterator[None]:
    """Put the user's path into errors of the disk; given the temporary path, only into those that concern it."""
    try:
        yield
    except OSError as error:
        unnamed = error.filename is None and error.errno in (errno.ENOSPC, errno.EROFS)  # writes to an open file
        if temporary is not None and temporary.name not in str(error) and not unnamed:
            raise
        raise _explained(error, path) from error


def _explained(error: OSError, path: Path) -> OSError:
    """The same error with the user's path in it instead of the temporary one."""
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return PermissionError(f"no permission to write {path}; choose another folder or change its permissions")
    if error.errno == errno.ENOSPC:
        return OSError(errno.ENOSPC, f"the disk is full: cannot write {path}")
    return error


def make_folder(folder: str | Path) -> None:
    """Create a folder for output, parents included, with errors that name it; an existing folder is fine."""
    folder = Path(folder)
    try:
        missing = [path for path in (folder, *folder.parents) if not path.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        for path in missing:
            _sync_entries(path.parent)
    except (FileExistsError, NotADirectoryError) as error:
        raise NotADirectoryError(f"cannot create the folder {folder}: a file is in the way") from error
    except OSError as error:
        raise _explained(error, folder) from error
