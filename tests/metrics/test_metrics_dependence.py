"""Variogram, Dawid-Sebastiani, threshold-weighted and weighted interval scores against scoringrules and in limits."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import scoringrules
import torch
from torch import Tensor

from marigold_uq import metrics

SHAPE = (3, 2, 2)  # a batch of 3 events


def ensemble(num_members: int = 12, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    samples = torch.randn(num_members, *SHAPE, generator=generator, dtype=torch.float64)
    return samples, torch.randn(SHAPE, generator=generator, dtype=torch.float64)


def random_mask() -> Tensor:
    return torch.rand(SHAPE, generator=torch.Generator().manual_seed(5)) < 0.7


@pytest.mark.parametrize("exponent", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("weighted", [False, True])
def test_the_variogram_score_is_that_of_scoringrules(exponent: float, weighted: bool) -> None:
    samples, target = ensemble()
    weight = torch.rand(4, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64) if weighted else None
    found = metrics.variogram_score(samples, target, 2, exponent=exponent, weight=weight)
    expected = scoringrules.vs_ensemble(
        target.flatten(1).numpy(),
        samples.flatten(2).movedim(0, 1).numpy(),
        w=None if weight is None else np.broadcast_to(weight.numpy(), (3, 4, 4)),
        p=exponent,
    )
    torch.testing.assert_close(found, torch.from_numpy(np.asarray(expected)))


def test_the_variogram_score_sees_correlations_and_no_common_shift() -> None:
    samples, target = ensemble(200)
    shared = samples[..., :1, :1].expand_as(samples)
    target = target[..., :1, :1].expand_as(target)
    independent = metrics.variogram_score(samples, target, 2)
    assert bool((metrics.variogram_score(shared, target, 2) < independent).all())
    torch.testing.assert_close(metrics.variogram_score(samples + 3, target, 2), independent)


@pytest.mark.parametrize("score", [metrics.variogram_score, metrics.dawid_sebastiani])
def test_masked_coordinates_leave_the_event(score: Callable[..., Tensor]) -> None:
    samples, target = ensemble()
    mask = random_mask()
    found = score(samples.where(mask, math.nan), target.where(mask, math.nan), 2, mask=mask)
    for b in range(3):
        alone = score(samples[:, b][:, mask[b]][:, None], target[b][mask[b]][None], 1)
        torch.testing.assert_close(found[b], alone[0])


def test_the_dawid_sebastiani_score_is_that_of_scoringrules() -> None:
    samples, target = ensemble()
    expected = scoringrules.dssmv_ensemble(target.flatten(1).numpy(), samples.flatten(2).movedim(0, 1).numpy())
    found = metrics.dawid_sebastiani(samples, target, 2)
    torch.testing.assert_close(found, torch.from_numpy(np.asarray(expected)))


def test_of_one_coordinate_the_dawid_sebastiani_score_is_the_gaussian_log_score() -> None:
    samples, target = ensemble()
    expected = 2 * metrics.gaussian_nll(samples, target) - math.log(2 * math.pi)
    torch.testing.assert_close(metrics.dawid_sebastiani(samples, target), expected)
    mask = random_mask()
    hidden = metrics.dawid_sebastiani(samples, target.where(mask, math.nan), mask=mask)
    torch.testing.assert_close(hidden, expected.where(mask, 0.0))


def test_too_few_members_and_members_without_spread_have_no_dawid_sebastiani_score() -> None:
    samples, target = ensemble(4)
    with pytest.raises(ValueError, match="4 members is singular in 4 dimensions"):
        metrics.dawid_sebastiani(samples, target, 2)
    with pytest.raises(ValueError, match="no spread in some direction"):
        metrics.dawid_sebastiani(torch.zeros_like(samples), target)


@pytest.mark.parametrize(("lower", "upper"), [(-0.5, 0.7), (-math.inf, 0.2), (0.1, math.inf), (-math.inf, math.inf)])
def test_the_threshold_weighted_crps_is_that_of_scoringrules(lower: float, upper: float) -> None:
    samples, target = ensemble()
    for fair, estimator in ((True, "fair"), (False, "nrg")):
        found = metrics.threshold_weighted_crps(samples, target, lower=lower, upper=upper, fair=fair)
        expected = scoringrules.twcrps_ensemble(
            target.numpy(), samples.numpy(), a=lower, b=upper, m_axis=0, estimator=estimator
        )
        torch.testing.assert_close(found, torch.from_numpy(np.asarray(expected)))


def test_parts_of_the_line_add_up_to_the_crps() -> None:
    samples, target = ensemble()
    parts = [(-math.inf, -0.3), (-0.3, 0.4), (0.4, math.inf)]
    total = sum(metrics.threshold_weighted_crps(samples, target, lower=a, upper=b, fair=False) for a, b in parts)
    torch.testing.assert_close(total, metrics.crps(samples, target, fair=False))


def test_the_weighted_interval_score_is_that_of_scoringrules() -> None:
    """Its version 0.10 adds half the median itself instead of half the median's error: it is given the error."""
    samples, target = ensemble()
    levels = [0.5, 0.8, 0.95]
    lower, upper = metrics.central_interval(samples, levels)
    expected = scoringrules.weighted_interval_score(
        target.numpy(),
        metrics.absolute_error(samples, target).numpy(),
        lower.movedim(0, -1).numpy(),
        upper.movedim(0, -1).numpy(),
        1 - np.array(levels),
    )
    found = metrics.weighted_interval_score(samples, target, levels)
    torch.testing.assert_close(found, torch.from_numpy(np.asarray(expected)))


def test_the_weighted_interval_score_of_many_levels_is_the_crps() -> None:
    samples, target = ensemble(500)
    levels = [(k + 0.5) / 200 for k in range(200)]
    found = metrics.weighted_interval_score(samples, target, levels)
    torch.testing.assert_close(found, metrics.crps(samples, target, fair=False), rtol=0.02, atol=0.005)


def test_arguments_are_checked() -> None:
    samples, target = ensemble()
    with pytest.raises(ValueError, match="lower < upper"):
        metrics.threshold_weighted_crps(samples, target, lower=1.0, upper=0.0)
    with pytest.raises(ValueError, match="must be positive; got 0"):
        metrics.variogram_score(samples, target, 2, exponent=0.0)
    with pytest.raises(ValueError, match=r"within 1\.\.3"):
        metrics.variogram_score(samples, target, 0)
    with pytest.raises(ValueError, match=r"weight must be \(D, D\) = \(4, 4\)"):
        metrics.variogram_score(samples, target, 2, weight=torch.ones(3, 3))
