"""Batches of distributions: rows, precision, detached copies, distribution functions, covariances, checked shapes."""

import math
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch
from support.laws import (
    BATCH,
    DENSITY_NAMES,
    EVENT_SHAPES,
    FAMILY_NAMES,
    JOINT_NAMES,
    generator,
    random_law,
    random_value,
    scores_of,
)
from support.references import total_covariance
from torch import Tensor

from marigold_uq.distributions import (
    FAMILIES,
    CholeskyDistribution,
    GaussianDistribution,
    LowRankDistribution,
    LowRankMixtureDistribution,
    MixtureDistribution,
    NoiseDistribution,
    PointDistribution,
)
from marigold_uq.distributions.mixture import pick_component
from marigold_uq.scores import SCORES, crps

every_family = pytest.mark.parametrize("name", FAMILY_NAMES)
every_shape = pytest.mark.parametrize("event_shape", EVENT_SHAPES.values(), ids=EVENT_SHAPES.keys())


def assert_same(left: NoiseDistribution, right: NoiseDistribution) -> None:
    for field in fields(left):
        assert torch.equal(getattr(left, field.name), getattr(right, field.name))


@every_family
@pytest.mark.parametrize("rows", [slice(1, 3), [2, 0], torch.tensor([True, False, True, False])])
def test_rows_of_a_batch_are_the_distributions_of_these_samples(name: str, rows: slice | list[int] | Tensor) -> None:
    law = random_law(name, (2, 5), batch=4)
    some = law[rows]
    torch.testing.assert_close(some.mean, law.mean[rows])
    torch.testing.assert_close(some.covariance(), law.covariance()[rows])
    torch.testing.assert_close(crps(some, law.mean[rows] + 1), crps(law, law.mean + 1)[rows])


@every_family
@pytest.mark.parametrize("index", [1, np.int64(1), torch.tensor(1)], ids=["python", "numpy", "torch"])
def test_an_index_that_drops_the_batch_axis_is_refused(name: str, index: Any) -> None:
    with pytest.raises(TypeError, match=r"use \[1 : 2\] instead of \[1\]"):
        random_law(name, (3,))[index]


@every_family
def test_a_batch_of_one_expands(name: str) -> None:
    wide = random_law(name, (2, 5), batch=1).expand(3)
    assert wide.shape == (3, 2, 5)
    assert_same(wide[2:], random_law(name, (2, 5), batch=1))


@every_family
def test_precision_changes_and_gradients_are_cut(name: str) -> None:
    law = random_law(name, (2, 5))
    assert law.to(torch.float32).dtype == torch.float32
    assert law.to("cpu").mean.device.type == "cpu"
    leaf = law._map(lambda parameter: parameter.clone().requires_grad_())
    assert leaf.mean.requires_grad
    assert not leaf.detach().mean.requires_grad
    assert_same(leaf.detach(), law)


@every_shape
@every_family
def test_the_covariance_is_that_of_the_dense_distribution(name: str, event_shape: tuple[int, ...]) -> None:
    law = random_law(name, event_shape)
    for b in range(BATCH):
        torch.testing.assert_close(law.covariance()[b], total_covariance(law, b))


@pytest.mark.parametrize("name", DENSITY_NAMES)
def test_the_distribution_function_inverts_the_quantiles(name: str) -> None:
    law = random_law(name, (2, 5))
    levels = torch.tensor([1e-4, 0.1, 0.5, 0.99], dtype=torch.float64)
    back = law.cdf(law.quantile(levels))
    torch.testing.assert_close(back, levels.reshape(-1, 1, 1, 1).expand_as(back), rtol=1e-9, atol=1e-12)


def test_the_distribution_function_of_draws_and_of_a_point_counts_them() -> None:
    draws = random_law("sample", (3,))
    expected = torch.stack([(draws.draws <= one).double().mean(0) for one in draws.draws])  # type: ignore[attr-defined]
    torch.testing.assert_close(draws.cdf(draws.draws), expected)  # type: ignore[attr-defined]
    point = random_law("point", (3,))
    assert torch.equal(point.cdf(point.mean), torch.ones_like(point.mean))
    assert torch.equal(point.cdf(point.mean - 1e-9), torch.zeros_like(point.mean))


@every_shape
@pytest.mark.parametrize("name", DENSITY_NAMES)
def test_a_density_takes_leading_axes_and_is_the_same_for_each(name: str, event_shape: tuple[int, ...]) -> None:
    """A mixture with as many components as samples used to mix up the two axes without a word."""
    law = random_law(name, event_shape, batch=3)
    values = torch.stack([random_value(law, seed) for seed in range(4)]).unflatten(0, (2, 2))
    result = law.log_prob(values)
    for i in range(2):
        for j in range(2):
            torch.testing.assert_close(result[i, j], law.log_prob(values[i, j]))
    mask = torch.rand(3, *event_shape, generator=generator()) < 0.6
    torch.testing.assert_close(law.log_prob(values, mask)[1, 0], law.log_prob(values[1, 0], mask))


@every_family
def test_a_value_of_another_shape_is_refused_by_density_and_distribution_function(name: str) -> None:
    law = random_law(name, (2, 5))
    with pytest.raises(ValueError, match=r"values of shape \(2, 1, 5\) do not fit a distribution of shape \(2, 2, 5\)"):
        law.cdf(torch.zeros(2, 1, 5))
    if law.has_density:
        with pytest.raises(ValueError, match="do not fit"):
            law.log_prob(torch.zeros(2, 1, 5))


