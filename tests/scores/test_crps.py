"""CRPS: numerical integral, Monte Carlo, scoringrules and degenerate limits."""

import numpy as np
import pytest
import scoringrules
import torch
from support.laws import EVENT_SHAPES, FAMILY_NAMES, generator, random_law, random_value
from support.references import assert_within_standard_errors, crps_by_integral, mixture_cdf
from torch import Tensor

from marigold_uq.distributions import (
    GaussianDistribution,
    MixtureDistribution,
    NoiseDistribution,
    PointDistribution,
)
from marigold_uq.scores import crps

CLOSED_FORMS = ["gaussian", "mixture", "low_rank", "cholesky", "low_rank_mixture"]


def marginal_parameters(law: NoiseDistribution) -> tuple[Tensor, Tensor, Tensor]:
    """Weights, means and standard deviations of every marginal, (N, K) each, for N coordinates of the whole batch."""
    marginal = law.marginal()
    if isinstance(marginal, GaussianDistribution):
        loc, scale = marginal.loc.flatten()[:, None], marginal.scale.flatten()[:, None]
        return torch.ones_like(loc), loc, scale
    assert isinstance(marginal, MixtureDistribution)
    parameters = (marginal.weights, marginal.loc, marginal.scale)
    return tuple(p.transpose(0, 1).flatten(1).T for p in parameters)


@pytest.mark.parametrize("name", CLOSED_FORMS)
def test_closed_form_is_the_integral_of_the_squared_distance_of_distribution_functions(name: str) -> None:
    law = random_law(name, (1, 3))
    value = random_value(law)
    rows = zip(*marginal_parameters(law), value.flatten().tolist(), crps(law, value).flatten().tolist(), strict=True)
    for weights, means, scales, y, score in rows:
        low, high = float((means - 12 * scales).min()), float((means + 12 * scales).max())
        expected = crps_by_integral(mixture_cdf(weights, means, scales), y, min(low, y), max(high, y))
        assert score == pytest.approx(expected, rel=1e-6)  # trapezoidal rule with 20000 intervals a side


@pytest.mark.parametrize("name", CLOSED_FORMS)
def test_closed_form_is_that_of_scoringrules(name: str) -> None:
    law = random_law(name, (2, 5))
    value = random_value(law)
    weights, means, scales = (p.numpy() for p in marginal_parameters(law))
    expected = scoringrules.crps_mixnorm(value.flatten().numpy(), means, scales, weights, backend="numpy")
    np.testing.assert_allclose(crps(law, value).flatten().numpy(), expected, rtol=1e-10)


def test_the_gaussian_crps_is_that_of_scoringrules() -> None:
    law = random_law("gaussian", (2, 5))
    value = random_value(law)
    expected = scoringrules.crps_normal(value.numpy(), law.mean.numpy(), law.stddev.numpy(), backend="numpy")
    np.testing.assert_allclose(crps(law, value).numpy(), expected, rtol=1e-10)


@pytest.mark.parametrize("name", CLOSED_FORMS)
def test_closed_form_is_the_mean_of_the_kernel_representation_over_draws(name: str) -> None:
    law = random_law(name, (1, 3))
    value, (first, second) = random_value(law), law.rsample((2, 20_000), generator(5))
    assert_within_standard_errors((first - value).abs() - 0.5 * (first - second).abs(), crps(law, value))


def test_the_crps_of_draws_is_the_fair_one_of_scoringrules() -> None:
    law = random_law("sample", (2, 5))
    value = random_value(law)
    draws = law.draws.movedim(0, -1).numpy()
    expected = scoringrules.crps_ensemble(value.numpy(), draws, estimator="fair", backend="numpy")
    np.testing.assert_allclose(crps(law, value).numpy(), expected, rtol=1e-10)


def test_the_crps_of_a_point_is_the_absolute_error() -> None:
    law = random_law("point", (2, 5))
    value = random_value(law)
    assert torch.equal(crps(law, value), (value - law.mean).abs())


@pytest.mark.parametrize("name", FAMILY_NAMES)
@pytest.mark.parametrize("event_shape", EVENT_SHAPES.values(), ids=EVENT_SHAPES.keys())
def test_the_crps_is_not_reduced(name: str, event_shape: tuple[int, ...]) -> None:
    law = random_law(name, event_shape)
    assert crps(law, random_value(law)).shape == law.mean.shape


def test_a_mixture_of_one_component_is_a_gaussian() -> None:
    gaussian = random_law("gaussian", (2, 5))
    assert isinstance(gaussian, GaussianDistribution)
    mixture = MixtureDistribution(*(p[:, None] for p in (gaussian.loc, gaussian.scale, gaussian.loc)))
    value = random_value(gaussian)
    torch.testing.assert_close(crps(mixture, value), crps(gaussian, value))


def test_equal_components_are_one() -> None:
    gaussian = random_law("gaussian", (2, 5))
    assert isinstance(gaussian, GaussianDistribution)
    loc, scale = (p[:, None].expand(-1, 4, -1, -1) for p in (gaussian.loc, gaussian.scale))
    mixture = MixtureDistribution(loc, scale, torch.randn(loc.shape, generator=generator(), dtype=torch.float64))
    value = random_value(gaussian)
    torch.testing.assert_close(crps(mixture, value), crps(gaussian, value))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_for_a_vanishing_scale_the_crps_is_the_absolute_error(dtype: torch.dtype) -> None:
    loc = torch.randn(2, 3, generator=generator(), dtype=dtype)
    value = torch.randn(2, 3, generator=generator(1), dtype=dtype)
    law = GaussianDistribution(loc, torch.full_like(loc, 1e-6))
    # the difference is at most E|X - mu| = 0.8 scale, plus rounding
    torch.testing.assert_close(crps(law, value), crps(PointDistribution(loc), value), rtol=1e-6, atol=1e-6)


def test_at_its_own_mean_a_standard_normal_scores_sqrt_2_minus_1_over_sqrt_pi() -> None:
    law = GaussianDistribution(torch.zeros(1, 1, dtype=torch.float64), torch.ones(1, 1, dtype=torch.float64))
    assert float(crps(law, torch.zeros(1, 1))) == pytest.approx((2**0.5 - 1) / np.pi**0.5)
