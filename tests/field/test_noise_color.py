"""Coloured noise has the variance of white noise, whatever its spectrum."""

import pytest
import torch

from marigold_uq.field.encoding import amplitudes
from marigold_uq.models.noise_color import NoiseColor


@pytest.mark.parametrize("length", [8, 9])
@pytest.mark.parametrize("wave", [0, 1, 3, 4])
def test_noise_of_a_single_wave_has_variance_one(length: int, wave: int) -> None:
    """The constant, and on even grids the alternating wave, have no twin among the conjugate waves."""
    generator, count = torch.Generator().manual_seed(0), 20000
    position = torch.arange(length)
    phase = 2 * torch.pi * torch.rand(500, 1, 1, generator=generator)
    color = NoiseColor(1, [1, length])
    color.amplitude[0] = amplitudes(torch.cos(2 * torch.pi * wave * position / length + phase))
    coloured = color(torch.randn(count, 1, length, generator=generator), 0)
    # squares of Gaussian numbers scatter by sqrt(2); five standard errors
    assert abs(float(coloured.square().mean((0, 1)).mean()) - 1) < 5 * (2 / count) ** 0.5
