"""Each published depth format, written small and read back; numbers and regions from the data sets' descriptions."""

from pathlib import Path

import numpy as np
import pytest
import torch
from support.depth_files import pack, write_array, write_image, write_list, write_png16, write_scannet
from torch.utils.data import DataLoader

from marigold_uq.depth.data import (
    DATASETS,
    SPECS,
    DepthDataError,
    ListedDepth,
    TarStorage,
    build_dataset,
    register_dataset,
)


def expected_image(pixels: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(pixels.transpose(2, 0, 1).astype(np.float32) / np.float32(255))


def test_hypersim_is_millimetres_below_65_m_at_480_by_640(tmp_path: Path) -> None:
    values = np.arange(480 * 640).reshape(480, 640) % 65536
    line = SPECS["hypersim"].example
    image_path, depth_path = line.split()
    pixels = write_image(tmp_path / image_path, 480, 640)
    write_png16(tmp_path / depth_path, values)

    sample = build_dataset("hypersim", tmp_path, write_list(tmp_path / "list.txt", line))[0]

    valid = (values > 0) & (values < 65000)
    assert torch.equal(sample["valid"][0], torch.from_numpy(valid))
    metres = np.where(valid, values.astype(np.float32) / np.float32(1000), 0)
    assert torch.equal(sample["depth"][0], torch.from_numpy(metres.astype(np.float32)))
    assert torch.equal(sample["image"], expected_image(pixels))
    assert sample["name"] == "ai_001_001/rgb_cam_00_fr0000"


def test_hypersim_frames_of_768_by_1024_shrink_by_taking_existing_depths(tmp_path: Path) -> None:
    values = np.random.default_rng(0).integers(1, 65000, (768, 1024))
    image_path, depth_path = SPECS["hypersim"].example.split()
    write_image(tmp_path / image_path, 768, 1024)
    write_png16(tmp_path / depth_path, values)

    sample = build_dataset("hypersim", tmp_path)[0]

    # nearest-exact: the pixel under the centre of the new one, floor((i + 1/2) 768 / 480)
    rows = np.floor((np.arange(480) + 0.5) * 1.6).astype(int)
    columns = np.floor((np.arange(640) + 0.5) * 1.6).astype(int)
    metres = values[np.ix_(rows, columns)].astype(np.float32) / np.float32(1000)
    assert torch.equal(sample["depth"][0], torch.from_numpy(metres))
    assert sample["image"].shape == (3, 480, 640)


def test_virtual_kitti_is_centimetres_below_80_m_in_the_benchmark_crop(tmp_path: Path) -> None:
    values = np.random.default_rng(0).integers(0, 65536, (375, 1242))
    image_path, depth_path = SPECS["vkitti2"].example.split()
    pixels = write_image(tmp_path / image_path, 375, 1242)
    write_png16(tmp_path / depth_path, values)

    sample = build_dataset("vkitti2", tmp_path)[0]

    window = slice(23, 375), slice(13, 1229)  # the last 352 of 375 rows, the middle 1216 of 1242 columns
    valid = (values > 0) & (values < 8000)
    metres = np.where(valid, values.astype(np.float32) / np.float32(100), np.float32(0))
    assert torch.equal(sample["depth"][0], torch.from_numpy(metres[window]))
    assert torch.equal(sample["valid"][0], torch.from_numpy(valid[window]))
    assert torch.equal(sample["image"], expected_image(pixels[window]))


def test_nyu_keeps_the_eigen_region_and_reads_the_raw_not_the_filled_depth(tmp_path: Path) -> None:
    values = np.full((480, 640), 2500)
    values[100, 100] = 0
    values[100, 101] = 1  # 1 mm is the open lower end
    values[100, 102] = 10000  # 10 m the open upper end
    line = SPECS["nyu"].example
    image_path, depth_path, filled_path = line.split()
    write_image(tmp_path / image_path, 480, 640)
    write_png16(tmp_path / depth_path, values)
    write_png16(tmp_path / filled_path, np.full((480, 640), 7777))

    sample = build_dataset("nyu", tmp_path, write_list(tmp_path / "list.txt", line))[0]

    valid = np.zeros((480, 640), dtype=bool)
    valid[45:471, 41:601] = True
    valid[100, 100:103] = False
    assert torch.equal(sample["valid"][0], torch.from_numpy(valid))
    assert sample["depth"][sample["valid"]].unique().tolist() == [2.5]


def test_nyu_of_another_size_is_refused_because_its_mask_would_be_wrong(tmp_path: Path) -> None:
    image_path, depth_path, _ = SPECS["nyu"].example.split()
    write_image(tmp_path / image_path, 240, 320)
    write_png16(tmp_path / depth_path, np.full((240, 320), 2500))
    with pytest.raises(DepthDataError, match="480 x 640"):
        build_dataset("nyu", tmp_path)[0]
    assert build_dataset("nyu", tmp_path, mask=None)[0]["valid"].all()


@pytest.mark.parametrize(
    ("mask", "rows", "columns"),
    # int() of the fractions of 352 x 1216
    [("kitti_eigen", slice(117, 321), slice(43, 1172)), ("kitti_garg", slice(143, 349), slice(43, 1172))],
)
def test_kitti_crops_then_masks_and_divides_by_256(tmp_path: Path, mask: str, rows: slice, columns: slice) -> None:
    values = np.random.default_rng(0).integers(0, 65536, (376, 1241))
    line = SPECS["kitti_eigen"].example
    image_path, depth_path, _ = line.split()
    pixels = write_image(tmp_path / image_path, 376, 1241)
    write_png16(tmp_path / depth_path, values)

    sample = build_dataset("kitti_eigen", tmp_path, write_list(tmp_path / "list.txt", line), mask=mask)[0]

    window = slice(24, 376), slice(12, 1228)
    inside = np.zeros((352, 1216), dtype=bool)
    inside[rows, columns] = True
    valid = inside & (values[window] > 0) & (values[window] < 80 * 256)
    assert torch.equal(sample["valid"][0], torch.from_numpy(valid))
    metres = np.where(valid, values[window].astype(np.float32) / np.float32(256), np.float32(0))
    assert torch.equal(sample["depth"][0], torch.from_numpy(metres))
    assert torch.equal(sample["image"], expected_image(pixels[window]))


def test_kitti_lines_without_depth_are_left_out_and_counted(tmp_path: Path) -> None:
    line = SPECS["kitti_eigen"].example
    image_path, depth_path, focal = line.split()
    write_image(tmp_path / image_path, 352, 1216)
    write_png16(tmp_path / depth_path, np.full((352, 1216), 256))
    absent = f"{image_path.replace('0069', '0070')} None {focal}"
    filenames = write_list(tmp_path / "list.txt", absent, line, "", absent)
    dataset = build_dataset("kitti_eigen", tmp_path, filenames)
    assert isinstance(dataset, ListedDepth)
    assert len(dataset) == 1
    assert len(dataset.lines_without_depth) == 2

    write_image(tmp_path / image_path.replace("0069", "0071"), 352, 1216)  # found, but has no ground truth
    found = build_dataset("kitti_eigen", tmp_path)
    assert isinstance(found, ListedDepth)
    assert len(found) == 1
    assert len(found.lines_without_depth) == 1


def test_eth3d_is_raw_little_endian_float32_with_inf_for_unknown(tmp_path: Path) -> None:
    values = np.random.default_rng(0).uniform(1, 40, (6, 9)).astype("<f4")
    values[0, 0], values[5, 8] = np.inf, 0
    line = SPECS["eth3d"].example
    image_path, depth_path = line.split()
    write_image(tmp_path / image_path, 6, 9)
    (tmp_path / depth_path).parent.mkdir(parents=True)
    (tmp_path / depth_path).write_bytes(values.tobytes())

    sample = build_dataset("eth3d", tmp_path, write_list(tmp_path / "list.txt", line))[0]

    valid = np.isfinite(values) & (values > 0)
    assert torch.equal(sample["valid"][0], torch.from_numpy(valid))
    assert torch.equal(sample["depth"][0], torch.from_numpy(np.where(valid, values, np.float32(0))))

    (tmp_path / depth_path).write_bytes(values.tobytes()[:-4])
    with pytest.raises(DepthDataError, match=r"212 bytes.*216"):
        build_dataset("eth3d", tmp_path)[0]


def test_scannet_is_millimetres_below_10_m(tmp_path: Path) -> None:
    line = SPECS["scannet"].example
    image_path, depth_path = line.split()
    write_image(tmp_path / image_path, 2, 2)
    write_png16(tmp_path / depth_path, np.array([[0, 1], [9999, 10000]]))
    sample = build_dataset("scannet", tmp_path, write_list(tmp_path / "list.txt", line))[0]
    assert sample["valid"][0].tolist() == [[False, False], [True, False]]
    assert sample["depth"][0, 1, 0] == np.float32(9.999)


@pytest.mark.parametrize("bare", [False, True])
def test_diode_takes_validity_from_its_mask_file(tmp_path: Path, bare: bool) -> None:
    values = np.array([[0.5, 0.7, 3.0], [349.0, 351.0, 5.0]], dtype=np.float32)
    mask = np.array([[1, 1, 0], [1, 1, 1]], dtype=np.float64)
    line = SPECS["diode"].example
    image_path, depth_path, mask_path = line.split()
    write_image(tmp_path / image_path, 2, 3)
    write_array(tmp_path / depth_path, values[..., None])
    write_array(tmp_path / mask_path, mask)
    if bare:  # only the image carries the folder
        line = " ".join([image_path, Path(depth_path).name, Path(mask_path).name])

    sample = build_dataset("diode", tmp_path, write_list(tmp_path / "list.txt", line))[0]

    assert sample["valid"][0].tolist() == [[False, True, False], [True, False, True]]
    assert sample["depth"][0].tolist() == [[0.0, np.float32(0.7), 0.0], [349.0, 0.0, 5.0]]


@pytest.mark.parametrize("name", list(SPECS))
def test_the_example_line_of_each_set_is_what_its_pattern_finds(name: str) -> None:
    spec = SPECS[name]
    image, depth, *rest = spec.example.split()
    match = spec.match(image)
    assert match is not None
    assert match.expand(spec.depth_template) == depth
    if spec.mask_template is not None:
        assert match.expand(spec.mask_template) == rest[0]
    assert spec.match(depth) is None or name == "eth3d"


def test_a_tar_gives_the_same_samples_as_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    filenames = write_list(tmp_path / "list.txt", *write_scannet(folder, 3))
    archive = pack(folder, tmp_path / "set.tar")
    for with_list in (filenames, None):
        in_folder, in_tar = build_dataset("scannet", folder, with_list), build_dataset("scannet", archive, with_list)
        assert len(in_folder) == len(in_tar) == 3  # type: ignore[arg-type]
        for i in range(3):
            a, b = in_folder[i], in_tar[i]
            assert a["name"] == b["name"]
            assert all(torch.equal(a[key], b[key]) for key in ("image", "depth", "valid"))


@pytest.mark.parametrize("start_method", ["fork", "spawn"])
def test_two_workers_read_a_tar_in_order(tmp_path: Path, start_method: str) -> None:
    count = 12 if start_method == "fork" else 3  # a spawned worker imports torch anew, which is the cost
    write_scannet(tmp_path / "set", count, size=(2, 2))
    dataset = build_dataset("scannet", pack(tmp_path / "set", tmp_path / "set.tar"), max_depth=100.0)
    workers = 2 if start_method == "fork" else 1
    loader = DataLoader(dataset, batch_size=1, num_workers=workers, multiprocessing_context=start_method)
    for _ in range(2 if start_method == "fork" else 1):
        batches = list(loader)
        assert [batch["name"][0] for batch in batches] == [f"scene0406_02/color/{i:06d}" for i in range(count)]
        assert [float(batch["depth"].mean()) for batch in batches] == [i + 1.0 for i in range(count)]


def test_a_compressed_tar_says_to_unpack_it(tmp_path: Path) -> None:
    import gzip

    write_scannet(tmp_path / "set", 1)
    packed = pack(tmp_path / "set", tmp_path / "set.tar").read_bytes()
    (tmp_path / "set.tar.gz").write_bytes(gzip.compress(packed))
    with pytest.raises(DepthDataError, match=r"set\.tar\.gz.*unpack it"):
        TarStorage(tmp_path / "set.tar.gz")


def test_unknown_names_and_options_list_what_is_known(tmp_path: Path) -> None:
    write_scannet(tmp_path, 1)
    with pytest.raises(ValueError, match="unknown data set 'nyuv3'; known: diode, eth3d"):
        build_dataset("nyuv3", tmp_path)
    with pytest.raises(ValueError, match=r"unknown option msak of scannet; known: .*mask"):
        build_dataset("scannet", tmp_path, msak="x")
    with pytest.raises(ValueError, match="needs root"):
        build_dataset("scannet")
    with pytest.raises(DepthDataError, match="neither a folder nor a tar"):
        build_dataset("scannet", tmp_path / "absent")
    with pytest.raises(DepthDataError, match=r"no image matches.*scan-net\.org"):
        build_dataset("scannet", tmp_path / "scene0406_02")
    with pytest.raises(DepthDataError, match="line 1 has 1 columns, ScanNet"):
        build_dataset("scannet", tmp_path, write_list(tmp_path / "list.txt", "scene0406_02/color/000000.jpg"))
    with pytest.raises(ValueError, match="unknown region 'eigen'; known: kitti_eigen"):
        build_dataset("scannet", tmp_path, mask="eigen")[0]


def test_another_module_can_register_a_data_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("marigold_uq.depth.data.registry.DATASETS", {})
    made = []

    @register_dataset("mine")
    def build(root: object, filenames: object, **options: object) -> object:
        made.append((root, filenames, options))
        return "the data set"

    assert build_dataset("mine", length=3) == "the data set"
    assert made == [(None, None, {"length": 3})]
    with pytest.raises(ValueError, match="already registered"):
        register_dataset("mine")(build)
    assert {"hypersim", "vkitti2", "nyu", "kitti_eigen", "eth3d", "scannet", "diode", "folder"} <= set(DATASETS)
