"""Arrays in files from strangers: npy, npz and HDF5 without pickles, links to other files, or claims beyond a limit.

A header of a hundred bytes can claim more than fits into memory, and a megabyte of zeros unpacks to a thousand. Sizes
are read first, and compared with a limit and with what the file holds.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy_format

__all__ = ["MAX_BYTES", "ArrayFileError", "check_bytes", "hdf5_array", "npz_names", "read_npy", "read_npz"]

MAX_BYTES = 2**32
"""What the arrays that are read of one file may take in memory, by default."""
_READ_HEADER = {(1, 0): npy_format.read_array_header_1_0, (2, 0): npy_format.read_array_header_2_0}

Array = np.ndarray[Any, np.dtype[Any]]


class ArrayFileError(ValueError):
    """A file of arrays that cannot be used; the message names it and says why."""


def read_npy(source: Path | bytes, name: str, *, max_bytes: int = MAX_BYTES) -> Array:
    """The array of an npy file, or of its contents.

    Args:
        source: The file or its contents.
        name: For messages.
        max_bytes: A larger array is refused.
    """
    with _explained(name), _opened(source) as file:
        available = file.seek(0, io.SEEK_END)
        file.seek(0)
        return _read_array(file, available, name, max_bytes)


def read_npz(source: Path | bytes, name: str, keys: Iterable[str], *, max_bytes: int = MAX_BYTES) -> dict[str, Array]:
    """Some arrays of an npz file, by their keys; together they may take `max_bytes`."""
    found: dict[str, Array] = {}
    with _explained(name), _opened(source) as file, zipfile.ZipFile(file) as archive:
        for key in keys:
            left = max_bytes - sum(array.nbytes for array in found.values())
            with archive.open(_member(archive, key, name)) as member:
                size = archive.getinfo(member.name).file_size
                found[key] = _read_array(member, size, f"{name}, array {key!r}", left)
    return found


def npz_names(source: Path | bytes, name: str) -> list[str]:
    """The keys of an npz file."""
    with _explained(name), _opened(source) as file, zipfile.ZipFile(file) as archive:
        return [entry.removesuffix(".npy") for entry in archive.namelist()]


def check_bytes(shape: Iterable[int], dtype: Any, name: str, max_bytes: int = MAX_BYTES) -> int:
    """The bytes of an array of numbers or text; pickled objects and more than `max_bytes` are refused."""
    shape, kind = tuple(shape), np.dtype(dtype)
    if kind.hasobject:
        raise ArrayFileError(f"{name} holds Python objects, which would have to be unpickled: store numbers or text")
    if any(size < 0 for size in shape):
        raise ArrayFileError(f"{name} claims the shape {shape}")
    size = prod(shape) * kind.itemsize
    if size > max_bytes:
        raise ArrayFileError(
            f"{name} has the shape {shape} of {kind}, {size:,} bytes; {max_bytes:,} are allowed: take a part of it, or "
            "raise the limit"
        )
    return size


def hdf5_array(file: Any, key: str, name: str) -> Any:
    """A dataset of numbers in an open HDF5 file, not read yet; one that lies in another file is refused."""
    import h5py

    with _explained(name):
        link = file.get(key, getlink=True)
        if link is None:
            raise ArrayFileError(f"{name} has no array {key!r}; it holds {', '.join(map(str, file)) or 'nothing'}")
        if not isinstance(link, h5py.HardLink):  # a soft one may lead to one into another file
            where = f"another file, {link.filename}" if isinstance(link, h5py.ExternalLink) else link.path
            raise ArrayFileError(f"{name}: {key!r} is a link to {where}, which is not followed")
        dataset = file[key]
        if not isinstance(dataset, h5py.Dataset):
            raise ArrayFileError(f"{name}: {key!r} is a {type(dataset).__name__}; expected an array")
        if dataset.is_virtual or dataset.external:
            raise ArrayFileError(f"{name}: the values of {key!r} lie in other files, which are not read")
        if dataset.shape is None or dataset.dtype.kind not in "iuf":
            raise ArrayFileError(f"{name}: {key!r} holds {dataset.dtype} of shape {dataset.shape}; expected numbers")
        return dataset


@contextmanager
def _opened(source: Path | bytes) -> Iterator[IO[bytes]]:
    with io.BytesIO(source) if isinstance(source, bytes) else source.open("rb") as file:
        yield file


@contextmanager
def _explained(name: str) -> Iterator[None]:
    """Turn whatever a damaged file makes its reader raise into one error that names the file."""
    try:
        yield
    except (ArrayFileError, FileNotFoundError, PermissionError, IsADirectoryError, ImportError):
        raise
    except Exception as error:  # numpy, zipfile and h5py meet damage with anything
        raise ArrayFileError(f"{name} is damaged: {error or type(error).__name__}") from error


def _member(archive: zipfile.ZipFile, key: str, name: str) -> str:
    """The entry of an npz archive that holds a key."""
    names = archive.namelist()
    for entry in (f"{key}.npy", key):
        if entry in names:
            return entry
    held = ", ".join(entry.removesuffix(".npy") for entry in names)
    raise ArrayFileError(f"{name} has no array {key!r}; it has {held or 'none'}")


def _read_array(file: IO[bytes], available: int, name: str, max_bytes: int) -> Array:
    """The array at the start of a file of `available` bytes."""
    version = npy_format.read_magic(file)
    read_header = _READ_HEADER.get(version)
    if read_header is None:
        raise ArrayFileError(f"{name} is an npy file of version {version}; known: {', '.join(map(str, _READ_HEADER))}")
    shape, fortran_order, dtype = read_header(file)
    size = check_bytes(shape, dtype, name, max_bytes)
    left = available - file.tell()
    if left < size:
        raise ArrayFileError(f"{name} is cut short: its shape {shape} of {dtype} takes {size:,} bytes, {left:,} follow")
    content = file.read(size)
    if len(content) < size:
        raise ArrayFileError(f"{name} is cut short: {len(content):,} of {size:,} bytes")
    flat = np.frombuffer(bytearray(content), dtype=dtype, count=prod(shape))
    return flat.reshape(shape[::-1]).T if fortran_order else flat.reshape(shape)
