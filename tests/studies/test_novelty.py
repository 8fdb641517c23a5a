"""The study of novelty: equations of another viscosity, and means over splits."""

import pytest
import torch
from torch import Tensor

from scripts.studies.novelty import over_splits, trajectories


@pytest.mark.parametrize("viscosity", [0.5, 1.0, 2.0])
def test_states_follow_the_equation_of_their_viscosity(viscosity: float) -> None:
    """From each saved state to the next, 2 later, by Runge and Kutta's explicit method of order four."""
    length, points, step = 100.0, 128, 0.005
    k = 2 * torch.pi * torch.fft.rfftfreq(points, length / points, dtype=torch.float64)
    resolved = torch.arange(len(k)) < points / 3

    def slope(u: Tensor) -> Tensor:
        v = torch.fft.rfft(u)
        product = -0.5j * k * resolved * torch.fft.rfft(u.square())
        return torch.fft.irfft((k**2 - viscosity * k**4) * v + product, n=points)

    states = trajectories(length, viscosity, 2)
    u = states[:, 27]
    for _ in range(400):
        first = slope(u)
        second = slope(u + step / 2 * first)
        third = slope(u + step / 2 * second)
        u = u + step / 6 * (first + 2 * second + 2 * third + slope(u + step * third))
    assert float((states[:, 28] - states[:, 27]).abs().max()) > 0.1
    torch.testing.assert_close(u, states[:, 28], rtol=0, atol=1e-3)


def test_rows_of_splits_become_their_mean_and_other_rows_stay() -> None:
    splits = {f"energy, range, split {i}": {"novelty": (value, 0.3)} for i, value in enumerate([0.5, 0.7])}
    assert over_splits(splits)["energy, range"]["novelty"] == pytest.approx((0.6, 0.1))
    assert over_splits({"blur": {"novelty": (0.5, 0.3)}}) == {"blur": {"novelty": (0.5, 0.3)}}
