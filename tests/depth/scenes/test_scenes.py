"""Procedural scenes: exact geometry, reproducible sampling, sane statistics."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from marigold_uq.depth.scenes import DEFAULT_KINDS, LAYOUTS, ProceduralScenes
from marigold_uq.depth.scenes.camera import Camera, make_camera
from marigold_uq.depth.scenes.effects import photograph
from marigold_uq.depth.scenes.lighting import corner_occlusion
from marigold_uq.depth.scenes.materials import Material, Palette
from marigold_uq.depth.scenes.photographs import CROPS_PER_PICTURE, photograph_crops
from marigold_uq.depth.scenes.primitives import (
    Primitive,
    bowl,
    box,
    ellipsoid,
    frustum,
    heightfield,
    intersect,
    quad,
    rod,
    sample_heights,
)
from marigold_uq.depth.scenes.raycast import cast_camera_rays, light_visibility
from marigold_uq.depth.scenes.scene import Stage
from marigold_uq.depth.scenes.surface import surface_points
from marigold_uq.depth.scenes.texture_bank import LEVELS, texture_bank
from marigold_uq.depth.scenes.textures import SIZE

GREY = Material(0, (0.2, 0.2, 0.2), (0.8, 0.8, 0.8))


def camera_at(x: float, y: float, z: float, pitch: float = 0.0, roll: float = 0.0, yaw: float = 0.0) -> Camera:
    return make_camera((x, y, z), yaw=yaw, pitch=pitch, roll=roll, horizontal_fov=60, height=48, width=64)


def hit_points(camera: Camera, primitive: Primitive) -> np.ndarray:
    """World points (N, 3) in double precision that the camera sees of one primitive."""
    hits = cast_camera_rays(camera, [primitive])
    seen = hits.index == 0
    assert seen.sum() > 30, "the test camera does not look at the primitive"
    return camera.position + camera.directions()[seen].astype(np.float64) * hits.depth[seen][:, None]


def test_depth_of_a_floor_is_the_closed_form_of_a_pitched_camera() -> None:
    height, pitch = 1.4, np.deg2rad(30)
    camera = camera_at(0, 0, height, pitch=30)
    hits = cast_camera_rays(camera, [quad((0, 0, 0), (500, 0, 0), (0, 500, 0), GREY)])
    slope = (np.arange(48) + 0.5 - 24) / camera.fy  # tangent of the angle below the optical axis
    expected = height / (np.sin(pitch) + slope * np.cos(pitch))
    rows = expected > 0
    np.testing.assert_allclose(hits.depth[rows], np.repeat(expected[rows, None], 64, axis=1), rtol=2e-4)  # float32 rays


def test_depth_of_a_sphere_is_planar_and_agrees_with_a_double_precision_quadratic() -> None:
    camera, center, radius = camera_at(0.1, 0, 0.3, pitch=5, roll=7, yaw=3), np.array([0.2, 3.0, 0.1]), 0.8
    hits = cast_camera_rays(camera, [ellipsoid(center, (2 * radius,) * 3, GREY)])
    d = camera.directions().astype(np.float64)
    offset = camera.position - center
    a, b, c = (d * d).sum(-1), (d * offset).sum(-1), offset @ offset - radius**2
    discriminant = b * b - a * c
    inside = discriminant > 1e-3 * a  # away from the silhouette, where single precision may disagree about a hit
    expected = (-b - np.sqrt(np.where(inside, discriminant, 1))) / a
    np.testing.assert_allclose(hits.depth[inside], expected[inside], rtol=1e-4)
    assert np.isinf(hits.depth[discriminant < -1e-3 * a]).all()


@pytest.mark.parametrize("sort", ["box", "ellipsoid", "bowl", "cylinder", "cone", "inverted", "rod", "heightfield"])
def test_hit_points_lie_on_the_implicit_surface(sort: str) -> None:
    heights = np.random.default_rng(0).uniform(-1, 1, (9, 9)).astype(np.float32)
    primitive = {
        "box": box((0, 2, 0), (1, 0.8, 0.6), GREY, yaw=30, tilt=20),
        "ellipsoid": ellipsoid((0, 2, 0), (1, 0.8, 0.6), GREY, yaw=30),
        "bowl": bowl((0, 2, 0), (1, 1, 0.8), GREY),
        "cylinder": frustum((0, 2, 0), 0.4, 0.8, GREY),
        "cone": frustum((0, 2, 0), 0.4, 0.8, GREY, taper=0.0),
        "inverted": frustum((0, 2, 0), 0.3, 0.8, GREY, taper=1.7, opened=True),
        "rod": rod((-0.5, 2, -0.3), (0.5, 2.4, 0.4), 0.1, GREY),
        "heightfield": heightfield((0, 2, 0), (2, 2, 0.4), heights, GREY, yaw=20),
    }[sort]
    points = hit_points(camera_at(0, 0, 0.7, pitch=20, roll=5), primitive)
    local = (points - primitive.center) @ primitive.world_to_local.T.astype(np.float64)
    x, y, z = local.T
    if sort == "box":
        residual = np.abs(local).max(axis=1) - 1
    elif sort in ("ellipsoid", "bowl"):
        residual = np.linalg.norm(local, axis=1) - 1
        assert sort == "ellipsoid" or (z < 1e-3).all()
    elif sort == "heightfield":
        surface = z - sample_heights(heights, x.astype(np.float32), y.astype(np.float32))
        border = np.abs(local[:, :2]).max(axis=1) - 1  # the solid is cut off there
        residual = np.where((np.abs(border) < 1e-3) & (surface < 0), border, surface)
    else:
        wide = max(1.0, primitive.taper)
        radius = (1 + primitive.taper) / 2 / wide + z * (primitive.taper - 1) / 2 / wide
        side, cap = (
            np.abs(np.hypot(x, y) - radius),
            np.where(np.hypot(x, y) < radius + 1e-3, np.abs(np.abs(z) - 1), np.inf),
        )
        residual = np.minimum(side, cap)
    # In units of the unit shape: single precision rays from 2 m away; 9 bisections of a step for height fields.
    np.testing.assert_allclose(residual, 0, atol=2e-3 if sort == "heightfield" else 2e-4)


def test_an_opened_frustum_shows_its_inside() -> None:
    camera = make_camera((0, 0, 2), yaw=0, pitch=90, roll=0, horizontal_fov=40, height=33, width=33)
    closed = cast_camera_rays(camera, [frustum((0, 0, 0), 0.3, 1.0, GREY)]).depth[16, 16]
    opened = cast_camera_rays(camera, [frustum((0, 0, 0), 0.3, 1.0, GREY, opened=True)]).depth[16, 16]
    assert closed == pytest.approx(1.5, abs=1e-4)
    assert opened == pytest.approx(2.5, abs=1e-4)


def test_a_cutout_lets_rays_through_its_holes() -> None:
    mask = np.zeros((2, 2), dtype=bool)
    mask[0, 0] = True  # upper left quarter
    sheet = quad((0, 1, 0), (0.3, 0, 0), (0, 0, 0.3), GREY, cutout=mask)
    hits = cast_camera_rays(camera_at(0, 0, 0), [sheet])
    rows, columns = np.nonzero(hits.index == 0)
    assert len(rows) > 0
    assert rows.max() < 24
    assert columns.max() < 32


def random_scene_of(kind: str) -> tuple[Camera, list[Primitive]]:
    rng, bank = np.random.default_rng(5), texture_bank()
    scene = LAYOUTS[kind](Stage(rng, Palette(rng, bank), bank, 48, 64))
    return scene.camera, scene.primitives


@pytest.mark.parametrize("kind", ["room", "street", "tabletop"])
def test_windows_on_the_screen_lose_no_hit(kind: str) -> None:
    camera, primitives = random_scene_of(kind)
    fast = cast_camera_rays(camera, primitives)
    slow = np.full((48, 64), np.inf, dtype=np.float32)
    directions = np.moveaxis(camera.directions(), -1, 0)  # 3, H, W
    with np.errstate(all="ignore"):
        for primitive in primitives:
            to_local = primitive.world_to_local
            direction = np.tensordot(to_local, directions, axes=1)
            slow = np.fmin(slow, intersect(primitive, to_local @ (camera.position - primitive.center), list(direction)))
    # Both round the same rays differently in single precision: a few pixels on silhouettes may fall on the other side.
    agree = np.isclose(fast.depth, slow, rtol=1e-3) | (np.isinf(fast.depth) & np.isinf(slow))
    assert agree.mean() > 0.995


def test_a_box_between_a_point_and_a_lamp_casts_a_shadow() -> None:
    blocker = box((0, 0, 1), (1, 1, 0.2), GREY)
    points = np.array([[0, 0, 0], [2, 0, 0], [0, 0, 1.5]], dtype=np.float32)
    lamp = np.tile(np.array([0, 0, 3], dtype=np.float32), (3, 1))
    assert light_visibility(points, lamp, [blocker]).tolist() == [0, 1, 1]


@pytest.mark.parametrize("shape", ["ellipsoid", "heightfield", "frustum"])
def test_normals_are_the_gradient_of_the_surface(shape: str) -> None:
    grid = np.linspace(-1, 1, 65)
    heights = (0.5 * np.sin(2 * grid)[None, :] * np.cos(grid)[:, None]).astype(np.float32)
    primitive = {
        "ellipsoid": ellipsoid((0, 2, 0), (1.4, 0.8, 0.6), GREY, yaw=25),
        "heightfield": heightfield((0, 2, 0), (3, 2, 0.6), heights, GREY),
        "frustum": frustum((0, 2, 0), 0.5, 1.0, GREY, taper=0.5),
    }[shape]
    camera = make_camera((0, 0, 0.8), yaw=0, pitch=20, roll=0, horizontal_fov=50, height=160, width=160)
    depth = cast_camera_rays(camera, [primitive]).depth
    rays = camera.directions()
    world = camera.position + rays * np.where(np.isfinite(depth), depth, 0)[..., None]
    across, down = world[1:-1, 2:] - world[1:-1, :-2], world[2:, 1:-1] - world[:-2, 1:-1]
    numeric = np.cross(down, across)
    with np.errstate(invalid="ignore"):  # background pixels
        numeric /= np.linalg.norm(numeric, axis=-1, keepdims=True)
    inner = np.isfinite(depth[1:-1, 1:-1]) & np.isfinite(numeric).all(axis=-1)
    points = world[1:-1, 1:-1][inner].astype(np.float32)
    viewing = rays[1:-1, 1:-1][inner]
    viewing = viewing / np.linalg.norm(viewing, axis=1, keepdims=True)
    analytic = surface_points([primitive], points, viewing, np.zeros(len(points), np.int32)).normal
    cosine = np.abs((analytic * numeric[inner]).sum(axis=1))
    assert np.median(cosine) > 0.999  # edges, where finite differences straddle two faces, are a minority
    assert ((analytic * viewing).sum(axis=1) <= 1e-5).all()


def test_texture_lookup_at_texel_centres_returns_the_texels_of_the_right_level() -> None:
    bank = texture_bank()
    number = bank.categories["poster"][3]
    for level in range(LEVELS):
        side = SIZE >> level
        row, column = side // 2, side // 4
        u, v = (np.array([(k + 0.5) / side], np.float32) for k in (column, row))
        sample = bank.lookup(np.array([number]), u + 7, v - 3, np.array([1.2 / side], np.float32))  # wrapped
        texel = bank.texels[bank.starts[level] + number * side * side + row * side + column]
        np.testing.assert_allclose(sample[0], texel / 255, atol=1e-3)  # float32 coordinates times 128 texels


def test_a_plane_is_not_darkened_by_corner_occlusion_but_a_recess_is() -> None:
    ramp = (1 / np.linspace(0.2, 1.0, 96, dtype=np.float32))[:, None] * np.ones((1, 128), np.float32)
    assert corner_occlusion(ramp, 1.0)[20:-20, 20:-20].min() > 0.99
    recess = np.full((96, 128), 1.0, np.float32)
    recess[40:56, 60:70] = 2.0
    assert corner_occlusion(recess, 1.0)[48, 65] < 0.9


def test_the_photographic_chain_keeps_shape_and_range() -> None:
    radiance = np.random.default_rng(1).gamma(0.5, 2.0, (40, 56, 3)).astype(np.float32)
    depth = np.linspace(0.5, 20, 40 * 56, dtype=np.float32).reshape(40, 56)
    for seed in range(30):
        image = photograph(radiance, depth, np.random.default_rng(seed))
        assert image.shape == (40, 56, 3)
        assert image.dtype == np.float32
        assert np.isfinite(image).all()
        assert image.min() >= 0
        assert image.max() <= 1


@pytest.mark.parametrize("kind", list(LAYOUTS))
def test_every_kind_gives_complete_samples(kind: str) -> None:
    scenes = ProceduralScenes(4, seed=2, height=48, width=64, kinds={kind: 1.0})
    for i in range(len(scenes)):
        sample = scenes[i]
        assert sample["kind"] == kind
        assert (sample["image"].shape, sample["image"].dtype) == ((3, 48, 64), torch.float32)
        assert (sample["depth"].shape, sample["depth"].dtype) == ((1, 48, 64), torch.float32)
        assert (sample["valid"].shape, sample["valid"].dtype) == ((1, 48, 64), torch.bool)
        assert 0 <= float(sample["image"].min()) < float(sample["image"].max()) <= 1
        assert torch.isfinite(sample["depth"]).all()
        assert float(sample["depth"].min()) > 0.04
        assert float(sample["valid"].float().mean()) >= 1 / 3


def test_sky_is_invalid_and_carries_the_largest_valid_depth() -> None:
    scenes = ProceduralScenes(8, seed=1, height=48, width=64, kinds={"landscape": 1.0})
    skies = [s for s in (scenes[i] for i in range(8)) if not s["valid"].all()]
    assert skies, "no landscape shows sky"
    for sample in skies:
        assert (sample["depth"][~sample["valid"]] == sample["depth"][sample["valid"]].max()).all()


def test_a_sample_depends_on_seed_split_and_index_alone() -> None:
    reference = ProceduralScenes(3, seed=7, height=48, width=64)
    first = [reference[i] for i in range(3)]
    again = ProceduralScenes(1000, seed=7, height=48, width=64)
    for i in (2, 0, 1):
        sample = again[i]
        assert torch.equal(sample["image"], first[i]["image"])
        assert torch.equal(sample["depth"], first[i]["depth"])
        assert (sample["name"], sample["kind"]) == (first[i]["name"], first[i]["kind"])
    others = [
        ProceduralScenes(3, seed=8, height=48, width=64),
        ProceduralScenes(3, seed=7, height=48, width=64, split="validation"),
        ProceduralScenes(3, seed=7, height=48, width=64, split="test"),
    ]
    images = [first[0]["image"], first[1]["image"], *(other[0]["image"] for other in others)]
    for i in range(len(images)):
        for j in range(i):
            assert not torch.equal(images[i], images[j])


def test_workers_and_batches_do_not_change_samples() -> None:
    scenes = ProceduralScenes(4, seed=3, height=48, width=64)
    batches = list(DataLoader(scenes, batch_size=2, num_workers=1))
    loaded = torch.cat([batch["image"] for batch in batches])
    assert torch.equal(loaded, torch.stack([scenes[i]["image"] for i in range(4)]))


def test_global_random_state_is_left_alone() -> None:
    before = np.random.get_state()[1].copy(), torch.get_rng_state()  # noqa: NPY002
    ProceduralScenes(1, height=48, width=64)[0]
    assert (before[0] == np.random.get_state()[1]).all()  # noqa: NPY002
    assert torch.equal(before[1], torch.get_rng_state())


def test_scenes_are_near_at_the_bottom() -> None:
    scenes = ProceduralScenes(40, seed=4, height=24, width=32)
    depths = [scenes[i]["depth"][0] for i in range(40)]
    nearer = [float(depth[-8:].median()) < float(depth[:8].median()) for depth in depths]
    # All 33 photographs of depth_real have this property; a camera free to look anywhere has it half of the time, and
    # 40 draws exceed 0.5 by three standard errors at 0.74.
    assert np.mean(nearer) > 0.74


def test_kinds_appear_with_the_frequency_asked_for() -> None:
    scenes = ProceduralScenes(60, seed=6, height=16, width=16, kinds={"still_life": 3, "from_above": 1})
    share = np.mean([scenes[i]["kind"] == "still_life" for i in range(60)])
    assert abs(share - 0.75) < 0.17  # three standard errors of 60 draws
    assert sum(DEFAULT_KINDS.values()) == pytest.approx(1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"length": 0}, "length"),
        ({"length": 1, "seed": -1}, "seed"),
        ({"length": 1, "split": "dev"}, "split"),
        ({"length": 1, "kinds": {"kitchen": 1.0}}, "kitchen"),
        ({"length": 1, "kinds": {"room": -1.0}}, "non-negative"),
        ({"length": 1, "kinds": {}}, "positive sum"),
    ],
)
def test_wrong_arguments_are_refused_with_their_value(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ProceduralScenes(**arguments)


def test_an_index_out_of_range_ends_iteration() -> None:
    scenes = ProceduralScenes(2, height=16, width=16)
    assert len(list(scenes)) == 2
    with pytest.raises(IndexError):
        scenes[2]


def test_prints_can_come_from_free_photographs() -> None:
    pytest.importorskip("skimage", reason="scikit-image carries the pictures")
    crops = photograph_crops(np.random.default_rng(0), 16)
    assert len(crops) > 2 * CROPS_PER_PICTURE  # scikit-learn alone has two pictures
    assert {(crop.shape, crop.dtype.name) for crop in crops} == {((16, 16, 3), "uint8")}
    assert len(texture_bank().categories["photograph"]) == 0
