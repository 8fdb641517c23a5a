"""Known distances from CSV and COLMAP files, and depth in their unit."""

import struct
from pathlib import Path

import numpy as np
import pytest
from support.cli_runs import depth, read_npz, save_models, save_picture
from support.colmap_models import (
    HEIGHT,
    LENS,
    POSE,
    SHIFT,
    WIDTH,
    known_points,
    write_binary_model,
    write_text_model,
)

from marigold_uq.depth.export import DepthRecord
from marigold_uq.depth.metric_points import MetricPoints, read_metric_points, to_metric


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


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("cameras", f"1 PINHOLE {WIDTH} {HEIGHT} 40 42"),
        ("points3D", "0 1 2"),
        ("images", "7 1 0 0"),
        ("images", "x"),
        ("images", "7 1 0 0 0 0 0 0 1 a.jpg\n1 2 inf\n"),
    ],
)
def test_too_few_words_in_a_colmap_text_are_named(name: str, content: str, tmp_path: Path) -> None:
    write_text_model(tmp_path / "model")
    (tmp_path / "model" / f"{name}.txt").write_text(content)
    with pytest.raises(ValueError, match=r"model.* is damaged"):
        read_metric_points(tmp_path / "model")


@pytest.mark.parametrize("name", ["cameras.bin", "images.bin", "points3D.bin"])
def test_a_damaged_colmap_file_is_named(name: str, tmp_path: Path) -> None:
    write_binary_model(tmp_path / "model")
    path = tmp_path / "model" / name
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(ValueError, match=rf"{name} is damaged"):
        read_metric_points(tmp_path / "model")


CAMERA = struct.pack("<QiiQQ", 1, 1, 1, WIDTH, HEIGHT)
POSED = struct.pack("<Qi7di", 1, 7, *POSE, *SHIFT, 1) + b"a.jpg\0"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("cameras.bin", struct.pack("<QiiQQ4d", 1, 2, 1, WIDTH, HEIGHT, *LENS), "of camera 1, which is not among"),
        ("cameras.bin", struct.pack("<QiiQQ4d", 1, 1, -1, WIDTH, HEIGHT, *LENS), "camera model -1 is not one of 11"),
        ("cameras.bin", CAMERA + struct.pack("<4d", float("nan"), 1, 1, 1), "no finite numbers"),
        ("cameras.bin", struct.pack("<QiiQQ4d", 1, 1, 1, 0, HEIGHT, *LENS), "no finite numbers"),
        ("images.bin", struct.pack("<Qi7di", 1, 7, 0, 0, 0, 0, *SHIFT, 1) + b"a.jpg\0" + bytes(8), "no finite numbers"),
        ("images.bin", POSED + struct.pack("<Q", 2**61), "bytes are announced, 0 follow"),
        ("points3D.bin", struct.pack("<QQ3d3BdQ", 1, 1, 1, 1, 1, 1, 1, 1, 1, 2**40), "bytes are announced, 0 follow"),
    ],
    ids=["absent camera", "unknown kind", "lens of NaN", "no size", "no pose", "claimed points", "claimed tracks"],
)
def test_a_colmap_model_that_contradicts_itself_is_refused(
    name: str, content: bytes, message: str, tmp_path: Path
) -> None:
    """A camera that is not there, one of no known kind, no numbers, no size, counts beyond the end of the file."""
    write_binary_model(tmp_path / "model")
    (tmp_path / "model" / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
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
        (b"x,y,depth\n1,\xff,3\n", "points.csv is no CSV file"),
        pytest.param("x,y,depth\n1,2,3" + 200_000 * "9", "points.csv is no CSV file", id="an endless number"),
    ],
)
def test_a_csv_that_cannot_be_used_says_why(content: str | bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "points.csv"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
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
