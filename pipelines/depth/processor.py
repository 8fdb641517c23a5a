"""diffusers' image processor for depth, with the two of its methods that fail or divide by zero made whole."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from diffusers.pipelines.marigold.marigold_image_processing import MarigoldImageProcessor
from PIL import Image

__all__ = ["DepthImageProcessor"]

_LARGEST = 2**16 - 1


class DepthImageProcessor(MarigoldImageProcessor):
    """`pipeline.image_processor`, for `visualize_depth`, `export_depth_to_16bit_png` and `visualize_uncertainty`."""

    @staticmethod
    def export_depth_to_16bit_png(depth: Any, val_min: float = 0.0, val_max: float = 1.0) -> list[Image.Image]:
        """Pictures of mode I;16, with `val_min` as 0 and `val_max` as 65535; rounded down, as in diffusers.

        Under Pillow 13 diffusers' own (0.42) fails. Values outside the range become its ends instead of wrapping round.

        Args:
            depth: (N, H, W, 1) array, (N, 1, H, W) tensor, or one map (H, W), or a list of maps.
            val_min: The smallest value.
            val_max: The largest value.
        """
        if not val_min < val_max:
            raise ValueError(f"val_min must be below val_max; got {val_min} and {val_max}")
        return [_picture16((one - val_min) / (val_max - val_min)) for one in _maps(depth, "depth")]

    @staticmethod
    def visualize_uncertainty(uncertainty: Any, saturation_percentile: float = 95) -> list[Image.Image]:
        """Grey pictures, white from this percentile on; a map that is zero everywhere is black.

        Args:
            uncertainty: As `depth` of the method above.
            saturation_percentile: Of each map.
        """
        pictures = []
        for one in _maps(uncertainty, "uncertainty"):
            if one.min() < 0:
                raise ValueError(f"uncertainty must not be negative; its minimum is {one.min():.6g}")
            white = float(np.percentile(one, saturation_percentile)) or float(one.max()) or 1.0
            pictures.append(Image.fromarray(np.clip(one * 255 / white, 0, 255).astype(np.uint8)))
        return pictures


def _picture16(unit: np.ndarray) -> Image.Image:
    if not np.isfinite(unit).all():
        raise ValueError("depth holds NaN or infinite values, which a 16-bit picture cannot show")
    return Image.fromarray((np.clip(unit, 0, 1) * _LARGEST).astype(np.uint16))


def _maps(given: Any, name: str) -> list[np.ndarray]:
    """The maps (H, W) in whatever diffusers' methods take."""
    if isinstance(given, list | tuple):
        return [one for item in given for one in _maps(item, name)]
    if not isinstance(given, np.ndarray | torch.Tensor):
        raise ValueError(f"{name} must be an array, a tensor, or a list of these; got {type(given).__name__}")
    batch = MarigoldImageProcessor.expand_tensor_or_array(given)
    if isinstance(batch, torch.Tensor):
        batch = MarigoldImageProcessor.pt_to_numpy(batch)
    if batch.ndim != 4 or batch.shape[-1] != 1 or batch.dtype.kind != "f":
        raise ValueError(
            f"{name} must be floats of shape (N, H, W, 1), or (N, 1, H, W) as a tensor; got {tuple(given.shape)} of "
            f"{given.dtype}"
        )
    return list(batch[..., 0])
