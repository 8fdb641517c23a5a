"""Candidates compared on the same units: paired errors, the one-error rule, and the number of steps chosen by it."""

import math

import pytest
import torch
from torch import Tensor

from marigold_uq.calibration import Comparison, choose_steps, unit_means
from marigold_uq.metrics import crps


def test_differences_are_paired_so_that_hard_units_cancel() -> None:
    generator = torch.Generator().manual_seed(0)
    hardness = 10 * torch.rand(400, generator=generator)
    noise = 0.1 * torch.randn(400, generator=generator)
    found = Comparison.of(torch.stack([hardness + 0.05 + noise, hardness]))
    assert (found.best, found.chosen, found.num_units) == (1, 1, 400)
    assert found.standard_errors[0] == pytest.approx(float(noise.double().std()) / 20, rel=1e-4)
    assert found.differences[0] == pytest.approx(0.05 + float(noise.mean()), abs=1e-5)
    assert found.standard_errors[1] == 0.0


def test_the_simplest_within_one_error_of_the_best_is_chosen_and_no_other() -> None:
    unit = torch.tensor([-1.0, 1.0]).repeat(50)  # of standard deviation 1.005, so an error of .1005 for 100 units
    best = torch.zeros(100)
    assert Comparison.of(torch.stack([0.2 + unit, 0.1 + unit, best])).chosen == 1
    assert Comparison.of(torch.stack([0.2 + unit, 0.11 + unit, best])).chosen == 2
    assert Comparison.of(torch.stack([best, best, best])).chosen == 0


def test_a_candidate_that_diverged_is_never_chosen() -> None:
    rows = torch.tensor([[math.nan, 1.0], [math.inf, 0.0], [3.0, 3.0]])
    found = Comparison.of(rows)
    assert (found.best, found.chosen) == (2, 2)
    assert found.scores[:2] == (math.inf, math.inf)
    with pytest.raises(FloatingPointError, match="all of 2 candidates"):
        Comparison.of(rows[:2])


def test_the_better_half_stays_with_all_that_one_error_cannot_tell_from_the_best() -> None:
    noisy = torch.tensor([-1.0, 1.0]).repeat(8)
    rows = torch.stack([0.2 + noisy, torch.full((16,), 0.1), 0.1 + noisy, torch.full((16,), 0.05), torch.zeros(16)])
    found = Comparison.of(rows)
    assert found.chosen == 0  # the worst mean, but within its error of .26
    assert found.near() == [0, 2, 4]
    assert found.contenders() == [0, 1, 2, 3, 4]  # 1 and 3 by their rank
    told_apart = Comparison.of(torch.arange(4.0)[:, None].expand(4, 16))
    assert told_apart.contenders() == [0, 1]


def test_a_candidate_that_diverged_stays_only_while_half_of_the_others_did() -> None:
    found = Comparison.of(torch.tensor([[math.nan, 1.0], [2.0, 2.0], [3.0, 3.0]]))
    assert found.near() == [1]
    assert found.contenders() == [1, 2]


@pytest.mark.parametrize("shape", [(3,), (2, 1), (0, 4)])
def test_a_comparison_needs_two_units(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="at least 2 units; got shape"):
        Comparison.of(torch.zeros(shape))


def test_unit_means_average_what_is_not_independent() -> None:
    assert unit_means(torch.tensor([1.0, 5.0, 3.0]), ["a", "b", "a"]).tolist() == [2.0, 5.0]
    with pytest.raises(ValueError, match="3 units"):
        unit_means(torch.zeros(2), ["a", "b", "a"])


@pytest.mark.parametrize(("bias", "expected"), [((0.0, 0.0, 0.0), 1), ((2.0, 0.0, 0.0), 2), ((2.0, 1.0, 0.0), 10)])
def test_the_fewest_steps_within_one_error_are_chosen(bias: tuple[float, ...], expected: int) -> None:
    target = torch.randn(300, generator=torch.Generator().manual_seed(0))
    shifts = dict(zip((1, 2, 10), bias, strict=True))

    def scores(steps: int) -> Tensor:
        draws = torch.randn(20, 300, generator=torch.Generator().manual_seed(1))
        return crps(draws + shifts[steps], target)

    found = choose_steps([10, 1, 2, 2], scores)
    assert found.steps == (1, 2, 10)
    assert found.num_inference_steps == expected


def test_steps_must_be_positive() -> None:
    with pytest.raises(ValueError, match="each at least 1; got"):
        choose_steps([0, 2], lambda steps: torch.zeros(3))
