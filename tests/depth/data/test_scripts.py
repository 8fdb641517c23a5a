"""The preparation scripts: what they say about complete and incomplete data, and Hypersim's conversion."""

from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from PIL import Image
from support.depth_files import pack, write_array, write_image, write_list, write_scannet
from support.scripts import load_script
from support.tiny_training import write_vkitti2

from marigold_uq.depth.data import SPECS, build_dataset
from marigold_uq.depth.data.hypersim import encode_depth, planar_depth, tone_map


@pytest.fixture(scope="module")
def prepare_depth() -> ModuleType:
    return load_script("scripts/prepare_depth.py")


def test_describe_prints_every_layout(prepare_depth: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert prepare_depth.main([]) == 0
    text = capsys.readouterr().out
    for spec in SPECS.values():
        assert f"{spec.name}: {spec.title}" in text
        assert spec.example.split()[0] in text
    assert "metres = value / 256" in text
    assert "https://diode-dataset.org/" in text


@pytest.mark.parametrize("in_tar", [False, True], ids=["folder", "tar"])
def test_check_of_complete_data_succeeds(
    prepare_depth: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], in_tar: bool
) -> None:
    filenames = write_list(tmp_path / "list.txt", *write_scannet(tmp_path / "set", 4))
    root = pack(tmp_path / "set", tmp_path / "set.tar") if in_tar else tmp_path / "set"
    assert prepare_depth.main(["--name", "scannet", "--root", str(root), "--filenames", str(filenames)]) == 0
    text = capsys.readouterr().out
    assert "4 samples" in text
    assert "all files present, 4 samples decoded without error" in text
    assert "the published split has 800 samples" in text


