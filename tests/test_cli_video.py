"""Videos through the `marigold-uq` command."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from PIL import Image
from support.cli_runs import depth, noisy_scene, read_npz, save_models, save_picture
from support.tiny_depth import picture, tiny_pipeline

from marigold_uq.commands import video as video_command
from marigold_uq.commands.video import common_noise
from marigold_uq.depth.video import read_frames, write_video
from marigold_uq.randomness import member_generators


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return save_models(tmp_path_factory.mktemp("models"))


@pytest.fixture
def frames(tmp_path):
    folder = tmp_path / "clip"
    folder.mkdir()
    for index, frame in enumerate(noisy_scene(5)):
        Image.fromarray(frame).save(folder / f"frame{index + 8}.png")  # frame9 before frame10
    return folder


def flicker(maps: list[np.ndarray]) -> float:
    """Mean absolute difference from frame to frame."""
    return float(np.mean([np.abs(after - before).mean() for before, after in pairwise(maps)]))


@pytest.mark.parametrize(("family", "mode"), [("gaussian", "trajectory"), ("gaussian", "ensemble"), ("point", "none")])
def test_depth_of_a_static_scene_flickers_less_than_with_independent_seeds(models, frames, tmp_path, family, mode):
    words = ["--uncertainty", mode, "--formats", "npz"]
    assert depth(models, frames, "-o", tmp_path / "v", "--video", *words, family=family) == 0
    names = [f"frame{index}" for index in range(8, 13)]
    carried = [read_npz(tmp_path / "v" / "clip" / f"{name}.npz")["depth"] for name in names]
    independent = []
    for seed, name in enumerate(names):
        depth(models, frames / f"{name}.png", "-o", tmp_path / f"s{seed}", "--seed", seed, *words, family=family)
        independent.append(read_npz(tmp_path / f"s{seed}" / f"{name}.npz")["depth"])
    assert flicker(carried) < 0.6 * flicker(independent)
    video = read_frames(tmp_path / "v" / "clip_depth.mp4")
    panels = 2 if mode == "none" else 3
    assert len(video) == 5
    assert next(iter(video))[1].shape == (12, 16 * panels, 3)


@pytest.mark.parametrize("members", [1, 3])
def test_all_frames_share_the_noise_of_the_first(members):
    pipeline, starts = tiny_pipeline(), []
    pipeline.unet.register_forward_pre_hook(lambda _, inputs: starts.append(inputs[0][:, 4:]))
    streams = member_generators(4, members)
    pipeline(picture(), 1, members, batch_size=members, generator=streams)
    assert torch.equal(common_noise(torch.zeros(members, 4, 12, 16), seed=4), starts[0])


def test_a_video_file_is_read_skipped_when_done_and_made_anew_on_request(models, tmp_path, capsys):
    clip = write_video(tmp_path / "walk.mp4", noisy_scene(3, 32, 32), fps=10)
    out = tmp_path / "out"
    assert depth(models, clip, "-o", out) == 0
    assert "walk.mp4: 3 frames, walk_depth.mp4" in capsys.readouterr().out
    assert read_frames(out / "walk_depth.mp4").fps == pytest.approx(10)
    assert {path.name for path in (out / "walk").iterdir()} == {f"walk_{i:06d}.npz" for i in range(3)}
    before = (out / "walk_depth.mp4").stat().st_mtime_ns
    assert depth(models, clip, "-o", out) == 0
    assert "done before, skipped" in capsys.readouterr().out
    assert (out / "walk_depth.mp4").stat().st_mtime_ns == before
    assert depth(models, clip, "-o", out, "--overwrite") == 0
    assert (out / "walk_depth.mp4").stat().st_mtime_ns > before


def test_a_broken_video_and_frames_of_changing_size_are_reported_and_leave_no_video(models, frames, tmp_path, capsys):
    (tmp_path / "bad.mp4").write_bytes(b"nothing")
    save_picture(frames / "frame99.png", height=20)
    clip = write_video(tmp_path / "good.avi", noisy_scene(2), fps=10)
    out = tmp_path / "out"
    words = ["--video", "--uncertainty", "none", "--formats", "color"]
    assert depth(models, tmp_path / "bad.mp4", frames, clip, "-o", out, *words) == 1
    failed = [line for line in capsys.readouterr().err.splitlines() if line.startswith("failed")]
    assert len(failed) == 2
    assert "bad.mp4 is not a video" in failed[0]
    assert "frame 5 is (20, 32, 3) uint8, but the first was (12, 32, 3)" in failed[1]
    assert [path.name for path in out.glob("*.mp4")] == ["good_depth.mp4"]


def test_videos_inside_folders_are_made_beside_the_pictures_there(models, tmp_path, capsys):
    for folder in ("a", "b"):
        (tmp_path / "in" / folder).mkdir(parents=True)
        write_video(tmp_path / "in" / folder / "clip.avi", noisy_scene(2), fps=10)
    save_picture(tmp_path / "in" / "a" / "photo.png")
    out = tmp_path / "out"
    words = ["--uncertainty", "none", "--formats", "color", "-o", out, "--recursive"]
    assert depth(models, tmp_path / "in", *words) == 0
    found = {path.relative_to(out).as_posix() for path in out.rglob("*") if path.suffix in (".mp4", ".png")}
    assert found == {"a/clip_depth.mp4", "b/clip_depth.mp4", "a/photo_depth_color.png"}
    assert depth(models, tmp_path / "in", *words) == 0
    assert capsys.readouterr().out.count("done before, skipped") == 3


def test_a_missing_video_is_as_missing_as_a_picture(models, tmp_path, capsys):
    for name in ("x.mp4", "x.jpg", "x"):
        assert depth(models, tmp_path / name, "-o", tmp_path / "out") == 2
        assert f"no such file or folder: {tmp_path / name}" in capsys.readouterr().err


def test_a_stopped_video_says_that_it_starts_over(models, frames, tmp_path, capsys, monkeypatch):
    def stop(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(video_command, "predict", stop)
    assert depth(models, frames, "-o", tmp_path / "out", "--video") == 130
    assert "clip: stopped; a video that is not finished starts over" in capsys.readouterr().out
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["clip.json"]
