"""Propriety: targets drawn from a law are scored best, on average, by that law itself."""

import pytest
import torch
from support.laws import FAMILY_SCORES, JOINT_DENSITY_NAMES, generator, has_density, law_from, random_raw
from support.references import STANDARD_ERRORS, assert_within_standard_errors, mean_and_error
from torch import Tensor

from marigold_uq.distributions import CholeskyDistribution, LowRankDistribution, NoiseDistribution
from marigold_uq.metrics import crps as ensemble_crps
from marigold_uq.scores import SCORES, crps, kernel_score
from marigold_uq.scores.ensemble import ensemble_energy_score, ensemble_kernel_score

SHAPE, NUM_TARGETS = (1, 2), 5000
STRICTLY_PROPER = [(n, s) for n, s in FAMILY_SCORES if has_density(n) and s != "squared_error"]


def scored(law: NoiseDistribution, value: Tensor, score: str) -> Tensor:
    """(N,), along the same directions at every call; coordinate-wise scores are added up."""
    options = {"generator": generator(5)} if score in ("energy", "projected") else {}
    return SCORES[score](law, value, **options).reshape(len(value), -1).sum(1)


def law_and_targets(name: str) -> tuple[Tensor, Tensor]:
    """Raw output (1, ...) of a law and NUM_TARGETS draws from it."""
    raw = random_raw(name, SHAPE, batch=1, seed=2)
    return raw, law_from(name, raw, SHAPE).rsample((NUM_TARGETS,), generator(3))[:, 0]


def repeated(raw: Tensor) -> Tensor:
    return raw.expand(NUM_TARGETS, *raw.shape[1:]).clone()


@pytest.mark.parametrize(("name", "score"), STRICTLY_PROPER)
def test_the_expected_score_is_stationary_at_the_true_law_in_every_raw_channel(name: str, score: str) -> None:
    raw, targets = law_and_targets(name)
    leaves = repeated(raw).requires_grad_()
    scored(law_from(name, leaves, SHAPE), targets, score).sum().backward()
    assert leaves.grad is not None
    assert_within_standard_errors(leaves.grad, 0.0)


@pytest.mark.parametrize(("name", "score"), STRICTLY_PROPER)
def test_every_other_law_scores_worse_than_the_true_one(name: str, score: str) -> None:
    """On common targets, five standard errors above zero: not a tie."""
    raw, targets = law_and_targets(name)
    best = scored(law_from(name, repeated(raw), SHAPE), targets, score)
    for seed in range(3):
        other = raw + 0.5 * torch.randn(raw.shape, generator=generator(10 + seed), dtype=torch.float64)
        mean, error = mean_and_error(scored(law_from(name, repeated(other), SHAPE), targets, score) - best)
        assert float(mean / error) > STANDARD_ERRORS


@pytest.mark.parametrize("name", sorted({n for n, s in FAMILY_SCORES if s == "squared_error"}))
def test_squared_error_is_best_at_the_mean_and_blind_to_the_rest(name: str) -> None:
    raw, _ = law_and_targets(name) if has_density(name) else (random_raw(name, SHAPE, batch=1, seed=2), None)
    law = law_from(name, raw, SHAPE)
    targets = law.rsample((NUM_TARGETS,), generator(3))

    def errors(one: NoiseDistribution) -> torch.Tensor:
        return torch.stack([SCORES["squared_error"](one, target) for target in targets])

    true = errors(law)
    assert torch.equal(true, errors(law.scaled(0.5)))
    shifted = errors(law.affine(1.0, 0.3))
    assert_within_standard_errors(shifted - true, 0.09)  # E (X - mu - 0.3)^2 - E (X - mu)^2


def correlated(correlation: float) -> CholeskyDistribution:
    tril = torch.linalg.cholesky(torch.tensor([[1.0, correlation], [correlation, 1.0]], dtype=torch.float64))
    return CholeskyDistribution(torch.zeros(NUM_TARGETS, 2, dtype=torch.float64), tril.expand(NUM_TARGETS, 2, 2))


@pytest.mark.parametrize("score", ["energy", "kernel", "log", "projected"])
def test_event_scores_see_a_wrong_correlation_where_the_crps_is_blind(score: str) -> None:
    true, targets = correlated(0.8), correlated(0.8).rsample(generator=generator(3))
    best = scored(true, targets, score)
    for wrong in (-0.8, 0.0, 0.95):
        other = correlated(wrong)
        torch.testing.assert_close(crps(other, targets), crps(true, targets))
        mean, error = mean_and_error(scored(other, targets, score) - best)
        assert float(mean / error) > STANDARD_ERRORS


@pytest.mark.parametrize("name", JOINT_DENSITY_NAMES)
def test_the_kernel_score_stays_proper_with_any_fixed_bandwidth(name: str) -> None:
    raw, targets = law_and_targets(name)
    for bandwidth in (0.3, 5.0):
        leaves = repeated(raw).requires_grad_()
        kernel_score(law_from(name, leaves, SHAPE), targets, bandwidth=bandwidth).sum().backward()
        assert leaves.grad is not None
        assert_within_standard_errors(leaves.grad, 0.0)


def test_the_kernel_score_tells_a_wrong_scale_best_near_the_root_of_the_dimension() -> None:
    """Expected excess of a law with twice the scale over the true one, D = 64: flat far from gamma = s sqrt(D)."""
    zeros, dim, count = torch.zeros(500, 64, dtype=torch.float64), 64, 500
    targets = torch.randn(count, dim, generator=generator(1), dtype=torch.float64)
    laws = [LowRankDistribution(zeros, torch.full_like(zeros, s**2), zeros.new_zeros(count, 0, dim)) for s in (1, 2)]

    def excess(bandwidth: float) -> float:
        true, wrong = (kernel_score(law, targets, bandwidth=bandwidth).mean() for law in laws)
        return float(wrong - true)

    assert excess(1.0) > 100 * excess(0.1)
    assert excess(1.0) > 3 * excess(10.0) > 0


@pytest.mark.parametrize("num_draws", [2, 5])
@pytest.mark.parametrize("score", ["crps", "energy", "kernel"])
def test_fair_scores_of_few_draws_are_best_for_draws_from_the_true_law(score: str, num_draws: int) -> None:
    """The unfair 1/(2 M^2) would prefer draws that are too close together."""
    count, dim = 40_000, 1 if score == "crps" else 2
    targets = torch.randn(count, dim, generator=generator(1), dtype=torch.float64)
    noise = torch.randn(num_draws, count, dim, generator=generator(2), dtype=torch.float64)

    def scores(shift: float, scale: float) -> Tensor:
        draws = shift + scale * noise
        if score == "crps":
            return ensemble_crps(draws, targets)[:, 0]
        if score == "energy":
            return ensemble_energy_score(draws, targets)
        return ensemble_kernel_score(draws, targets, torch.full((count,), 2.0, dtype=torch.float64))

    for shift, scale in [(0.4, 1.0), (-0.4, 1.0), (0.0, 0.6), (0.0, 1.5)]:
        mean, error = mean_and_error(scores(shift, scale) - scores(0.0, 1.0))
        assert float(mean / error) > STANDARD_ERRORS
