"""Files that are whole or not there: written under a temporary name, then renamed."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4


@contextmanager
def atomic_path(path: str | Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Give a temporary path beside `path` to write to; rename it to `path` if the block succeeds, else remove it.

    Raises:
        FileExistsError: `path` exists and `overwrite` is not set; nothing is written.
        FileNotFoundError, NotADirectoryError: the folder of `path` is missing, or is a file.
        PermissionError: `path` cannot be written.
    """
    path = Path(path)
    temporary = path.with_name(f".marigold-uq-{uuid4().hex}{path.suffix}")  # the suffix tells writers the format
    try:
        _check_target(path, overwrite)
        yield temporary
        _check_target(path, overwrite)  # another process may have been faster
        os.replace(temporary, path)
    except OSError as error:
        raise _explained(error, path) from error
    finally:
        with suppress(OSError):  # in a folder we may not enter, the error above is the one to report
            temporary.unlink(missing_ok=True)


def _check_target(path: Path, overwrite: bool) -> None:
    if path.exists() and not overwrite:
        raise FileExistsError(f"{path} exists; pass overwrite=True to replace it")
    if path.parent.exists() and not path.parent.is_dir():
        raise NotADirectoryError(f"cannot write {path}: {path.parent} is a file, not a folder")
    if not path.parent.exists():
        raise FileNotFoundError(f"cannot write {path}: the folder {path.parent} does not exist; create it first")


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
