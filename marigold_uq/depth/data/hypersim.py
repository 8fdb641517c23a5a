"""Hypersim's HDF5 frames to the prepared form: tone-mapped 8-bit colour and planar depth in millimetres."""

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from marigold_uq.array_files import check_bytes, hdf5_array
from marigold_uq.depth.data.sample import DepthDataError
from marigold_uq.files import atomic_path, make_folder

FOCAL, FOCAL_WIDTH = 886.81, 1024  # pixels, for frames 1024 pixels wide
_GAMMA = 1 / 2.2
PERCENTILE, TARGET_BRIGHTNESS = 90.0, 0.8
_DARK = 1e-4  # below this brightness percentile there is nothing to expose: the frame becomes black
_NO_ENTITY = -1
_MAX_BYTES = 2**30  # a frame of theirs has 6 MB
_SPLIT_COLUMNS = ("scene_name", "camera_name", "frame_id", "included_in_public_release", "split_partition_name")

Floats = NDArray[np.floating]


@dataclass(frozen=True)
class HypersimFrame:
    """One rendered frame: scene "ai_001_001", camera "cam_00", frame number and split ("train", "val" or "test")."""

    scene: str
    camera: str
    frame: int
    split: str

    def source(self, root: Path, quantity: str) -> Path:
        """The HDF5 file of `quantity`: color, depth_meters or render_entity_id."""
        folder = "final" if quantity == "color" else "geometry"
        return (
            root
            / self.scene
            / "images"
            / f"scene_{self.camera}_{folder}_hdf5"
            / f"frame.{self.frame:04d}.{quantity}.hdf5"
        )

    @property
    def image(self) -> str:
        """Path of the prepared image, relative to its split's folder."""
        return f"{self.scene}/rgb_{self.camera}_fr{self.frame:04d}.png"

    @property
    def depth(self) -> str:
        """Path of the prepared depth, relative to its split's folder."""
        return f"{self.scene}/depth_plane_{self.camera}_fr{self.frame:04d}.png"


def read_split(path: Path) -> Iterator[HypersimFrame]:
    """The frames of metadata_images_split_scene_v1.csv that are part of the public release."""
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        absent = set(_SPLIT_COLUMNS) - set(reader.fieldnames or ())
        if absent:
            raise DepthDataError(f"lacks the columns {', '.join(sorted(absent))}; is it the split file?", str(path))
        for row in reader:
            if row["included_in_public_release"].strip().lower() == "true":
                yield HypersimFrame(
                    row["scene_name"], row["camera_name"], int(row["frame_id"]), row["split_partition_name"]
                )


def planar_depth(distance: Floats) -> Floats:
    """Distance from the camera centre to depth along the optical axis: distance f / |(x, y, f)|.

    Args:
        distance: (H, W), metres; x and y are measured from the picture's centre to the pixel's.
    """
    height, width = distance.shape
    focal = FOCAL * width / FOCAL_WIDTH
    x = np.arange(width) - (width - 1) / 2
    y = np.arange(height) - (height - 1) / 2
    return distance * focal / np.sqrt(x[None, :] ** 2 + y[:, None] ** 2 + focal**2)


def tone_map(colour: Floats, valid: NDArray[np.bool_]) -> NDArray[np.uint8]:
    """Linear radiance (H, W, 3) to 8 bit: (s c)^(1 / 2.2), s such that the 90th brightness percentile becomes 0.8.

    The brightness is 0.3 R + 0.59 G + 0.11 B, its percentile is taken over valid pixels.
    """
    brightness = colour @ np.array([0.3, 0.59, 0.11])
    measurable = valid & np.isfinite(brightness)
    scale = 1.0
    if measurable.any():
        percentile = np.percentile(brightness[measurable], PERCENTILE)
        scale = TARGET_BRIGHTNESS ** (1 / _GAMMA) / percentile if percentile >= _DARK else 0.0
    mapped = np.clip(np.nan_to_num(colour) * scale, 0, None) ** _GAMMA
    return np.round(255 * np.clip(mapped, 0, 1)).astype(np.uint8)


def encode_depth(depth: Floats, valid: NDArray[np.bool_]) -> NDArray[np.uint16]:
    """Metres to millimetres in 16 bit; 0 where invalid, not finite or out of range."""
    millimetres = np.round(np.where(valid & np.isfinite(depth), depth, 0.0) * 1000)
    return np.where(millimetres <= np.iinfo(np.uint16).max, millimetres, 0).astype(np.uint16)


def convert_frame(frame: HypersimFrame, root: Path, output: Path, *, overwrite: bool = False) -> bool:
    """Write the two PNGs of a frame below `output`; False if both are already there.

    Each file appears under its name only when complete, so an interrupted run resumes where it stopped.
    """
    image_path, depth_path = output / frame.split / frame.image, output / frame.split / frame.depth
    if image_path.is_file() and depth_path.is_file() and not overwrite:
        return False
    colour = _read_hdf5(frame.source(root, "color")).astype(np.float64)
    distance = _read_hdf5(frame.source(root, "depth_meters")).astype(np.float64)
    valid = _read_hdf5(frame.source(root, "render_entity_id")) != _NO_ENTITY
    if colour.shape[:2] != distance.shape or distance.shape != valid.shape:
        raise DepthDataError(
            f"sizes differ: colour {colour.shape}, depth {distance.shape}, entities {valid.shape}", frame.image
        )
    _write_png(depth_path, encode_depth(planar_depth(distance), valid))
    _write_png(image_path, tone_map(colour, valid))
    return True


def _read_hdf5(path: Path) -> NDArray[np.generic]:
    try:
        import h5py
    except ImportError as error:
        raise ImportError("preparing Hypersim needs h5py: `pip install h5py`") from error
    if not path.is_file():
        raise DepthDataError("missing file", str(path))
    try:
        with h5py.File(path, "r") as file:
            dataset = hdf5_array(file, "dataset", "the file")
            check_bytes(dataset.shape, dataset.dtype, "the file", _MAX_BYTES)
            return dataset[()]
    except Exception as error:  # h5py meets damage with anything
        raise DepthDataError(f"cannot be read as HDF5 with an array called 'dataset': {error}", str(path)) from error


def _write_png(path: Path, pixels: NDArray[np.generic]) -> None:
    make_folder(path.parent)
    with atomic_path(path, overwrite=True) as temporary:
        Image.fromarray(pixels).save(temporary, format="PNG")
