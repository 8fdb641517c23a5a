"""What a layout hands to the renderer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from marigold_uq.depth.scenes.camera import Camera, make_camera, rotation_about
from marigold_uq.depth.scenes.materials import Colour, Palette
from marigold_uq.depth.scenes.primitives import Primitive
from marigold_uq.depth.scenes.texture_bank import TextureBank
from marigold_uq.depth.scenes.vectors import Array


@dataclass(frozen=True)
class Light:
    """A spherical lamp of `radius` metres at `position`; `reach` is where it has lost half its strength."""

    position: Array  # (3,)
    colour: Colour
    radius: float
    reach: float
    shadows: bool = True


@dataclass(frozen=True)
class Atmosphere:
    """Light from all around (`above`, `below` the horizon), the sky's two colours, and haze of `visibility` metres."""

    above: Colour = (0.5, 0.5, 0.5)
    below: Colour = (0.3, 0.3, 0.3)
    zenith: Colour = (0.4, 0.6, 0.9)
    horizon: Colour = (0.8, 0.85, 0.9)
    visibility: float = float("inf")


@dataclass(frozen=True)
class Scene:
    """Everything needed to make one picture."""

    primitives: list[Primitive]
    camera: Camera
    lights: list[Light]
    atmosphere: Atmosphere = field(default_factory=Atmosphere)


@dataclass(frozen=True)
class Stage:
    """What every layout works with: chance, materials, hole patterns and the size of the picture."""

    rng: np.random.Generator
    palette: Palette
    bank: TextureBank
    height: int
    width: int

    def uniform(self, low: float, high: float) -> float:
        """A number in [low, high)."""
        return float(self.rng.uniform(low, high))

    def chance(self, probability: float) -> bool:
        """True with the given probability."""
        return bool(self.rng.random() < probability)

    def one_of(self, makers: Sequence[Callable[[Stage], list[Primitive]]]) -> list[Primitive]:
        """Something made by a random one of `makers`."""
        return makers[int(self.rng.integers(len(makers)))](self)

    def camera(
        self,
        position: tuple[float, float, float],
        *,
        yaw: float,
        pitch: float,
        roll: float,
        fov: float,
        squeeze: float = 1.0,
    ) -> Camera:
        """A camera of the stage's picture size; angles in degrees, `squeeze` as pixel_aspect of `make_camera`."""
        return make_camera(
            position,
            yaw=yaw,
            pitch=pitch,
            roll=roll,
            horizontal_fov=fov,
            height=self.height,
            width=self.width,
            pixel_aspect=squeeze,
        )

    def mask(self, name: str) -> NDArray[np.bool_]:
        """A random hole pattern of a sort."""
        masks = self.bank.masks[name]
        return masks[int(self.rng.integers(len(masks)))]


def placed(group: list[Primitive], x: float, y: float, z: float = 0.0, yaw: float = 0.0) -> list[Primitive]:
    """A group built around the origin (front towards -y), turned by `yaw` degrees and put at (x, y, z)."""
    rotation, translation = rotation_about(2, np.deg2rad(yaw)), np.array([x, y, z], dtype=np.float32)
    return [primitive.moved(rotation, translation) for primitive in group]
