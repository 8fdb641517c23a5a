"""The exported graph is the pipeline: same maps, on pictures of any size, for both kinds of models."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from support.tiny_conditioned import conditioned_pipeline
from support.tiny_depth import picture, tiny_autoencoder_tiny, tiny_pipeline
from torch import Tensor

from marigold_uq import MarigoldUQDepthPipeline
from marigold_uq.calibration import Calibration, IntervalGrid
from marigold_uq.cli import main
from marigold_uq.distributions import GaussianDistribution
from marigold_uq.picture_files import ImageError
from marigold_uq.pipelines.depth.images import load_images

pytest.importorskip("onnx", reason="the export needs the extra onnx")
pytest.importorskip("onnxruntime", reason="the export needs the extra onnx")

from marigold_uq.depth.onnx_export import TILE, OneStepDepth, export_onnx
from marigold_uq.depth.onnx_model import INPUT, OnnxDepth, _pixels

GRID = IntervalGrid((0.5, 0.9), ((0.8,), (2.1,)))
MEMBERS = 6
SIZES = [(48, 80), (33, 57), (64, 64), (130, 20), (16 * TILE + 5, 40)]
"""Whole cells and broken ones; the last is longer than the stored tile of random numbers."""


def calibrated(pipeline: MarigoldUQDepthPipeline, mode: str) -> MarigoldUQDepthPipeline:
    return pipeline.calibrate(
        Calibration(kappa=1.3, interval=GRID, uncertainty=mode, ensemble_size=MEMBERS, num_inference_steps=1)
    )


def image(height: int, width: int) -> Tensor:
    return torch.from_numpy(picture(height, width)).permute(2, 0, 1)


def run(path: Path, pixels: Tensor) -> list[Tensor]:
    return [torch.from_numpy(one) for one in OnnxDepth(path).session.run(None, {INPUT: pixels[None].numpy()})]


def call(pipeline: MarigoldUQDepthPipeline, pixels: Tensor, mode: str, start: Tensor | None, **options: Any) -> Any:
    return pipeline(
        pixels, uncertainty=mode, ensemble_size=MEMBERS, num_inference_steps=1, coverage=0.9, output_type="pt",
        latents=start, **{"processing_resolution": 0, **options},
    )  # fmt: skip


def start_of(pipeline: MarigoldUQDepthPipeline, pixels: Tensor) -> Tensor:
    """The stored start for a picture, written down a second time: numbers repeat after TILE cells."""
    cells = [-(-edge // pipeline.vae_scale_factor) for edge in pixels.shape[-2:]]
    tile = OneStepDepth(pipeline, num_members=MEMBERS).start
    repeats = [1, 1, *(-(-edge // TILE) for edge in cells)]
    return tile.repeat(*repeats)[..., : cells[0], : cells[1]]


@pytest.mark.parametrize("family", ["gaussian", "low_rank"])
def test_with_depth_cells_the_graph_is_the_marginal_call(family: str, tmp_path: Path) -> None:
    pipeline = calibrated(conditioned_pipeline(family), "marginal")
    found = export_onnx(pipeline, tmp_path / "m.onnx", coverages=[0.5, 0.9], ensemble_size=MEMBERS)
    assert found.coverages == (0.5, 0.9)
    for size in SIZES:
        pixels = image(*size)
        prediction, std, interval = run(tmp_path / "m.onnx", pixels)
        expected = call(pipeline, pixels, "marginal", start_of(pipeline, pixels))
        assert prediction.shape == (1, 1, *size)
        assert torch.allclose(prediction, expected.prediction, atol=2e-5)
        assert torch.allclose(std, expected.uncertainty, atol=2e-5)
        assert torch.allclose(interval[1:], expected.interval, atol=1e-4)
        assert bool((std > 0).all())


@pytest.mark.parametrize("kind", ["kl", "tiny"])
def test_with_an_autoencoder_the_graph_is_the_trajectory_call_given_its_draws(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A metric model, whose members are not aligned; the pipeline is made to draw what is stored in the graph."""
    vae = tiny_autoencoder_tiny() if kind == "tiny" else None
    metric = {"scale_invariant": False, "shift_invariant": False}
    pipeline = calibrated(tiny_pipeline("gaussian", vae=vae, default_denoising_steps=1, **metric), "trajectory")
    export_onnx(pipeline, tmp_path / "m.onnx", ensemble_size=MEMBERS)
    tile = OneStepDepth(pipeline, num_members=MEMBERS).deviations

    def stored_draws(law: GaussianDistribution, sample_shape: Any = (), generator: Any = None) -> Tensor:
        return law.loc + law.scale * tile[:, None, :, : law.loc.shape[-2], : law.loc.shape[-1]]

    monkeypatch.setattr(GaussianDistribution, "rsample", stored_draws)
    for size in [(24, 32), (17, 30), (50, 21)]:
        pixels = image(*size)
        prediction, std, interval = run(tmp_path / "m.onnx", pixels)
        expected = call(pipeline, pixels, "trajectory", start_of(pipeline, pixels))
        assert torch.allclose(prediction, expected.prediction, atol=1e-5)
        assert torch.allclose(std, expected.uncertainty, atol=1e-5)
        assert torch.allclose(interval, expected.interval, atol=5e-5)


def test_relative_depth_is_that_of_a_call_without_uncertainty(tmp_path: Path) -> None:
    pipeline, pixels = tiny_pipeline("gaussian"), image(31, 44)
    export_onnx(pipeline, tmp_path / "m.onnx", ensemble_size=MEMBERS)
    prediction, std = run(tmp_path / "m.onnx", pixels)
    options = {"latents": start_of(pipeline, pixels), "num_inference_steps": 1, "processing_resolution": 0}
    assert torch.allclose(prediction, pipeline(pixels, output_type="pt", **options).prediction, atol=1e-5)
    assert bool((std > 0).all())


