"""Video files and folders of frames in, video out, latents carried over."""

import sys

import cv2
import numpy as np
import pytest
import torch
from PIL import Image

from marigold_uq.depth import video
from marigold_uq.depth.video import carry_latents, read_frames, write_video
from marigold_uq.picture_files import ImageError


def moving_square(count: int = 6, height: int = 48, width: int = 64) -> list[np.ndarray]:
    """A red square that moves right over a grey ground; large blocks, since the codecs lose detail."""
    frames = np.full((count, height, width, 3), 90, dtype=np.uint8)
    for index in range(count):
        frames[index, 16:32, 4 + 6 * index : 20 + 6 * index] = (220, 30, 30)
    return list(frames)


@pytest.mark.parametrize("suffix", [".mp4", ".avi"])
def test_a_video_comes_back_with_its_order_its_colours_and_its_rate(suffix, tmp_path):
    frames = moving_square()
    path = write_video(tmp_path / f"clip{suffix}", iter(frames), fps=12.5)
    video = read_frames(path)
    assert len(video) == len(frames)
    assert video.fps == pytest.approx(12.5, rel=1e-3)
    for _ in range(2):  # it can be read more than once
        read = list(video)
        assert [name for name, _ in read] == [f"clip_{index:06d}" for index in range(len(frames))]
        for (_, picture), frame in zip(read, frames, strict=True):
            assert picture.dtype == np.uint8
            assert picture.shape == frame.shape
            # Lossy, with colour at half resolution; red taken for blue would be wrong by 10.6 on average.
            assert np.abs(picture.astype(float) - frame).mean() < 6
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("suffix", [".mp4", ".avi"])
def test_odd_sizes_and_grey_frames_are_written(suffix, tmp_path):
    frames = [np.full((33, 47), 40 * index, dtype=np.uint8) for index in range(4)]
    pictures = [picture for _, picture in read_frames(write_video(tmp_path / f"odd{suffix}", frames, fps=10))]
    assert [picture.shape for picture in pictures] == [(34, 48, 3)] * 4
    for index, picture in enumerate(pictures):
        assert picture.mean() == pytest.approx(40 * index, abs=4)


def test_a_folder_of_frames_is_read_in_natural_order(tmp_path):
    for index in (10, 2, 1):
        Image.new("L", (4, 3), index).save(tmp_path / f"frame{index}.png")
    frames = read_frames(tmp_path, fps=5)
    assert len(frames) == 3
    assert frames.fps == 5
    assert [(name, int(picture[0, 0, 0])) for name, picture in frames] == [
        ("frame1", 1),
        ("frame2", 2),
        ("frame10", 10),
    ]


def test_what_is_no_video_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        read_frames(tmp_path / "nowhere.mp4")
    with pytest.raises(FileNotFoundError, match="no image found"):
        read_frames(tmp_path)
    for content, message in ((b"", "empty"), (b"no video at all" * 100, "not a video")):
        (tmp_path / "bad.mp4").write_bytes(content)
        with pytest.raises(ImageError, match=message):
            read_frames(tmp_path / "bad.mp4")
    Image.new("L", (4, 3)).save(tmp_path / "frame001.png")
    with pytest.raises(ImageError, match="a folder of frames"):
        read_frames(tmp_path / "frame001.png")


def test_a_truncated_video_yields_what_it_holds_and_says_so(tmp_path):
    path = write_video(tmp_path / "clip.avi", moving_square(30), fps=10)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    video = read_frames(path)
    if len(video) < 30:  # OpenCV counted what is left
        assert 0 < len(list(video)) <= len(video)
    else:
        with pytest.warns(UserWarning, match="declares 30 frames"):
            assert 0 < len(list(video)) < 30


@pytest.mark.parametrize(
    ("name", "frames", "fps", "message"),
    [
        ("clip.gif", moving_square(2), 10, r"ends in \.mp4 or \.avi"),
        ("clip.mp4", [], 10, "no frames"),
        ("clip.mp4", moving_square(2), 0, "fps must be a positive number"),
        ("clip.mp4", [*moving_square(2), np.zeros((8, 8, 3), np.uint8)], 10, r"frame 2 is \(8, 8, 3\)"),
        ("clip.mp4", [np.zeros((8, 8, 3))], 10, "float64"),
    ],
)
def test_wrong_video_output_is_refused_and_leaves_nothing(name, frames, fps, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        write_video(tmp_path / name, frames, fps)
    assert not list(tmp_path.iterdir())


def test_an_existing_video_is_replaced_only_when_asked(tmp_path):
    path = tmp_path / "clip.mp4"
    path.write_bytes(b"precious")
    with pytest.raises(FileExistsError, match="overwrite=True"):
        write_video(path, moving_square(), 10)
    write_video(path, moving_square(), 10, overwrite=True)
    assert len(read_frames(path)) == 6


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="missing does not exist"):
        write_video(tmp_path / "missing" / "clip.mp4", moving_square(), 10)


