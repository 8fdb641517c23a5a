"""Zarr stores that are filled piece by piece: coordinates and empty arrays first, then whole chunks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from marigold_uq.pipelines.field.states import xarray_module

__all__ = ["EmptyArray", "create_store", "finish_store", "open_store", "zarr_module"]


@dataclass(frozen=True)
class EmptyArray:
    """An array (float32) that has no values yet: its dimensions, shape, chunks and attributes."""

    dims: Sequence[str]
    shape: Sequence[int]
    chunks: Sequence[int]
    attributes: Mapping[str, Any] = field(default_factory=dict)


def zarr_module() -> Any:
    """zarr, or an error that says how to get it."""
    try:
        import zarr
    except ImportError as error:
        raise ImportError("zarr stores need zarr: pip install 'marigold_uq[weather]'") from error
    return zarr


def create_store(
    path: Path, coordinates: Mapping[str, Any], attributes: Mapping[str, Any], arrays: Mapping[str, EmptyArray]
) -> Any:
    """A new store of format 2, which all readers know, with coordinates as xarray takes them; returns its group."""
    from numcodecs import Blosc

    data = xarray_module().Dataset(coords=dict(coordinates), attrs=dict(attributes))
    data.to_zarr(path, zarr_format=2, consolidated=False)
    group = open_store(path)
    for name, one in arrays.items():
        group.create_array(
            name,
            shape=tuple(one.shape),
            chunks=tuple(one.chunks),
            dtype="float32",
            fill_value=float("nan"),
            compressors=Blosc(cname="zstd", clevel=3, shuffle=Blosc.SHUFFLE),
            attributes={**_plain(one.attributes), "_ARRAY_DIMENSIONS": list(one.dims)},
        )
    return group


def open_store(path: Path) -> Any:
    """The group of a store, to read and to fill."""
    return zarr_module().open_group(path, mode="r+", zarr_format=2)


def finish_store(path: Path) -> None:
    """Write the index that readers open the store by."""
    zarr_module().consolidate_metadata(str(path), zarr_format=2)


def _plain(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Attributes as JSON has them."""
    return {key: value.item() if isinstance(value, np.generic) else value for key, value in attributes.items()}
