"""Video in and out, and latents carried from frame to frame so that depth does not flicker.

Frames come from a video file or from a folder of images and leave as a video file; nothing here knows the network.
"""

from __future__ import annotations

import itertools
import math
import shutil
import subprocess
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from marigold_uq.files import atomic_path
from marigold_uq.picture_files import IMAGE_SUFFIXES, ImageError, list_images
from marigold_uq.pipelines.depth.images import load_images, to_uint8

_CODECS = {".mp4": "mp4v", ".avi": "MJPG"}  # both are built into OpenCV's wheels
_DEFAULT_FPS = 24.0


class Frames(ABC):
    """Frames in order, as (name, picture) with picture (H, W, 3) uint8; read anew, one at a time, by each loop.

    Attributes:
        path: the video file or folder.
        fps: frames per second.
    """

    def __init__(self, path: Path, fps: float) -> None:
        if not (math.isfinite(fps) and fps > 0):
            raise ValueError(f"fps must be a positive number, but got {fps}")
        self.path = path
        self.fps = fps

    @abstractmethod
    def __len__(self) -> int:
        """Number of frames; for a video file, as its header has it."""

    @abstractmethod
    def __iter__(self) -> Iterator[tuple[str, np.ndarray]]:
        """Yield (name, picture); names have no suffix and sort in the order of time."""


class _FolderFrames(Frames):
    """The images of a folder, in natural order ("frame2" before "frame10"), named by their files."""

    def __init__(self, path: Path, fps: float = _DEFAULT_FPS) -> None:
        super().__init__(path, fps)
        self.files = list_images(path)

    def __len__(self) -> int:
        return len(self.files)

    def __iter__(self) -> Iterator[tuple[str, np.ndarray]]:
        for file in self.files:
            yield file.stem, to_uint8(load_images(file)[0])


class _VideoFrames(Frames):
    """The frames of a video file, decoded by OpenCV, upright, named stem_000000, stem_000001, ..."""

    def __init__(self, path: Path, fps: float | None = None) -> None:
        capture = _open_video(path)
        cv2 = _cv2()
        declared_fps, self._length = capture.get(cv2.CAP_PROP_FPS), int(capture.get(cv2.CAP_PROP_FRAME_COUNT))
        if self._length <= 0:  # a stream without a frame count: count by skipping through it
            self._length = sum(1 for _ in itertools.takewhile(bool, iter(capture.grab, None)))
        capture.release()
        if self._length == 0:
            raise ImageError(f"{path} holds no video frame")
        super().__init__(path, fps if fps is not None else declared_fps if declared_fps > 0 else _DEFAULT_FPS)

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[tuple[str, np.ndarray]]:
        capture = _open_video(self.path)
        count = 0
        try:
            while True:
                read, frame = capture.read()
                if not read:
                    break
                yield f"{self.path.stem}_{count:06d}", np.ascontiguousarray(frame[..., ::-1])  # OpenCV has BGR
                count += 1
        finally:
            capture.release()
        if count == 0:
            raise ImageError(f"{self.path} is damaged: not one frame could be decoded")
        if count < self._length:
            warnings.warn(f"{self.path} declares {self._length} frames; {count} could be decoded", stacklevel=2)


def read_frames(path: str | Path, *, fps: float | None = None) -> Frames:
    """Frames of a video file or of a folder of images.

    Args:
        path: the file or folder.
        fps: frames per second; by default what the video file says, or 24.

    Raises:
        FileNotFoundError: no such path, or no image in the folder.
        ImageError: not a video that OpenCV can read.
    """
    path = Path(path).expanduser()
    if path.is_dir():
        return _FolderFrames(path, _DEFAULT_FPS if fps is None else fps)
    if not path.exists():
        raise FileNotFoundError(f"no such video file or folder of frames: {path}")
    return _VideoFrames(path, fps)


