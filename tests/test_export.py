"""Files: what is written can be read back, by us and by others (OpenCV, numpy), and is never half written."""

import errno
import json
import os
import re
import tempfile
from pathlib import Path

import cv2
import matplotlib
import numpy as np
import pytest
from diffusers.pipelines.marigold.marigold_image_processing import MarigoldImageProcessor
from PIL import Image

from marigold_uq.colors import INVALID_COLOR, color_depth, color_uncertainty, colored_points, place, saturation, sheet
from marigold_uq.export import (
    FORMATS,
    DepthRecord,
    ExportOptions,
    atomic_path,
    export,
    load_png16,
    make_folder,
    output_paths,
    save_image,
    save_npz,
    save_ply,
    save_png16,
    save_tiff,
)

HEIGHT, WIDTH = 24, 32


@pytest.fixture
def depth() -> np.ndarray:
    return np.random.default_rng(0).random((HEIGHT, WIDTH), dtype=np.float32)


@pytest.fixture
def record(depth) -> DepthRecord:
    rng = np.random.default_rng(1)
    std = (0.1 * rng.random(depth.shape)).astype(np.float32)
    return DepthRecord(
        image=rng.integers(0, 256, (HEIGHT, WIDTH, 3), dtype=np.uint8),
        depth=depth,
        uncertainty=std,
        epistemic=std / 2,
        quantiles=np.stack([depth - std, depth + std]),
        quantile_levels=(0.05, 0.95),
        metadata={"units": "m", "members": 10},
    )


def read_ply(path: Path) -> tuple[np.ndarray, list[str]]:
    """A reader of our own for binary little-endian vertex lists (the PLY format of G. Turk)."""
    header, body = path.read_bytes().split(b"end_header\n", 1)
    lines = header.decode("ascii").splitlines()
    assert lines[:2] == ["ply", "format binary_little_endian 1.0"]
    kinds = {"float": "<f4", "uchar": "u1"}
    properties = [line.split()[1:] for line in lines if line.startswith("property")]
    vertices = np.frombuffer(body, dtype=[(name, kinds[kind]) for kind, name in properties])
    assert f"element vertex {len(vertices)}" in lines
    return vertices, lines


# --- data -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value_range", [None, (0.0, 65.535), (-3.0, 100.0)])
def test_png16_returns_within_half_a_step(value_range, depth, tmp_path):
    values = 40 * depth + 1
    path = save_png16(tmp_path / "d.png", values, value_range=value_range, units="m", metadata={"camera": "left"})
    loaded, text = load_png16(path)
    low, high = value_range or (float(values.min()), float(values.max()))
    half_step = (high - low) / 65535 / 2
    assert np.abs(loaded - values).max() <= half_step * 1.001 + 4e-6  # plus float32 rounding near 40
    assert text["units"] == "m"
    assert text["camera"] == "left"


def test_png16_is_read_by_opencv_and_the_recorded_scale_applies(depth, tmp_path):
    path = save_png16(tmp_path / "d.png", depth, value_range=(0.0, 65.535))
    pixels = cv2.imread(str(path), cv2.IMREAD_UNCHANGED)
    assert pixels.dtype == np.uint16
    assert np.array_equal(pixels, np.rint(depth.astype(np.float64) / 0.001))  # one step is a millimetre
    with Image.open(path) as image:
        assert float(image.info["scale"]) == pytest.approx(0.001)
        assert float(image.info["offset"]) == 0.0


@pytest.mark.parametrize("value", [0.0, -2.5, 7.25])
def test_a_constant_map_survives_png16_exactly(value, tmp_path):
    loaded, _ = load_png16(save_png16(tmp_path / "c.png", np.full((3, 4), value)))
    assert np.array_equal(loaded, np.full((3, 4), value, dtype=np.float32))


