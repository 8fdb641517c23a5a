"""Broken files are named and counted; training stops or goes on as configured."""

import json
import pickle
import re
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support.depth_files import pack, write_image, write_png16, write_scannet
from torch._utils import ExceptionWrapper
from torch.utils.data import DataLoader

from marigold_uq.depth.data import SPECS, DepthDataError, DepthDataset, ImageDepthFolder, ListedDepth

IMAGE, DEPTH = "scene0406_02/color/000001.jpg", "scene0406_02/depth/000001.png"
NAME = "scene0406_02/color/000001"


def truncate(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])


def flip_bits(path: Path) -> None:
    """Damage the compressed pixels in the middle of a PNG; header and ending stay."""
    data = bytearray(path.read_bytes())
    start = data.index(b"IDAT") + 8
    for i in range(start, start + 6):
        data[i] ^= 0xFF
    path.write_bytes(bytes(data))


BREAKAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing depth": (lambda root: (root / DEPTH).unlink(), rf"{DEPTH}: missing"),
    "missing image": (lambda root: (root / IMAGE).unlink(), rf"{IMAGE}: missing"),
    "wrong size": (
        lambda root: write_png16(root / DEPTH, np.full((5, 8), 1000)),
        rf"{NAME}: wrong size: the image is 6 x 8 .* depth 5 x 8",
    ),
    "all invalid": (lambda root: write_png16(root / DEPTH, np.zeros((6, 8))), rf"{NAME}: no valid depth pixel"),
    "corrupt PNG": (lambda root: flip_bits(root / DEPTH), rf"{DEPTH}: cannot be decoded as png"),
    "not a PNG": (lambda root: (root / DEPTH).write_bytes(b"<html>404</html>"), rf"{DEPTH}: cannot be decoded as png"),
    "truncated PNG": (lambda root: truncate(root / DEPTH), rf"{DEPTH}: cannot be decoded as png"),
    "truncated JPEG": (lambda root: truncate(root / IMAGE), rf"{IMAGE}: cannot be decoded as an image"),
    "empty file": (lambda root: (root / IMAGE).write_bytes(b""), rf"{IMAGE}: cannot be decoded as an image \(0 bytes"),
    "colour depth": (lambda root: write_image(root / DEPTH, 6, 8), rf"{DEPTH}: depth must be one \(H, W\) map"),
}


def three_samples(tmp_path: Path, breakage: str, in_tar: bool, on_error: str) -> ListedDepth:
    """Samples 0, 1, 2 of which 1 is broken."""
    folder = tmp_path / "set"
    write_scannet(folder, 3)
    lines = [f"scene0406_02/color/{i:06d}.jpg scene0406_02/depth/{i:06d}.png" for i in range(3)]
    (tmp_path / "list.txt").write_text("\n".join(lines))
    BREAKAGES[breakage][0](folder)
    root = pack(folder, tmp_path / "set.tar") if in_tar else folder
    return ListedDepth(SPECS["scannet"], root, tmp_path / "list.txt", on_error=on_error)


@pytest.mark.parametrize("in_tar", [False, True], ids=["folder", "tar"])
@pytest.mark.parametrize("breakage", list(BREAKAGES))
def test_raise_names_the_file_and_the_reason(tmp_path: Path, breakage: str, in_tar: bool) -> None:
    dataset = three_samples(tmp_path, breakage, in_tar, "raise")
    assert dataset[0]["name"].endswith("000000")
    with pytest.raises(DepthDataError, match=BREAKAGES[breakage][1]):
        dataset[1]
    assert [name for name, _ in dataset.problems] == [NAME]


@pytest.mark.parametrize("in_tar", [False, True], ids=["folder", "tar"])
@pytest.mark.parametrize("breakage", list(BREAKAGES))
def test_skip_counts_it_once_and_gives_the_next_sample(tmp_path: Path, breakage: str, in_tar: bool) -> None:
    dataset = three_samples(tmp_path, breakage, in_tar, "skip")
    assert dataset.problems == []
    for _ in range(2):
        assert [sample["name"][-1] for sample in dataset] == ["0", "2", "2"]
    ((name, reason),) = dataset.problems
    assert name == NAME
    assert re.match(BREAKAGES[breakage][1], reason)


def folder_of_arrays(root: Path, suffix: str, on_error: str = "skip") -> ImageDepthFolder:
    for index in range(2):
        write_image(root / f"rgb/{index}.png", 4, 5, seed=index)
        path = root / f"depth/{index}.{suffix}"
        path.parent.mkdir(exist_ok=True)
        values = np.full((4, 5), 2.0, np.float32)
        np.save(path, values) if suffix == "npy" else np.savez_compressed(path, depth=values)
    return ImageDepthFolder(root, on_error=on_error)


