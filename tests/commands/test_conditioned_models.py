"""The commands with a model that has an image encoder: by default, in every mode, and after calibration."""

import json
from pathlib import Path

import numpy as np
import pytest
from support.cli_runs import read_npz, run, save_picture
from support.tiny_conditioned import conditioned_pipeline

SIZES = [(48, 64), (48, 64), (32, 64), (100, 80)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "conditioned"
    conditioned_pipeline("low_rank").save_pretrained(folder)
    return folder


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    folder = tmp_path / "photos"
    folder.mkdir()
    for index, (height, width) in enumerate(SIZES):
        save_picture(folder / f"p{index}.png", height=height, width=width, seed=index)
    return folder


def depth(model: Path, source: Path, output: Path, *words: object) -> int:
    return run("depth", source, "-o", output, "--model", model, "--device", "cpu", *words)


def test_marginal_is_the_default_and_batches_change_nothing(model: Path, photos: Path, tmp_path: Path) -> None:
    for size in (1, 8):
        options = ["--batch_size", size, "--coverage", 0.9, "--formats", "npz", "png16", "tiff", "ply", "sheet"]
        assert depth(model, photos, tmp_path / f"out{size}", *options) == 0
    assert json.loads((tmp_path / "out1" / "p0.json").read_text())["asked"]["uncertainty"] == "marginal"
    for index, size in enumerate(SIZES):
        one, other = (read_npz(tmp_path / f"out{batch}" / f"p{index}.npz") for batch in (1, 8))
        assert one["depth"].shape == size
        assert (one["interval"][0] < one["interval"][1]).all()
        for name in ("depth", "uncertainty", "interval"):
            np.testing.assert_allclose(one[name], other[name], atol=1e-5)


@pytest.mark.parametrize("mode", ["marginal", "trajectory", "ensemble", "none"])
def test_every_mode_gives_the_same_depth_of_one_chain_and_videos_run(mode: str, model: Path, tmp_path: Path) -> None:
    frames = tmp_path / "frames"
    frames.mkdir()
    for index in range(2):
        save_picture(frames / f"f{index}.png", height=48, width=64, seed=index)
    words = ["--uncertainty", mode, "--ensemble_size", 3, "--formats", "npz"]
    assert depth(model, frames, tmp_path / "pictures", *words) == 0
    assert depth(model, frames, tmp_path / "video", "--video", *words) == 0
    assert (tmp_path / "video" / "frames_depth.mp4").stat().st_size > 0
    for folder in (tmp_path / "pictures", tmp_path / "video" / "frames"):
        maps = read_npz(folder / "f1.npz")
        assert ("uncertainty" in maps) == (mode != "none")
        assert np.isfinite(maps["depth"]).all()


def test_a_calibrated_copy_gives_its_intervals_also_as_onnx(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("onnxruntime", reason="the export needs the extra onnx")
    data = tmp_path / "data"
    for name in ("images", "depth"):
        (data / name).mkdir(parents=True)
    rng = np.random.default_rng(0)
    for index in range(6):
        save_picture(data / "images" / f"{index}.png", height=48, width=64, seed=index)
        np.save(data / "depth" / f"{index}.npy", rng.uniform(1, 5, (48, 64)).astype(np.float32))
    options = ["--ensemble_size", 4, "--num_pixels", 100, "--modes", "marginal", "--report", "false"]
    copy = tmp_path / "copy"
    assert run("calibrate", "depth", "--model", model, "--data.root", data, "-o", copy, *options) == 0
    words = ["--ensemble_size", 4, "--coverage", 0.5, "--formats", "npz"]
    assert depth(copy, data / "images", tmp_path / "out", *words) == 0
    maps = read_npz(tmp_path / "out" / "0.npz")
    half = (maps["interval"][1] - maps["interval"][0]) / 2
    assert np.allclose(half / maps["uncertainty"], half[0, 0] / maps["uncertainty"][0, 0], rtol=1e-3)
    capsys.readouterr()
    export = ["export-onnx", "-o", tmp_path / "m.onnx", "--ensemble_size", 4, "--coverages", 0.5]
    assert run(*export, "--model", copy) == 0
    assert "intervals of 50%" in capsys.readouterr().out
