"""Fair scores from draws: pair by pair, scoringrules, unbiasedness, ties, and memory."""

import math
import subprocess
import sys
import textwrap
from itertools import combinations

import numpy as np
import pytest
import scoringrules
import torch
from scipy import special
from support.laws import generator, random_law, random_value
from support.references import assert_within_standard_errors, energy_by_pairs, expected_norm
from torch import Tensor

from marigold_uq.distributions import SampleDistribution
from marigold_uq.metrics import crps as ensemble_crps
from marigold_uq.scores import energy_score
from marigold_uq.scores.ensemble import coordinate_energy_score, ensemble_energy_score

OPTIONS = [(1.0, 1.0), (0.5, 1.0), (1.7, 1.0), (1.0, 0.4), (1.0, 0.0), (1.3, 0.5)]  # exponent, lam


def draws_and_value(*shape: int, num_draws: int = 6) -> tuple[Tensor, Tensor]:
    draws = torch.randn(num_draws, *shape, generator=generator(), dtype=torch.float64)
    return draws, torch.randn(*shape, generator=generator(1), dtype=torch.float64)


@pytest.mark.parametrize(("exponent", "lam"), OPTIONS)
def test_the_energy_score_of_draws_is_the_fair_one_pair_by_pair(exponent: float, lam: float) -> None:
    draws, value = draws_and_value(2, 3, 4)
    score = energy_score(SampleDistribution(draws), value, exponent=exponent, lam=lam)
    expected = [energy_by_pairs(draws[:, b].flatten(1), value[b].flatten(), exponent, lam) for b in range(2)]
    torch.testing.assert_close(score, torch.tensor(expected, dtype=torch.float64))


def test_the_energy_score_of_draws_is_the_fair_one_of_scoringrules() -> None:
    draws, value = draws_and_value(2, 3, 4)
    members = draws.flatten(2).transpose(0, 1).numpy()  # (B, M, D)
    expected = scoringrules.es_ensemble(value.flatten(1).numpy(), members, estimator="fair", backend="numpy")
    np.testing.assert_allclose(ensemble_energy_score(draws, value).numpy(), expected, rtol=1e-10)


@pytest.mark.parametrize(("exponent", "lam"), OPTIONS)
def test_the_score_of_single_coordinates_is_the_energy_score_in_one_dimension(exponent: float, lam: float) -> None:
    draws, value = draws_and_value(2, 3)
    score = coordinate_energy_score(draws, value, exponent=exponent, lam=lam)
    columns = ensemble_energy_score(draws.reshape(6, 6, 1), value.reshape(6, 1), exponent=exponent, lam=lam)
    torch.testing.assert_close(score, columns.reshape(2, 3))


def test_in_one_dimension_the_fair_energy_score_is_the_fair_crps() -> None:
    draws, value = draws_and_value(4, 1)
    torch.testing.assert_close(ensemble_energy_score(draws, value), ensemble_crps(draws, value)[:, 0])
    torch.testing.assert_close(coordinate_energy_score(draws, value), ensemble_crps(draws, value))


def test_the_fair_crps_is_the_mean_over_pairs_of_distinct_draws() -> None:
    draws, value = draws_and_value(5)
    pairs = torch.stack([(x - z).abs() for x, z in combinations(draws, 2)]).mean(0)
    torch.testing.assert_close(ensemble_crps(draws, value), (draws - value).abs().mean(0) - 0.5 * pairs)


@pytest.mark.parametrize("num_draws", [2, 3])
def test_fair_scores_of_few_draws_are_unbiased(num_draws: int) -> None:
    """The exact energy score of N(0, I) in 3 dimensions at y, against 20000 ensembles of 2 or 3 draws."""
    y = torch.tensor([0.5, -1.0, 0.3], dtype=torch.float64)
    draws = torch.randn(num_draws, 20_000, 3, generator=generator(), dtype=torch.float64)
    exact = expected_norm(y, 1.0) - 0.5 * expected_norm(torch.zeros(3), math.sqrt(2))
    assert_within_standard_errors(ensemble_energy_score(draws, y.expand(20_000, 3)), exact)


def absolute_moment(mean: float, scale: float, exponent: float) -> float:
    """E|N(mean, scale^2)|^exponent by Kummer's function."""
    factor = (scale * math.sqrt(2)) ** exponent * math.gamma((1 + exponent) / 2) / math.sqrt(math.pi)
    return factor * float(special.hyp1f1(-exponent / 2, 0.5, -(mean**2) / (2 * scale**2)))


@pytest.mark.parametrize(("exponent", "lam"), [(0.5, 1.0), (1.5, 1.0), (1.0, 0.3)])
def test_other_exponents_are_estimated_without_bias_for_independent_gaussians(exponent: float, lam: float) -> None:
    law = random_law("gaussian", (2,), batch=1)
    value, rng = random_value(law), generator(7)
    estimates = torch.stack(
        [energy_score(law, value, exponent=exponent, lam=lam, num_draws=16, generator=rng) for _ in range(500)]
    )
    parameters = zip((value - law.mean).flatten().tolist(), law.stddev.flatten().tolist(), strict=True)
    exact = [
        absolute_moment(gap, scale, exponent) - 0.5 * lam * absolute_moment(0.0, math.sqrt(2) * scale, exponent)
        for gap, scale in parameters
    ]
    assert_within_standard_errors(estimates, torch.tensor([exact], dtype=torch.float64))