def test_check_says_exactly_what_is_missing_and_what_is_broken(
    prepare_depth: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    filenames = write_list(tmp_path / "list.txt", *write_scannet(tmp_path, 9))
    for i in (0, 2, 4):
        (tmp_path / f"scene0406_02/depth/{i:06d}.png").unlink()
    (tmp_path / "scene0406_02/color/000001.jpg").unlink()
    (tmp_path / "scene0406_02/depth/000005.png").write_bytes(b"broken")
    arguments = ["--name", "scannet", "--root", str(tmp_path), "--filenames", str(filenames), "--examples", "2"]
    assert prepare_depth.main([*arguments, "--decode", "all"]) == 1
    text = capsys.readouterr().out
    assert "3 depth files missing:\n    scene0406_02/depth/000000.png\n    scene0406_02/depth/000002.png\n" in text
    assert "    ... and 1 more" in text
    assert "1 image files missing:\n    scene0406_02/color/000001.jpg" in text
    assert "1 of 5 decoded samples broken:\n    scene0406_02/color/000005: scene0406_02/depth/000005.png:" in text
    assert "http://www.scan-net.org/" in text
    assert prepare_depth.main([*arguments, "--decode", "0"]) == 1  # what is missing is found without decoding


@pytest.mark.parametrize("name", list(SPECS))
def test_check_of_an_empty_folder_says_where_to_get_each_set(
    prepare_depth: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    assert prepare_depth.main(["--name", name, "--root", str(tmp_path)]) == 1
    text = capsys.readouterr().out
    assert "unusable" in text
    assert "http" in text.split("get it from:")[1]


def test_check_reads_image_and_depth_folders(
    prepare_depth: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for i in range(3):
        write_image(tmp_path / f"rgb/{i}.png", 2, 3)
        write_array(tmp_path / f"depth/{i}.npy", np.ones((2, 3)))
    arguments = ["--name", "folder", "--root", str(tmp_path), "--decode", "all"]
    assert prepare_depth.main(arguments) == 0
    (tmp_path / "depth/1.npy").unlink()
    assert prepare_depth.main(arguments) == 1
    assert "1 of 3 decoded samples broken:\n    1: 1: missing depth file" in capsys.readouterr().out
    assert prepare_depth.main(["--name", "folder", "--root", str(tmp_path / "absent")]) == 1


# ---------------------------------------------------------------------------------------------------------- Hypersim


def test_planar_depth_of_a_wall_is_constant() -> None:
    x = np.arange(1024) - 511.5
    y = np.arange(768) - 383.5
    rays = np.sqrt((x[None] / 886.81) ** 2 + (y[:, None] / 886.81) ** 2 + 1)  # length of the ray that has z = 1
    np.testing.assert_allclose(planar_depth(3.0 * rays), 3.0, rtol=1e-12)


def test_tone_mapping_brings_the_90th_percentile_of_brightness_to_08() -> None:
    generator = np.random.default_rng(0)
    colour = generator.gamma(2.0, 3.0, (60, 80, 3))
    valid = generator.random((60, 80)) > 0.2
    colour[~valid] = 1e6  # must not count
    mapped = tone_map(colour, valid)
    brightness = colour @ np.array([0.3, 0.59, 0.11])
    expected = (colour * 0.8**2.2 / np.percentile(brightness[valid], 90)) ** (1 / 2.2)
    np.testing.assert_array_equal(mapped, np.round(255 * np.clip(expected, 0, 1)).astype(np.uint8))
    grey = np.repeat(generator.gamma(2.0, 3.0, (60, 80, 1)), 3, axis=2)
    percentile = np.percentile(tone_map(grey, np.ones((60, 80), bool)), 90)
    assert abs(percentile / 255 - 0.8) < 0.5 / 255  # rounding to 8 bit
    assert tone_map(np.zeros((2, 2, 3)), np.ones((2, 2), bool)).max() == 0


def test_depth_is_encoded_in_millimetres_with_zero_for_everything_unusable() -> None:
    depth = np.array([[1.2344, 65.535, 65.536], [np.nan, np.inf, 2.0]])
    valid = np.array([[True, True, True], [True, True, False]])
    assert encode_depth(depth, valid).tolist() == [[1234, 65535, 0], [0, 0, 0]]


def write_hypersim_frame(root: Path, scene: str, frame: int, *, size: tuple[int, int] = (6, 8)) -> np.ndarray:
    """The three HDF5 files of a frame; the distance map."""
    h5py = pytest.importorskip("h5py", reason="Hypersim's files are HDF5")
    generator = np.random.default_rng(frame)
    distance = generator.uniform(1, 5, size).astype(np.float16)
    entities = np.ones(size, dtype=np.int32)
    entities[0, 0] = -1
    arrays = {"color": generator.uniform(0, 3, (*size, 3)).astype(np.float16), "depth_meters": distance}
    for quantity, values in {**arrays, "render_entity_id": entities}.items():
        kind = "final" if quantity == "color" else "geometry"
        path = root / scene / f"images/scene_cam_00_{kind}_hdf5/frame.{frame:04d}.{quantity}.hdf5"
        path.parent.mkdir(parents=True, exist_ok=True)
        with h5py.File(path, "w") as file:
            file["dataset"] = values
    return distance


def test_hypersim_is_converted_resumed_and_read_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    raw, output = tmp_path / "raw", tmp_path / "prepared"
    distances = [write_hypersim_frame(raw, "ai_001_001", frame) for frame in range(2)]
    write_hypersim_frame(raw, "ai_002_003", 7)
    header = "scene_name,camera_name,frame_id,included_in_public_release,exclude_reason,split_partition_name"
    rows = ["ai_001_001,cam_00,0,True,,train", "ai_001_001,cam_00,1,True,,train", "ai_002_003,cam_00,7,True,,val"]
    split = write_list(tmp_path / "split.csv", header, *rows, "ai_001_001,cam_00,5,False,broken,")
    arguments = ["--root", str(raw), "--split_csv", str(split), "--output", str(output)]
    main = load_script("scripts/prepare_hypersim.py").main

    assert main(arguments) == 0
    assert "3 converted, 0 already there, 0 of 3 failed" in capsys.readouterr().out
    assert (output / "filename_list_train.txt").read_text().splitlines()[1] == (
        "ai_001_001/rgb_cam_00_fr0001.png ai_001_001/depth_plane_cam_00_fr0001.png"
    )
    assert (output / "filename_list_test.txt").read_text() == ""

    dataset = build_dataset("hypersim", output / "train", output / "filename_list_train.txt", resize=None)
    for sample, distance in zip([dataset[0], dataset[1]], distances, strict=True):
        expected = torch.from_numpy(planar_depth(distance.astype(np.float64))).float()
        assert sample["valid"][0].sum() == 47  # pixel (0, 0) shows no entity
        assert float((sample["depth"][0] - expected)[sample["valid"][0]].abs().max()) <= 0.5e-3 + 1e-6  # millimetres

    kept = output / "train/ai_001_001/rgb_cam_00_fr0000.png"
    kept.write_bytes(b"kept")
    (output / "train/ai_001_001/rgb_cam_00_fr0001.png").unlink()
    assert main(arguments) == 0
    assert "1 converted, 2 already there" in capsys.readouterr().out
    assert kept.read_bytes() == b"kept"
    assert main([*arguments, "--overwrite", "--workers", "2"]) == 0
    with Image.open(kept) as picture:
        assert picture.size == (8, 6)
    assert not list(output.rglob("*.tmp"))


def test_missing_hypersim_frames_are_counted_named_and_left_out_of_the_list(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    raw, output = tmp_path / "raw", tmp_path / "prepared"
    write_hypersim_frame(raw, "ai_001_001", 0)
    write_hypersim_frame(raw, "ai_001_001", 1)
    (raw / "ai_001_001/images/scene_cam_00_geometry_hdf5/frame.0001.depth_meters.hdf5").write_bytes(b"cut off")
    header = "scene_name,camera_name,frame_id,included_in_public_release,split_partition_name"
    rows = [f"ai_001_001,cam_00,{frame},True,train" for frame in range(3)]
    split = write_list(tmp_path / "split.csv", header, *rows)
    arguments = ["--root", str(raw), "--split_csv", str(split), "--output", str(output), "--splits", "train"]
    assert load_script("scripts/prepare_hypersim.py").main(arguments) == 1
    text = capsys.readouterr().out
    assert "1 converted, 0 already there, 2 of 3 failed" in text
    assert "frame.0001.depth_meters.hdf5: cannot be read as HDF5" in text
    assert "frame.0002.color.hdf5: missing file" in text
    assert len((output / "filename_list_train.txt").read_text().splitlines()) == 1


def test_a_filename_list_holds_the_whole_samples_that_match(
    prepare_depth: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_vkitti2(tmp_path / "set", 3)
    (tmp_path / "set/depth/Scene02/clone/frames/depth/Camera_0/depth_00001.png").unlink()
    path = tmp_path / "list.txt"
    arguments = ["--name", "vkitti2", "--root", str(tmp_path / "set"), "--write_list", str(path)]
    assert prepare_depth.main([*arguments, "--match", "rgb/Scene(02|06)/"]) == 0
    assert "2 of 3 samples" in capsys.readouterr().out
    data = build_dataset("vkitti2", tmp_path / "set", path, crop=None)
    assert [name[-5:] for name in map(data.name_of, range(len(data)))] == ["00000", "00002"]
    assert prepare_depth.main([*arguments, "--match", "Scene99"]) == 1
    assert prepare_depth.main(arguments) == 2  # the list is there
    assert "exists" in capsys.readouterr().err