@pytest.mark.parametrize(
    ("array", "value_range", "message"),
    [
        (np.array([[0.0, np.nan]]), None, "1 pixels are NaN"),
        (np.array([[0.0, 2.0]]), (0.0, 1.0), r"\[0, 2\] do not fit value_range=\(0, 1\)"),
        (np.zeros((2, 3, 4)), None, r"shape \(2, 3, 4\)"),
        (np.zeros((0, 4)), None, "at least one pixel"),
    ],
)
def test_png16_refuses_what_it_cannot_hold(array, value_range, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        save_png16(tmp_path / "d.png", array, value_range=value_range)
    assert not list(tmp_path.iterdir())


def test_a_png_of_somebody_else_is_not_taken_for_ours(tmp_path):
    Image.fromarray(np.zeros((2, 2), dtype=np.uint16)).save(tmp_path / "foreign.png")
    with pytest.raises(ValueError, match="no scale and offset"):
        load_png16(tmp_path / "foreign.png")


def test_tiff_is_lossless_also_for_others_and_for_nan(depth, tmp_path):
    depth[0, 0] = np.nan
    path = save_tiff(tmp_path / "d.tiff", depth, description="metres")
    np.testing.assert_array_equal(cv2.imread(str(path), cv2.IMREAD_UNCHANGED), depth)
    with Image.open(path) as image:
        np.testing.assert_array_equal(np.asarray(image), depth)
        assert image.tag_v2[270] == "metres"


def test_npz_needs_no_pickle(depth, tmp_path):
    path = save_npz(tmp_path / "d.npz", depth=depth, note="text")
    with np.load(path, allow_pickle=False) as loaded:
        np.testing.assert_array_equal(loaded["depth"], depth)
        assert str(loaded["note"]) == "text"
    with pytest.raises(ValueError, match="without pickle"):
        save_npz(tmp_path / "e.npz", bad=np.array([{}], dtype=object))


# --- writing safely ---------------------------------------------------------------------------------------------------

SAVERS = {
    "png16": lambda path, **kwargs: save_png16(path, np.eye(4), **kwargs),
    "tiff": lambda path, **kwargs: save_tiff(path, np.eye(4), **kwargs),
    "npz": lambda path, **kwargs: save_npz(path, eye=np.eye(4), **kwargs),
    "image": lambda path, **kwargs: save_image(path.with_suffix(".png"), np.zeros((4, 4, 3), np.uint8), **kwargs),
    "ply": lambda path, **kwargs: save_ply(
        path, np.ones((4, 4)), np.zeros((4, 4, 3), np.uint8), field_of_view=60, **kwargs
    ),
}


@pytest.mark.parametrize("saver", SAVERS.values(), ids=SAVERS)
def test_an_existing_file_is_replaced_only_when_asked(saver, tmp_path):
    path = saver(tmp_path / "file.png")
    path.write_bytes(b"precious")
    with pytest.raises(FileExistsError, match=r"file\.png exists; pass overwrite=True"):
        saver(tmp_path / "file.png")
    assert path.read_bytes() == b"precious"
    saver(tmp_path / "file.png", overwrite=True)
    assert path.read_bytes() != b"precious"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("saver", SAVERS.values(), ids=SAVERS)
def test_a_missing_folder_and_a_file_in_its_place_are_named(saver, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"the folder .*missing does not exist"):
        saver(tmp_path / "missing" / "file.png")
    (tmp_path / "taken").touch()
    with pytest.raises(NotADirectoryError, match="taken is a file, not a folder"):
        saver(tmp_path / "taken" / "file.png")


@pytest.fixture
def forbidden_folder():
    """A folder without write permission, for a user whom permissions bind (root sheds its rights meanwhile)."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o555)
    was_root = os.geteuid() == 0
    if was_root:
        os.seteuid(65534)
    yield folder
    if was_root:
        os.seteuid(0)
    folder.chmod(0o755)
    folder.rmdir()


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="permissions of POSIX systems")
@pytest.mark.parametrize("saver", SAVERS.values(), ids=SAVERS)
def test_no_write_permission_names_the_file(saver, forbidden_folder):
    with pytest.raises(PermissionError, match=rf"no permission to write {re.escape(str(forbidden_folder))}.*file\.png"):
        saver(forbidden_folder / "file.png")
    with pytest.raises(PermissionError, match=r"no permission to write .*inner"):
        make_folder(forbidden_folder / "inner")


def write_then(path: Path, what_happens, **kwargs) -> None:
    """Write half of `path`, then let something happen before the rest."""
    with atomic_path(path, **kwargs) as temporary:
        temporary.write_bytes(b"half")
        what_happens()


def raising(error: BaseException):
    def happens():
        raise error

    return happens


@pytest.mark.parametrize(
    ("number", "error", "message"),
    [
        (errno.EROFS, PermissionError, r"no permission to write .*file\.bin"),
        (errno.ENOSPC, OSError, r"disk is full: cannot write .*file\.bin"),
        (errno.EIO, OSError, re.escape(os.strerror(errno.EIO))),
    ],
)
def test_failures_of_the_disk_name_the_file_and_leave_nothing_behind(number, error, message, tmp_path):
    with pytest.raises(error, match=message):
        write_then(tmp_path / "file.bin", raising(OSError(number, os.strerror(number))))
    assert not list(tmp_path.iterdir())


def test_a_crash_while_writing_leaves_the_old_file_alone(tmp_path):
    target = tmp_path / "file.bin"
    target.write_bytes(b"old")
    with pytest.raises(KeyboardInterrupt):
        write_then(target, raising(KeyboardInterrupt()), overwrite=True)
    assert target.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [target]


def test_a_file_that_appears_meanwhile_is_not_replaced(tmp_path):
    target = tmp_path / "file.bin"
    with pytest.raises(FileExistsError):
        write_then(target, lambda: target.write_bytes(b"theirs"))
    assert target.read_bytes() == b"theirs"


# --- colours ----------------------------------------------------------------------------------------------------------


def test_depth_has_marigolds_colours(depth):
    """Oracle: diffusers' visualize_depth, which interpolates the same eleven colours; matplotlib's table has 256."""
    expected = np.asarray(MarigoldImageProcessor.visualize_depth(depth[None, ..., None])[0])
    ours = color_depth(depth, value_range=(0.0, 1.0))
    assert np.abs(ours.astype(int) - expected).max() <= 3  # 255 * slope of the map (at most 2.9) / 256, and rounding


def test_near_is_warm_for_depth_and_disparity():
    near_far = np.array([[0.0, 1.0]])
    (near, far) = color_depth(near_far)[0].astype(int)
    assert near[0] > near[2]  # more red than blue
    assert far[2] > far[0]
    assert np.array_equal(color_depth(1 - near_far, inverse=True), color_depth(near_far))


def test_colours_use_the_range_given_or_the_maps_own():
    ramp = np.linspace(2, 4, 9)[None]
    assert np.array_equal(color_depth(ramp), color_depth((ramp - 2) / 2, value_range=(0, 1)))
    assert np.array_equal(color_depth(ramp, value_range=(3, 4))[0, 0], color_depth(ramp)[0, 0])  # clipped, not wrapped


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("values", [np.zeros((3, 4)), np.full((3, 4), 0.7), np.full((3, 4), np.nan), np.zeros((1, 1))])
def test_flat_and_invalid_maps_are_drawn_without_a_warning(values):
    """diffusers divides by zero for an all-zero uncertainty."""
    for picture in (color_depth(values), color_uncertainty(values)):
        assert picture.shape == (*values.shape, 3)
        assert picture.dtype == np.uint8
    if np.isnan(values).all():
        assert (color_depth(values) == INVALID_COLOR).all()
    if not values.any():
        assert (color_uncertainty(values) <= 4).all()  # magma starts at (0, 0, 4)


def test_few_wild_pixels_do_not_darken_the_uncertainty():
    std = np.full((10, 10), 0.1)
    std[0, 0] = 1000.0
    assert saturation(std) == pytest.approx(0.1)
    assert color_uncertainty(std)[5, 5].sum() > 600
    mostly_certain = np.zeros((10, 10))
    mostly_certain[0, 0] = 0.5
    assert color_uncertainty(mostly_certain)[0, 0].sum() > 600


def test_nonsense_is_not_drawn():
    with pytest.raises(ValueError, match="cannot be negative, but its minimum is -1"):
        color_uncertainty(np.array([[-1.0, 1.0]]))
    with pytest.raises(ValueError, match=r"shape \(3,\)"):
        color_depth(np.zeros(3))
    with pytest.raises(ValueError, match="ordered"):
        color_depth(np.zeros((2, 2)), value_range=(1.0, 0.0))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("size", [(60, 80), (90, 40), (20, 200), (1, 1), (10, 20000)])
def test_the_sheet_shows_every_panel_at_any_aspect_ratio(size):
    depth = np.linspace(0, 1, size[0] * size[1]).reshape(size)
    image = np.full((*size, 3), (10, 200, 30), dtype=np.uint8)
    maps = [depth, 0.1 * depth, 0.05 * depth]
    pictures = [sheet(image, *maps[:count], dpi=60) for count in (1, 2, 3)]
    areas = [picture.width * picture.height for picture in pictures]
    assert areas == sorted(set(areas))  # each further panel takes room
    assert max(pictures[-1].size) < 60 * 36  # inches
    assert (np.asarray(pictures[0]) == (10, 200, 30)).all(axis=-1).any()  # the photograph is there, in its colours


def test_the_sheet_leaves_matplotlibs_global_state_alone(record):
    before = dict(matplotlib.rcParams)
    sheet(record.image, record.depth, record.uncertainty, dpi=60)
    assert dict(matplotlib.rcParams) == before


def test_a_file_name_with_dollars_is_not_taken_for_a_formula(record):
    sheet(record.image, record.depth, title=r"photo $\frac$ 1.jpg", units="$\\undefined$", dpi=60)


# --- point clouds -----------------------------------------------------------------------------------------------------


def test_points_lie_on_the_rays_of_the_camera():
    """A pinhole camera of 90 degrees: the outer edge of the middle row is seen under 45 degrees."""
    depth = np.full((3, 101), 2.0)
    points, _ = colored_points(depth, np.zeros((3, 101, 3), np.uint8), field_of_view=90.0)
    assert points[1, 50].tolist() == [0.0, 0.0, -2.0]
    half_pixel_inside = np.arctan2(points[1, 100, 0], 2.0)
    assert np.tan(half_pixel_inside) == pytest.approx(50 / 50.5)
    assert points[0, 50, 1] > 0 > points[2, 50, 1]  # y is up
    explicit, _ = colored_points(depth, np.zeros((3, 101, 3), np.uint8), intrinsics=(50.5, 50.5, 50.0, 1.0))
    np.testing.assert_allclose(explicit, points)


def test_ply_holds_points_colours_and_uncertainty(record, tmp_path):
    path = save_ply(
        tmp_path / "cloud.ply",
        record.depth,
        record.image,
        field_of_view=60,
        uncertainty=record.uncertainty,
        comment="m",
    )
    vertices, lines = read_ply(path)
    assert len(vertices) == (record.depth > 0).sum()
    np.testing.assert_array_equal(-vertices["z"], record.depth.ravel())
    np.testing.assert_array_equal(vertices["uncertainty"], record.uncertainty.ravel())
    np.testing.assert_array_equal(
        np.stack([vertices[c] for c in ("red", "green", "blue")], 1), record.image.reshape(-1, 3)
    )
    assert "comment m" in lines


def test_ply_keeps_the_most_certain_points(record, tmp_path):
    keep = {"image": record.image, "field_of_view": 60, "uncertainty": record.uncertainty}
    half, _ = read_ply(save_ply(tmp_path / "half.ply", record.depth, **keep, keep_fraction=0.5))
    assert len(half) == HEIGHT * WIDTH // 2
    assert half["uncertainty"].max() <= np.median(record.uncertainty)
    sure, _ = read_ply(save_ply(tmp_path / "sure.ply", record.depth, **keep, max_uncertainty=0.02))
    assert len(sure) == (record.uncertainty <= 0.02).sum()
    flat, _ = read_ply(
        save_ply(tmp_path / "flat.ply", record.depth, **(keep | {"uncertainty": 0 * record.depth}), keep_fraction=0.1)
    )
    assert len(flat) == HEIGHT * WIDTH  # all tie: none is less certain than another


def test_ply_leaves_out_invalid_depth_and_resizes_the_photograph(tmp_path):
    depth = np.array([[1.0, np.nan], [0.0, np.inf]])
    image = np.full((8, 8, 3), 77, dtype=np.uint8)
    vertices, _ = read_ply(save_ply(tmp_path / "one.ply", depth, image, field_of_view=60))
    assert len(vertices) == 1
    assert vertices["red"][0] == 77


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "either intrinsics"),
        ({"intrinsics": (1, 1, 0, 0), "field_of_view": 60}, "either intrinsics"),
        ({"intrinsics": (0, 1, 0, 0)}, "positive fx"),
        ({"field_of_view": 180}, "between 0 and 180"),
        ({"field_of_view": 60, "keep_fraction": 0.5}, "needs an uncertainty"),
        ({"field_of_view": 60, "uncertainty": np.ones((4, 4)), "keep_fraction": 1.5}, r"in \(0, 1\]"),
        ({"field_of_view": 60, "uncertainty": np.ones((2, 2))}, r"shape \(2, 2\)"),
        ({"field_of_view": 60, "uncertainty": np.ones((4, 4)), "max_uncertainty": 0.5}, "no point left"),
    ],
)
def test_wrong_point_cloud_arguments_are_explained(arguments, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        save_ply(tmp_path / "cloud.ply", np.ones((4, 4)), np.zeros((4, 4, 3), np.uint8), **arguments)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("near_far", [None, (1.0, 3.0)])
def test_distances_are_placed_and_their_spread_follows(inverse, near_far):
    """Witness for the spread: the standard deviation over many draws, 3 % being 4 standard errors of 10 000 draws."""
    values = np.array([[0.2, 0.5, 0.9]])
    std = np.full_like(values, 0.002)
    z, z_std = place(values, std, inverse=inverse, near_far=near_far)
    assert (np.diff(z) < 0).all() if inverse else (np.diff(z) > 0).all()
    draws = np.random.default_rng(0).normal(values[0], std[0], (10_000, 3))
    drawn, _ = place(draws, inverse=inverse, near_far=near_far)
    np.testing.assert_allclose(z_std[0], drawn.std(axis=0), rtol=0.03)


def test_relative_values_span_the_assumed_distances():
    ends = np.array([[0.0, 1.0]])
    np.testing.assert_allclose(place(ends, near_far=(1.0, 3.0))[0], [[1.0, 3.0]])
    np.testing.assert_allclose(place(ends, near_far=(1.0, 3.0), inverse=True)[0], [[3.0, 1.0]])
    for near_far in ((3.0, 1.0), (0.0, 1.0), (1.0, float("inf"))):
        with pytest.raises(ValueError, match="0 < near < far"):
            place(ends, near_far=near_far, inverse=True)


# --- a whole prediction -----------------------------------------------------------------------------------------------


def test_every_format_writes_the_files_it_announces(record, tmp_path):
    announced = output_paths(tmp_path / "out", "room", list(FORMATS), record.layers)
    written = export(record, tmp_path / "out", "room", list(FORMATS))
    assert written == list(announced)
    assert sorted(written) == sorted((tmp_path / "out").iterdir())
    assert {path.name for path in written} == {
        *(f"room_{layer}_16bit.png" for layer in ("depth", "uncertainty", "epistemic", "q0.05", "q0.95")),
        *(f"room_{layer}.tiff" for layer in ("depth", "uncertainty", "epistemic", "q0.05", "q0.95")),
        *(f"room_{layer}_color.png" for layer in ("depth", "uncertainty", "epistemic")),
        "room.npz", "room_sheet.png", "room.ply",
    }  # fmt: skip


def test_uncertainty_comes_back_as_data_from_every_data_format(record, tmp_path):
    export(record, tmp_path, "room", ["png16", "tiff", "npz", "ply"])
    step = record.uncertainty.max() / 65535
    png, text = load_png16(tmp_path / "room_uncertainty_16bit.png")
    np.testing.assert_allclose(png, record.uncertainty, atol=0.51 * step)
    assert json.loads(text["metadata"]) == {"quantity": "uncertainty", "units": "m", "members": 10}
    with Image.open(tmp_path / "room_uncertainty.tiff") as tiff:
        np.testing.assert_array_equal(np.asarray(tiff), record.uncertainty)
        assert json.loads(tiff.tag_v2[270])["quantity"] == "uncertainty"
    with np.load(tmp_path / "room.npz") as npz:
        for name in ("depth", "uncertainty", "epistemic", "quantiles"):
            np.testing.assert_array_equal(npz[name], getattr(record, name))
        assert tuple(npz["quantile_levels"]) == record.quantile_levels
        assert json.loads(str(npz["metadata"]))["units"] == "m"
    vertices, _ = read_ply(tmp_path / "room.ply")
    assert len(vertices) == pytest.approx(0.9 * HEIGHT * WIDTH, abs=1)  # the default keeps nine tenths
    kept = np.sort(record.uncertainty, axis=None)[: len(vertices)]  # and these are the most certain
    np.testing.assert_array_equal(np.sort(vertices["uncertainty"]), kept)


def test_relative_depth_is_stored_over_the_whole_unit_interval(depth, tmp_path):
    """So that a reader who ignores the text chunks and divides by 65535 is right, as with diffusers' export."""
    record = DepthRecord(np.zeros((HEIGHT, WIDTH, 3), np.uint8), 0.5 * depth)
    export(record, tmp_path, "x", ["png16"])
    pixels = cv2.imread(str(tmp_path / "x_depth_16bit.png"), cv2.IMREAD_UNCHANGED)
    np.testing.assert_allclose(pixels / 65535, 0.5 * depth, atol=0.51 / 65535)


def test_total_and_epistemic_share_one_colour_scale(record, tmp_path):
    export(record, tmp_path, "x", ["uncertainty"])
    shown = np.asarray(Image.open(tmp_path / "x_epistemic_color.png"))
    np.testing.assert_array_equal(shown, color_uncertainty(record.epistemic, vmax=saturation(record.uncertainty)))


def test_options_reach_the_files(record, tmp_path):
    options = ExportOptions(
        depth_range=(0.0, 65.535), uncertainty_max=0.5, intrinsics=(30.0, 30.0, 16.0, 12.0), keep_fraction=0.25
    )
    no_quantiles = DepthRecord(record.image, record.depth, record.uncertainty, metadata={"units": "m"})
    export(no_quantiles, tmp_path, "x", ["png16", "color", "uncertainty", "ply"], options=options)
    assert float(load_png16(tmp_path / "x_depth_16bit.png")[1]["scale"]) == pytest.approx(0.001)
    vertices, _ = read_ply(tmp_path / "x.ply")
    assert len(vertices) == HEIGHT * WIDTH // 4
    shown = np.asarray(Image.open(tmp_path / "x_uncertainty_color.png"))
    np.testing.assert_array_equal(shown, color_uncertainty(record.uncertainty, vmax=0.5))
    shown = np.asarray(Image.open(tmp_path / "x_depth_color.png"))
    np.testing.assert_array_equal(shown, color_depth(record.depth, value_range=(0.0, 65.535)))


def test_depth_alone_is_enough_except_for_the_uncertainty_picture(depth, tmp_path):
    record = DepthRecord(np.zeros((HEIGHT, WIDTH, 3), np.uint8), depth, metadata={"prediction_type": "disparity"})
    rest = [name for name in FORMATS if name != "uncertainty"]
    assert len(export(record, tmp_path, "x", rest)) == len(rest)
    with pytest.raises(ValueError, match="'uncertainty' needs an uncertainty"):
        export(record, tmp_path, "y", ["npz", "uncertainty"])
    assert not list(tmp_path.glob("y*"))


def test_one_existing_file_stops_the_whole_export(record, tmp_path):
    (tmp_path / "x_sheet.png").write_bytes(b"precious")
    with pytest.raises(FileExistsError, match=r"x_sheet\.png exist"):
        export(record, tmp_path, "x", ["npz", "sheet"])
    assert [path.name for path in tmp_path.iterdir()] == ["x_sheet.png"]
    export(record, tmp_path, "x", ["npz", "sheet"], overwrite=True)
    assert (tmp_path / "x_sheet.png").read_bytes() != b"precious"


def test_bad_requests_are_refused_before_anything_is_written(record, tmp_path):
    with pytest.raises(ValueError, match="unknown format 'exr'; choose from png16"):
        export(record, tmp_path / "out", "x", ["npz", "exr"])
    with pytest.raises(ValueError, match="without folders"):
        export(record, tmp_path / "out", "../x", ["npz"])
    assert not (tmp_path / "out").exists()
    (tmp_path / "taken").touch()
    with pytest.raises(NotADirectoryError, match="a file is in the way"):
        export(record, tmp_path / "taken" / "out", "x", ["npz"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"image": np.zeros((4, 4, 3))}, "uint8"),
        ({"image": np.zeros((4, 4), np.uint8)}, r"\(4, 4\)"),
        ({"uncertainty": np.zeros((2, 2))}, r"uncertainty has shape \(2, 2\), but depth has \(24, 32\)"),
        ({"quantile_levels": (0.5,)}, "one level each"),
        ({"depth": np.zeros((2, 3, 4))}, r"depth must be a map \(H, W\)"),
    ],
)
def test_records_are_valid_by_construction(change, message, record):
    fields = {name: getattr(record, name) for name in DepthRecord.__dataclass_fields__}
    with pytest.raises(ValueError, match=message):
        DepthRecord(**(fields | change))


def test_metadata_must_be_json(record):
    with pytest.raises(TypeError, match="ndarray is not JSON serializable"):
        DepthRecord(record.image, record.depth, metadata={"bad": np.zeros(2)})
