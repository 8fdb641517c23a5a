"""What the demo shows of a picture, without a browser; the page itself is in tests/commands/test_demo_browser.py."""

import asyncio
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from support.cli_runs import read_npz, save_picture
from support.tiny_conditioned import conditioned_pipeline
from support.tiny_depth import tiny_pipeline

from marigold_uq.calibration import Calibration, IntervalGrid
from marigold_uq.depth.demo import opacity, predict
from marigold_uq.depth.glb import glb_bytes
from marigold_uq.metrics import nested_interval
from marigold_uq.picture_files import ImageError

MEMBERS = 4
GRID = IntervalGrid((0.5, 0.9), ((0.8,), (2.0,)))


def pipeline(*, calibrated: bool = True):
    made = tiny_pipeline("gaussian", default_processing_resolution=16, default_denoising_steps=1)
    record = Calibration(kappa=1.5, interval=GRID, uncertainty="trajectory", ensemble_size=MEMBERS)
    return made.calibrate(record) if calibrated else made


def shown(folder: Path, *, calibrated: bool = True, height: int = 12, width: int = 16):
    path = save_picture(folder / "p.png", height=height, width=width)
    return predict(pipeline(calibrated=calibrated), path, max_pixels=10**6, ensemble_size=MEMBERS)


@pytest.mark.parametrize("level", [0.5, 0.7, 0.9])
def test_the_interval_of_a_pixel_is_that_of_the_pipeline(level: float, tmp_path: Path) -> None:
    found = shown(tmp_path)
    whole = pipeline()(
        Image.open(tmp_path / "p.png"),
        uncertainty="trajectory",
        ensemble_size=MEMBERS,
        coverage=level,
        generator=torch.Generator().manual_seed(0),
    ).interval[0]
    for row, column in ((0, 0), (5, 9), (11, 15)):
        assert found.interval_at(row, column, level) == pytest.approx(tuple(whole[row, column]), abs=1e-6)


def test_without_a_calibration_the_interval_is_that_of_the_members_and_it_says_so(tmp_path: Path) -> None:
    found = shown(tmp_path, calibrated=False)
    assert found.members is not None
    lower, upper = nested_interval(found.members[:, 3, 4], 0.8)
    assert found.interval_at(3, 4, 0.8) == (pytest.approx(float(lower)), pytest.approx(float(upper)))
    assert "not calibrated" in found.sentence(3, 4, 0.8)


def test_a_model_with_an_image_encoder_is_shown_by_its_quantiles(tmp_path: Path) -> None:
    record = Calibration(kappa=1.5, interval=GRID, uncertainty="marginal", ensemble_size=MEMBERS)
    model = conditioned_pipeline("low_rank").calibrate(record)
    path = save_picture(tmp_path / "p.png", height=48, width=64)
    found = predict(model, path, max_pixels=10**6, ensemble_size=MEMBERS)
    generator = torch.Generator().manual_seed(0)
    expected = model(path, uncertainty="marginal", ensemble_size=MEMBERS, coverage=0.9, generator=generator)
    assert found.interval_at(5, 7, 0.9) == pytest.approx(tuple(expected.interval[0, 5, 7]), abs=1e-5)
    assert found.record.metadata["uncertainty"] == "marginal"
    assert found.cloud(0.5)[1] < found.cloud(1.0)[1]


def test_a_level_beyond_the_calibration_is_flagged(tmp_path: Path) -> None:
    found = shown(tmp_path)
    assert "extrapolated: calibrated from 50% to 90%" in found.sentence(3, 4, 0.95)
    assert "extrapolated" not in found.sentence(3, 4, 0.9)


def test_a_click_into_a_large_picture_that_is_shown_small_finds_its_pixel(tmp_path: Path) -> None:
    found = shown(tmp_path, height=400, width=1800)
    assert found.depth_picture().shape == (200, 900, 3)
    assert found.pixel_of(0, 0) == (1, 1)
    assert found.pixel_of(899, 199) == (399, 1799)
    assert found.pixel_of(450, 150) == (301, 901)


def test_opacity_falls_from_certain_to_unsure_and_keeps_the_share() -> None:
    std = np.random.default_rng(0).random(1000)
    alpha = opacity(std, 0.6)
    assert bool((np.diff(alpha[np.argsort(std)].astype(int)) <= 0).all())
    assert (alpha > 0).sum() == pytest.approx(600, abs=2)
    assert (alpha == 255).sum() == pytest.approx(500, abs=2)
    assert bool((opacity(std, 1.0) == 255).all())


def test_the_cloud_holds_the_most_certain_points_and_fewer_for_a_smaller_share(tmp_path: Path) -> None:
    found = shown(tmp_path)
    counts = [found.cloud(share)[1] for share in (0.2, 0.5, 1.0)]
    assert counts == sorted(counts)
    assert counts[-1] == 12 * 16
    assert counts[0] == pytest.approx(0.2 * 12 * 16, abs=2)


