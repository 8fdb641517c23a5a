"""Quantiles, intervals and the coverage a finite ensemble can reach."""

import math

import numpy as np
import pytest
import scoringrules
import torch

from marigold_uq import metrics

STANDARD_ERRORS = 5  # Monte-Carlo tolerance; a right formula fails about once in two million checks


def members_and_target(num_members: int, repeats: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    draws = torch.randn(
        num_members + 1, repeats, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )  # one Gaussian
    return draws[1:], draws[0]


def observed_coverage(samples: torch.Tensor, target: torch.Tensor, level: float, method: str) -> tuple[float, float]:
    """Share of covered targets and its standard error."""
    share = float(metrics.coverage(*metrics.central_interval(samples, level, method), target).mean())
    return share, math.sqrt(max(share * (1 - share), 1e-6) / target.numel())


class TestQuantiles:
    @pytest.mark.parametrize("method", ["weibull", "linear"])
    @pytest.mark.parametrize("num_members", [1, 2, 10, 39, 100])
    def test_equal_numpy(self, num_members, method):
        samples, _ = members_and_target(num_members, 12)
        levels = [0.0, 0.001, 0.025, 0.1, 1 / 3, 0.5, 0.77, 0.975, 1.0]
        expected = np.quantile(samples.reshape(num_members, 3, 4).numpy(), levels, axis=0, method=method)
        actual = metrics.quantiles(samples.reshape(num_members, 3, 4), levels, method)
        np.testing.assert_allclose(actual, expected, rtol=1e-12, atol=1e-14)

    def test_one_level_has_no_level_axis(self):
        samples, _ = members_and_target(10, 6)
        single = metrics.quantiles(samples, 0.3)
        assert single.shape == (6,)
        assert torch.equal(single, metrics.quantiles(samples, [0.3])[0])

    def test_members_that_agree_are_every_quantile(self):
        assert torch.equal(metrics.quantiles(torch.full((4, 3), 2.0), [0.01, 0.6]), torch.full((2, 3), 2.0))

    def test_gradient_reaches_the_neighbouring_members_only(self):
        samples = torch.tensor([3.0, 1.0, 2.0, 4.0], dtype=torch.float64, requires_grad=True)
        metrics.quantiles(samples, 0.5).backward()  # halfway between 2 and 3
        assert samples.grad is not None
        assert samples.grad.tolist() == [0.5, 0.0, 0.5, 0.0]

    @pytest.mark.parametrize("level", [-0.1, 95.0, []])
    def test_levels_are_fractions(self, level):
        with pytest.raises(ValueError, match=r"0\.95, not 95"):
            metrics.quantiles(torch.zeros(3, 2), level)

    def test_unknown_methods_are_named(self):
        with pytest.raises(ValueError, match="quantiles know"):
            metrics.quantiles(torch.zeros(3, 2), 0.5, "hazen")
        with pytest.raises(ValueError, match="intervals know"):
            metrics.central_interval(torch.zeros(3, 2), 0.5, "hazen")


class TestIntervals:
    def test_statistics_by_hand(self):
        lower, upper = torch.tensor([0.0, 0.0, 0.0, 0.0]), torch.tensor([1.0, 1.0, 1.0, 2.0])
        target = torch.tensor([-0.5, 0.0, 1.0, 3.0])
        assert metrics.coverage(lower, upper, target).tolist() == [0, 1, 1, 0]
        assert metrics.interval_width(lower, upper).tolist() == [1, 1, 1, 2]
        score = metrics.interval_score(lower, upper, target, 0.8)
        np.testing.assert_allclose(score, [1 + 10 * 0.5, 1, 1, 2 + 10 * 1], rtol=1e-6)

    def test_interval_score_equals_scoringrules(self):
        samples, target = members_and_target(15, 40)
        lower, upper = metrics.central_interval(samples, 0.7)
        expected = scoringrules.interval_score(target.numpy(), lower.numpy(), upper.numpy(), 0.3)
        np.testing.assert_allclose(metrics.interval_score(lower, upper, target, 0.7), expected, rtol=1e-12)

    def test_several_levels_at_once_equal_one_by_one(self):
        samples, _ = members_and_target(15, 40)
        for method in ("weibull", "linear", "minmax", "gaussian", "student_t"):
            lower, upper = metrics.central_interval(samples, [0.5, 0.9], method)
            for row, level in enumerate([0.5, 0.9]):
                single = metrics.central_interval(samples, level, method)
                torch.testing.assert_close((lower[row], upper[row]), single)

    def test_student_t_covers_as_told_with_three_members(self):
        samples, target = members_and_target(3, 50_000)
        lower, upper = metrics.student_t_interval(samples, 0.95)
        share = float(metrics.coverage(lower, upper, target).mean())
        assert share == pytest.approx(0.95, abs=STANDARD_ERRORS * math.sqrt(0.95 * 0.05 / 50_000))

    def test_one_member_has_no_spread_based_interval(self):
        with pytest.raises(ValueError, match="at least 2 members"):
            metrics.student_t_interval(torch.zeros(1, 3), 0.9)


class TestExpectedCoverage:
    # Coverage of the nominal 95 % interval with perfect Gaussian members, three digits. Source: the reference table
    # given with the method, made before and apart from this package.
    TABLE = (
        ("linear", {10: 0.791, 20: 0.872, 50: 0.915, 100: 0.933}),
        ("weibull", {10: 0.818, 20: 0.905, 50: 0.954, 100: 0.952}),
        ("gaussian", {10: 0.905, 20: 0.929, 50: 0.942, 100: 0.946}),
    )

    @pytest.mark.parametrize(("method", "row"), TABLE)
    def test_reproduces_the_published_table(self, method, row):
        for num_members, value in row.items():
            # half a digit of rounding and as much for the table's own error
            assert metrics.expected_coverage(num_members, 0.95, method) == pytest.approx(value, abs=1e-3)

    @pytest.mark.parametrize("method", ["weibull", "linear", "minmax", "gaussian", "student_t"])
    @pytest.mark.parametrize(("num_members", "level"), [(2, 0.5), (10, 0.95), (13, 0.7), (50, 0.95)])
    def test_agrees_with_simulation(self, method, num_members, level):
        samples, target = members_and_target(num_members, 20_000, seed=num_members)
        share, standard_error = observed_coverage(samples, target, level, method)
        expected = metrics.expected_coverage(num_members, level, method)
        assert share == pytest.approx(expected, abs=STANDARD_ERRORS * standard_error)

    def test_is_the_nominal_level_where_weibull_hits_an_order_statistic(self):
        for num_members, level in [(39, 0.95), (19, 0.9), (9, 0.6)]:
            assert metrics.expected_coverage(num_members, level) == pytest.approx(level, abs=1e-12)

    def test_is_then_free_of_the_law(self):
        draws = members_and_target(19, 20_000)
        samples, target = (d.exp() for d in draws)  # log-normal
        share, standard_error = observed_coverage(samples, target, 0.9, "weibull")
        assert share == pytest.approx(0.9, abs=STANDARD_ERRORS * standard_error)

    def test_tends_to_the_nominal_level_and_one_member_covers_nothing(self):
        for method in ("weibull", "linear", "gaussian"):
            assert metrics.expected_coverage(100_000, 0.95, method) == pytest.approx(0.95, abs=1e-4)
        for method in ("weibull", "linear", "minmax"):
            assert metrics.expected_coverage(1, 0.95, method) == 0
        with pytest.raises(ValueError, match="at least one member"):
            metrics.expected_coverage(0, 0.95)


class TestReliability:
    LEVELS = (0.2, 0.5, 0.8, 0.95)

    def test_honest_members_reach_what_is_expected_of_them(self):
        samples, target = members_and_target(10, 20_000)
        observed = metrics.reliability(samples, target, self.LEVELS)
        assert observed.shape == (4, 20_000)
        for share, level in zip(observed.mean(dim=1).tolist(), self.LEVELS, strict=True):
            standard_error = math.sqrt(share * (1 - share) / 20_000)
            expected = metrics.expected_coverage(10, level)
            assert share == pytest.approx(expected, abs=STANDARD_ERRORS * standard_error)

    def test_over_confident_members_fall_short(self):
        samples, target = members_and_target(50, 5000)
        observed = metrics.reliability(0.5 * samples, target, self.LEVELS).mean(dim=1)
        assert all(
            share < 0.8 * metrics.expected_coverage(50, level)
            for share, level in zip(observed.tolist(), self.LEVELS, strict=True)
        )

    def test_given_intervals_of_several_levels_broadcast(self):
        samples, target = members_and_target(10, 30)
        lower, upper = metrics.central_interval(samples, list(self.LEVELS))
        expected = metrics.reliability(samples, target, self.LEVELS)
        assert torch.equal(metrics.coverage(lower, upper, target), expected)


@pytest.mark.parametrize("members", [2, 5, 10, 40])
def test_nested_intervals_grow_with_coverage_at_every_point(members):
    samples = torch.randn(members, 200, generator=torch.Generator().manual_seed(members), dtype=torch.float64) ** 3
    levels = torch.cat([torch.linspace(0.01, 0.5, 50), torch.linspace(0.5, 0.99, 99), torch.tensor([0.999, 0.99999])])
    ends = [metrics.nested_interval(samples, float(level)) for level in levels]
    lower, upper = (torch.stack(part) for part in zip(*ends, strict=True))
    assert bool((lower.diff(dim=0) <= 0).all())
    assert bool((upper.diff(dim=0) >= 0).all())
    assert bool((lower <= upper).all())


@pytest.mark.parametrize("members", [2, 5, 10, 40])
def test_nested_intervals_are_weibulls_as_far_as_the_members_reach(members):
    samples = torch.randn(members, 30, generator=torch.Generator().manual_seed(0))
    reach = (members - 1) / (members + 1)
    for level in (0.3 * reach, 0.9 * reach, reach):
        for nested, weibull in zip(
            metrics.nested_interval(samples, level), metrics.central_interval(samples, level), strict=True
        ):
            torch.testing.assert_close(nested, weibull)
    just_beyond = metrics.nested_interval(samples, reach + 1e-9)  # no jump where the two meet
    torch.testing.assert_close(just_beyond[0], samples.amin(0), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(just_beyond[1], samples.amax(0), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("members", [2, 5, 10, 40])
def test_nested_intervals_of_gaussian_members_cover_about_what_is_asked_for(members):
    trials = 40_000
    drawn = torch.randn(members + 1, trials, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for level in (0.5, 0.68, 0.8, 0.9, 0.95, 0.99):
        lower, upper = metrics.nested_interval(drawn[:-1], level)
        observed = float(metrics.coverage(lower, upper, drawn[-1]).mean())
        expected = metrics.expected_coverage(members, level) if level <= (members - 1) / (members + 1) else level
        # Beyond the members' reach the range of a few members stands for their standard deviation.
        assert observed == pytest.approx(expected, abs=0.012 + 4 * math.sqrt(level * (1 - level) / trials))


def test_one_member_has_no_interval():
    with pytest.raises(ValueError, match="at least 2"):
        metrics.nested_interval(torch.zeros(1, 3), 0.9)