def write_video(path: str | Path, frames: Iterable[np.ndarray], fps: float, *, overwrite: bool = False) -> Path:
    """Write pictures (H, W, 3) or (H, W), uint8, all of one size, as a video; returns the path.

    The suffix chooses the codec: .mp4 is H.264 where there is an ffmpeg with libx264 (the system's, or the package
    imageio-ffmpeg), else MPEG-4; .avi is Motion JPEG, which plays almost anywhere but is larger. Odd sizes are widened
    by one repeated row or column, which these codecs need.
    """
    path = Path(path)
    if path.suffix.lower() not in _CODECS:
        raise ValueError(f"cannot write {path}: a video ends in {' or '.join(_CODECS)}")
    if not (math.isfinite(fps) and fps > 0):
        raise ValueError(f"fps must be a positive number, but got {fps}")
    remaining = iter(frames)
    first = next(remaining, None)
    if first is None:
        raise ValueError(f"cannot write {path}: there are no frames")
    with atomic_path(path, overwrite=overwrite) as temporary:
        _encode(temporary, path, itertools.chain([first], remaining), first.shape, fps)
    return path


def describe_codec(suffix: str = ".mp4") -> str:
    """What :func:`write_video` uses for files with this suffix here, for people."""
    if suffix.lower() == ".avi":
        return "Motion JPEG"
    return "H.264" if _h264_program() else "MPEG-4, which browsers do not play: install ffmpeg for H.264"


def _encode(temporary: Path, path: Path, frames: Iterable[np.ndarray], shape: tuple[int, ...], fps: float) -> None:
    program = _h264_program() if path.suffix.lower() == ".mp4" else None
    pictures = _even_frames(frames, shape)
    if program is None:
        _encode_with_opencv(temporary, path, pictures, shape, fps)
    else:
        _encode_with_ffmpeg(program, temporary, path, pictures, shape, fps)


def _even_frames(frames: Iterable[np.ndarray], shape: tuple[int, ...]) -> Iterator[np.ndarray]:
    """(H, W, 3) uint8 of even height and width; all frames must be as the first."""
    for index, frame in enumerate(frames):
        if frame.shape != shape or frame.dtype != np.uint8:
            raise ValueError(f"frame {index} is {frame.shape} {frame.dtype}, but the first was {shape} uint8")
        colored = frame[..., None].repeat(3, axis=2) if frame.ndim == 2 else frame
        yield np.pad(colored, ((0, shape[0] % 2), (0, shape[1] % 2), (0, 0)), mode="edge")


def _even_size(shape: tuple[int, ...]) -> tuple[int, int]:
    """Width and height."""
    return shape[1] + shape[1] % 2, shape[0] + shape[0] % 2


def _encode_with_opencv(
    temporary: Path, path: Path, frames: Iterator[np.ndarray], shape: tuple[int, ...], fps: float
) -> None:
    cv2, codec = _cv2(), _CODECS[path.suffix.lower()]
    writer = cv2.VideoWriter(str(temporary), cv2.VideoWriter_fourcc(*codec), fps, _even_size(shape))
    if not writer.isOpened():
        _check_writable(temporary)
        raise RuntimeError(f"this OpenCV cannot encode {codec}: cannot write {path}; try .avi or another OpenCV build")
    try:
        for frame in frames:
            writer.write(np.ascontiguousarray(frame[..., ::-1]))
    finally:
        writer.release()


