"""Rollouts of a process whose forecast law is known: mean and covariance at every lead time."""

import pytest
import torch
from support.linear_process import POINTS, LinearProcess, perfect_pipeline
from torch import Tensor

MEMBERS, LEADS = 3000, 5
STANDARD_ERRORS = 4.5  # the largest of about 600 numbers exceeds 4.5 in 0.4 % of all seeds


def start() -> Tensor:
    """Two forecasts from different states, (2, 2, 1, D)."""
    return torch.randn(2, 2, 1, POINTS, generator=torch.Generator().manual_seed(5)) * 1.5


def worst(members: Tensor, before: Tensor, last: Tensor) -> tuple[float, float]:
    """Largest error of mean and covariance in standard errors, over all lead times; members (M, L, 1, D)."""
    mean_error, cov_error = 0.0, 0.0
    for lead, (mean, cov) in enumerate(LinearProcess().forecast(before.double(), last.double(), LEADS)):
        drawn = members[:, lead, 0].double()
        variance = cov.diagonal()
        mean_error = max(mean_error, float(((drawn.mean(0) - mean).abs() / (variance / len(drawn)).sqrt()).max()))
        error = ((variance[:, None] * variance + cov**2) / len(drawn)).sqrt()
        cov_error = max(cov_error, float(((drawn.T.cov() - cov).abs() / error).max()))
    return mean_error, cov_error


@pytest.mark.parametrize(("steps", "eta"), [(1, 1.0), (3, 1.0), (4, 0.0)])
def test_mean_and_covariance_of_a_rollout_are_exact_at_every_lead_time(steps: int, eta: float) -> None:
    states = start()
    forecast = perfect_pipeline(eta=eta)(
        states,
        LEADS,
        ensemble_size=MEMBERS,
        num_inference_steps=steps,
        generator=torch.Generator().manual_seed(0),
        batch_size=2 * MEMBERS,
    )
    for index in range(2):
        mean_error, cov_error = worst(forecast.samples[:, index], states[index, 0, 0], states[index, 1, 0])
        assert mean_error < STANDARD_ERRORS
        assert cov_error < STANDARD_ERRORS


def test_the_check_notices_states_that_are_not_fed_back() -> None:
    """The same numbers, every lead time from the initial state: the error the exact law must reveal."""
    states = start()[:1]
    once = perfect_pipeline()(
        states,
        ensemble_size=MEMBERS,
        num_inference_steps=2,
        generator=torch.Generator().manual_seed(0),
        batch_size=MEMBERS,
    )
    stale = once.samples[:, 0].expand(-1, LEADS, -1, -1)
    mean_error, cov_error = worst(stale, states[0, 0, 0], states[0, 1, 0])
    assert mean_error > 50
    assert cov_error > 10


def test_epistemic_and_spread_agree_with_the_known_law_at_the_first_lead() -> None:
    """With one step from pure noise U_T is the whole variance of the increment: both are sqrt(d + f^2)."""
    forecast = perfect_pipeline()(
        start(),
        ensemble_size=400,
        num_inference_steps=1,
        generator=torch.Generator().manual_seed(0),
        output_epistemic=True,
    )
    process = LinearProcess()
    expected = (process.diag + process.factor**2).sqrt().float().expand(2, 1, 1, POINTS)
    torch.testing.assert_close(forecast.epistemic, expected, rtol=1e-4, atol=0)
    torch.testing.assert_close(
        forecast.uncertainty, expected, rtol=4.5 / 800**0.5, atol=0
    )  # se of a deviation: s/sqrt(2M)
