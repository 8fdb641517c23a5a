"""Files and folders that are complete or absent, hashes of their contents, and checks of the settings behind them."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from numbers import Number
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np

__all__ = [
    "TEMPORARY",
    "atomic_folder",
    "atomic_path",
    "differences",
    "fingerprint",
    "make_folder",
    "remove",
    "require_same",
]

TEMPORARY = ".marigold-uq-"
"""How names of unfinished files and folders begin."""


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
    temporary = path.with_name(f"{TEMPORARY}{uuid4().hex}{path.suffix}")  # the suffix tells writers the format
    try:
        with _explaining(path):
            _check_target(path, overwrite)
        with _explaining(path, temporary):
            yield temporary
        with _explaining(path):
            _check_target(path, overwrite)  # another process may have been faster
            os.replace(temporary, path)
    finally:
        remove(temporary)


@contextmanager
def atomic_folder(path: str | Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Give a temporary folder beside `path` to fill; rename it to `path` if the block succeeds, else remove it.

    With `overwrite` the old folder is moved away before it is deleted: at every moment one of the two is complete.
    A link stays, and the folder that it names is written.
    """
    path = Path(os.path.realpath(path)) if Path(path).is_symlink() else Path(path)
    temporary = path.with_name(f"{TEMPORARY}{uuid4().hex}")
    old = path.with_name(f"{TEMPORARY}{uuid4().hex}")
    try:
        with _explaining(path):
            _check_target(path, overwrite)
            temporary.mkdir()
        with _explaining(path, temporary):
            yield temporary
        with _explaining(path):
            _check_target(path, overwrite)
            if path.exists():
                os.replace(path, old)
            os.replace(temporary, path)
    finally:
        if old.exists() and not path.exists():
            os.replace(old, path)
        for leftover in (temporary, old):
            remove(leftover)


def remove(path: Path) -> None:
    """Delete a file or a folder, as far as that is possible."""
    with suppress(OSError):  # in a folder we may not enter, an earlier error is the one to report
        shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)


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
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise NotADirectoryError(f"cannot create the folder {folder}: a file is in the way") from error
    except OSError as error:
        raise _explained(error, Path(folder)) from error
