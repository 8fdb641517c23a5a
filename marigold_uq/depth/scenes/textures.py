"""Procedural pictures that serve as surface textures, and masks that cut holes into rectangles.

Each function draws one tile of SIZE x SIZE from a generator, grey (S, S) or colour (S, S, 3), values in [0, 1].
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import cv2
import numpy as np
from numpy.typing import NDArray

from marigold_uq.depth.scenes.vectors import Array

Rng = np.random.Generator
SIZE = 128


def _unit_range(values: Array) -> Array:
    low, high = np.percentile(values, [0.5, 99.5])
    return np.clip((values - low) / (high - low + 1e-9), 0, 1).astype(np.float32)


def spectral_noise(rng: Rng, exponent: float, stretch: float = 1.0, size: int = SIZE) -> Array:
    """Periodic Gaussian noise of amplitude spectrum 1 / |k|^exponent; `stretch` > 1 draws it out along the columns."""
    ky, kx = np.meshgrid(np.fft.fftfreq(size) * size, np.fft.rfftfreq(size) * size, indexing="ij")
    frequency = np.sqrt((kx / stretch) ** 2 + (ky * stretch) ** 2)
    frequency[0, 0] = 1.0
    white = np.fft.rfft2(rng.standard_normal((size, size)))
    white[0, 0] = 0.0
    return _unit_range(np.fft.irfft2(white / frequency**exponent, s=(size, size)))


def natural(rng: Rng) -> Array:
    """Noise with the power law of natural images (amplitude ~ 1 / k) and its neighbours."""
    return spectral_noise(rng, rng.uniform(0.6, 2.2), rng.choice([1.0, 1.0, 1.6]))


def speckle(rng: Rng) -> Array:
    """Fine grain: asphalt, carpet, gravel, terrazzo."""
    fine = spectral_noise(rng, rng.uniform(0.0, 0.6))
    return _unit_range(fine + rng.uniform(0.2, 0.8) * spectral_noise(rng, 1.5))


def wood(rng: Rng) -> Array:
    """Grain along the rows, perhaps cut into planks with dark joints."""
    stretch = rng.uniform(3, 6)
    grain = spectral_noise(rng, 1.1, stretch) * 0.7 + 0.3 * spectral_noise(rng, 0.7, stretch)
    rings = 0.5 + 0.5 * np.sin(2 * np.pi * (rng.uniform(2, 6) * spectral_noise(rng, 1.8, stretch)))
    tile = 0.7 * grain + rng.uniform(0, 0.3) * rings
    if rng.random() < 0.6:
        edges = np.linspace(0, SIZE, rng.integers(3, 9)).astype(int)
        for top, bottom in itertools.pairwise(edges):
            shift = rng.integers(SIZE)
            tile[top:bottom] = np.roll(tile[top:bottom], shift, axis=1) + rng.normal(0, 0.12)
            tile[top] = tile[top:bottom, shift : shift + 1] = -0.1
    return _unit_range(tile)


def bricks(rng: Rng) -> Array:
    """Courses of bricks or blocks, every second one shifted."""
    courses, per_course, joint = int(rng.choice([4, 8, 16])), int(rng.choice([2, 4, 8])), int(rng.integers(1, 3))
    tile = np.zeros((SIZE, SIZE), dtype=np.float32)
    rise, run = SIZE // courses, SIZE // per_course
    for course in range(courses):
        for k in range(per_course):
            block = np.zeros((SIZE, SIZE), dtype=np.float32)
            block[course * rise + joint : (course + 1) * rise, k * run + joint : (k + 1) * run] = rng.uniform(0.4, 1.0)
            tile += np.roll(block, (course % 2) * run // 2, axis=1)
    return _unit_range(tile + 0.3 * spectral_noise(rng, 0.8))


def tiles(rng: Rng) -> Array:
    """Square tiles with thin joints, in one shade, in varied shades, or as a chequerboard."""
    count, joint = int(rng.choice([2, 4, 8])), int(rng.integers(0, 3))
    shades = rng.uniform(0.5, 1.0, (count, count)) if rng.random() < 0.5 else np.full((count, count), 0.8)
    if rng.random() < 0.3:
        shades = np.indices((count, count)).sum(axis=0) % 2
    side = SIZE // count
    tile = np.kron(shades, np.ones((side, side))).astype(np.float32)
    for k in range(joint):
        tile[k::side] = tile[:, k::side] = rng.uniform(0, 0.5)
    return np.clip(tile + rng.uniform(0, 0.3) * (spectral_noise(rng, 1.0) - 0.5), 0, 1)


def stripes(rng: Rng) -> Array:
    """Stripes of random widths, hard or soft, perhaps crossed as in tartan or ribbed like corduroy."""
    profile = np.repeat(rng.random(32), rng.integers(1, 12, 32))[:SIZE]
    profile = np.resize(profile, SIZE)
    if rng.random() < 0.3:
        profile = 0.5 + 0.5 * np.sin(2 * np.pi * rng.integers(4, 20) * np.arange(SIZE) / SIZE)
    tile = np.tile(profile, (SIZE, 1))
    if rng.random() < 0.35:
        tile = (tile + tile.T) / 2
    return _unit_range(tile + 0.15 * spectral_noise(rng, 0.6))


def carpet(rng: Rng) -> Array:
    """Broken short streaks, like woven carpet tiles or fabric."""
    streaks = spectral_noise(rng, 0.4, rng.uniform(2, 6))
    return _unit_range(streaks + 0.6 * spectral_noise(rng, 0.0))


def blobs(rng: Rng) -> Array:
    """Flat patches: thresholded smooth noise in a few grey levels."""
    smooth = spectral_noise(rng, rng.uniform(1.6, 2.6))
    levels = int(rng.integers(2, 6))
    return _unit_range(np.floor(smooth * levels) + 0.1 * spectral_noise(rng, 0.5))


def marble(rng: Rng) -> Array:
    """Thin veins where smooth noise crosses its middle."""
    return _unit_range(np.abs(spectral_noise(rng, 1.5) - 0.5) ** rng.uniform(0.3, 1.0))


def leaves(rng: Rng) -> Array:
    """Hundreds of overlapping little ellipses, lighter ones on top: foliage, hedges, rubble."""
    tile = np.zeros((SIZE, SIZE), dtype=np.float32)
    for shade in np.linspace(0.1, 1.0, 400):
        center = tuple(int(c) for c in rng.integers(0, SIZE, 2))
        axes = (int(rng.integers(2, 9)), int(rng.integers(1, 5)))
        cv2.ellipse(tile, center, axes, float(rng.uniform(0, 180)), 0, 360, float(shade * rng.uniform(0.5, 1)), -1)
    return tile


def rosette(rng: Rng) -> Array:
    """Ornaments: a rug of nested rotationally symmetric figures."""
    y, x = np.mgrid[0:SIZE, 0:SIZE] / SIZE * 4 - 2
    radius, angle = np.hypot(x % 2 - 1, y % 2 - 1), np.arctan2(y % 2 - 1, x % 2 - 1)
    folds, rate = rng.integers(3, 10), rng.uniform(4, 14)
    pattern = np.sin(rate * radius + np.cos(folds * angle) * rng.uniform(0.5, 3)) + 0.5 * np.sin(folds * angle)
    return _unit_range(np.sign(pattern) * 0.5 + pattern + 0.6 * spectral_noise(rng, 0.8))


def _text(canvas: Array, rng: Rng, left: int, top: int, right: int, bottom: int, line: int, colour: Array) -> None:
    """Rows of dashes as long as words."""
    for y in range(top, bottom - line, line + max(1, line // 2)):
        x = left
        while x < right - 2:
            length = int(rng.integers(2, 5 + 4 * line))
            canvas[y : y + line, x : min(x + length, right)] = colour
            x += length + max(1, line)


def page(rng: Rng) -> Array:
    """A printed page: paper, columns of text, a picture."""
    canvas = np.full((SIZE, SIZE, 3), rng.uniform(0.75, 1.0), dtype=np.float32)
    columns = int(rng.integers(1, 4))
    for k in range(columns):
        left, right = 8 + k * 112 // columns, (k + 1) * 112 // columns
        _text(
            canvas,
            rng,
            left,
            int(rng.integers(6, 40)),
            right,
            SIZE - 6,
            int(rng.integers(1, 3)),
            rng.uniform(0, 0.4, 3),
        )
    if rng.random() < 0.7:
        _picture(canvas, rng)
    return canvas


def _picture(canvas: Array, rng: Rng) -> None:
    """Paste a coloured noise picture into a random rectangle."""
    height, width = rng.integers(20, 80, 2)
    top, left = rng.integers(0, SIZE - height), rng.integers(0, SIZE - width)
    noise = np.stack([spectral_noise(rng, 1.3) for _ in range(3)], axis=-1)
    canvas[top : top + height, left : left + width] = (noise * rng.random(3))[:height, :width]


def poster(rng: Rng) -> Array:
    """Coloured rectangles, ellipses, wedges and lettering on plain or shaded ground: pictures, boxes, labels, toys."""
    first, second = rng.random(3), rng.random(3)
    ramp = np.linspace(0, 1, SIZE)[:, None, None] * (rng.random() < 0.4)
    canvas = np.broadcast_to(first * (1 - ramp) + second * ramp, (SIZE, SIZE, 3)).astype(np.float32).copy()
    for _ in range(int(rng.integers(2, 9))):
        colour = tuple(float(c) for c in rng.random(3))
        a, b = ([int(c) for c in rng.integers(0, SIZE, 2)] for _ in range(2))
        kind = rng.integers(4)
        if kind == 0:
            cv2.rectangle(canvas, a, b, colour, -1)
        elif kind == 1:
            axes = [int(c) for c in rng.integers(6, 50, 2)]
            cv2.ellipse(canvas, a, axes, float(rng.uniform(0, 180)), 0, 360, colour, -1, cv2.LINE_AA)
        elif kind == 2:
            corners = rng.integers(0, SIZE, (3, 2)).astype(np.int32)
            cv2.fillPoly(canvas, [corners], colour, cv2.LINE_AA)
        else:
            cv2.line(canvas, a, b, colour, int(rng.integers(2, 16)), cv2.LINE_AA)
    for _ in range(int(rng.integers(0, 4))):
        top, left = (int(c) for c in rng.integers(0, 90, 2))
        _text(
            canvas, rng, left, top, min(left + 70, SIZE), min(top + 40, SIZE), int(rng.integers(1, 10)), rng.random(3)
        )
    return np.clip(canvas + 0.08 * (spectral_noise(rng, 1.0)[..., None] - 0.5), 0, 1)


def painting(rng: Rng) -> Array:
    """A colourful natural-spectrum picture with an invented composition."""
    shared = spectral_noise(rng, rng.uniform(1.2, 1.8))
    mixing = rng.uniform(0, 1, 3)
    layers = [mixing[c] * shared + (1 - mixing[c]) * spectral_noise(rng, 1.4) for c in range(3)]
    canvas = np.stack(layers, axis=-1).astype(np.float32)
    return np.clip(np.floor(canvas * 6) / 6 if rng.random() < 0.3 else canvas, 0, 1)


def books(rng: Rng) -> Array:
    """Spines of books standing in a row, dark above them."""
    canvas = np.full((SIZE, SIZE, 3), rng.uniform(0, 0.25), dtype=np.float32)
    x = 0
    while x < SIZE:
        width, top = int(rng.integers(3, 14)), int(rng.integers(4, 50))
        if rng.random() < 0.92:
            canvas[top:, x : x + width - 1] = rng.random(3) * rng.uniform(0.3, 1)
            band = int(rng.integers(top, SIZE))
            canvas[band : band + int(rng.integers(2, 20)), x : x + width - 1] = rng.random(3)
        x += width
    return canvas


def facade(rng: Rng) -> Array:
    """A grid of windows in a plastered or brick wall."""
    wall, glass = rng.uniform(0.3, 1.0, 3), rng.uniform(0, 0.4, 3)
    canvas = np.clip(wall + 0.15 * (spectral_noise(rng, 0.9)[..., None] - 0.5), 0, 1).astype(np.float32)
    rows, columns = int(rng.choice([1, 2, 4])), int(rng.choice([1, 2, 4]))
    tall, wide = SIZE // rows, SIZE // columns
    for i in range(rows):
        for j in range(columns):
            top, left = int((i + 0.25) * tall), int((j + 0.25) * wide)
            bottom, right = int((i + rng.uniform(0.75, 0.9)) * tall), int((j + 0.78) * wide)
            cv2.rectangle(canvas, (left - 2, top - 2), (right + 2, bottom + 2), [float(c) for c in rng.random(3)], -1)
            cv2.rectangle(canvas, (left, top), (right, bottom), [float(c) for c in glass * rng.uniform(0.5, 2)], -1)
    return canvas


def screen(rng: Rng) -> Array:
    """What a monitor shows: often nothing."""
    if rng.random() < 0.5:
        return np.full((SIZE, SIZE, 3), rng.uniform(0, 0.15), dtype=np.float32)
    return page(rng) if rng.random() < 0.5 else poster(rng)


def keys(rng: Rng) -> Array:
    """Rows of keys or buttons."""
    canvas = np.full((SIZE, SIZE), rng.uniform(0, 0.3), dtype=np.float32)
    pitch = int(rng.integers(8, 22))
    for y in range(2, SIZE, pitch):
        for x in range(2 + (y // pitch) % 2 * 3, SIZE, pitch):
            canvas[y : y + pitch - 3, x : x + pitch - 3] = rng.uniform(0.5, 1)
    return canvas


def plain(rng: Rng) -> Array:
    """Almost nothing: faint large-scale unevenness."""
    return 0.5 + 0.5 * spectral_noise(rng, 2.0)


TEXTURES: dict[str, tuple[Callable[[Rng], Array], int]] = {  # name: (how it is drawn, how many variants)
    "natural": (natural, 14),
    "speckle": (speckle, 8),
    "wood": (wood, 16),
    "bricks": (bricks, 8),
    "tiles": (tiles, 10),
    "stripes": (stripes, 10),
    "carpet": (carpet, 8),
    "blobs": (blobs, 8),
    "marble": (marble, 6),
    "leaves": (leaves, 8),
    "rosette": (rosette, 5),
    "page": (page, 8),
    "poster": (poster, 40),
    "painting": (painting, 12),
    "books": (books, 8),
    "facade": (facade, 10),
    "screen": (screen, 6),
    "keys": (keys, 3),
    "plain": (plain, 5),
}


# Masks: True where there is matter.

_MASK_SIZE = 96


def _mask_foliage(rng: Rng) -> NDArray[np.bool_]:
    """A ragged clump of leaves."""
    y, x = np.mgrid[-1 : 1 : _MASK_SIZE * 1j, -1 : 1 : _MASK_SIZE * 1j]
    noise = spectral_noise(rng, rng.uniform(0.5, 1.1), size=_MASK_SIZE)
    return noise + 0.35 * (1 - np.hypot(x, y) * 1.3) > rng.uniform(0.35, 0.6)


def _mask_fronds(rng: Rng) -> NDArray[np.bool_]:
    """Long leaves that spring from the middle of the lower edge."""
    canvas = np.zeros((_MASK_SIZE, _MASK_SIZE), dtype=np.uint8)
    root = (_MASK_SIZE // 2, _MASK_SIZE)
    for _ in range(int(rng.integers(6, 22))):
        angle, length, bend = rng.uniform(0.1, np.pi - 0.1), rng.uniform(0.5, 1.0) * _MASK_SIZE, rng.normal(0, 0.5)
        reach = np.linspace(0, length, 12)
        heading = angle + bend * (reach / length) ** 2
        path = np.stack([root[0] + reach * np.cos(heading), root[1] - reach * np.sin(heading)], axis=-1)
        cv2.polylines(canvas, [path.astype(np.int32)], False, 1, int(rng.integers(1, 5)))
    return canvas > 0


def _mask_branches(rng: Rng) -> NDArray[np.bool_]:
    """Bare twigs."""
    canvas = np.zeros((_MASK_SIZE, _MASK_SIZE), dtype=np.uint8)
    tips = [(_MASK_SIZE / 2, float(_MASK_SIZE), np.pi / 2, 30.0)]
    for _ in range(40):
        x, y, heading, length = tips[int(rng.integers(len(tips)))]
        heading += rng.normal(0, 0.6)
        end = (x + length * np.cos(heading), y - length * np.sin(heading))
        cv2.line(canvas, (int(x), int(y)), (int(end[0]), int(end[1])), 1, max(1, int(length / 10)))
        tips.append((*end, heading, length * 0.75))
    return canvas > 0


def _mask_bars(rng: Rng) -> NDArray[np.bool_]:
    """A frame with upright or horizontal slats: chair backs, railings, cots."""
    bars, fill, rim = int(rng.integers(2, 9)), rng.uniform(0.15, 0.6), int(rng.integers(4, 14))
    profile = (np.arange(_MASK_SIZE) * bars / _MASK_SIZE) % 1 < fill
    mask = np.tile(profile, (_MASK_SIZE, 1))
    mask[:rim] = mask[-rim:] = mask[:, :rim] = mask[:, -rim:] = True
    return mask if rng.random() < 0.6 else mask.T.copy()


def _mask_lattice(rng: Rng) -> NDArray[np.bool_]:
    """Crossing laths, straight or diagonal: fences, racks, trellis."""
    y, x = np.mgrid[0:_MASK_SIZE, 0:_MASK_SIZE]
    if rng.random() < 0.5:
        x, y = x + y, x - y
    pitch, fill = rng.integers(8, 26), rng.uniform(0.15, 0.5)
    return ((x % pitch) < fill * pitch) | ((y % pitch) < fill * pitch)


def _mask_oval(rng: Rng) -> NDArray[np.bool_]:
    """A rounded shape, solid or a ring: backs of chairs, mirrors, handles, leaves."""
    y, x = np.mgrid[-1 : 1 : _MASK_SIZE * 1j, -1 : 1 : _MASK_SIZE * 1j]
    power = rng.uniform(2, 6)
    radius = (np.abs(x) ** power + np.abs(y) ** power) ** (1 / power)
    return (radius < 1) & (radius > (rng.uniform(0.5, 0.85) if rng.random() < 0.3 else -1))


def _mask_silhouette(rng: Rng) -> NDArray[np.bool_]:
    """A random smooth contour: figures, tools, toys seen edge-on."""
    angle = np.linspace(0, 2 * np.pi, 64, endpoint=False)
    radius = 0.7 + sum(rng.normal(0, 0.28 / k) * np.cos(k * angle + rng.uniform(0, 6.3)) for k in range(1, 8))
    contour = np.stack([np.cos(angle), np.sin(angle)], axis=-1) * np.clip(radius, 0.2, 1)[:, None]
    canvas = np.zeros((_MASK_SIZE, _MASK_SIZE), dtype=np.uint8)
    cv2.fillPoly(canvas, [((contour + 1) * _MASK_SIZE / 2).astype(np.int32)], 1)
    return canvas > 0


MASKS: dict[str, tuple[Callable[[Rng], NDArray[np.bool_]], int]] = {
    "foliage": (_mask_foliage, 12),
    "fronds": (_mask_fronds, 8),
    "branches": (_mask_branches, 6),
    "bars": (_mask_bars, 12),
    "lattice": (_mask_lattice, 8),
    "oval": (_mask_oval, 8),
    "silhouette": (_mask_silhouette, 16),
}
