"""affine, scaled and convolved: moments, exact identities of the scores, and how they compose."""

import math
from collections.abc import Callable

import pytest
import torch
from support.laws import (
    BATCH,
    EVENT_SHAPES,
    FAMILY_NAMES,
    JOINT_DENSITY_NAMES,
    generator,
    has_density,
    law_from,
    random_law,
    random_raw,
    random_value,
)
from support.references import STANDARD_ERRORS, dense_components, dense_kernel_score, mean_and_error, total_covariance
from torch import Tensor

from marigold_uq.distributions import (
    FAMILIES,
    LowRankMixtureDistribution,
    MixtureDistribution,
    NoiseDistribution,
)
from marigold_uq.scores import crps, kernel_score, log_score

Shape = tuple[int, ...]


def signed(shape: Shape, seed: int) -> Tensor:
    """Numbers of both signs, away from zero."""
    numbers = torch.randn(shape, generator=generator(seed), dtype=torch.float64)
    return numbers + 0.3 * numbers.sign()


AFFINE: dict[str, Callable[[Shape], tuple[float | Tensor, float | Tensor]]] = {
    "positive number": lambda event: (0.7, 0.3),
    "negative number": lambda event: (-1.3, 0.5),
    "0-d tensor": lambda event: (torch.tensor(-0.4, dtype=torch.float64), 2.0),
    "per sample": lambda event: (signed((BATCH, *[1] * len(event)), 1), signed((BATCH, *[1] * len(event)), 2)),
    "per coordinate": lambda event: (signed((BATCH, *event), 3), signed((BATCH, *event), 4)),
    "without batch axis": lambda event: (signed(event, 5), signed(event, 6)),
    "last axis only": lambda event: (signed(event[-1:], 7), signed(event[-1:], 8)),
    "shift only": lambda event: (1.0, signed((BATCH, *event), 9)),
}

every_family = pytest.mark.parametrize("name", FAMILY_NAMES)
every_shape = pytest.mark.parametrize("event_shape", EVENT_SHAPES.values(), ids=EVENT_SHAPES.keys())


def assert_same_law(left: NoiseDistribution, right: NoiseDistribution) -> None:
    """Equal moments, equal joint covariance, equal marginal CRPS and, where there is one, equal density."""
    value = random_value(left)
    torch.testing.assert_close(left.mean, right.mean)
    torch.testing.assert_close(left.variance, right.variance)
    torch.testing.assert_close(crps(left, value), crps(right, value))
    for b in range(BATCH):
        torch.testing.assert_close(total_covariance(left, b), total_covariance(right, b))
    if left.has_density:
        torch.testing.assert_close(log_score(left, value), log_score(right, value))


@every_shape
@every_family
def test_affine_moves_the_mean_and_scales_the_covariance_on_both_sides(name: str, event_shape: Shape) -> None:
    law = random_law(name, event_shape)
    for scale, shift in (case(event_shape) for case in AFFINE.values()):
        moved = law.affine(scale, shift)
        torch.testing.assert_close(moved.mean, scale * law.mean + shift)
        torch.testing.assert_close(moved.variance, scale * scale * law.variance)
        rows = torch.as_tensor(scale, dtype=torch.float64).expand(law.mean.shape).flatten(1)
        for b in range(BATCH):
            expected = torch.outer(rows[b], rows[b]) * total_covariance(law, b)
            torch.testing.assert_close(total_covariance(moved, b), expected)


@every_shape
@every_family
def test_the_crps_of_the_moved_law_at_the_moved_target_is_scaled(name: str, event_shape: Shape) -> None:
    """CRPS(sX + t, sy + t) = |s| CRPS(X, y): an identity of the whole marginal law, not of two moments."""
    law = random_law(name, event_shape)
    value = random_value(law)
    for scale, shift in (case(event_shape) for case in AFFINE.values()):
        moved = crps(law.affine(scale, shift), scale * value + shift)
        torch.testing.assert_close(moved, torch.as_tensor(scale, dtype=torch.float64).abs() * crps(law, value))


@every_shape
@pytest.mark.parametrize("name", JOINT_DENSITY_NAMES)
def test_the_joint_density_of_the_moved_law_changes_by_the_jacobian(name: str, event_shape: Shape) -> None:
    law = random_law(name, event_shape)
    value = random_value(law)
    for scale, shift in (case(event_shape) for case in AFFINE.values()):
        jacobian = torch.as_tensor(scale, dtype=torch.float64).abs().log().expand(value.shape).flatten(1).sum(1)
        moved = log_score(law.affine(scale, shift), scale * value + shift)
        torch.testing.assert_close(moved, log_score(law, value) + jacobian)


@every_family
def test_two_affine_maps_compose(name: str) -> None:
    law = random_law(name, (2, 5))
    a, b, c, d = signed((BATCH, 2, 5), 1), signed((BATCH, 2, 5), 2), -0.6, 0.2
    assert_same_law(law.affine(a, b).affine(c, d), law.affine(c * a, c * b + d))


@every_family
def test_affine_by_one_and_zero_changes_nothing(name: str) -> None:
    law = random_law(name, (2, 5))
    assert_same_law(law.affine(1.0, 0.0), law)


