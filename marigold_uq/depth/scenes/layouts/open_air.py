"""Streets, squares and landscapes under the sky."""

from __future__ import annotations

import numpy as np

from marigold_uq.depth.scenes.furniture import carton, person
from marigold_uq.depth.scenes.layouts.indoor import lamp_colour, scaled, without_obstruction
from marigold_uq.depth.scenes.outdoors import bicycle, building, bush, car, fence, pole, tree
from marigold_uq.depth.scenes.primitives import Primitive, box, heightfield, quad, sample_heights
from marigold_uq.depth.scenes.scene import Atmosphere, Light, Scene, Stage, placed
from marigold_uq.depth.scenes.textures import spectral_noise

_SUN_DISTANCE = 1000.0


def daylight(s: Stage) -> tuple[list[Light], Atmosphere]:
    """Sun, overcast sky, dusk, or a night with lamps."""
    if s.chance(0.1):
        return _night(s)
    azimuth, elevation = s.uniform(0, 2 * np.pi), s.uniform(0.25, 1.3)
    direction = np.array([np.cos(azimuth) * np.cos(elevation), np.sin(azimuth) * np.cos(elevation), np.sin(elevation)])
    strength = s.uniform(0.4, 2.2) if s.chance(0.65) else s.uniform(0, 0.2)
    sun = Light(
        (direction * _SUN_DISTANCE).astype(np.float32),
        scaled(lamp_colour(s), strength),
        s.uniform(4, 40),
        1e5,
        shadows=strength > 0.2,
    )
    ambient = s.uniform(0.3, 0.8)
    blue = (ambient * s.uniform(0.75, 1.0), ambient * s.uniform(0.85, 1.0), ambient)
    horizon = scaled((s.uniform(0.8, 1.05), s.uniform(0.85, 1.0), 1.0), s.uniform(0.6, 2.2))
    zenith = scaled((s.uniform(0.3, 1.0), s.uniform(0.55, 1.0), 1.0), s.uniform(0.5, 1.8))
    visibility = s.uniform(40, 400) if s.chance(0.4) else float("inf")
    return [sun], Atmosphere(blue, scaled(blue, s.uniform(0.3, 0.8)), zenith, horizon, visibility)


def _night(s: Stage) -> tuple[list[Light], Atmosphere]:
    lights = []
    for number in range(int(s.rng.integers(1, 4))):
        spot = np.array([s.uniform(-8, 8), s.uniform(-2, 20), s.uniform(3, 7)], np.float32)
        lights.append(Light(spot, scaled(lamp_colour(s), s.uniform(0.5, 2)), 0.3, s.uniform(3, 9), shadows=number == 0))
    dark = (0.05, 0.05, 0.07)
    return lights, Atmosphere(dark, dark, (0.01, 0.01, 0.03), (0.03, 0.03, 0.05))


def _roadside(s: Stage, side: int, kerb: float, length: float) -> list[Primitive]:
    """Buildings, walls, hedges and trees along one side of a road, from before the camera to its end."""
    parts: list[Primitive] = []
    setback, y = kerb + s.uniform(0.5, 5), -4.0
    urban = s.uniform(0.1, 1.0)
    while y < length:
        run = s.uniform(4, 18)
        if s.chance(urban):
            group = building(s, run, s.uniform(5, 12))
            parts += placed(group, side * (setback + s.uniform(0, 1.0)), y + run / 2, 0, 0 if side > 0 else 180)
        else:
            if s.chance(0.6):
                parts += placed(fence(s, run), side * setback, y + run / 2)
            for _ in range(int(s.rng.integers(1, 4))):
                item = tree(s) if s.chance(0.65) else bush(s)
                parts += placed(item, side * (setback + s.uniform(0.5, 8)), y + s.uniform(0, run), 0, s.uniform(0, 360))
        y += run
    return parts