def test_a_glb_file_has_the_layout_of_gltf() -> None:
    """Header, JSON and binary chunks of glTF 2.0, read here by the letter of the specification."""
    points = np.array([[0.0, 1.0, -2.0], [3.0, -1.0, -5.0]])
    colors = np.array([[255, 0, 188, 255], [0, 10, 0, 128]], dtype=np.uint8)
    content = glb_bytes(points, colors)
    magic, version, length = struct.unpack_from("<4sII", content)
    assert (magic, version, length) == (b"glTF", 2, len(content))
    size, kind = struct.unpack_from("<I4s", content, 12)
    assert (kind, size % 4) == (b"JSON", 0)
    scene = json.loads(content[20 : 20 + size])
    binary_size, kind = struct.unpack_from("<I4s", content, 20 + size)
    assert (kind, binary_size) == (b"BIN\0", scene["buffers"][0]["byteLength"])
    binary = content[28 + size :]
    assert len(binary) == binary_size
    position, color = scene["accessors"]
    assert (position["min"], position["max"]) == ([0, -1, -5], [3, 1, -2])
    views = [binary[v["byteOffset"] : v["byteOffset"] + v["byteLength"]] for v in scene["bufferViews"]]
    assert np.array_equal(np.frombuffer(views[0], "<f4").reshape(2, 3), points)
    read = np.frombuffer(views[1], "<u2").reshape(2, 4) / 65535
    assert color["normalized"]
    assert color["componentType"] == 5123
    # 188 is the middle of linear light, .5029, and 10 lies on the linear foot of the curve
    assert np.allclose(read, [[1, 0, 0.50289, 1], [0, 10 / 255 / 12.92, 0, 128 / 255]], atol=2e-5)


@pytest.mark.parametrize(
    ("points", "message"),
    [(np.empty((0, 3)), "at least one point"), (np.full((1, 3), np.nan), "all finite"), (np.zeros((2, 2)), "expected")],
)
def test_a_cloud_that_cannot_be_written_is_refused(points: np.ndarray, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        glb_bytes(points, np.zeros((len(points), 4), np.uint8))


def test_files_hold_the_interval_of_the_level_where_it_is_calibrated(tmp_path: Path) -> None:
    found = shown(tmp_path)
    names = {path.name for path in found.write_files(0.9, 0.5, tmp_path, "p")}
    assert names >= {"p.npz", "p.ply", "p_sheet.png", "p_depth_16bit.png", "p_lower_16bit.png", "p_upper_16bit.png"}
    (path,) = [one for one in found.write_files(0.9, 0.5, tmp_path, "p") if one.suffix == ".npz"]
    content = read_npz(path)
    assert content["coverage"] == 0.9
    assert np.allclose(content["interval"][1] - content["depth"], 2.0 * content["uncertainty"], atol=1e-6)
    (path,) = [one for one in found.write_files(0.99, 0.5, tmp_path, "p") if one.suffix == ".npz"]
    assert "interval" not in read_npz(path)


def test_files_that_are_no_pictures_or_too_large_are_refused(tmp_path: Path) -> None:
    (tmp_path / "x.png").write_bytes(b"not a picture")
    with pytest.raises(ImageError, match="is not an image"):
        predict(pipeline(), tmp_path / "x.png", max_pixels=10**6)
    with pytest.raises(ImageError, match="more than the 100 allowed"):
        predict(pipeline(), save_picture(tmp_path / "p.png"), max_pixels=100)


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:7860", 200), ("localhost:7860", 200), ("LOCALHOST:8000", 200), ("[::1]:7860", 200),
        ("rebound.example:7860", 403), ("127.0.0.1.example", 403), ("", 403),
    ],
)  # fmt: skip
def test_a_page_elsewhere_whose_name_was_made_to_mean_this_computer_is_refused(host: str, status: int) -> None:
    """DNS rebinding: the browser takes the demo for a part of that page, and only the name in the request tells."""
    pytest.importorskip("gradio", reason='the demo needs gradio: pip install ".[demo]"')
    from starlette.responses import PlainTextResponse

    from marigold_uq.depth.demo_page import _SameOrigin

    events: list[dict[str, Any]] = []

    async def send(event: dict[str, Any]) -> None:
        events.append(event)

    scope = {"type": "http", "method": "GET", "path": "/", "headers": [(b"host", host.encode())]}
    asyncio.run(_SameOrigin(PlainTextResponse("the page"))(scope, None, send))
    assert events[0]["status"] == status
    policy = [value for name, value in events[0]["headers"] if name == b"content-security-policy"]
    assert len(policy) == (status == 200)
