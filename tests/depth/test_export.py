"""Files: what is written can be read back, by us and by others (OpenCV, numpy), and is never half written."""

import errno
import json
import os
import re
import tempfile
from pathlib import Path

import cv2
import numpy as np
import pytest
from PIL import Image
from support.depth_record import HEIGHT, WIDTH, random_depth, random_record, read_ply

from marigold_uq.depth.colors import color_depth, color_uncertainty, saturation
from marigold_uq.depth.export import (
    FORMATS,
    DepthRecord,
    ExportOptions,
    export,
    load_png16,
    output_paths,
    save_image,
    save_npz,
    save_ply,
    save_png16,
    save_tiff,
)
from marigold_uq.files import atomic_path, make_folder


@pytest.fixture
def depth() -> np.ndarray:
    return random_depth()


@pytest.fixture
def record() -> DepthRecord:
    return random_record()


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


# --- a whole prediction -----------------------------------------------------------------------------------------------


def test_every_format_writes_the_files_it_announces(record, tmp_path):
    announced = output_paths(tmp_path / "out", "room", list(FORMATS), record.layers)
    written = export(record, tmp_path / "out", "room", list(FORMATS))
    assert written == list(announced)
    assert sorted(written) == sorted((tmp_path / "out").iterdir())
    assert {path.name for path in written} == {
        *(f"room_{layer}_16bit.png" for layer in ("depth", "uncertainty", "epistemic", "lower", "upper")),
        *(f"room_{layer}.tiff" for layer in ("depth", "uncertainty", "epistemic", "lower", "upper")),
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
        for name in ("depth", "uncertainty", "epistemic", "interval"):
            np.testing.assert_array_equal(npz[name], getattr(record, name))
        assert npz["coverage"] == record.coverage
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
    no_interval = DepthRecord(record.image, record.depth, record.uncertainty, metadata={"units": "m"})
    export(no_interval, tmp_path, "x", ["png16", "color", "uncertainty", "ply"], options=options)
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
        ({"coverage": None}, "needs its coverage"),
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
