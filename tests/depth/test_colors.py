"""Pictures: colours, sheets and point clouds show what the arrays say, for any size and any number."""

import matplotlib
import numpy as np
import pytest
from diffusers.pipelines.marigold.marigold_image_processing import MarigoldImageProcessor
from support.depth_record import HEIGHT, WIDTH, random_depth, random_record, read_ply

from marigold_uq.depth.colors import (
    INVALID_COLOR,
    color_depth,
    color_uncertainty,
    colored_points,
    place,
    saturation,
    sheet,
)
from marigold_uq.depth.export import DepthRecord, save_ply


@pytest.fixture
def depth() -> np.ndarray:
    return random_depth()


@pytest.fixture
def record() -> DepthRecord:
    return random_record()


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
