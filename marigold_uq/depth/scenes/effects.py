"""From radiance to a photograph: exposure, colour cast, focus, motion, vignetting, noise, compression."""

from __future__ import annotations

import cv2
import numpy as np

from marigold_uq.depth.scenes.textures import spectral_noise
from marigold_uq.depth.scenes.vectors import Array, mean_channel

Rng = np.random.Generator
_REFERENCE_WIDTH = 256  # pixels; blur is stated for pictures of this width and grows with it


def expose(radiance: Array, rng: Rng) -> Array:
    """Put a bright percentile near white (or leave the picture dark), then a soft shoulder and gamma; (H, W, 3)."""
    luminance = mean_channel(radiance[::2, ::2])
    level = rng.uniform(0.45, 1.15) if rng.random() < 0.85 else np.exp(rng.uniform(np.log(0.08), np.log(0.5)))
    scaled = radiance * np.float32(level / max(float(np.percentile(luminance, 95)), 1e-4))
    shoulder = rng.uniform(0.6, 1.0)
    bent = np.where(
        scaled < shoulder, scaled, shoulder + (1 - shoulder) * np.tanh((scaled - shoulder) / (1 - shoulder + 1e-6))
    )
    return np.clip(bent, 0, 1) ** np.float32(1 / rng.uniform(1.8, 2.5))


def _colour_cast(image: Array, rng: Rng) -> Array:
    """White balance errors, saturation, contrast; rarely black and white."""
    warmth = rng.normal(0, 0.1)  # errors lie along the colours of light sources, hardly towards green or magenta
    gains = np.exp(np.array([warmth, 0, -warmth]) + rng.normal(0, 0.02, 3)).astype(np.float32)
    grey = mean_channel(image)[..., None]
    saturation = 0.0 if rng.random() < 0.03 else rng.uniform(0.5, 1.4)
    image = grey + (image - grey) * np.float32(saturation)
    contrast = np.float32(rng.uniform(0.8, 1.3))
    return np.clip((image * gains - 0.5) * contrast + 0.5 + np.float32(rng.normal(0, 0.04)), 0, 1)


def _black_level(image: Array, rng: Rng) -> Array:
    """Stretch the tones so that the darkest ones come (more or less) to black, as cameras do."""
    low = np.float32(np.percentile(mean_channel(image[::2, ::2]), 1) * rng.uniform(0, 1))
    return np.clip((image - low) / (1 - min(float(low), 0.8)), 0, 1)


def _soften(image: Array, rng: Rng, base: float = 0.45) -> Array:
    """Lens and demosaicing blur; always a little, which also smooths jagged edges."""
    extra = abs(rng.normal(0, 0.35)) if rng.random() < 0.5 else 0.0
    extra += rng.uniform(0, 1.2) if rng.random() < 0.06 else 0.0
    return cv2.GaussianBlur(image, (0, 0), float(base + extra * image.shape[1] / _REFERENCE_WIDTH))


def _defocus(image: Array, depth: Array, rng: Rng) -> Array:
    """Thin-lens blur, circle of confusion ~ |1/depth - 1/focus|, from blurred copies; focus at a random seen depth."""
    inverse = 1 / depth
    focus = 1 / rng.choice(depth.ravel())
    spread = np.abs(inverse - focus) / max(float(inverse.max() - inverse.min()), 1e-6)
    amount = (spread * rng.uniform(0.5, 2.0)).astype(np.float32)[..., None]
    result = image
    for threshold, sigma in ((0.2, 0.8), (0.5, 1.4), (0.9, 2.2)):
        blend = np.clip((amount - threshold) / 0.3 + 0.5, 0, 1)
        blurred = cv2.GaussianBlur(image, (0, 0), max(sigma * image.shape[1] / _REFERENCE_WIDTH, 0.3))
        result = result * (1 - blend) + blurred * blend
    return result


def motion(image: Array, rng: Rng) -> Array:
    """Straight camera shake of a few pixels."""
    length, angle = rng.uniform(1.5, 5.0), rng.uniform(0, np.pi)
    kernel = np.zeros((7, 7), dtype=np.float32)
    for share in np.linspace(-0.5, 0.5, 25):
        x, y = 3 + share * length * np.cos(angle), 3 + share * length * np.sin(angle)
        kernel[round(float(y)), round(float(x))] += 1
    return cv2.filter2D(image, -1, kernel / kernel.sum(), borderType=cv2.BORDER_REFLECT)


