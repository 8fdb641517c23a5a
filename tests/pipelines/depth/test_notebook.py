"""The output of a call in a notebook, on disk, and as points in space."""

import base64
import io
import pickle
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from support.depth_record import read_ply
from support.tiny_depth import generator, picture, tiny_pipeline

from marigold_uq.pipelines.depth import MarigoldUQDepthOutput

OPTIONS = {"uncertainty": "trajectory", "ensemble_size": 4, "coverage": 0.8}


@pytest.fixture(scope="module")
def output() -> MarigoldUQDepthOutput:
    return tiny_pipeline("gaussian")([picture(), picture(30, 20, seed=1)], generator=generator(), **OPTIONS)


def test_jupyter_gets_a_sheet_per_image_as_html_and_the_first_as_png(output: MarigoldUQDepthOutput) -> None:
    html = output._repr_html_()
    assert html is not None
    sheets = [Image.open(io.BytesIO(base64.b64decode(code))) for code in re.findall(r"base64,([^\"]+)\"", html)]
    assert len(sheets) == 2
    first = output._repr_png_()
    assert first is not None
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(first))), np.asarray(sheets[0]))
    shown = np.asarray(sheets[0].convert("RGB"))
    assert (shown == np.asarray(output.sheet(0))).all()
    assert sheets[0].size != sheets[1].size


def test_many_images_show_the_first_eight() -> None:
    html = tiny_pipeline()(
        [picture(8, 8, seed=i) for i in range(10)], generator=generator(), batch_size=10
    )._repr_html_()
    assert html is not None
    assert html.count("<img") == 8
    assert "and 2 more" in html


@pytest.mark.parametrize("kind", ["np", "pt"])
def test_saving_writes_the_maps_that_were_returned(kind: str, tmp_path: Path) -> None:
    output = tiny_pipeline("gaussian")([picture(), picture(seed=1)], generator=generator(), output_type=kind, **OPTIONS)
    written = output.save(tmp_path / "out", names=["a", "b"])
    endings = (".npz", "_depth_color.png", "_uncertainty_color.png", "_sheet.png")
    assert {path.name for path in written} == {f"{name}{ending}" for name in "ab" for ending in endings}
    place = (0, 0) if kind == "pt" else (0, slice(None), slice(None), 0)
    with np.load(tmp_path / "out" / "a.npz") as found:
        assert np.array_equal(found["depth"], np.asarray(output.prediction)[place])
        assert np.array_equal(found["uncertainty"], np.asarray(output.uncertainty)[place])
        assert found["interval"].shape == (2, 24, 32)
        assert found["coverage"] == 0.8
    with pytest.raises(FileExistsError, match="exist"):
        output.save(tmp_path / "out", names=["a", "b"])
    with pytest.raises(ValueError, match="2 different ones"):
        output.save(tmp_path / "out", names=["a"])
    assert len(output.save(tmp_path / "out", names=["a", "b"], formats=["npz"], overwrite=True)) == 2


def test_depth_alone_is_saved_without_a_picture_of_uncertainty(tmp_path: Path) -> None:
    written = tiny_pipeline()(picture()).save(tmp_path)
    assert {path.name for path in written} == {"image_0.npz", "image_0_depth_color.png", "image_0_sheet.png"}


@pytest.mark.parametrize("confidence", [0.0, 0.25, 0.9])
def test_a_point_cloud_keeps_the_share_that_is_most_certain(
    output: MarigoldUQDepthOutput, confidence: float, tmp_path: Path
) -> None:
    cloud = output.to_pointcloud(min_confidence=confidence)
    count = 24 * 32
    assert len(cloud.points) == len(cloud.colors) == len(cloud.uncertainty)
    assert len(cloud.points) == pytest.approx((1 - confidence) * count, abs=1.01)
    everything = output.to_pointcloud().uncertainty
    assert cloud.uncertainty.max() <= np.sort(everything)[len(cloud.points) - 1]
    vertices, _ = read_ply(cloud.save(tmp_path / "cloud.ply"))
    assert len(vertices) == len(cloud.points)
    np.testing.assert_allclose(vertices["z"], cloud.points[:, 2], rtol=1e-6)


def test_wrong_requests_say_what_is_missing(output: MarigoldUQDepthOutput) -> None:
    with pytest.raises(ValueError, match="min_confidence must be at least 0 and below 1; got 1"):
        output.to_pointcloud(min_confidence=1)
    with pytest.raises(ValueError, match="needs an uncertainty"):
        tiny_pipeline()(picture()).to_pointcloud(min_confidence=0.5)
    bare = MarigoldUQDepthOutput(np.zeros((1, 4, 5, 1), np.float32))
    assert bare._repr_html_() is None
    assert bare._repr_png_() is None
    with pytest.raises(ValueError, match="holds no pictures"):
        bare.save("out")


def test_what_it_is_shown_with_is_no_output_and_survives_pickling(output: MarigoldUQDepthOutput) -> None:
    assert "shown_with" not in output
    again = pickle.loads(pickle.dumps(output))
    assert again._repr_png_() == output._repr_png_()
    flat, spec = torch.utils._pytree.tree_flatten(output)
    assert torch.utils._pytree.tree_unflatten(flat, spec)._repr_html_() is None