def _traffic(s: Stage, kerb: float, length: float) -> list[list[Primitive]]:
    """Parked and moving cars, poles, people, bicycles."""
    groups = []
    for side in (-1, 1):
        if s.chance(0.5):
            y = s.uniform(2, 12)
            while y < min(length, 45):
                groups.append(placed(car(s), side * (kerb - 1.0), y, 0, s.rng.normal(0, 3)))
                y += s.uniform(5, 14)
        y = s.uniform(3, 10)
        while y < min(length, 60):
            item = s.one_of((pole, pole, tree, person, bicycle))
            groups.append(placed(item, side * (kerb + s.uniform(0.3, 1.5)), y, 0, s.uniform(0, 360)))
            y += s.uniform(4, 18)
    for _ in range(int(s.rng.integers(0, 4))):
        groups.append(placed(car(s), s.uniform(-0.7, 0.7) * kerb, s.uniform(7, 50), 0, s.rng.normal(0, 4)))
    return groups


def _road(s: Stage, kerb: float, length: float) -> list[Primitive]:
    """Roadway, verges, markings, pavements."""
    marking = s.palette.ceramic()
    parts = [
        quad(
            (0, 100, -0.02),
            (120, 0, 0),
            (0, 130, 0),
            s.palette.grass() if s.chance(0.4) else s.palette.asphalt(),
            casts_shadow=False,
        ),
        quad((0, 100, 0), (kerb, 0, 0), (0, 130, 0), s.palette.asphalt(), casts_shadow=False),
    ]
    if s.chance(0.7):
        for side in (-1, 1):
            wide = s.uniform(0.8, 3)
            parts.append(box((side * (kerb + wide / 2), 60, 0.02), (wide, 140, 0.2), s.palette.asphalt()))
    if s.chance(0.6):
        centre, dash = s.uniform(-0.3, 0.3) * kerb, s.uniform(1.5, 4)
        parts += [
            box((centre, y, 0.004), (0.13, dash, 0.008), marking) for y in np.arange(2, min(length, 40), 2.2 * dash)
        ]
    if s.chance(0.5):
        parts += [box((side * kerb * 0.93, 60, 0.004), (0.12, 130, 0.008), marking) for side in (-1, 1)]
    return parts


def street(s: Stage) -> Scene:
    """A street seen from a car or a pavement, at times as a squeezed panorama."""
    kerb, length = s.uniform(2.2, 7), s.uniform(15, 85)
    squeeze = s.uniform(1.3, 2.7) if s.chance(0.5) else 1.0
    fov = s.uniform(70, 92) if squeeze > 1 else s.uniform(50, 85)
    camera = s.camera(
        (s.uniform(-0.6, 0.6) * kerb, 0, s.uniform(1.2, 2.2)),
        yaw=s.rng.normal(0, 7) + (s.uniform(-40, 40) if s.chance(0.12) else 0),
        pitch=s.rng.normal(2, 4),
        roll=s.rng.normal(0, 1.2),
        fov=fov,
        squeeze=squeeze,
    )
    groups = _traffic(s, kerb, length)
    parts = _road(s, kerb, length) + _roadside(s, -1, kerb, length) + _roadside(s, 1, kerb, length)
    if s.chance(0.6):
        groups.append(placed(building(s, s.uniform(8, 40), 8), s.uniform(-10, 10), length + s.uniform(0, 30), 0, 90))
    if s.chance(0.4):
        groups.append(_hills(s))
    for group in groups:
        parts += without_obstruction(group, camera, 0.7)
    lights, atmosphere = daylight(s)
    return Scene(parts, camera, lights, atmosphere)


def _hills(s: Stage) -> list[Primitive]:
    """A ridge or a row of woods on the horizon."""
    far, green = s.uniform(80, 200), s.palette.foliage()
    return [box((x, far, 0), (s.uniform(30, 90), 5, s.uniform(5, 40)), green) for x in range(-150, 151, 40)]


def _obstacle(s: Stage, far: float) -> list[Primitive]:
    """A low wall, step, bench or ramp."""
    y, size = s.uniform(2.5, far), s.rng.uniform([0.5, 0.3, 0.2], [6, 3, 1.4])
    center = (s.uniform(-0.7, 0.7) * y, y, size[2] / 2 - 0.1)
    return [box(center, size, s.palette.asphalt(), yaw=s.uniform(-40, 40), tilt=s.uniform(-15, 15))]