def _vignette(image: Array, rng: Rng) -> Array:
    """Darkening towards the corners."""
    height, width = image.shape[:2]
    y, x = np.ogrid[-1 : 1 : height * 1j, -1 : 1 : width * 1j]
    return image * (1 - rng.uniform(0, 0.4) * (x**2 + y**2) / 2)[..., None].astype(np.float32)


def _stains(image: Array, rng: Rng) -> Array:
    """Uneven illumination that has nothing to do with the scene's geometry: multiply with smooth noise."""
    height, width = image.shape[:2]
    field = cv2.resize(
        spectral_noise(rng, rng.uniform(1.2, 2.2), size=64), (width, height), interpolation=cv2.INTER_CUBIC
    )
    return image * (1 - rng.uniform(0.05, 0.5) * field[..., None])


def _sensor_noise(image: Array, rng: Rng) -> Array:
    """Read and shot noise, partly correlated between neighbours as after demosaicing."""
    strength = np.float32(np.exp(rng.uniform(np.log(0.002), np.log(0.03))))
    noise = rng.standard_normal(image.shape, dtype=np.float32)
    if rng.random() < 0.5:
        noise = cv2.GaussianBlur(noise, (0, 0), 0.7) * np.float32(2.2)
    return np.clip(image + noise * strength * np.sqrt(0.3 + image), 0, 1)


_N = np.arange(8)
_DCT = (
    np.cos(np.pi * (2 * _N[None, :] + 1) * _N[:, None] / 16) * np.where(_N == 0, np.sqrt(1 / 8), 0.5)[:, None]
).astype(np.float32)


def compress(image: Array, rng: Rng) -> Array:
    """Block artefacts: 8 x 8 cosine transform, rounded to steps that grow with frequency and are larger for colour."""
    height, width = image.shape[:2]
    rows, columns = height // 8 * 8, width // 8 * 8
    grey = mean_channel(image)[..., None]
    planes = np.concatenate([grey, image[..., :1] - grey, image[..., 2:] - grey], axis=-1)[:rows, :columns]
    blocks = planes.reshape(rows // 8, 8, columns // 8, 8, 3).transpose(0, 2, 4, 1, 3)  # rows, columns, plane, 8, 8
    coefficients = _DCT @ blocks @ _DCT.T
    step = np.exp(rng.uniform(np.log(0.01), np.log(0.08))) * (1 + (_N[:, None] + _N[None, :]) * 0.5)
    steps = (step * np.array([1, 2, 2])[:, None, None]).astype(np.float32)
    rounded = _DCT.T @ (np.rint(coefficients / steps) * steps) @ _DCT
    decoded = rounded.transpose(0, 3, 1, 4, 2).reshape(rows, columns, 3)
    result = image.copy()
    red, blue = decoded[..., 0] + decoded[..., 1], decoded[..., 0] + decoded[..., 2]
    result[:rows, :columns] = np.stack([red, 3 * decoded[..., 0] - red - blue, blue], axis=-1)
    return np.clip(result, 0, 1)


def photograph(radiance: Array, depth: Array, rng: Rng) -> Array:
    """The whole chain on linear radiance (H, W, 3), given a depth without holes for the focus."""
    image = radiance
    if rng.random() < 0.35:
        image = _stains(image, rng)
    image = expose(image, rng)
    if rng.random() < 0.12:
        image = _defocus(image, depth, rng)
    if rng.random() < 0.08:
        image = motion(image, rng)
    image = _soften(image, rng)
    if rng.random() < 0.5:
        image = _vignette(image, rng)
    if rng.random() < 0.8:
        image = _black_level(image, rng)
    image = _colour_cast(image, rng)
    if rng.random() < 0.8:
        image = _sensor_noise(image, rng)
    if rng.random() < 0.5:
        image = compress(image, rng)
    return np.clip(image, 0, 1).astype(np.float32)