@pytest.mark.parametrize(
    "build",
    [
        lambda: GaussianDistribution(torch.zeros(2, 3), torch.ones(5, 1, 3)),
        lambda: MixtureDistribution(torch.zeros(2, 3, 4), torch.ones(2, 3, 4), torch.zeros(2, 3, 1)),
        lambda: LowRankDistribution(torch.zeros(2, 3), torch.ones(2, 3), torch.zeros(2, 1, 4)),
        lambda: LowRankDistribution(torch.zeros(2, 3), torch.ones(3), torch.zeros(2, 1, 3)),
        lambda: LowRankMixtureDistribution(
            torch.zeros(2, 2, 3), torch.ones(2, 2, 3), torch.zeros(2, 2, 1, 3), torch.zeros(2)
        ),
        lambda: CholeskyDistribution(torch.zeros(2, 3), torch.ones(2, 2, 2)),
    ],
)
def test_parameters_that_do_not_fit_one_another_are_refused(build: Callable[[], NoiseDistribution]) -> None:
    with pytest.raises(ValueError, match=r"do not fit: .* must be \(.*\) beside loc .* got"):
        build()


@pytest.mark.parametrize("name", [n for n in FAMILY_NAMES if n != "cholesky"])
def test_raw_output_of_another_size_than_the_event_is_refused(name: str) -> None:
    raw = torch.zeros(2, FAMILIES[name].num_raw_channels(2), 1, 1)
    with pytest.raises(ValueError, match=r"other space axes than the event \(2, 8, 8\)"):
        FAMILIES[name].from_raw(raw, event_shape=(2, 8, 8))


@every_family
@pytest.mark.parametrize("variance", [-2.0, math.nan, math.inf])
def test_noise_of_impossible_variance_is_refused(name: str, variance: float) -> None:
    with pytest.raises(ValueError, match="variance of added noise must be finite and at least 0"):
        random_law(name, (3,)).convolved(variance)


@every_family
@pytest.mark.parametrize("tau", [0.0, -1.0, math.nan, math.inf])
def test_an_impossible_tau_is_refused(name: str, tau: float) -> None:
    with pytest.raises(ValueError, match="must be positive and finite"):
        random_law(name, (3,)).scaled(tau)


@pytest.mark.parametrize("name", JOINT_NAMES)
def test_a_scale_of_zero_makes_a_coordinate_certain_and_leaves_the_others(name: str) -> None:
    law = random_law(name, (3,))
    scale = torch.tensor([1.0, 0.0, -2.0], dtype=torch.float64)
    moved = law.affine(scale, 0.5)
    torch.testing.assert_close(moved.variance, scale.square() * law.variance)
    for b in range(BATCH):
        torch.testing.assert_close(moved.covariance()[b], torch.outer(scale, scale) * law.covariance()[b])


@every_family
def test_an_empty_batch_goes_through(name: str) -> None:
    law = random_law(name, (2, 5))[:0]
    assert law.rsample((3,), generator()).shape == (3, 0, 2, 5)
    assert law.quantile([0.1, 0.9]).shape == (2, 0, 2, 5)
    for score in scores_of(name):
        options = {"generator": generator()} if score in ("energy", "projected") else {}
        assert SCORES[score](law, torch.zeros(0, 2, 5), **options).numel() == 0


def test_a_draw_of_a_point_is_not_the_point_itself() -> None:
    law = PointDistribution(torch.zeros(2, 3))
    law.rsample().add_(1)
    assert torch.equal(law.loc, torch.zeros(2, 3))


def test_a_far_component_of_no_weight_does_not_move_the_median() -> None:
    loc = torch.tensor([[[1.0], [1e20]]], dtype=torch.float64)
    law = MixtureDistribution(loc, torch.ones_like(loc), torch.tensor([[[0.0], [-200.0]]], dtype=torch.float64))
    assert float(law.quantile(0.5)) == pytest.approx(1.0, abs=1e-12)


def test_a_uniform_number_picks_the_component_whose_share_it_falls_into() -> None:
    """The borders belong to the next component, and what float32 weights lack of 1 to the last one."""
    weights = torch.tensor([[0.0, 0.25, 0.75]])
    index = torch.arange(3).expand(1, 3)
    picked = [int(pick_component(weights, torch.tensor([u]), index)[0]) for u in (0.0, 0.2, 0.25, 0.9)]
    assert picked == [1, 1, 2, 2]
    short = torch.full((1, 25), 0.03999)  # sums to .99975
    assert int(pick_component(short, torch.tensor([0.9999]), torch.arange(25).expand(1, 25))[0]) == 24


def test_pooled_distributions_are_mixed_in_equal_parts() -> None:
    """A Gaussian and a mixture of three count alike, whatever the scale of their logits."""
    one, other = random_law("gaussian", (2, 5)), random_law("mixture", (2, 5))
    pooled, value = MixtureDistribution.pool([one, other]), random_value(one)
    torch.testing.assert_close(pooled.cdf(value), (one.cdf(value) + other.cdf(value)) / 2)
    torch.testing.assert_close(pooled.mean, (one.mean + other.mean) / 2)
    with pytest.raises(TypeError, match="'gaussian' and 'mixture' can be pooled; got 'low_rank'"):
        MixtureDistribution.pool([one, random_law("low_rank", (2, 5))])
