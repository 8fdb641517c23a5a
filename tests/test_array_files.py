"""npy, npz and HDF5 from strangers: what was written comes back; nothing runs, nothing fills the memory."""

import io
import os
import pickle
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from marigold_uq.array_files import ArrayFileError, hdf5_array, npz_names, read_npy, read_npz


def npy(array: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


def npz(compressed: bool = True, **arrays: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    (np.savez_compressed if compressed else np.savez)(buffer, **arrays)  # type: ignore[arg-type]
    return buffer.getvalue()


def header_of(shape: str, dtype: str = "<f8") -> bytes:
    """An npy file of version 1.0 that claims a shape, and has no values."""
    text = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape}, }}".encode()
    text += b" " * (117 - len(text)) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text


ARRAYS = [
    np.arange(6.0).reshape(2, 3),
    np.asfortranarray(np.arange(24, dtype=np.int16).reshape(2, 3, 4)),
    np.array(3.5, np.float32),
    np.zeros((0, 3)),
    np.array(["concrete", "energy"]),
    np.arange(4, dtype=">u4"),
    np.array([True, False]),
]


@pytest.mark.parametrize("array", ARRAYS, ids=[str(array.dtype) + str(array.shape) for array in ARRAYS])
def test_what_numpy_wrote_comes_back(array: np.ndarray, tmp_path: Path) -> None:
    (tmp_path / "a.npy").write_bytes(npy(array))
    for found in (read_npy(npy(array), "a"), read_npy(tmp_path / "a.npy", "a")):
        assert found.dtype == array.dtype
        np.testing.assert_array_equal(found, array)
    for compressed in (False, True):
        content = npz(compressed, first=array, second=ARRAYS[0])
        assert npz_names(content, "a") == ["first", "second"]
        np.testing.assert_array_equal(read_npz(content, "a", ["first"])["first"], array)


class Bomb:
    """Unpickling it makes a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def test_a_pickle_is_refused_and_not_run(tmp_path: Path) -> None:
    target = tmp_path / "was_here"
    objects = np.empty(1, object)
    objects[0] = Bomb(target)
    buffer = io.BytesIO()
    np.save(buffer, objects, allow_pickle=True)
    for content in (buffer.getvalue(), pickle.dumps(Bomb(target))):
        with pytest.raises(ArrayFileError, match="stranger"):
            read_npy(content, "stranger.npy")
        archive = io.BytesIO()
        with zipfile.ZipFile(archive, "w") as file:
            file.writestr("x.npy", content)
        with pytest.raises(ArrayFileError, match="stranger"):
            read_npz(archive.getvalue(), "stranger.npz", ["x"])
    assert not target.exists()


def test_a_size_that_is_only_claimed_takes_no_memory() -> None:
    tracemalloc.start()
    with pytest.raises(ArrayFileError, match=r"a\.npy has the shape \(1000000, 1000000\) of float64, 8,000,000,0"):
        read_npy(header_of("(1000000, 1000000)"), "a.npy")
    with pytest.raises(ArrayFileError, match=r"cut short: its shape \(1000, 1000\).*takes 8,000,000 bytes, 0 follow"):
        read_npy(header_of("(1000, 1000)"), "a.npy")
    with pytest.raises(ArrayFileError, match=r"claims the shape \(-1,\)"):
        read_npy(header_of("(-1,)"), "a.npy")
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()


def test_an_archive_that_unpacks_to_more_than_allowed_is_refused() -> None:
    content = npz(x=np.zeros(10**6), y=np.zeros(10**6))
    assert len(content) < 20_000
    assert read_npz(content, "a.npz", ["x", "y"], max_bytes=16 * 10**6)["y"].shape == (10**6,)
    with pytest.raises(ArrayFileError, match=r"array 'x' has the shape \(1000000,\) .* 7,999,999 are allowed"):
        read_npz(content, "a.npz", ["x"], max_bytes=8 * 10**6 - 1)
    with pytest.raises(ArrayFileError, match=r"array 'y' has the shape"):
        read_npz(content, "a.npz", ["x", "y"], max_bytes=16 * 10**6 - 1)


def test_missing_keys_and_other_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ArrayFileError, match=r"a\.npz has no array 'z'; it has x, y"):
        read_npz(npz(x=np.zeros(1), y=np.zeros(1)), "a.npz", ["z"])
    for content in (b"", b"PK\x03\x04", b"some text", npz(x=np.zeros(3))[:60]):
        with pytest.raises(ArrayFileError, match=r"a\.npz is damaged"):
            read_npz(content, "a.npz", ["x"])
    with pytest.raises(FileNotFoundError):
        read_npy(tmp_path / "none.npy", "none")


@pytest.mark.parametrize("kind", ["npy", "npz", "stored npz"])
def test_damage_is_an_error_of_ours_or_an_array(kind: str) -> None:
    """A byte or a few changed, cut, doubled."""
    array = np.arange(12.0).reshape(3, 4)
    content = npy(array) if kind == "npy" else npz(kind == "npz", x=array)
    rng, refused = np.random.default_rng(0), list[str]()
    for number in range(600):
        damaged = bytearray(content)
        for place in rng.integers(0, len(content), 1 + number % 3):
            damaged[place] = rng.integers(0, 256)
        whole = bytes(damaged[: rng.integers(0, len(damaged))] if number % 5 == 0 else damaged)
        try:
            found = read_npy(whole, "a") if kind == "npy" else read_npz(whole, "a", ["x"])["x"]
            assert isinstance(found, np.ndarray)
        except ArrayFileError as error:
            refused.append(str(error))
    assert 100 < len(refused) < 600
    assert all(message.startswith("a") for message in refused)


def test_hdf5_never_leads_to_another_file(tmp_path: Path) -> None:
    secret = tmp_path / "secret.h5"
    with h5py.File(secret, "w") as file:
        file["values"] = np.arange(3.0)
    (tmp_path / "raw").write_bytes(np.arange(3.0).tobytes())
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["own"] = np.arange(2.0)
        file["link"] = h5py.ExternalLink(str(secret), "values")
        file["whole"] = h5py.ExternalLink(str(secret), "/")
        file["soft"] = h5py.SoftLink("/whole/values")  # no link to another file itself
        file.create_dataset("raw", (3,), "f8", external=[(str(tmp_path / "raw"), 0, 24)])
        layout = h5py.VirtualLayout((3,), "f8")
        layout[:] = h5py.VirtualSource(str(secret), "values", (3,))
        file.create_virtual_dataset("virtual", layout)
        file["text"] = "words"
        file.create_group("group")
    with h5py.File(tmp_path / "a.h5") as file:
        np.testing.assert_array_equal(hdf5_array(file, "own", "a.h5"), [0, 1])
        for key, message in {
            "link": "is a link to another file",
            "soft": "is a link to /whole/values, which is not followed",
            "raw": "lie in other files",
            "virtual": "lie in other files",
            "text": "expected numbers",
            "group": "is a Group; expected an array",
            "none": "no array 'none'; it holds group, link, own, raw, soft",
        }.items():
            with pytest.raises(ArrayFileError, match=message):
                hdf5_array(file, key, "a.h5")