def test_without_opencv_the_error_says_what_to_install(tmp_path, monkeypatch):
    path = write_video(tmp_path / "clip.avi", moving_square(), 10)
    monkeypatch.setitem(sys.modules, "cv2", None)
    with pytest.raises(ImportError, match="pip install opencv-python"):
        read_frames(path)


# --- latents ----------------------------------------------------------------------------------------------------------


def draw(seed: int, scale: float = 1.0) -> torch.Tensor:
    return scale * torch.randn(2, 4, 64, 64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("strength", [0.0, 0.1, 0.5, 0.9])
@pytest.mark.parametrize("scale", [0.0, 0.4, 1.0, 3.0])
def test_carried_latents_keep_unit_variance_whatever_the_prediction_is(strength, scale):
    """16 384 draws per sample: the variance has a standard error of 0.011, the cross term one of at most 0.016."""
    carried = carry_latents(draw(0, scale), draw(1), strength)
    assert carried.square().mean(dim=(1, 2, 3)).sub(1).abs().max() < 5 * 0.019


def test_the_recipe_of_diffusers_shrinks_the_variance_and_differs_only_by_a_factor():
    previous, noise = draw(0), draw(1)
    recipe = carry_latents(previous, noise, 0.1, keep_variance=False)
    assert torch.equal(recipe, 0.9 * noise + 0.1 * previous)
    assert recipe.var() == pytest.approx(0.82, abs=0.03)
    ratio = carry_latents(previous, noise, 0.1) / recipe
    torch.testing.assert_close(ratio, ratio[:, :1, :1, :1].expand_as(ratio), rtol=1e-5, atol=0)


def test_strength_zero_is_the_common_noise_and_samples_do_not_mix():
    previous, noise = draw(0), draw(1)
    assert torch.equal(carry_latents(previous, noise, 0.0), noise)
    one = carry_latents(previous[:1], noise[:1], 0.3)
    assert torch.equal(carry_latents(previous, noise, 0.3)[:1], one)


def test_half_precision_stays_half():
    carried = carry_latents(draw(0).half(), draw(1).half())
    assert carried.dtype == torch.float16
    torch.testing.assert_close(carried.float(), carry_latents(draw(0), draw(1)), rtol=0, atol=8e-3)  # 2 roundings at 4


def test_wrong_latents_are_refused():
    with pytest.raises(ValueError, match="must have one size"):
        carry_latents(torch.zeros(1, 4, 8, 8), torch.zeros(1, 4, 8, 9))
    for strength in (-0.1, 1.0):
        with pytest.raises(ValueError, match=r"in \[0, 1\)"):
            carry_latents(torch.zeros(1, 4, 8, 8), torch.zeros(1, 4, 8, 8), strength)


def codec_of(path) -> str:
    """The four letters in the file's header."""
    capture = cv2.VideoCapture(str(path))
    code = int(capture.get(cv2.CAP_PROP_FOURCC))
    capture.release()
    return code.to_bytes(4, "little").decode()


def test_an_mp4_is_h264_where_there_is_an_encoder_and_mpeg4_otherwise(tmp_path, monkeypatch):
    frames, has_h264 = moving_square(), video._h264_program() is not None
    path = write_video(tmp_path / "a.mp4", frames, fps=10)
    assert (codec_of(path).lower() in ("h264", "avc1")) == has_h264
    assert video.describe_codec().startswith("H.264" if has_h264 else "MPEG-4")
    monkeypatch.setattr(video, "_h264_program", lambda: None)
    plain = write_video(tmp_path / "b.mp4", frames, fps=10)
    assert codec_of(plain).lower() in ("mp4v", "fmp4")
    assert "install ffmpeg for H.264" in video.describe_codec()
    assert len(read_frames(path)) == len(read_frames(plain)) == len(frames)


@pytest.mark.skipif(video._h264_program() is None, reason="no ffmpeg with libx264 here")
def test_an_encoder_that_fails_or_is_stopped_leaves_nothing(tmp_path, monkeypatch):
    def failing():
        yield from moving_square(2)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_video(tmp_path / "a.mp4", failing(), fps=10)
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(video, "_even_size", lambda shape: (0, 0))
    with pytest.raises(RuntimeError, match=r"ffmpeg could not write .*a\.mp4"):
        write_video(tmp_path / "a.mp4", moving_square(2), fps=10)
    assert not list(tmp_path.iterdir())