def _skyline(s: Stage, far: float) -> list[list[Primitive]]:
    """Houses, trees, bushes and fences along the far side."""
    groups, x = [], -far
    while x < far:
        run, sort = s.uniform(3, 14), s.rng.random()
        if sort < 0.35:
            item = building(s, run, 6)
        elif sort < 0.85:
            item = s.one_of((tree, tree, tree, bush))
        else:
            item = fence(s, run)
        groups.append(placed(item, x + run / 2, far + s.uniform(-0.15, 0.3) * far, 0, 90))
        x += run * s.uniform(0.4, 1.2)
    return groups


def square(s: Stage) -> Scene:
    """A yard, park or playground: people, low walls, ramps and bushes on open ground, trees and houses behind."""
    far = s.uniform(8, 60)
    pitch = float(np.clip(s.rng.normal(8, 8), -6, 30))
    camera = s.camera((0, 0, s.uniform(0.5, 1.9)), yaw=0, pitch=pitch, roll=s.rng.normal(0, 3), fov=s.uniform(48, 78))
    ground = s.palette.asphalt() if s.chance(0.6) else s.palette.grass()
    parts = [quad((0, 60, 0), (120, 0, 0), (0, 80, 0), ground, casts_shadow=False)]
    if s.chance(0.5):
        relief, cover = spectral_noise(s.rng, 2.0, size=48) * 2 - 1, s.palette.grass() if s.chance(0.5) else ground
        parts.append(heightfield((0, far / 2, -0.1), (far * 1.6, far, s.uniform(0.3, 1.4)), relief, cover))
    groups = _skyline(s, far) + [_obstacle(s, far) for _ in range(int(s.rng.integers(0, 5)))]
    for _ in range(int(s.rng.integers(1, 9))):
        y = float(np.exp(s.uniform(np.log(1.8), np.log(far))))
        item = s.one_of((person, person, pole, bush, tree, carton, bicycle, car))
        groups.append(placed(item, s.uniform(-0.6, 0.6) * y, y, 0, s.uniform(0, 360)))
    for group in groups:
        parts += without_obstruction(group, camera, 0.6)
    lights, atmosphere = daylight(s)
    return Scene(parts, camera, lights, atmosphere)


def landscape(s: Stage) -> Scene:
    """Hills with trees, rocks and fences, seen by a walker."""
    extent, relief = s.uniform(60, 300), s.uniform(4, 50)
    heights = (spectral_noise(s.rng, s.uniform(1.5, 2.3), size=64) * 2 - 1).astype(np.float32)
    center_y, material = extent / 2 - 5, s.palette.grass()

    def ground(x: float, y: float) -> float:
        local = [np.array([v], np.float32) for v in (2 * x / extent, 2 * (y - center_y) / extent)]
        return float(sample_heights(heights, *local)[0]) * relief / 2

    eye = ground(0, 0) + s.uniform(1.2, 4)
    parts = [heightfield((0, center_y, 0), (extent, extent, relief), heights, material)]
    parts.append(quad((0, 400, -relief / 2), (900, 0, 0), (0, 500, 0), s.palette.grass(), casts_shadow=False))
    camera = s.camera(
        (0, 0, eye),
        yaw=s.rng.normal(0, 8),
        pitch=s.rng.normal(6, 6),
        roll=s.rng.normal(0, 2),
        fov=s.uniform(45, 75),
    )
    for _ in range(int(s.rng.integers(2, 16))):
        y = float(np.exp(s.uniform(np.log(4), np.log(extent * 0.7))))
        x = s.uniform(-0.7, 0.7) * y
        item = s.one_of((tree, tree, bush, bush, person, pole, carton))
        parts += without_obstruction(placed(item, x, y, ground(x, y) - 0.1, s.uniform(0, 360)), camera, 0.8)
    lights, atmosphere = daylight(s)
    return Scene(parts, camera, lights, atmosphere)
