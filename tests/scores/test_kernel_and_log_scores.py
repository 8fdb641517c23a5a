"""Kernel and log scores: dense matrices, torch.distributions, Monte Carlo, scoringrules and degenerate limits."""

import math

import numpy as np
import pytest
import scoringrules
import torch
from support.laws import (
    BATCH,
    DENSITY_NAMES,
    EVENT_SHAPES,
    JOINT_DENSITY_NAMES,
    generator,
    random_law,
    random_raw,
    random_value,
)
from support.references import (
    assert_within_standard_errors,
    dense_components,
    dense_kernel_score,
    dense_log_density,
    kernel_by_pairs,
)
from torch import Tensor
from torch import distributions as td

from marigold_uq.distributions import (
    CholeskyDistribution,
    GaussianDistribution,
    HeadOptions,
    LowRankDistribution,
    LowRankMixtureDistribution,
    MixtureDistribution,
    NoiseDistribution,
    PointDistribution,
    SampleDistribution,
)
from marigold_uq.scores import kernel_score, log_score

every_shape = pytest.mark.parametrize("event_shape", EVENT_SHAPES.values(), ids=EVENT_SHAPES.keys())


def flat_low_rank(dim: int = 6, rank: int = 2) -> LowRankDistribution:
    law = LowRankDistribution.from_raw(
        torch.randn(BATCH, (2 + rank) * dim, generator=generator(), dtype=torch.float64), HeadOptions(rank=rank)
    )
    assert law.loc.shape == (BATCH, dim)
    return law


@every_shape
@pytest.mark.parametrize("name", JOINT_DENSITY_NAMES)
def test_the_joint_log_score_is_that_of_dense_multivariate_normals(name: str, event_shape: tuple[int, ...]) -> None:
    law = random_law(name, event_shape)
    value = random_value(law)
    expected = [-dense_log_density(dense_components(law, b), value[b]) for b in range(BATCH)]
    torch.testing.assert_close(log_score(law, value), torch.tensor(expected, dtype=torch.float64))