@pytest.mark.parametrize("suffix", ["npy", "npz"])
def test_skip_takes_the_next_sample_whatever_one_byte_of_an_array_file_is(tmp_path: Path, suffix: str) -> None:
    dataset = folder_of_arrays(tmp_path, suffix)
    path = tmp_path / f"depth/0.{suffix}"
    whole, names = path.read_bytes(), set()
    for place in range(0, min(len(whole), 200)):
        for value in (0, 0x7B, whole[place] ^ 0x80):
            path.write_bytes(whole[:place] + bytes([value]) + whole[place + 1 :])
            names.add(dataset[0]["name"])
    assert names == {"0", "1"}


def test_an_array_that_unpacks_to_more_than_a_picture_may_have_is_broken(tmp_path: Path) -> None:
    dataset = folder_of_arrays(tmp_path, "npz")
    with zipfile.ZipFile(tmp_path / "depth/0.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("depth.npy", claimed_array("(30000, 30000)") + b"\0" * 10**6)
    assert dataset[0]["name"] == "1"
    assert "(30000, 30000) of float64, 7,200,000,000 bytes; 536,870,912 are allowed" in dataset.problems[0][1]


def claimed_array(shape: str) -> bytes:
    text = f"{{'descr': '<f8', 'fortran_order': False, 'shape': {shape}, }}".ljust(117).encode() + b"\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text


@pytest.mark.parametrize("image", ["../secret.png", "/etc/secret.png", "rgb/../../secret.png", "a\0b.png"])
def test_an_index_may_not_lead_out_of_the_folder(tmp_path: Path, image: str) -> None:
    root = tmp_path / "set"
    folder_of_arrays(root, "npy")
    write_image(tmp_path / "secret.png", 4, 5)
    (root / "index.json").write_text(json.dumps([{"image": image, "depth": "depth/0.npy"}]))
    with pytest.raises(DepthDataError, match="not below the data set's folder"):
        ImageDepthFolder(root)[0]


def test_the_last_broken_sample_is_replaced_by_the_first(tmp_path: Path) -> None:
    dataset = three_samples(tmp_path, "missing depth", False, "skip")
    (tmp_path / "set/scene0406_02/depth/000002.png").unlink()
    assert [sample["name"][-1] for sample in dataset] == ["0", "0", "0"]
    assert len(dataset.problems) == 2


def test_a_set_without_any_good_sample_stops_even_when_skipping(tmp_path: Path) -> None:
    dataset = three_samples(tmp_path, "missing depth", False, "skip")
    for i in (0, 2):
        (tmp_path / f"set/scene0406_02/depth/{i:06d}.png").unlink()
    with pytest.raises(DepthDataError, match=r"none of the 3 samples is usable.*000000"):
        dataset[0]


def test_problems_found_by_workers_reach_the_main_process(tmp_path: Path) -> None:
    dataset = three_samples(tmp_path, "wrong size", True, "skip")
    names = [batch["name"][0][-1] for batch in DataLoader(dataset, batch_size=1, num_workers=2)]
    assert names == ["0", "2", "2"]
    ((name, reason),) = dataset.problems
    assert name == NAME
    assert "wrong size" in reason


def test_a_worker_raises_the_same_error_class(tmp_path: Path) -> None:
    dataset = three_samples(tmp_path, "corrupt PNG", False, "raise")
    with pytest.raises(DepthDataError) as caught:
        dataset[1]
    # What DataLoader does with a worker's exception, without the five seconds it then waits for the worker.
    carried = ExceptionWrapper((caught.type, caught.value, caught.tb), where="in DataLoader worker process 0")
    with pytest.raises(DepthDataError, match=rf"{DEPTH}: cannot be decoded as png"):
        carried.reraise()


def test_the_error_survives_pickling() -> None:
    error = pickle.loads(pickle.dumps(DepthDataError("missing", "a.png")))
    assert str(error) == "a.png: missing"


def test_scan_finds_every_problem_without_stopping(tmp_path: Path) -> None:
    dataset = three_samples(tmp_path, "all invalid", False, "raise")
    (tmp_path / "set/scene0406_02/depth/000002.png").unlink()
    assert [name[-1] for name, _ in dataset.scan()] == ["1", "2"]


def test_indices_are_checked_and_the_policy_too(tmp_path: Path) -> None:
    dataset: DepthDataset = three_samples(tmp_path, "missing depth", False, "skip")
    assert dataset[-1]["name"].endswith("2")
    with pytest.raises(IndexError, match="index 3 of a data set with 3"):
        dataset[3]
    with pytest.raises(ValueError, match="on_error must be one of raise, skip, got 'ignore'"):
        ListedDepth(SPECS["scannet"], tmp_path / "set", on_error="ignore")
