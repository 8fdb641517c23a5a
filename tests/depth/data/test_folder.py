"""Image and depth folders, index files, and rows of Hugging Face datasets."""

import io
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from support.depth_files import write_array, write_image, write_png16

from marigold_uq.depth.data import DepthDataError, HuggingFaceDepth, ImageDepthFolder, build_dataset
from marigold_uq.depth.data.decoding import exr_channel_names

VALUES = np.random.default_rng(0).uniform(0.5, 9, (4, 5)).astype(np.float32)


def write_depth(path: Path, values: np.ndarray) -> None:
    """Floats in the format of the ending; EXR by the OpenEXR package."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".npy":
        np.save(path, values)
    elif path.suffix == ".npz":
        np.savez(path, depth=values, confidence=np.ones_like(values))
    elif path.suffix in (".tif", ".tiff"):
        Image.fromarray(values, mode="F").save(path)
    else:
        openexr = pytest.importorskip("OpenEXR", reason="the OpenEXR package writes the test file")
        header = {"compression": openexr.ZIP_COMPRESSION, "type": openexr.scanlineimage}
        openexr.File(header, {"Z": values}).write(str(path))


@pytest.mark.parametrize("suffix", [".npy", ".npz", ".tif", ".tiff", ".exr"])
def test_float_files_are_metres_as_they_are(tmp_path: Path, suffix: str) -> None:
    pixels = write_image(tmp_path / "rgb/a.png", 4, 5)
    values = VALUES.copy()
    values[0, :4] = np.nan, np.inf, -1, 0
    write_depth(tmp_path / f"depth/a{suffix}", values)

    (sample,) = list(ImageDepthFolder(tmp_path))

    valid = np.ones((4, 5), dtype=bool)
    valid[0, :4] = False
    assert torch.equal(sample["valid"][0], torch.from_numpy(valid))
    assert torch.equal(sample["depth"][0], torch.from_numpy(np.where(valid, values, np.float32(0))))
    assert torch.equal(
        sample["image"], torch.from_numpy(pixels.transpose(2, 0, 1).astype(np.float32) / np.float32(255))
    )
    assert sample["name"] == "a"
    assert {key: value.dtype for key, value in sample.items() if key != "name"} == {
        "image": torch.float32,
        "depth": torch.float32,
        "valid": torch.bool,
    }


def test_exr_with_equal_colour_channels_is_depth_and_with_different_ones_is_refused(tmp_path: Path) -> None:
    openexr = pytest.importorskip("OpenEXR", reason="the OpenEXR package writes the test file")
    header = {"compression": openexr.ZIP_COMPRESSION, "type": openexr.scanlineimage}
    write_image(tmp_path / "rgb/a.png", 4, 5)
    (tmp_path / "depth").mkdir()
    openexr.File(header, {"RGB": np.dstack([VALUES] * 3)}).write(str(tmp_path / "depth/a.exr"))
    assert torch.equal(ImageDepthFolder(tmp_path)[0]["depth"][0], torch.from_numpy(VALUES))
    openexr.File(header, {"RGB": np.dstack([VALUES, 2 * VALUES, VALUES])}).write(str(tmp_path / "depth/a.exr"))
    with pytest.raises(DepthDataError, match="differing colour channels"):
        ImageDepthFolder(tmp_path)[0]
    openexr.File(header, {"RGB": np.dstack([VALUES, 2 * VALUES, VALUES]), "Z": VALUES}).write(
        str(tmp_path / "depth/a.exr")
    )
    assert torch.equal(ImageDepthFolder(tmp_path)[0]["depth"][0], torch.from_numpy(VALUES))
    (tmp_path / "depth/a.exr").write_bytes((tmp_path / "depth/a.exr").read_bytes()[:50])
    with pytest.raises(DepthDataError, match=r"depth/a\.exr"):
        ImageDepthFolder(tmp_path)[0]


@pytest.mark.parametrize("channels", ["Z", "Y", "RGB"])
def test_exr_through_opencv_is_right_or_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, channels: str
) -> None:
    openexr = pytest.importorskip("OpenEXR", reason="the OpenEXR package writes the test file")
    header = {"compression": openexr.ZIP_COMPRESSION, "type": openexr.scanlineimage}
    write_image(tmp_path / "rgb/a.png", 4, 5)
    (tmp_path / "depth").mkdir()
    pixels = VALUES if len(channels) == 1 else np.dstack([VALUES] * 3)
    openexr.File(header, {channels: pixels}).write(str(tmp_path / "depth/a.exr"))
    assert exr_channel_names((tmp_path / "depth/a.exr").read_bytes(), "a.exr") == sorted(channels)

    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)  # as if the package were not there
    monkeypatch.setenv("OPENCV_IO_ENABLE_OPENEXR", "1")
    if channels != "Z" and cv2_reads_exr():
        assert torch.equal(ImageDepthFolder(tmp_path)[0]["depth"][0], torch.from_numpy(VALUES))
    else:
        with pytest.raises(DepthDataError, match="pip install OpenEXR"):
            ImageDepthFolder(tmp_path)[0]


def cv2_reads_exr() -> bool:
    """Whether this OpenCV was built with EXR."""
    import cv2

    (line,) = (line for line in cv2.getBuildInformation().splitlines() if "OpenEXR" in line)
    return not line.split(":")[1].strip().startswith("NO")


def test_integer_files_need_a_scale(tmp_path: Path) -> None:
    write_image(tmp_path / "images/a.jpg", 2, 3)
    write_png16(tmp_path / "depth/a.png", np.array([[0, 500, 1000], [1500, 65535, 1]]))
    with pytest.raises(DepthDataError, match=r"depth/a\.png: uint16 values need depth_scale"):
        ImageDepthFolder(tmp_path)[0]
    sample = ImageDepthFolder(tmp_path, depth_scale=1000, min_depth=0.001, max_depth=65)[0]
    assert sample["depth"][0].tolist() == [[0, 0.5, 1.0], [1.5, 0, 0]]
    assert sample["valid"][0].tolist() == [[False, True, True], [True, False, False]]
    with pytest.raises(DepthDataError, match="depth_scale must be positive, got 0"):
        ImageDepthFolder(tmp_path, depth_scale=0)[0]


def test_disparity_becomes_its_inverse_and_zero_stays_invalid(tmp_path: Path) -> None:
    write_image(tmp_path / "rgb/a.jpg", 1, 3)
    write_png16(tmp_path / "depth/a.png", np.array([[0, 256, 1024]]))
    sample = ImageDepthFolder(tmp_path, depth_scale=256, kind="disparity_px")[0]
    assert sample["depth"][0].tolist() == [[0, 1.0, 0.25]]
    assert sample["valid"][0].tolist() == [[False, True, True]]


def test_stems_match_in_subfolders_and_unmatched_files_are_problems(tmp_path: Path) -> None:
    for name in ("x/1.png", "x/2.jpg", "y/1.png"):
        write_image(tmp_path / "rgb" / name, 4, 5)
    for name in ("x/1.npy", "y/1.npy", "z/9.npy"):
        write_array(tmp_path / "depth" / name, VALUES)
    (tmp_path / "depth/readme.txt").write_text("no depth")
    dataset = ImageDepthFolder(tmp_path, on_error="skip")
    assert [sample["name"] for sample in dataset] == ["x/1", "y/1", "y/1", "x/1"]
    assert dataset.problems == [("x/2", "x/2: missing depth file"), ("z/9", "z/9: missing image file")]


def test_two_files_of_one_stem_are_ambiguous(tmp_path: Path) -> None:
    write_image(tmp_path / "rgb/a.png", 4, 5)
    write_image(tmp_path / "rgb/a.jpg", 4, 5)
    write_array(tmp_path / "depth/a.npy", VALUES)
    with pytest.raises(DepthDataError, match="two files have the stem 'a'"):
        ImageDepthFolder(tmp_path)


@pytest.mark.parametrize("kind_of_index", ["csv", "json"])
def test_an_index_gives_paths_scale_and_kind_per_row(tmp_path: Path, kind_of_index: str) -> None:
    write_image(tmp_path / "pictures/a.jpg", 1, 2)
    write_image(tmp_path / "pictures/b.jpg", 1, 2)
    write_png16(tmp_path / "maps/first.png", np.array([[100, 200]]))
    write_png16(tmp_path / "maps/second.png", np.array([[100, 200]]))
    rows: list[dict[str, Any]] = [
        {"image": "pictures/a.jpg", "depth": "maps/first.png", "depth_scale": 100, "kind": "depth_m", "note": "x"},
        {"image": "pictures/b.jpg", "depth": "maps/second.png", "depth_scale": 50, "kind": "disparity_px", "note": ""},
    ]
    index = tmp_path / f"rows.{kind_of_index}"
    if kind_of_index == "json":
        index.write_text(json.dumps(rows))
    else:
        cells = [list(rows[0]), *([str(cell) for cell in row.values()] for row in rows)]
        index.write_text("\n".join(",".join(row) for row in cells))
    dataset = build_dataset("folder", tmp_path, index)
    assert dataset[0]["depth"][0].tolist() == [[1.0, 2.0]]
    assert dataset[1]["depth"][0].tolist() == [[0.5, 0.25]]
    assert dataset[1]["name"] == "pictures/b"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("not json", "is not a readable index"),
        ('{"a": 1}', "must hold a list of objects"),
        ('[{"depth": "a.npy"}]', "row 0 needs image and depth, or name"),
        ('[{"image": "a.jpg", "depth": "a.npy", "kind": "inches"}]', "row 0: unknown kind 'inches'"),
        ('[{"image": "a.jpg", "depth": "a.npy", "depth_scale": "mm"}]', "row 0: depth_scale 'mm' is not a number"),
        ("[]", "no sample found"),
    ],
)
def test_a_wrong_index_names_its_row(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "index.json").write_text(text)
    with pytest.raises(DepthDataError, match=message):
        ImageDepthFolder(tmp_path)


def test_grey_palette_alpha_and_16_bit_images_become_rgb(tmp_path: Path) -> None:
    grey = np.array([[0, 51], [102, 255]], dtype=np.uint8)
    pictures = {
        "grey": Image.fromarray(grey),
        "palette": Image.fromarray(grey).convert("P"),
        "alpha": Image.fromarray(np.dstack([grey, grey, grey, grey // 2])),
        "deep": Image.fromarray(grey.astype(np.uint16) * 257),
    }
    (tmp_path / "rgb").mkdir()
    for name, picture in pictures.items():
        picture.save(tmp_path / f"rgb/{name}.png")
        write_array(tmp_path / f"depth/{name}.npy", np.ones((2, 2)))
    expected = torch.from_numpy(grey / 255).float().expand(3, 2, 2)
    for sample in ImageDepthFolder(tmp_path):
        torch.testing.assert_close(sample["image"], expected, rtol=0, atol=1e-6, msg=sample["name"])  # float32 rounding


# ------------------------------------------------------------------------------------------------ Hugging Face rows


def png_bytes(array: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(array).save(buffer, format="PNG")
    return buffer.getvalue()


def test_rows_of_pil_numpy_tensor_list_and_bytes_give_the_same_sample() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (4, 5, 3), dtype=np.uint8)
    millimetres = np.random.default_rng(1).integers(1, 9000, (4, 5)).astype(np.uint16)
    rows = [
        {"image": Image.fromarray(pixels), "depth": Image.fromarray(millimetres)},
        {"image": pixels, "depth": millimetres},
        {"image": torch.from_numpy(pixels).permute(2, 0, 1), "depth": torch.from_numpy(millimetres.astype(np.int32))},
        {"image": pixels.tolist(), "depth": millimetres.tolist()},
        {"image": png_bytes(pixels), "depth": png_bytes(millimetres)},
        {
            "image": {"bytes": png_bytes(pixels), "path": "a.png"},
            "depth": {"bytes": png_bytes(millimetres), "path": None},
        },
        {"image": (pixels / np.float32(255)).astype(np.float32), "depth": millimetres[..., None]},
    ]
    dataset = HuggingFaceDepth(rows, depth_scale=1000)
    for sample in dataset:
        assert torch.equal(sample["depth"][0], torch.from_numpy(millimetres.astype(np.float32) / np.float32(1000)))
        assert torch.equal(sample["image"], torch.from_numpy(pixels.transpose(2, 0, 1).astype(np.float32)) / 255)
    assert dataset[3]["name"] == "row_000003"


def test_broken_rows_are_problems_and_a_wrong_column_lists_the_columns() -> None:
    good = {"image": np.zeros((2, 2, 3), np.uint8), "depth": np.ones((2, 2)), "id": "fine"}
    rows = [
        {**good, "depth": None},
        {**good, "depth": np.ones((2, 3))},
        {**good, "image": b"no image"},
        {**good, "image": 300 * np.ones((2, 2, 3))},
        good,
    ]
    dataset = HuggingFaceDepth(rows, name_column="id", on_error="skip")
    assert [sample["name"] for sample in dataset] == ["fine"] * 5
    reasons = [reason for _, reason in dataset.problems]
    expected = ["missing depth", "wrong size", "cannot be decoded as an image", "image values must lie"]
    assert [word in reason for word, reason in zip(expected, reasons, strict=True)] == [True] * 4
    with pytest.raises(DepthDataError, match="no column 'depth_map'; the row has image, depth, id"):
        HuggingFaceDepth(rows, depth_column="depth_map")[0]


def test_loading_by_name_without_the_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match="pip install datasets"):
        build_dataset("huggingface", "somebody/depth")


def test_a_real_datasets_folder_is_read(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="Hugging Face datasets is optional")
    pixels = np.random.default_rng(0).integers(0, 256, (4, 5, 3), dtype=np.uint8)
    features = datasets.Features(
        {"image": datasets.Image(), "depth_map": datasets.Image(), "name": datasets.Value("string")}
    )
    columns = {"image": [Image.fromarray(pixels)], "depth_map": [Image.fromarray(VALUES)], "name": ["first"]}
    datasets.Dataset.from_dict(columns, features=features).save_to_disk(str(tmp_path / "saved"))
    dataset = build_dataset("huggingface", tmp_path / "saved", depth_column="depth_map", name_column="name")
    sample = dataset[0]
    assert sample["name"] == "first"
    assert torch.equal(sample["depth"][0], torch.from_numpy(VALUES))
