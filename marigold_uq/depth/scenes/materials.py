"""What surfaces are made of: a texture between two colours, gloss, and glow."""

from __future__ import annotations

import colorsys
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike

from marigold_uq.depth.scenes.texture_bank import TextureBank

Rng = np.random.Generator
Colour = tuple[float, float, float]


def as_colour(values: ArrayLike) -> Colour:
    """Red, green and blue as plain numbers."""
    red, green, blue = np.asarray(values, dtype=float)
    return float(red), float(green), float(blue)


@dataclass(frozen=True)
class Material:
    """Albedo = dark + (light - dark) * texture(u, v), per colour channel.

    `tile` is the extent of one texture tile in metres, or zero to stretch one tile over each face.
    `gloss` scales the specular highlight of exponent `shininess`; `glow` is emitted light in units of lit white paper.
    """

    texture: int
    dark: Colour
    light: Colour
    tile: float = 1.0
    turned: bool = False
    offset: tuple[float, float] = (0.0, 0.0)
    gloss: float = 0.0
    shininess: float = 20.0
    glow: float = 0.0


class Palette:
    """Draws materials of a named sort; the sort fixes what is typical, chance departs from it."""

    def __init__(self, rng: Rng, bank: TextureBank, surprise: float = 0.12) -> None:
        """`surprise` is the probability that a surface gets a texture that its sort would not."""
        self.rng, self.bank, self.surprise = rng, bank, surprise
        self.mood = float(rng.uniform(0, 1))  # scenes have a leaning towards some hue
        self.colourfulness = float(rng.beta(1.6, 2.2))

    def colour(self, value: tuple[float, float] = (0.1, 0.95), saturation: float = 1.0) -> Colour:
        """A colour of the given range of brightness; hues lean to the scene's mood."""
        hue = (self.mood + self.rng.normal(0, 0.08)) % 1 if self.rng.random() < 0.2 else self.rng.random()
        amount = min(0.95, saturation * self.rng.beta(1.2, 2.0) * (0.4 + 1.2 * self.colourfulness))
        return colorsys.hsv_to_rgb(float(hue), amount, float(self.rng.uniform(*value)))

    def _pick(self, *names: str) -> int:
        numbers = self.bank.categories[names[int(self.rng.integers(len(names)))]]
        return int(self.rng.choice(numbers))

    def _make(
        self,
        textures: tuple[str, ...],
        base: Colour,
        contrast: tuple[float, float],
        tile: tuple[float, float],
        gloss: tuple[float, float] = (0.0, 0.1),
    ) -> Material:
        """A texture between `base` and a darker (or lighter) shade of it."""
        rng = self.rng
        if rng.random() < self.surprise:
            textures = ("natural", "speckle", "blobs", "stripes", "tiles", "marble", "painting", "poster")
            contrast = (0.2, 0.9)
        depth = rng.uniform(*contrast)
        dark = as_colour(np.clip(np.array(base) * (1 - depth) * rng.uniform(0.85, 1.1, 3), 0, 1))
        pair = (dark, base) if rng.random() < 0.85 else (base, dark)
        return Material(
            self._pick(*textures),
            pair[0],
            pair[1],
            tile=float(np.exp(rng.uniform(*np.log(tile)))),
            turned=bool(rng.random() < 0.5),
            offset=(float(rng.random()), float(rng.random())),
            gloss=float(rng.uniform(*gloss)),
            shininess=float(np.exp(rng.uniform(1.5, 5))),
        )

    def wall(self) -> Material:
        """Paint, paper, panels, now and then bricks or tiles; mostly light and pale."""
        sort = self.rng.choice(["plain", "natural", "other"], p=[0.6, 0.2, 0.2])
        base = self.colour((0.55, 0.98), 0.25 if self.rng.random() < 0.75 else 0.9)
        if sort == "plain":
            return self._make(("plain",), base, (0.02, 0.15), (1.0, 4.0))
        if sort == "natural":
            return self._make(("natural", "speckle", "marble"), base, (0.05, 0.4), (0.3, 3.0))
        return self._make(("bricks", "tiles", "stripes", "wood", "rosette"), base, (0.1, 0.6), (0.4, 2.5))

    def floor(self) -> Material:
        """Carpet, boards, tiles, concrete, rugs."""
        sort = self.rng.choice(["wood", "carpet", "tiles", "plain"], p=[0.3, 0.35, 0.2, 0.15])
        if sort == "wood":
            return self.wood(tile=(0.5, 1.8), gloss=(0, 0.4))
        if sort == "carpet":
            return self._make(
                ("carpet", "speckle", "natural", "rosette", "stripes"),
                self.colour((0.15, 0.75), 0.5),
                (0.15, 0.7),
                (0.25, 1.5),
            )
        if sort == "tiles":
            return self._make(("tiles", "marble"), self.colour((0.35, 0.95), 0.3), (0.1, 0.6), (0.5, 2.0), (0, 0.5))
        return self._make(("plain", "natural"), self.colour((0.2, 0.8), 0.3), (0.05, 0.4), (0.8, 4.0), (0, 0.4))

    def wood(self, tile: tuple[float, float] = (0.25, 1.2), gloss: tuple[float, float] = (0.0, 0.35)) -> Material:
        """Browns from birch to ebony."""
        value = self.rng.uniform(0.15, 0.95)
        base = colorsys.hsv_to_rgb(
            float(self.rng.uniform(0.02, 0.12)), float(self.rng.uniform(0.1, 0.65)), float(value)
        )
        return self._make(("wood",), base, (0.1, 0.55), tile, gloss)

    def furniture(self) -> Material:
        """Wood, or a painted board."""
        if self.rng.random() < 0.55:
            return self.wood()
        return self._make(
            ("plain", "natural", "plain"), self.colour((0.05, 0.95), 0.8), (0.02, 0.3), (0.3, 2.0), (0, 0.4)
        )

    def fabric(self) -> Material:
        """Upholstery, curtains, bed covers, clothes."""
        textures = ("natural", "carpet", "stripes", "plain", "blobs", "rosette", "tiles")
        return self._make(textures, self.colour((0.1, 0.95)), (0.05, 0.6), (0.1, 1.0))

    def plastic(self) -> Material:
        """Coloured or black things with a highlight."""
        base = self.colour((0.02, 0.2), 0.4) if self.rng.random() < 0.35 else self.colour((0.3, 1.0), 2.5)
        return self._make(("plain",), base, (0.0, 0.15), (0.2, 1.0), (0.05, 0.8))

    def metal(self) -> Material:
        """Greys with a strong highlight."""
        return self._make(("plain", "natural"), self.colour((0.15, 0.85), 0.25), (0.05, 0.4), (0.2, 1.0), (0.2, 1.0))

    def ceramic(self) -> Material:
        """White or glazed."""
        base = self.colour((0.75, 1.0), 0.2) if self.rng.random() < 0.5 else self.colour((0.2, 0.95), 1.4)
        return self._make(("plain",), base, (0.0, 0.1), (0.2, 1.0), (0.2, 0.9))

    def _print(self, *names: str) -> Material:
        """One coloured picture over each face, in its own colours, slightly tinted."""
        low = float(self.rng.uniform(0, 0.15))
        high = as_colour(self.rng.uniform(0.6, 1.0) * self.rng.uniform(0.8, 1.0, 3))
        return Material(
            self._pick(*names), (low, low, low), high, tile=0.0, gloss=float(self.rng.uniform(0, 0.4)), shininess=30.0
        )

    def poster(self) -> Material:
        """Pictures, maps and notices on walls."""
        names = ("poster", "painting", "page", "photograph", "photograph")
        return self._print(*(n for n in names if len(self.bank.categories[n])))

    def packaging(self) -> Material:
        """Printed cartons, cans, covers of books and magazines."""
        names = ("poster", "poster", "poster", "page", "painting", "photograph")
        return self._print(*(n for n in names if len(self.bank.categories[n])))

    def paper(self) -> Material:
        """Printed sheets."""
        return self._print("page")

    def books(self) -> Material:
        """A row of book spines."""
        return self._print("books")

    def screen(self) -> Material:
        """A monitor, on or off."""
        glow = float(self.rng.uniform(0.3, 1.0)) if self.rng.random() < 0.5 else 0.0
        return replace(self._print("screen"), glow=glow)

    def keyboard(self) -> Material:
        """Keys."""
        return self._print("keys")

    def window(self) -> Material:
        """Daylight, perhaps with an indistinct view of the outside."""
        material = self._print("plain", "leaves", "painting", "natural")
        return replace(material, glow=float(self.rng.uniform(0.8, 3.0)))

    def lamp(self) -> Material:
        """A luminous surface."""
        return Material(self._pick("plain"), (0.9, 0.9, 0.85), (1.0, 1.0, 1.0), glow=float(self.rng.uniform(1.5, 4.0)))

    def skin(self) -> Material:
        """Skin tones."""
        base = colorsys.hsv_to_rgb(
            float(self.rng.uniform(0.02, 0.08)), float(self.rng.uniform(0.3, 0.6)), float(self.rng.uniform(0.25, 0.95))
        )
        return Material(self._pick("plain"), base, base, gloss=0.05)

    def foliage(self) -> Material:
        """Leaves in green, autumn colours at times."""
        hue = self.rng.uniform(0.18, 0.42) if self.rng.random() < 0.85 else self.rng.uniform(0.02, 0.17)
        base = colorsys.hsv_to_rgb(float(hue), float(self.rng.uniform(0.2, 0.8)), float(self.rng.uniform(0.15, 0.75)))
        return self._make(("leaves", "leaves", "natural"), base, (0.4, 0.95), (0.4, 2.0))

    def grass(self) -> Material:
        """Lawn, meadow, earth, sand, snow."""
        hue, value = self.rng.uniform(0.06, 0.35), self.rng.uniform(0.25, 0.85)
        base = colorsys.hsv_to_rgb(float(hue), float(self.rng.uniform(0.0, 0.6)), float(value))
        return self._make(("natural", "speckle", "leaves", "blobs"), base, (0.2, 0.7), (0.8, 6.0))

    def asphalt(self) -> Material:
        """Road, paving, concrete."""
        base = self.colour((0.2, 0.75), 0.3)
        return self._make(
            ("speckle", "natural", "natural", "tiles", "bricks"), base, (0.08, 0.45), (1.0, 6.0), (0, 0.3)
        )

    def facade(self) -> Material:
        """Fronts of houses with their windows."""
        if self.rng.random() < 0.3:
            return self._make(("bricks", "natural", "leaves"), self.colour((0.25, 0.9), 0.7), (0.1, 0.6), (1.0, 4.0))
        return replace(self._print("facade"), tile=float(self.rng.uniform(3.0, 9.0)))

    def anything(self) -> Material:
        """Whatever."""
        sorts = [
            self.wood,
            self.fabric,
            self.plastic,
            self.metal,
            self.ceramic,
            self.packaging,
            self.poster,
            self.furniture,
            self.wall,
        ]
        return sorts[int(self.rng.integers(len(sorts)))]()
