"""A fixed library of textures with their image pyramids, looked up per pixel without loops over surfaces."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from marigold_uq.depth.scenes.photographs import photograph_crops
from marigold_uq.depth.scenes.textures import MASKS, SIZE, TEXTURES
from marigold_uq.depth.scenes.vectors import Array

_BANK_SEED = 20240607  # the library belongs to the renderer, like a font: the same for every data set and split
LEVELS = 6  # 128, 64, 32, 16, 8, 4 texels


@dataclass(frozen=True)
class TextureBank:
    """All textures at all pyramid levels in one flat array.

    `texels` is (N, 3) uint8; level l of texture k starts at row `starts[l] + k * (SIZE >> l)**2`.
    `categories` maps a name to the numbers of its textures, `masks` a name to its hole patterns.
    """

    texels: NDArray[np.uint8]
    starts: NDArray[np.int64]
    categories: dict[str, range]
    masks: dict[str, list[NDArray[np.bool_]]]

    def lookup(self, texture: NDArray[np.int64], u: Array, v: Array, footprint: Array) -> Array:
        """Bilinear samples in [0, 1], (N, 3), at tile coordinates (u, v), one tile per unit, wrapped.

        `footprint` is the width of a pixel on the surface in tiles; it selects the pyramid level against aliasing.
        """
        level = np.clip(np.log2(np.maximum(footprint * SIZE, 1e-6)) + 0.3, 0, LEVELS - 1).astype(np.int64)
        side = SIZE >> level
        texels_per_tile = side.astype(np.float32)
        x, y = u * texels_per_tile - np.float32(0.5), v * texels_per_tile - np.float32(0.5)
        column, row = np.floor(x), np.floor(y)
        across, down = (x - column)[:, None], (y - row)[:, None]
        left, upper = column.astype(np.int64) & (side - 1), row.astype(np.int64) & (side - 1)
        right, lower = (left + 1) & (side - 1), (upper + 1) & (side - 1)
        base = self.starts[level] + texture * side * side
        first, second = base + upper * side, base + lower * side
        top = self._blend(first + left, first + right, across)
        bottom = self._blend(second + left, second + right, across)
        return (top + (bottom - top) * down) * np.float32(1 / 255)

    def _blend(self, first: NDArray[np.int64], second: NDArray[np.int64], share: Array) -> Array:
        """Texels `first`, mixed with `second` by `share`; (N, 3)."""
        start = np.take(self.texels, first, axis=0).astype(np.float32)
        return start + (np.take(self.texels, second, axis=0) - start) * share


def _pyramid(tile: NDArray[np.uint8]) -> list[NDArray[np.uint8]]:
    """The tile and its halvings by 2 x 2 means."""
    levels, current = [tile], tile.astype(np.float32)
    for _ in range(LEVELS - 1):
        side = current.shape[0] // 2
        current = current.reshape(side, 2, side, 2, 3).mean(axis=(1, 3))
        levels.append(np.rint(current).astype(np.uint8))
    return levels


def _as_colour(tile: Array) -> NDArray[np.uint8]:
    colour = tile if tile.ndim == 3 else np.repeat(tile[..., None], 3, axis=-1)
    return np.rint(colour * 255).astype(np.uint8)


@lru_cache(maxsize=2)
def texture_bank(with_photographs: bool = False) -> TextureBank:
    """Draw the library once per process; `with_photographs` adds crops of freely licensed pictures as prints."""
    tiles: list[NDArray[np.uint8]] = []
    categories: dict[str, range] = {}
    for number, (name, (draw, count)) in enumerate(TEXTURES.items()):
        rng = np.random.default_rng([_BANK_SEED, number])
        categories[name] = range(len(tiles), len(tiles) + count)
        tiles += [_as_colour(draw(rng)) for _ in range(count)]
    crops = photograph_crops(np.random.default_rng([_BANK_SEED, 999]), SIZE) if with_photographs else []
    categories["photograph"] = range(len(tiles), len(tiles) + len(crops))
    tiles += crops
    pyramids = [_pyramid(tile) for tile in tiles]
    rows = [np.concatenate([p[level].reshape(-1, 3) for p in pyramids]) for level in range(LEVELS)]
    starts = np.cumsum([0] + [len(r) for r in rows[:-1]])
    masks = {}
    for number, (name, (cut, count)) in enumerate(MASKS.items()):
        rng = np.random.default_rng([_BANK_SEED, 500 + number])
        masks[name] = [cut(rng) for _ in range(count)]
    return TextureBank(np.concatenate(rows), starts.astype(np.int64), categories, masks)