def _encode_with_ffmpeg(
    program: str, temporary: Path, path: Path, frames: Iterator[np.ndarray], shape: tuple[int, ...], fps: float
) -> None:
    _check_writable(temporary)
    width, height = _even_size(shape)
    source = ["-f", "rawvideo", "-pix_fmt", "rgb24", "-s", f"{width}x{height}", "-r", f"{fps:.6f}", "-i", "-"]
    target = ["-an", "-c:v", "libx264", "-pix_fmt", "yuv420p", "-crf", "18", "-movflags", "+faststart", str(temporary)]
    # A session of its own: Ctrl-C is for us, and then we end it.
    process = subprocess.Popen(
        [program, "-loglevel", "error", "-y", *source, *target],
        stdin=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    assert process.stdin is not None
    try:
        with suppress(BrokenPipeError):  # its message says why
            for frame in frames:
                process.stdin.write(np.ascontiguousarray(frame).tobytes())
        message = process.communicate()[1].decode(errors="replace").strip()
    except BaseException:
        process.kill()
        process.communicate()
        raise
    if process.returncode:
        raise RuntimeError(f"ffmpeg could not write {path}: {message}")


@cache
def _h264_program() -> str | None:
    """An ffmpeg that writes H.264: the system's, or that of the package imageio-ffmpeg."""
    for program in (shutil.which("ffmpeg"), _packaged_ffmpeg()):
        if program is None:
            continue
        with suppress(OSError):
            listed = subprocess.run([program, "-hide_banner", "-encoders"], capture_output=True, text=True, check=False)
            if " libx264 " in listed.stdout:
                return program
    return None


def _packaged_ffmpeg() -> str | None:
    try:
        from imageio_ffmpeg import get_ffmpeg_exe

        return str(get_ffmpeg_exe())
    except (ImportError, RuntimeError):
        return None


def _check_writable(path: Path) -> None:
    """Raise the OSError that OpenCV swallowed, if the file system was the reason."""
    path.open("wb").close()


def carry_latents(
    previous: torch.Tensor, noise: torch.Tensor, strength: float = 0.1, *, keep_variance: bool = True
) -> torch.Tensor:
    """Starting latents of the next frame: the same noise for all frames, with a little of the previous prediction.

    With s = strength, diffusers' recipe is (1 - s) noise + s previous. Its second moment is (1 - s)² + s² v, where v is
    that of the previous latents (noise and prediction taken as independent): 0.82 for s = 0.1 and v = 1, so the sampler
    starts from less noise than its schedule promises. Here the mix is divided by the root of that number, per sample,
    which keeps its direction and brings the variance back to 1. `keep_variance=False` is diffusers' recipe to the bit.

    Args:
        previous: (B, C, H, W) predicted latents of the previous frame.
        noise: (B, C, H, W) standard normal noise, one draw per member, reused for every frame.
        strength: 0 keeps only the common noise, which already removes most flicker; must be below 1.
        keep_variance: restore unit variance.
    """
    if previous.shape != noise.shape:
        raise ValueError(
            f"the previous frame has latents {tuple(previous.shape)}, this one {tuple(noise.shape)}; "
            "frames of a video must have one size: start anew with fresh noise where it changes"
        )
    if not 0.0 <= strength < 1.0:
        raise ValueError(f"strength must be in [0, 1), but got {strength}")
    mix = (1.0 - strength) * noise + strength * previous
    if not keep_variance:
        return mix
    axes = tuple(range(1, previous.dim()))
    power = previous.float().square().mean(dim=axes, keepdim=True)  # v, (B, 1, 1, 1)
    return mix / ((1.0 - strength) ** 2 + strength**2 * power).sqrt().to(mix.dtype)


def _cv2() -> Any:
    try:
        import cv2
    except ImportError as error:
        raise ImportError("reading and writing video needs OpenCV: pip install opencv-python") from error
    return cv2


def _open_video(path: Path) -> Any:
    if path.stat().st_size == 0:
        raise ImageError(f"{path} is empty (0 bytes)")
    if path.suffix.lower() in IMAGE_SUFFIXES and path.suffix.lower() != ".gif":  # OpenCV would look for its siblings
        raise ImageError(f"{path} is a single image; give a video file or a folder of frames")
    capture = _cv2().VideoCapture(str(path))
    if not capture.isOpened():
        raise ImageError(f"{path} is not a video, or of a kind OpenCV cannot read")
    return capture
