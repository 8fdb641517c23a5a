"""Known distances from CSV and COLMAP files, and depth in their unit."""

import struct
from pathlib import Path

import numpy as np
import pytest
from support.cli_runs import depth, read_npz, save_models, save_picture

from marigold_uq.depth.export import DepthRecord
from marigold_uq.depth.metric_points import MetricPoints, read_metric_points, to_metric

HEIGHT, WIDTH = 24, 32
LENS = (40.0, 42.0, 15.5, 11.5)  # fx, fy, cx, cy with the first pixel's centre at 0
POSE = np.array([0.9, 0.1, -0.2, 0.3])  # a quaternion, not normalised
SHIFT = np.array([0.3, -0.2, 0.5])


def rotate(quaternion: np.ndarray, vector: np.ndarray) -> np.ndarray:
    """By quaternion products, the slow and sure way."""

    def product(p: np.ndarray, q: np.ndarray) -> np.ndarray:
        return np.array([p[0] * q[0] - p[1:] @ q[1:], *(p[0] * q[1:] + q[0] * p[1:] + np.cross(p[1:], q[1:]))])

    unit = quaternion / np.linalg.norm(quaternion)
    return product(product(unit, np.array([0.0, *vector])), unit * [1, -1, -1, -1])[1:]


def known_points(count: int = 30) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Pixels (N, 2), distances (N,) and the points in the world (N, 3) that are seen there."""
    rng = np.random.default_rng(0)
    xy = np.stack([rng.uniform(0, WIDTH - 1, count), rng.uniform(0, HEIGHT - 1, count)], 1)
    z = 2 + 3 * xy[:, 1] / HEIGHT
    seen = np.stack([(xy[:, 0] - LENS[2]) / LENS[0] * z, (xy[:, 1] - LENS[3]) / LENS[1] * z, z], 1)
    back = POSE * [1, -1, -1, -1]
    return xy, z, np.array([rotate(back, point - SHIFT) for point in seen])


def write_text_model(folder: Path) -> None:
    xy, _, world = known_points()
    folder.mkdir(parents=True)
    camera = f"1 PINHOLE {WIDTH} {HEIGHT} {LENS[0]} {LENS[1]} {LENS[2] + 0.5} {LENS[3] + 0.5}"
    (folder / "cameras.txt").write_text(f"# cameras\n{camera}\n")
    seen = " ".join(f"{x + 0.5} {y + 0.5} {i}" for i, (x, y) in enumerate(xy.tolist())) + " 3.0 4.0 -1"
    pose = " ".join(map(str, [*POSE.tolist(), *SHIFT.tolist()]))
    (folder / "images.txt").write_text(f"# images\n7 {pose} 1 room/a b.jpg\n{seen}\n8 {pose} 1 empty.jpg\n\n")
    rows = "".join(f"{i} {x} {y} {z} 1 2 3 0.5 7 {i}\n" for i, (x, y, z) in enumerate(world.tolist()))
    (folder / "points3D.txt").write_text(rows)


def write_binary_model(folder: Path) -> None:
    xy, _, world = known_points()
    folder.mkdir(parents=True)
    lens = [LENS[0], LENS[1], LENS[2] + 0.5, LENS[3] + 0.5]
    (folder / "cameras.bin").write_bytes(struct.pack("<QiiQQ4d", 1, 1, 1, WIDTH, HEIGHT, *lens))
    seen = b"".join(struct.pack("<ddq", x + 0.5, y + 0.5, i) for i, (x, y) in enumerate(xy))
    head = struct.pack("<Qi7di", 1, 7, *POSE, *SHIFT, 1) + b"room/a b.jpg\0" + struct.pack("<Q", len(xy))
    (folder / "images.bin").write_bytes(head + seen)
    rows = [struct.pack("<Q3d3BdQii", i, *point, 1, 2, 3, 0.5, 1, 7, i) for i, point in enumerate(world)]
    (folder / "points3D.bin").write_bytes(struct.pack("<Q", len(world)) + b"".join(rows))


@pytest.mark.parametrize("write", [write_text_model, write_binary_model])
def test_a_colmap_model_gives_distances_along_the_axis_and_the_lens(write: object, tmp_path: Path) -> None:
    write(tmp_path / "model" / "sparse" / "0")  # type: ignore[operator]
    found = read_metric_points(tmp_path / "model").of(tmp_path / "elsewhere" / "room" / "a b.jpg")
    xy, z, _ = known_points()
    np.testing.assert_allclose(found.xy, xy, atol=1e-9)
    np.testing.assert_allclose(found.depth, z, atol=1e-9)
    assert found.intrinsics == pytest.approx(LENS)
    larger = found.at_size(2 * WIDTH, 2 * HEIGHT)
    np.testing.assert_allclose(larger.xy, 2 * xy + 0.5, atol=1e-9)  # centres of pixels stay where they are
    assert larger.intrinsics == pytest.approx((80, 84, 31.5, 23.5))


@pytest.mark.parametrize("name", ["cameras.bin", "images.bin", "points3D.bin"])
def test_a_damaged_colmap_file_is_named(name: str, tmp_path: Path) -> None:
    write_binary_model(tmp_path / "model")
    path = tmp_path / "model" / name
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(ValueError, match=rf"{name} is damaged"):
        read_metric_points(tmp_path / "model")


def test_a_csv_may_serve_one_picture_or_many(tmp_path: Path) -> None:
    path = tmp_path / "points.csv"
    path.write_text("x,y,depth\n1,2,3.5\n4,5,6\n")
    found = read_metric_points(path).of(Path("any.jpg"))
    assert found.xy.tolist() == [[1, 2], [4, 5]]
    assert found.depth.tolist() == [3.5, 6]
    path.write_text("depth, y, x, image\n1,2,3,a.jpg\n1,2,3,a.jpg\n2,2,3,sub/a.jpg\n2,2,3,b\n")
    points = read_metric_points(path)
    assert points.of(Path("photos/a.jpg")).depth.tolist() == [1, 1]
    assert points.of(Path("photos/sub/a.jpg")).depth.tolist() == [2]
    assert points.of(Path("b.png")).depth.tolist() == [2]
    with pytest.raises(ValueError, match=r"no metric points of c\.jpg; it has those of a\.jpg, b, sub/a\.jpg"):
        points.of(Path("c.jpg"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a,b\n1,2\n", "needs the columns x, y, depth.*it has a, b"),
        ("", "it has none"),
        ("x,y,depth\n", "has no points"),
        ("x,y,depth\n1,2,far\n", "line 2: could not convert"),
        ("x,y,depth\n1,2\n", "line 2"),
        ("x,y,depth\n1,2,-3\n", "with positive depth"),
        ("x,y,depth\n1,nan,3\n", "must be finite"),
    ],
)
def test_a_csv_that_cannot_be_used_says_why(content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "points.csv"
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        read_metric_points(path)


def test_a_missing_file_and_a_folder_without_a_model_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no metric points at .*nowhere\.csv"):
        read_metric_points(tmp_path / "nowhere.csv")
    with pytest.raises(FileNotFoundError, match="holds no COLMAP model"):
        read_metric_points(tmp_path)


def record(*, disparity: bool = False) -> tuple[DepthRecord, np.ndarray]:
    """A prediction known up to scale and shift, and the depth that it stands for."""
    true = (2 + 3 * np.linspace(0, 1, HEIGHT)[:, None] + np.linspace(0, 1, WIDTH)).astype(np.float32)
    value = ((1 / true - 0.05) if disparity else (true - 1) / 8).astype(np.float32)
    std = np.full_like(value, 0.01)
    kind = "disparity" if disparity else "depth"
    interval = np.stack([value - 0.02, value + 0.02])
    return DepthRecord(
        np.zeros((HEIGHT, WIDTH, 3), np.uint8), value, std, 0.5 * std, interval, 0.9, {"prediction_type": kind}
    ), true


@pytest.mark.parametrize("disparity", [False, True])
def test_points_bring_depth_spread_and_interval_to_their_unit(disparity: bool) -> None:
    given, true = record(disparity=disparity)
    xy = np.array([[1, 2], [30, 3], [12, 20], [5, 15], [20, 8]])
    points = MetricPoints(xy.astype(float), true[xy[:, 1], xy[:, 0]].astype(float))
    found = to_metric(given, points, "m")
    np.testing.assert_allclose(found.depth, true, rtol=1e-4)
    slope = true**2 if disparity else 8.0  # of metres in the prediction
    assert found.uncertainty is not None
    assert found.epistemic is not None
    assert found.interval is not None
    np.testing.assert_allclose(found.uncertainty, slope * given.uncertainty, rtol=1e-2)
    np.testing.assert_allclose(found.epistemic, slope * given.epistemic, rtol=1e-2)
    ends = np.sort(1 / (given.interval + 0.05) if disparity else 8 * given.interval + 1, axis=0)
    np.testing.assert_allclose(found.interval, ends, rtol=1e-2)
    assert found.units == "m"
    assert not found.is_disparity
    assert found.metadata["metric_fit"]["points"] == 5


def test_the_command_writes_metres_and_uses_the_models_lens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    models = save_models(tmp_path / "models")
    save_picture(tmp_path / "photo.png")
    (tmp_path / "points.csv").write_text("x,y,depth\n2,2,1500\n12,9,4000\n3,10,2500\n9,4,2800\n")
    words = [tmp_path / "photo.png", "--metric-points", tmp_path / "points.csv", "--unit", "mm", "--coverage", 0.9]
    code = depth(models, *words, "-o", tmp_path / "out", "--formats", "npz", "ply", "--fov", 50)
    told = capsys.readouterr()
    if code:  # the random model may see the points inside out, which is said
        assert "would turn the scene inside out" in told.err
        return
    found = read_npz(tmp_path / "out" / "photo.npz")
    assert '"units": "mm"' in str(found["metadata"])
    assert " mm, 2 files" in told.out
    assert found["depth"].mean() > 500


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--unit", "m"], "this model's is relative; give --metric_points"),
        (["--fov", "200"], "fov is an angle in degrees between 0 and 180; got 200"),
        (["--intrinsics", "1", "2"], "intrinsics are fx fy cx cy"),
        (["--intrinsics", "1", "1", "0", "0", "--fov", "40"], "give fov or intrinsics, not both"),
        (["--metric-points", "nowhere.csv"], "no metric points at nowhere.csv"),
    ],
)
def test_options_of_lens_and_unit_that_cannot_be_served_are_refused(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    models = save_models(tmp_path / "models")
    save_picture(tmp_path / "photo.png")
    assert depth(models, tmp_path / "photo.png", "-o", tmp_path / "out", *words) == 2
    assert message in capsys.readouterr().err
