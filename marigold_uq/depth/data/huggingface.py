"""Hugging Face `datasets` with an image and a depth column."""

from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from marigold_uq.depth.data.base import DepthDataset
from marigold_uq.depth.data.decoding import (
    Values,
    as_map,
    decode_depth,
    decode_image,
    format_of,
    image_to_tensor,
)
from marigold_uq.depth.data.sample import DepthDataError, DepthSample, assemble_sample, to_depth


class Rows(Protocol):
    """What is needed of a `datasets.Dataset`: a list of dicts will do."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> dict[str, Any]: ...


class HuggingFaceDepth(DepthDataset):
    """Rows with an image and a depth column.

    A cell may be a PIL image, a numpy array, a tensor, nested lists, encoded bytes, or the `{"bytes", "path"}` of an
    undecoded `datasets.Image`. Images of integers are in [0, 255], of floats in [0, 1], channels last (first for
    tensors).

    Args:
        dataset: the rows.
        image_column, depth_column: their keys.
        name_column: a column with the sample's name; by default the row number.
        depth_scale, kind, min_depth, max_depth, on_error: as in `ImageDepthFolder`.
    """

    def __init__(
        self,
        dataset: Rows,
        *,
        image_column: str = "image",
        depth_column: str = "depth",
        name_column: str | None = None,
        depth_scale: float | None = None,
        kind: str = "depth_m",
        min_depth: float = 0.0,
        max_depth: float = float("inf"),
        on_error: str = "raise",
    ) -> None:
        if len(dataset) == 0:
            raise DepthDataError("the dataset has no rows")
        self.dataset = dataset
        self.image_column, self.depth_column, self.name_column = image_column, depth_column, name_column
        self.depth_scale, self.kind = depth_scale, kind
        self.min_depth, self.max_depth = min_depth, max_depth
        super().__init__(len(dataset), on_error)

    @classmethod
    def from_hub(
        cls, name: str | Path, *, split: str = "train", config: str | None = None, revision: str | None = None,
        **options: Any,
    ) -> "HuggingFaceDepth":  # fmt: skip
        """Load by name from the Hub, or from a folder written by `save_to_disk`; needs the package `datasets`."""
        try:
            import datasets
        except ImportError as error:
            raise ImportError("loading by name needs Hugging Face datasets: `pip install datasets`") from error
        if any((Path(name) / marker).is_file() for marker in ("state.json", "dataset_dict.json")):
            rows = datasets.load_from_disk(str(name))
            rows = rows[split] if isinstance(rows, dict) else rows
        else:
            rows = datasets.load_dataset(str(name), config, split=split, revision=revision)
        return cls(rows, **options)

    def name_of(self, index: int) -> str:
        """The row number; the name column is only known once the row is read."""
        return f"row_{index:06d}"

    def read(self, index: int) -> DepthSample:
        """Decode row `index`."""
        where = self.name_of(index)
        try:
            row = self.dataset[index]
        except Exception as error:  # `datasets` decodes images while it reads the row
            raise DepthDataError(f"cannot be read: {error}", where) from error
        image = _image(self._cell(row, self.image_column, where), where)
        values = _depth(self._cell(row, self.depth_column, where), where, (image.shape[1], image.shape[2]))
        name = where if self.name_column is None else str(self._cell(row, self.name_column, where))
        depth = to_depth(values, self.depth_scale, self.kind, where)
        return assemble_sample(name, image, depth, min_depth=self.min_depth, max_depth=self.max_depth)

    def _cell(self, row: dict[str, Any], column: str, where: str) -> Any:
        if column not in row:
            raise DepthDataError(f"no column {column!r}; the row has {', '.join(map(str, row))}", where)
        if row[column] is None:
            raise DepthDataError(f"missing {column}", where)
        return row[column]


def _encoded(cell: Any, where: str) -> tuple[bytes, str] | None:
    """(bytes, path) of an undecoded file, None if the cell is something else."""
    if isinstance(cell, bytes):
        return cell, where
    if not isinstance(cell, dict):
        return None
    path = cell.get("path") or where
    if cell.get("bytes") is not None:
        return cell["bytes"], path
    try:
        return Path(path).read_bytes(), path
    except OSError as error:
        raise DepthDataError(f"cannot be read: {error}", path) from error


def _image(cell: Any, where: str) -> Tensor:
    """Any cell to (3, H, W) float32 in [0, 1]."""
    encoded = _encoded(cell, where)
    if encoded is not None:
        return decode_image(*encoded)
    if isinstance(cell, Image.Image):
        try:
            return image_to_tensor(cell)
        except Exception as error:
            raise DepthDataError(f"image cannot be decoded: {error}", where) from error
    pixels = torch.as_tensor(np.asarray(cell))
    if pixels.ndim == 2:
        pixels = pixels[None]
    elif pixels.ndim == 3 and not isinstance(cell, Tensor):
        pixels = pixels.permute(2, 0, 1)
    if pixels.ndim != 3 or pixels.shape[0] not in (1, 3, 4):
        raise DepthDataError(f"image of shape {tuple(np.shape(cell))}; expected (H, W, 3) or a (3, H, W) tensor", where)
    scale = 1.0 if pixels.is_floating_point() else 255.0
    colours = pixels[:3].to(torch.float32) / scale
    if colours.min() < 0 or colours.max() > 1:
        raise DepthDataError("image values must lie in [0, 1] (floats) or [0, 255] (integers)", where)
    return colours.expand(3, -1, -1).contiguous()


def _depth(cell: Any, where: str, size: tuple[int, int]) -> Values:
    """Any cell to the (H, W) numbers it stores."""
    encoded = _encoded(cell, where)
    if encoded is not None:
        data, path = encoded
        return decode_depth(data, "png" if path == where else format_of(path), path, size)
    try:
        values = np.asarray(cell)
    except Exception as error:
        raise DepthDataError(f"depth cannot be decoded: {error}", where) from error
    return as_map(values, where)