@every_family
def test_scaled_keeps_the_mean_and_is_linear_in_tau(name: str) -> None:
    """Cov(tau) = between components + tau * within them, so three values of tau lie on a line."""
    law = random_law(name, (2, 5))
    at = {tau: law.scaled(tau) for tau in (0.25, 1.0, 2.0)}
    for scaled in at.values():
        torch.testing.assert_close(scaled.mean, law.mean)
    for b in range(BATCH):
        within = total_covariance(at[2.0], b) - total_covariance(at[1.0], b)
        torch.testing.assert_close(total_covariance(at[1.0], b), total_covariance(law, b))
        torch.testing.assert_close(total_covariance(at[0.25], b), total_covariance(law, b) - 0.75 * within)
    if has_density(name):
        assert bool((at[2.0].variance > law.variance).all())


@pytest.mark.parametrize("name", ["gaussian", "low_rank", "cholesky"])
def test_scaled_multiplies_the_covariance_of_a_single_gaussian(name: str) -> None:
    law = random_law(name, (2, 5))
    for b in range(BATCH):
        torch.testing.assert_close(total_covariance(law.scaled(0.3), b), 0.3 * total_covariance(law, b))


@pytest.mark.parametrize("name", ["mixture", "low_rank_mixture"])
def test_scaled_keeps_the_spread_between_component_means(name: str) -> None:
    law = random_law(name, (2, 5))
    assert isinstance(law, MixtureDistribution | LowRankMixtureDistribution)
    between = (law.marginal().weights * (law.loc - law.mean.unsqueeze(1)).square()).sum(1)
    torch.testing.assert_close(law.scaled(1e-12).variance, between)


@every_family
def test_two_taus_compose(name: str) -> None:
    law = random_law(name, (2, 5))
    assert_same_law(law.scaled(0.3).scaled(1.7), law.scaled(0.51))


@every_family
@pytest.mark.parametrize("tau", [0.0, -1.0, math.nan])
def test_tau_must_be_positive(name: str, tau: float) -> None:
    with pytest.raises(ValueError, match="tau multiplies a covariance and must be positive"):
        random_law(name, (3,)).scaled(tau)


@every_shape
@every_family
def test_convolution_adds_to_the_diagonal_of_the_covariance(name: str, event_shape: Shape) -> None:
    law, variance = random_law(name, event_shape), 0.37
    noisy = law.convolved(variance)
    torch.testing.assert_close(noisy.mean, law.mean)
    for b in range(BATCH):
        expected = total_covariance(law, b) + variance * torch.eye(law.mean[0].numel(), dtype=torch.float64)
        torch.testing.assert_close(total_covariance(noisy, b), expected)


@every_family
def test_convolution_is_the_law_of_draws_plus_noise(name: str) -> None:
    """E cos(a . x) and E sin(a . x), the characteristic function, along ten directions, against noisy draws."""
    law, variance, count = random_law(name, (2, 3)), 0.37, 20_000
    noise = math.sqrt(variance) * torch.randn(count, BATCH, 2, 3, generator=generator(1), dtype=torch.float64)
    noisy = law.rsample((count,), generator(2)) + noise
    direct = law.convolved(variance).rsample((count,), generator(3))
    directions = torch.randn(10, 2, 3, generator=generator(4), dtype=torch.float64)
    for wave in (torch.cos, torch.sin):
        left, right = (wave(torch.einsum("nbcl,acl->nba", x, directions)) for x in (noisy, direct))
        (mean_left, error_left), (mean_right, error_right) = mean_and_error(left), mean_and_error(right)
        error = (error_left.square() + error_right.square()).sqrt()
        assert float(((mean_left - mean_right).abs() / error).max()) < STANDARD_ERRORS


@every_family
def test_convolutions_add_up_and_commute_with_affine_maps(name: str) -> None:
    law = random_law(name, (2, 5))
    assert_same_law(law.convolved(0.2).convolved(0.3), law.convolved(0.5))
    assert_same_law(law.affine(-2.0, 0.4).convolved(0.8), law.convolved(0.2).affine(-2.0, 0.4))
    assert_same_law(law.convolved(0.0), law)


@pytest.mark.parametrize("name", ["point", "sample"])
def test_of_point_and_sample_tau_shrinks_the_added_noise_only(name: str) -> None:
    """In the reverse step of these families tau multiplies sigma^2 and nothing else."""
    law = random_law(name, (2, 5))
    assert_same_law(law.scaled(0.3), law)
    assert_same_law(law.convolved(0.8).scaled(0.25), law.convolved(0.2))


def test_a_little_noise_around_draws_gives_the_kernel_score_of_the_draws_as_a_mixture() -> None:
    law = random_law("sample", (2, 3))
    value = random_value(law)
    score = kernel_score(law.convolved(1e-10), value, bandwidth=1.5, per_dimension=False)
    expected = [dense_kernel_score(dense_components(law, b), value[b], gamma=1.5) for b in range(BATCH)]
    torch.testing.assert_close(score, torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("name", [name for name in FAMILIES if FAMILIES[name].has_spread])
def test_quantiles_have_the_gradient_of_finite_differences(name: str) -> None:
    raw = random_raw(name, (2, 3), batch=1).requires_grad_()

    def quantiles(raw: torch.Tensor) -> torch.Tensor:
        return law_from(name, raw, (2, 3)).quantile([0.1, 0.5, 0.8])

    # Bisection is exact to float64; differences of 1e-5 leave 1e-10 of curvature.
    torch.autograd.gradcheck(quantiles, (raw,), eps=1e-5, atol=1e-5)
