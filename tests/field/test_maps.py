"""Isotropic spectra and event scores against sums written out, averages over many ensembles, and known waves."""

import math

import pytest
import torch

from marigold_uq.field.maps import exceedance_brier, isotropic_spectrum


def test_a_wave_has_all_its_power_in_its_shell() -> None:
    y, x = torch.meshgrid(torch.arange(16.0), torch.arange(16.0), indexing="ij")
    unit = 2 * math.pi / 16
    state = 3.0 + 2.0 * torch.cos(unit * (3 * x - 4 * y) + 0.3)
    power = isotropic_spectrum(state.double())
    expected = torch.zeros(12, dtype=torch.float64)
    expected[0], expected[5] = 9.0, 2.0
    torch.testing.assert_close(power, expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("side", [7, 8])
def test_shells_add_up_to_the_mean_square_and_turning_the_square_changes_nothing(side: int) -> None:
    states = torch.randn(3, 2, side, side, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    power = isotropic_spectrum(states)
    torch.testing.assert_close(power.sum(-1), states.square().mean((-2, -1)))
    torch.testing.assert_close(isotropic_spectrum(states.rot90(1, (-2, -1))), power)
    torch.testing.assert_close(isotropic_spectrum(states.roll((2, 3), (-2, -1))), power)


def test_a_rectangle_has_no_isotropic_spectrum() -> None:
    with pytest.raises(ValueError, match="8 x 6"):
        isotropic_spectrum(torch.zeros(8, 6))


def test_the_brier_score_is_the_average_over_members_and_pairs() -> None:
    """E (1_X - o)^2 - 1/2 E (1_X - 1_X')^2 over members and different pairs: the fair energy score of the indicator."""
    generator = torch.Generator().manual_seed(1)
    samples, target = torch.randn(5, 40, generator=generator), torch.randn(40, generator=generator)
    event, happened = (samples.abs() > 0.8).double(), (target.abs() > 0.8).double()
    pairs = [(event[i] - event[j]) ** 2 for i in range(5) for j in range(5) if i != j]
    expected = (event - happened).square().mean(0) - 0.5 * torch.stack(pairs).mean(0)
    torch.testing.assert_close(exceedance_brier(samples.double(), target.double(), 0.8), expected)


def test_its_mean_does_not_depend_on_the_number_of_samples() -> None:
    """Perfect samples of N(0, 1): P (1 - P) with P = P(|x| > 1) = .3173."""
    generator = torch.Generator().manual_seed(2)
    for members in (2, 10):
        samples = torch.randn(members, 40_000, generator=generator)
        scores = exceedance_brier(samples, torch.randn(40_000, generator=generator), 1.0)
        error = float(scores.std()) / math.sqrt(len(scores))
        assert abs(float(scores.mean()) - 0.3173 * 0.6827) < 4 * error
    with pytest.raises(ValueError, match="at least 2"):
        exceedance_brier(torch.zeros(1, 3), torch.zeros(3), 1.0)