def test_a_picture_file_gives_what_the_pipeline_gives(tmp_path: Path) -> None:
    """Through the resizing to the model's resolution and back, up and down."""
    pipeline = calibrated(conditioned_pipeline(), "marginal")
    export_onnx(pipeline, tmp_path / "m.onnx", ensemble_size=MEMBERS, model="mine")
    model = OnnxDepth(tmp_path / "m.onnx", num_threads=1)
    assert model.facts["model"] == "mine"
    assert model.coverages == (0.9,)
    for size in [(100, 151), (40, 30)]:
        file = tmp_path / "picture.png"
        Image.fromarray((255 * picture(*size)).round().astype(np.uint8)).save(file)
        maps = model(file)
        small = [edge * 64 // max(size) for edge in size]  # as the pipeline rounds
        expected = call(
            pipeline, file, "marginal", start_of(pipeline, torch.zeros(3, *small)), processing_resolution=64
        )
        assert np.allclose(maps.prediction, expected.prediction[0, 0], atol=1e-4)
        assert np.allclose(maps.uncertainty, expected.uncertainty[0, 0], atol=1e-4)
        assert np.allclose(maps.interval, expected.interval, atol=4e-4)
        assert np.allclose(model(picture(*size)).prediction, maps.prediction, atol=0.05)


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (lambda: tiny_pipeline("point"), {}, "family gaussian; this one is 'point'"),
        (lambda: conditioned_pipeline("mixture"), {}, "family gaussian or low_rank; this one is 'mixture'"),
        (conditioned_pipeline, {"coverages": [0.9]}, "no calibrated intervals"),
        (lambda: conditioned_pipeline().to(torch.bfloat16), {}, "export in float32"),
    ],
)
def test_what_cannot_be_exported_is_an_error_that_says_why(
    make: Any, options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        export_onnx(make(), tmp_path / "m.onnx", **options)
    assert not list(tmp_path.iterdir())


def test_a_graph_that_differs_from_torch_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("marigold_uq.depth.onnx_export._TOLERANCE", 0.0)
    with pytest.raises(RuntimeError, match="differs from torch"):
        export_onnx(conditioned_pipeline(), tmp_path / "m.onnx")
    assert not list(tmp_path.iterdir())


def test_the_command_writes_a_file_that_runs_without_torch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    calibrated(conditioned_pipeline(), "marginal").save_pretrained(tmp_path / "model")
    words = ["export-onnx", "--model", str(tmp_path / "model"), "-o", str(tmp_path / "m.onnx")]
    assert main([*words, "--ensemble_size", str(MEMBERS), "--coverages", "0.5", "0.9"]) == 0
    assert "intervals of 50%, 90%" in capsys.readouterr().out
    assert main(words) == 2
    assert "exists" in capsys.readouterr().err
    code = (
        "import sys, numpy; from marigold_uq.depth.onnx_model import OnnxDepth\n"
        f"maps = OnnxDepth({str(tmp_path / 'm.onnx')!r})(numpy.zeros((40, 50, 3)))\n"
        "print(maps.interval.shape, 'torch' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert found == "(2, 2, 40, 50) False\n"


def test_other_files_and_pictures_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no such file"):
        OnnxDepth(tmp_path / "none.onnx")
    export_onnx(conditioned_pipeline(), tmp_path / "m.onnx")
    model = OnnxDepth(tmp_path / "m.onnx")
    for wrong in (np.zeros((4, 4, 2)), np.full((4, 4, 3), 2.0), np.zeros((4, 4, 3), np.int64)):
        with pytest.raises(ValueError, match="a picture"):
            model(wrong)


PIXELS = np.random.default_rng(0).integers(0, 256, (6, 8, 3), dtype=np.uint8)
PICTURES = {
    "colour.png": Image.fromarray(PIXELS),
    "grey.png": Image.fromarray(PIXELS[..., 0]),
    "deep.png": Image.fromarray(PIXELS[..., 0].astype(np.uint16) * 200),
    "alpha.png": Image.fromarray(np.dstack([PIXELS, PIXELS[..., 0]])),
    "palette.gif": Image.fromarray(PIXELS).convert("P"),
}


@pytest.mark.parametrize("name", PICTURES)
def test_a_file_is_read_as_the_pipeline_reads_it(name: str, tmp_path: Path) -> None:
    PICTURES[name].save(tmp_path / name)
    (expected,) = load_images(tmp_path / name)
    for given in (tmp_path / name, Image.open(tmp_path / name)):
        np.testing.assert_allclose(_pixels(given), expected.permute(1, 2, 0).numpy(), atol=1e-6)


def test_a_strangers_file_cannot_harm(tmp_path: Path) -> None:
    """EXIF that no parser takes, a file that asks another program to open it, and one that claims too many pixels."""
    exif = b"Exif\0\0MM\0*\0\0\0\x08\0\x02\x01\x12\0\x03\0\0\0\x01\0\x06\0\0\x01\x1a\0\x02\0\0\0\x04ab\0\0\0\0\0\0"
    Image.fromarray(PIXELS).save(tmp_path / "turned.jpg", exif=exif)
    assert _pixels(tmp_path / "turned.jpg").shape == (8, 6, 3)
    (tmp_path / "program.eps").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 6\n%%EOF\n")
    Image.new("1", (13000, 13000)).save(tmp_path / "large.gif")
    for name in ("program.eps", "large.gif"):
        with pytest.raises(ImageError, match=name):
            _pixels(tmp_path / name)
