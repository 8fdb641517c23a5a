"""Photometric augmentation of an image (3, H, W) in [0, 1]; the depth does not change."""

import math
from dataclasses import dataclass, fields

import torch
from torch import Tensor
from torch.nn.functional import pad

_LUMA = (0.299, 0.587, 0.114)  # ITU-R BT.601


@dataclass(frozen=True)
class PhotometricTransform:
    """Strengths of the colour changes; 0 switches one off, and with all off the image is returned untouched.

    A factor of strength s is exp(u), u uniform in [-s, s]: as often 1 / f as f.

    Args:
        brightness: factor on the image (0.2: from 0.82 to 1.22 times).
        contrast: factor on the distance from the mean brightness.
        gamma: exponent x^f.
        saturation: factor on the distance from grey.
        hue: rotation about the grey axis by an angle in [-hue, hue], radians.
        white_balance: one factor per channel, with product 1.
        grayscale: probability of a grey image.
        blur: Gaussian blur with a standard deviation in [0, blur], pixels.
        noise: Gaussian noise with a standard deviation in [0, noise].
    """

    brightness: float = 0.0
    contrast: float = 0.0
    gamma: float = 0.0
    saturation: float = 0.0
    hue: float = 0.0
    white_balance: float = 0.0
    grayscale: float = 0.0
    blur: float = 0.0
    noise: float = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            if not 0 <= getattr(self, field.name) < math.inf:
                raise ValueError(f"{field.name} must be a non-negative number, got {getattr(self, field.name)}")
        if self.grayscale > 1:
            raise ValueError(f"grayscale is a probability, got {self.grayscale}")

    def __call__(self, image: Tensor, generator: torch.Generator) -> Tensor:
        """Change the colours of `image` (3, H, W)."""
        changed = image
        if self.gamma:
            changed = changed.clamp(0, 1) ** _factor(self.gamma, generator)
        if self.brightness:
            changed = changed * _factor(self.brightness, generator)
        if self.contrast:
            mean = _luma(changed).mean()
            changed = mean + (changed - mean) * _factor(self.contrast, generator)
        if self.saturation:
            grey = _luma(changed)
            changed = grey + (changed - grey) * _factor(self.saturation, generator)
        if self.hue:
            changed = _rotate_hue(changed, _symmetric(self.hue, generator))
        if self.white_balance:
            logarithms = (2 * torch.rand(3, 1, 1, generator=generator) - 1) * self.white_balance
            changed = changed * (logarithms - logarithms.mean()).exp()
        if self.grayscale and float(torch.rand(1, generator=generator)) < self.grayscale:
            changed = _luma(changed).expand(3, -1, -1)
        if self.blur:
            changed = gaussian_blur(changed, self.blur * float(torch.rand(1, generator=generator)))
        if self.noise:
            scale = self.noise * float(torch.rand(1, generator=generator))
            changed = changed + scale * torch.randn(changed.shape, generator=generator)
        return image if changed is image else changed.clamp(0, 1)


def gaussian_blur(image: Tensor, sigma: float) -> Tensor:
    """Convolve (C, H, W) with a Gaussian of standard deviation `sigma` pixels, cut at 3 sigma, edges repeated."""
    radius = math.ceil(3 * sigma)
    if radius == 0:
        return image
    height, width = image.shape[-2:]
    weights = [math.exp(-0.5 * (offset / sigma) ** 2) for offset in range(-radius, radius + 1)]
    total = sum(weights)
    padded = pad(image, (radius, radius, radius, radius), mode="replicate")  # (C, H + 2r, W + 2r)
    # Shifted sums: on a CPU several times faster than conv2d with so few channels.
    rows = torch.zeros_like(padded[:, :height])
    for shift, weight in enumerate(weights):
        rows.add_(padded[:, shift : shift + height], alpha=weight / total)
    blurred = torch.zeros_like(image)
    for shift, weight in enumerate(weights):
        blurred.add_(rows[:, :, shift : shift + width], alpha=weight / total)
    return blurred


def _symmetric(strength: float, generator: torch.Generator) -> float:
    return strength * (2 * float(torch.rand(1, generator=generator)) - 1)


def _factor(strength: float, generator: torch.Generator) -> float:
    return math.exp(_symmetric(strength, generator))


def _luma(image: Tensor) -> Tensor:
    """(3, H, W) to (1, H, W)."""
    return (image * image.new_tensor(_LUMA).view(3, 1, 1)).sum(dim=0, keepdim=True)


def _rotate_hue(image: Tensor, angle: float) -> Tensor:
    """Rodrigues' rotation about k = (1, 1, 1) / sqrt(3): grey stays grey."""
    cosine, sine = math.cos(angle), math.sin(angle) / math.sqrt(3)
    cross = image.roll(1, dims=0) - image.roll(-1, dims=0)  # (k x v) sqrt(3)
    return cosine * image + sine * cross + (1 - cosine) * image.mean(dim=0, keepdim=True)