@every_shape
@pytest.mark.parametrize("gamma", [0.4, 1.0, 7.0])
@pytest.mark.parametrize("name", JOINT_DENSITY_NAMES)
def test_the_joint_kernel_score_is_that_of_dense_matrices(
    name: str, gamma: float, event_shape: tuple[int, ...]
) -> None:
    law = random_law(name, event_shape)
    value = random_value(law)
    expected = [dense_kernel_score(dense_components(law, b), value[b], gamma) for b in range(BATCH)]
    score = kernel_score(law, value, bandwidth=gamma, per_dimension=False)
    torch.testing.assert_close(score, torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("name", ["gaussian", "mixture"])
def test_the_kernel_score_of_independent_coordinates_is_the_dense_one_in_one_dimension(name: str) -> None:
    law = random_law(name, (2, 2))
    value = random_value(law)
    score = kernel_score(law, value, bandwidth=0.8)
    for b in range(BATCH):
        for c, l in np.ndindex(2, 2):
            single = scalar_mixture(law, b, (c, l))
            expected = dense_kernel_score(dense_components(single, 0), value[b, c, l], gamma=0.8)
            assert float(score[b, c, l]) == pytest.approx(expected, rel=1e-9)


def scalar_mixture(law: NoiseDistribution, b: int, where: tuple[int, int]) -> LowRankMixtureDistribution:
    """One coordinate of a law with independent coordinates, as a joint mixture in one dimension."""
    if isinstance(law, GaussianDistribution):
        parameters = [law.loc[b][where][None], law.scale[b][where][None].square(), torch.zeros(1, dtype=torch.float64)]
    else:
        assert isinstance(law, MixtureDistribution)
        at = (b, slice(None), *where)
        parameters = [law.loc[at], law.scale[at].square(), law.logits[at]]
    loc, variance, logits = (p[None] for p in parameters)  # (1, K)
    return LowRankMixtureDistribution(loc[..., None], variance[..., None], loc.new_zeros(*loc.shape, 0, 1), logits)


def test_the_log_score_of_independent_gaussians_is_torchs_normal() -> None:
    law = random_law("gaussian", (2, 5))
    value = random_value(law)
    torch.testing.assert_close(log_score(law, value), -td.Normal(law.mean, law.stddev).log_prob(value))


def test_the_log_score_of_independent_mixtures_is_torchs_mixture_same_family() -> None:
    law = random_law("mixture", (2, 5))
    assert isinstance(law, MixtureDistribution)
    last = [p.movedim(1, -1) for p in (law.logits, law.loc, law.scale)]
    reference = td.MixtureSameFamily(td.Categorical(logits=last[0]), td.Normal(last[1], last[2]))
    value = random_value(law)
    torch.testing.assert_close(log_score(law, value), -reference.log_prob(value))


def test_the_low_rank_log_score_is_torchs_low_rank_multivariate_normal() -> None:
    law = flat_low_rank()
    reference = td.LowRankMultivariateNormal(law.loc, law.cov_factor.mT, law.cov_diag)
    value = random_value(law)
    torch.testing.assert_close(log_score(law, value), -reference.log_prob(value))


def test_the_low_rank_mixture_log_score_is_torchs_mixture_of_low_rank_normals() -> None:
    law = random_law("low_rank_mixture", (4,))
    assert isinstance(law, LowRankMixtureDistribution)
    parts = td.LowRankMultivariateNormal(law.loc, law.cov_factor.mT, law.cov_diag)
    reference = td.MixtureSameFamily(td.Categorical(logits=law.logits), parts)
    value = random_value(law)
    torch.testing.assert_close(log_score(law, value), -reference.log_prob(value))


@pytest.mark.parametrize("name", DENSITY_NAMES)
def test_the_kernel_score_is_its_expectation_over_draws(name: str) -> None:
    law, gamma = random_law(name, (1, 3)), 1.7
    value, (first, second) = random_value(law), law.rsample((2, 20_000), generator(5))

    def kernel(gap: Tensor) -> Tensor:
        square = gap.flatten(2).square().sum(2) if law.joint else gap.square()
        return torch.exp(-square / gamma**2)

    estimates = 0.5 * kernel(first - second) - kernel(first - value) + 0.5
    score = kernel_score(law, value, bandwidth=gamma, per_dimension=False)
    assert_within_standard_errors(estimates, score)


def test_the_kernel_score_of_draws_is_the_fair_one_pair_by_pair() -> None:
    law = random_law("sample", (1, 3))
    assert isinstance(law, SampleDistribution)
    value, gamma = random_value(law), 1.3
    expected = [kernel_by_pairs(law.draws[:, b].flatten(1), value[b].flatten(), gamma) for b in range(BATCH)]
    score = kernel_score(law, value, bandwidth=gamma, per_dimension=False)
    torch.testing.assert_close(score, torch.tensor(expected, dtype=torch.float64))


def test_the_kernel_score_of_draws_is_the_fair_one_of_scoringrules() -> None:
    """scoringrules' kernel is exp(-|x - z|^2 / 2), that is gamma = sqrt(2)."""
    law = random_law("sample", (1, 3))
    assert isinstance(law, SampleDistribution)
    value = random_value(law)
    draws = law.draws.flatten(2).transpose(0, 1).numpy()
    expected = scoringrules.gksmv_ensemble(value.flatten(1).numpy(), draws, estimator="fair", backend="numpy")
    score = kernel_score(law, value, bandwidth=math.sqrt(2), per_dimension=False)
    np.testing.assert_allclose(score.numpy(), expected, rtol=1e-10)


@pytest.mark.parametrize("name", ["low_rank", "cholesky", "low_rank_mixture", "sample", "point"])
def test_a_bandwidth_per_dimension_is_multiplied_by_the_root_of_the_dimension(name: str) -> None:
    law = random_law(name, (2, 5))
    value = random_value(law)
    absolute = kernel_score(law, value, bandwidth=0.9 * math.sqrt(10), per_dimension=False)
    torch.testing.assert_close(kernel_score(law, value, bandwidth=0.9), absolute)


@pytest.mark.parametrize("name", ["gaussian", "mixture"])
def test_independent_coordinates_are_one_dimension_each(name: str) -> None:
    law = random_law(name, (2, 5))
    value = random_value(law)
    absolute = kernel_score(law, value, bandwidth=0.9, per_dimension=False)
    assert torch.equal(kernel_score(law, value, bandwidth=0.9), absolute)


@pytest.mark.parametrize("name", ["gaussian", "mixture", "low_rank", "cholesky", "low_rank_mixture", "sample", "point"])
def test_every_sample_may_have_its_own_bandwidth(name: str) -> None:
    law = random_law(name, (2, 5))
    value, bandwidths = random_value(law), torch.tensor([0.3, 2.0])
    scores = kernel_score(law, value, bandwidth=bandwidths)
    for b, bandwidth in enumerate(bandwidths.tolist()):
        torch.testing.assert_close(scores[b], kernel_score(law, value, bandwidth=bandwidth)[b])


def test_a_bandwidth_must_be_positive() -> None:
    law = random_law("low_rank", (3,))
    for bandwidth in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match="bandwidth of a kernel must be positive"):
            kernel_score(law, random_value(law), bandwidth=bandwidth)


