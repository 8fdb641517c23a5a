"""Depth with uncertainty from an exported ONNX graph. Needs onnxruntime, numpy, Pillow and OpenCV, but no torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from marigold_uq.picture_files import ImageError, array_of_picture, read_array

__all__ = ["OnnxDepth", "OnnxMaps"]

INPUT = "image"
OUTPUTS = ("prediction", "uncertainty", "interval")
METADATA = "marigold_uq"
"""Key of the facts about the model in the file's metadata, as JSON."""


@dataclass(frozen=True)
class OnnxMaps:
    """Maps of one picture, at its size."""

    prediction: NDArray[np.float32]  # (H, W)
    uncertainty: NDArray[np.float32]  # (H, W), a standard deviation
    interval: NDArray[np.float32]  # (L, 2, H, W), lower and upper end for each of the graph's coverages


class OnnxDepth:
    """A graph that `marigold-uq export-onnx` wrote.

    The graph itself takes `image`, (1, 3, H, W) in [0, 1] of any size, and returns maps of that size; calls of this
    class resize to the model's resolution and back, as the pipeline does.

    Args:
        path: The file.
        num_threads: For onnxruntime; None lets it choose.
        providers: Of onnxruntime; by default the processor.
    """

    def __init__(
        self, path: str | Path, *, num_threads: int | None = None, providers: Sequence[str] = ("CPUExecutionProvider",)
    ) -> None:
        try:
            import onnxruntime
        except ImportError as error:
            raise ImportError("running an exported model needs onnxruntime: pip install onnxruntime") from error
        if not Path(path).is_file():
            raise FileNotFoundError(f"no such file: {path}; marigold-uq export-onnx writes one")
        settings = onnxruntime.SessionOptions()
        settings.log_severity_level = 3
        if num_threads is not None:
            settings.intra_op_num_threads = settings.inter_op_num_threads = num_threads
        self.session: Any = onnxruntime.InferenceSession(str(path), settings, providers=list(providers))
        found = self.session.get_modelmeta().custom_metadata_map
        if METADATA not in found:
            raise ValueError(f"{path} was not written by marigold-uq export-onnx: its metadata have no {METADATA!r}")
        self.facts: dict[str, Any] = json.loads(found[METADATA])

    @property
    def coverages(self) -> tuple[float, ...]:
        """Of the intervals."""
        return tuple(self.facts["coverages"])

    def __call__(self, image: str | Path | Image.Image | np.ndarray, *, resolution: int | None = None) -> OnnxMaps:
        """Depth of a picture: a path, a PIL image, or an array (H, W, 3) of unsigned integers or of floats in [0, 1].

        Files are read as the pipeline reads them: any bit depth, alpha, EXIF orientation; an ImageError says what is
        wrong with those that are damaged or too large. `resolution` is the longer edge for the network, 0 for the
        picture's own; by default the model's.
        """
        pixels = _pixels(image)  # (H, W, 3)
        height, width = pixels.shape[:2]
        edge = self.facts["processing_resolution"] if resolution is None else resolution
        small = _shrink(pixels, edge) if edge else pixels
        found = self.session.run(list(OUTPUTS[:2]), {INPUT: np.ascontiguousarray(small.transpose(2, 0, 1)[None])})
        prediction, std = (_resize(one[0, 0], height, width) for one in found)
        reach = np.array(self.facts["half_widths"], np.float32).reshape(-1, 1, 1) * std  # (L, H, W)
        return OnnxMaps(prediction, std, np.stack([prediction - reach, prediction + reach], 1))


def _pixels(image: str | Path | Image.Image | np.ndarray) -> NDArray[np.float32]:
    """(H, W, 3) in [0, 1]; grey becomes three channels, and white shows through what is transparent."""
    if isinstance(image, str | Path):
        pixels = read_array(image)
    else:
        pixels = array_of_picture(image, "the picture") if isinstance(image, Image.Image) else np.asarray(image)
    pixels = pixels[..., None] if pixels.ndim == 2 else pixels
    if pixels.ndim != 3 or pixels.shape[2] not in (1, 3, 4) or 0 in pixels.shape:
        raise ImageError(f"a picture is (H, W, 3), grey (H, W) or with alpha (H, W, 4); got {pixels.shape}")
    unit = _unit(pixels)
    if unit.shape[2] == 4:
        unit = unit[..., :3] * unit[..., 3:] + (1 - unit[..., 3:])
    return np.repeat(unit, 3, 2) if unit.shape[2] == 1 else unit


def _unit(pixels: np.ndarray) -> NDArray[np.float32]:
    """Values in [0, 1]: unsigned integers by the largest of their type."""
    if pixels.dtype.kind == "u":
        return pixels.astype(np.float32) / np.float32(np.iinfo(pixels.dtype).max)
    if pixels.dtype.kind != "f" or not (pixels.min() >= 0 and pixels.max() <= 1):
        raise ImageError(f"a picture holds unsigned integers, or floats in [0, 1]; got {pixels.dtype}")
    return pixels.astype(np.float32)


def _shrink(pixels: NDArray[np.float32], edge: int) -> NDArray[np.float32]:
    """Longer edge of `edge` pixels, antialiased; the shorter one rounded down."""
    height, width = pixels.shape[:2]
    longer = max(height, width)
    size = max(1, width * edge // longer), max(1, height * edge // longer)
    planes = [Image.fromarray(plane).resize(size, Image.Resampling.BILINEAR) for plane in np.moveaxis(pixels, -1, 0)]
    return np.stack([np.asarray(plane) for plane in planes], -1)


def _resize(plane: NDArray[np.float32], height: int, width: int) -> NDArray[np.float32]:
    import cv2

    if plane.shape == (height, width):
        return plane
    return np.asarray(cv2.resize(plane, (width, height), interpolation=cv2.INTER_LINEAR), np.float32)