def test_fair_scores_need_two_draws() -> None:
    law = SampleDistribution(torch.zeros(1, 2, 3))
    for options in ({}, {"exponent": 0.5}):
        with pytest.raises(ValueError, match="needs at least 2; got 1"):
            energy_score(law, torch.zeros(2, 3), **options)


def test_without_the_second_term_one_draw_is_enough() -> None:
    law = SampleDistribution(torch.zeros(1, 2, 3))
    torch.testing.assert_close(energy_score(law, torch.ones(2, 3), lam=0.0), torch.full((2,), math.sqrt(3)))


@pytest.mark.parametrize("exponent", [0.0, 2.0, -1.0])
def test_exponents_without_propriety_are_errors(exponent: float) -> None:
    with pytest.raises(ValueError, match="strictly between 0 and 2"):
        energy_score(SampleDistribution(torch.zeros(2, 2, 3)), torch.zeros(2, 3), exponent=exponent)


@pytest.mark.parametrize("exponent", [0.5, 1.0, 1.5])
def test_coinciding_draws_and_targets_have_finite_gradients(exponent: float) -> None:
    for score in (ensemble_energy_score, coordinate_energy_score):
        draws = torch.zeros(3, 2, 4, requires_grad=True)
        values = score(draws, torch.zeros(2, 4), exponent=exponent)
        values.sum().backward()
        assert bool((values == 0).all())
        assert bool((draws.grad == 0).all())


def test_float32_draws_are_compared_with_a_float64_target() -> None:
    draws, value = draws_and_value(2, 5)
    mixed = ensemble_energy_score(draws.float(), value)
    assert mixed.dtype == torch.float64
    torch.testing.assert_close(mixed, ensemble_energy_score(draws, value), rtol=1e-5, atol=1e-6)


def test_distances_over_a_whole_map_keep_the_digits_of_float32() -> None:
    draws = torch.randn(3, 1, 480 * 640, generator=generator())
    value = torch.randn(1, 480 * 640, generator=generator(1))
    exact = ensemble_energy_score(draws.double(), value.double())
    torch.testing.assert_close(ensemble_energy_score(draws, value).double(), exact, rtol=1e-6, atol=0)


def test_draws_close_together_and_far_from_the_origin_keep_their_distances() -> None:
    """Distances from inner products would drown a spread of 0.1 around 1000 in float32."""
    draws = 1000 + 0.1 * torch.randn(6, 2, 50, generator=generator())
    value = 1000 + 0.1 * torch.randn(2, 50, generator=generator(1))
    exact = ensemble_energy_score(draws.double(), value.double())
    torch.testing.assert_close(ensemble_energy_score(draws, value).double(), exact, rtol=1e-5, atol=0)


PEAK_MEMORY = """
    import resource, torch
    from marigold_uq.metrics import crps
    from marigold_uq.scores.ensemble import *

    torch.set_num_threads(1)
    draws, value = torch.randn(20, 1, 1, 480, 640), torch.randn(1, 1, 480, 640)
    whole = [
        lambda x: ensemble_energy_score(x, value),
        lambda x: ensemble_kernel_score(x, value, torch.tensor([550.0])),
    ]
    single = [lambda x: crps(x, value), lambda x: coordinate_energy_score(x, value, exponent=1.5)]

    def peak():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    before = peak()
    for scores in (whole, single):
        for gradient in (False, True):
            for score in scores:
                result = score(draws.requires_grad_(gradient))
                if gradient:
                    result.sum().backward()
                    draws.grad = None
            print((peak() - before) / (4 * draws.numel()))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is in kilobytes on Linux only")
def test_twenty_members_of_a_480_x_640_map_never_meet_all_at_once() -> None:
    """Peak growth of a process in units of the draws, M x D; M x M x D would be 20 units, all pairs 10.

    An implementation that keeps the pairs for the gradient was measured at 16.
    Whole events need less than a copy of the draws, and half a dozen for the gradients of its three uses. Single
    coordinates keep some results of the draws' size (a sort and its int64 indices are 3 units), but no pairs.
    """
    code = textwrap.dedent(PEAK_MEMORY)
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    whole, whole_gradient, single, single_gradient = map(float, run.stdout.split())
    assert whole < 2
    assert whole_gradient < 10
    assert single < 10
    assert single_gradient < 19


def test_squares_are_added_up_in_float64() -> None:
    """With a block per coordinate the norm of float32 differences is rounded once, at the end."""
    gap = torch.randn(500, 4, generator=generator())
    chunk = 2 * len(gap)  # two points, the value and one draw, of every row
    score = ensemble_energy_score(gap.unsqueeze(0), torch.zeros_like(gap), lam=0.0, chunk_elements=chunk)
    assert torch.equal(score, gap.double().square().sum(1).sqrt().float())