@pytest.mark.parametrize("name", ["point", "sample"])
def test_families_without_a_density_have_no_log_score(name: str) -> None:
    law = random_law(name, (3,))
    with pytest.raises(TypeError, match=rf"'{name}' has no density"):
        log_score(law, random_value(law))


# Degenerate limits


def test_rank_zero_is_diagonal() -> None:
    raw = random_raw("gaussian", (2, 5))
    law = LowRankDistribution.from_raw(raw)
    diagonal = GaussianDistribution(law.loc, law.cov_diag.sqrt())
    value = random_value(law)
    torch.testing.assert_close(log_score(law, value), log_score(diagonal, value).flatten(1).sum(1))
    shared = [dense_kernel_score(dense_components(diagonal, b), value[b], gamma=1.1) for b in range(BATCH)]
    score = kernel_score(law, value, bandwidth=1.1, per_dimension=False)
    torch.testing.assert_close(score, torch.tensor(shared, dtype=torch.float64))


def test_a_low_rank_mixture_of_one_component_is_low_rank() -> None:
    law = random_law("low_rank", (2, 5))
    assert isinstance(law, LowRankDistribution)
    mixture = LowRankMixtureDistribution(
        law.loc[:, None], law.cov_diag[:, None], law.cov_factor[:, None], torch.full((BATCH, 1), 0.7)
    )
    value = random_value(law)
    torch.testing.assert_close(log_score(mixture, value), log_score(law, value))
    torch.testing.assert_close(kernel_score(mixture, value), kernel_score(law, value))


def test_low_rank_with_as_many_factors_as_coordinates_is_cholesky() -> None:
    law = flat_low_rank(dim=4, rank=4)
    covariance = torch.stack([dense_components(law, b)[0].covariance for b in range(BATCH)])
    same = CholeskyDistribution(law.loc, torch.linalg.cholesky(covariance))
    value = random_value(law)
    torch.testing.assert_close(log_score(law, value), log_score(same, value))
    torch.testing.assert_close(kernel_score(law, value), kernel_score(same, value))


def test_in_one_dimension_joint_and_independent_laws_agree() -> None:
    gaussian = random_law("gaussian", (1,))
    joint = LowRankDistribution(gaussian.mean, gaussian.variance, gaussian.mean.new_zeros(BATCH, 0, 1))
    value = random_value(gaussian)
    torch.testing.assert_close(kernel_score(joint, value), kernel_score(gaussian, value)[:, 0])
    torch.testing.assert_close(log_score(joint, value), log_score(gaussian, value)[:, 0])


def test_for_a_vanishing_covariance_the_kernel_score_is_that_of_a_point() -> None:
    point = random_law("point", (2, 5))
    assert isinstance(point, PointDistribution)
    law = point.convolved(1e-14)
    joint = LowRankDistribution(point.loc, law.variance, point.loc.new_zeros(BATCH, 0, 2, 5))
    value = random_value(point)
    torch.testing.assert_close(kernel_score(joint, value), kernel_score(point, value))
    closeness = torch.exp(-(value - point.loc).flatten(1).square().sum(1) / 10)
    torch.testing.assert_close(kernel_score(point, value), 1 - closeness)  # 1/2 - k(x, y) + 1/2


def test_the_kernel_score_lies_between_zero_and_one() -> None:
    for name in DENSITY_NAMES:
        law = random_law(name, (2, 5))
        for distance in (0.0, 1.0, 1e3):
            score = kernel_score(law, law.mean + distance)
            assert bool(((score >= 0) & (score <= 1)).all())
