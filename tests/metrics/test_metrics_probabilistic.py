"""Ensemble statistics against brute force, scoringrules, closed forms and degenerate limits."""

import math
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import scoringrules
import torch
from scipy import stats
from torch import Tensor

from marigold_uq import metrics
from marigold_uq.metrics.probabilistic import CHUNK_ELEMENTS

STANDARD_ERRORS = 5  # Monte-Carlo tolerance; a right formula fails about once in two million checks


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def ensemble(num_members: int, *shape: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Float64 members (M, *shape) and target (*shape); some members tie with each other and with the target."""
    rng = generator(seed)
    samples = torch.randn(num_members, *shape, generator=rng, dtype=torch.float64)
    target = torch.randn(*shape, generator=rng, dtype=torch.float64)
    samples[0, 0] = target[0]
    samples[-1] = samples[0]
    return samples, target


def brute_crps(members: np.ndarray, value: float, fair: bool) -> float:
    count = len(members)
    error = sum(abs(x - value) for x in members) / count
    pairs = sum(abs(x - z) for x in members for z in members)
    return error - (pairs / (2 * count * (count - 1 if fair else count)) if count > 1 else 0.0)


def brute_energy(members: np.ndarray, value: np.ndarray, fair: bool, exponent: float) -> float:
    count = len(members)
    error = sum(np.linalg.norm(x - value) ** exponent for x in members) / count
    pairs = sum(np.linalg.norm(x - z) ** exponent for x in members for z in members)
    return error - (pairs / (2 * count * (count - 1 if fair else count)) if count > 1 else 0.0)


def gaussian_crps(loc: float, scale: float, value: float) -> float:
    z = (value - loc) / scale
    return scale * (z * (2 * stats.norm.cdf(z) - 1) + 2 * stats.norm.pdf(z) - 1 / math.sqrt(math.pi))


class TestErrors:
    def test_squared_error_is_that_of_the_mean(self):
        samples, target = ensemble(6, 4, 3)
        expected = (samples.numpy().mean(0) - target.numpy()) ** 2
        np.testing.assert_allclose(metrics.squared_error(samples, target), expected, rtol=1e-12)

    @pytest.mark.parametrize("num_members", [1, 2, 5, 6])
    def test_absolute_error_is_that_of_the_median_or_on_request_the_mean(self, num_members):
        samples, target = ensemble(num_members, 4, 3)
        median = abs(np.median(samples.numpy(), axis=0) - target.numpy())
        mean = abs(samples.numpy().mean(axis=0) - target.numpy())
        np.testing.assert_allclose(metrics.absolute_error(samples, target), median, rtol=1e-12, atol=1e-15)
        np.testing.assert_allclose(metrics.absolute_error(samples, target, "mean"), mean, rtol=1e-12, atol=1e-15)

    def test_variance_is_unbiased_and_refuses_one_member(self):
        samples, _ = ensemble(5, 4)
        np.testing.assert_allclose(metrics.ensemble_variance(samples), samples.numpy().var(0, ddof=1), rtol=1e-12)
        with pytest.raises(ValueError, match="at least 2 members"):
            metrics.ensemble_variance(samples[:1])


class TestCrps:
    @pytest.mark.parametrize("fair", [True, False])
    @pytest.mark.parametrize("num_members", [1, 2, 3, 20])
    def test_equals_the_double_sum(self, num_members, fair):
        samples, target = ensemble(num_members, 4, 3)
        expected = [
            [brute_crps(samples[:, i, j].numpy(), float(target[i, j]), fair) for j in range(3)] for i in range(4)
        ]
        np.testing.assert_allclose(metrics.crps(samples, target, fair=fair), expected, rtol=1e-12, atol=1e-14)

    @pytest.mark.parametrize(("fair", "estimator"), [(True, "fair"), (False, "nrg")])
    def test_equals_scoringrules(self, fair, estimator):
        samples, target = ensemble(17, 50)
        expected = scoringrules.crps_ensemble(target.numpy(), samples.numpy(), m_axis=0, estimator=estimator)
        np.testing.assert_allclose(metrics.crps(samples, target, fair=fair), expected, rtol=1e-10, atol=1e-12)

    def test_equals_torchmetrics(self):
        torchmetrics = pytest.importorskip("torchmetrics.regression", reason="an optional second oracle")
        if not hasattr(torchmetrics, "ContinuousRankedProbabilityScore"):
            pytest.skip("this torchmetrics has no ContinuousRankedProbabilityScore")
        samples, target = ensemble(9, 30)
        expected = torchmetrics.ContinuousRankedProbabilityScore()(samples.T, target)
        # torchmetrics scores the empirical law, in float32 arithmetic on accumulated sums
        assert float(metrics.crps(samples, target, fair=False).mean()) == pytest.approx(float(expected), rel=1e-5)

    def test_fair_score_is_unbiased_for_the_gaussian_closed_form_and_the_other_is_not(self):
        loc, scale, value, num_members, repeats = 0.2, 1.3, 0.7, 4, 40_000
        samples = loc + scale * torch.randn(num_members, repeats, generator=generator(), dtype=torch.float64)
        target = torch.full((repeats,), value, dtype=torch.float64)
        exact = gaussian_crps(loc, scale, value)
        fair, plain = metrics.crps(samples, target), metrics.crps(samples, target, fair=False)
        tolerance = STANDARD_ERRORS * float(fair.std()) / math.sqrt(repeats)
        assert float(fair.mean()) == pytest.approx(exact, abs=tolerance)
        # bias of the other: half of E|X - X'| = 2 s / sqrt(pi), divided by M
        bias = scale / math.sqrt(math.pi) / num_members
        assert float(plain.mean()) == pytest.approx(exact + bias, abs=tolerance)

    def test_members_that_agree_give_the_absolute_error(self):
        target = torch.randn(7, generator=generator(), dtype=torch.float64)
        samples = torch.full((5, 7), 0.3, dtype=torch.float64)
        torch.testing.assert_close(metrics.crps(samples, target), (0.3 - target).abs(), rtol=1e-12, atol=1e-14)

    def test_single_precision_keeps_its_digits_far_from_zero(self):
        samples = 280 + 0.01 * torch.randn(50, 200, generator=generator())
        target = 280 + 0.01 * torch.randn(200, generator=generator(1))
        exact = metrics.crps(samples.double(), target.double())
        # differences of neighbouring float32 numbers are exact, so only sums of 50 terms round: 50 * 6e-8
        torch.testing.assert_close(metrics.crps(samples, target).double(), exact, rtol=0, atol=0.02 * 3e-6)

    def test_gradient_is_right_and_the_sorted_paths_agree(self):
        samples, target = torch.randn(5, 3, generator=generator(), dtype=torch.float64), torch.zeros(3).double()
        samples.requires_grad_()
        assert torch.autograd.gradcheck(lambda x: metrics.crps(x, target), samples)
        torch.testing.assert_close(metrics.crps(samples, target), metrics.crps(samples.detach(), target))


class TestEnergyScore:
    @pytest.mark.parametrize("fair", [True, False])
    @pytest.mark.parametrize("exponent", [0.5, 1.0, 1.7])
    @pytest.mark.parametrize("num_members", [1, 2, 6])
    def test_equals_the_double_sum(self, num_members, exponent, fair):
        samples, target = ensemble(num_members, 3, 2, 4)
        score = metrics.energy_score(samples, target, 2, fair=fair, exponent=exponent)
        flat = samples.reshape(num_members, 3, 8).numpy()
        expected = [brute_energy(flat[:, i], target[i].flatten().numpy(), fair, exponent) for i in range(3)]
        np.testing.assert_allclose(score, expected, rtol=1e-12)

    @pytest.mark.parametrize(("fair", "estimator"), [(True, "fair"), (False, "nrg")])
    def test_equals_scoringrules(self, fair, estimator):
        samples, target = ensemble(12, 5, 7)
        expected = scoringrules.es_ensemble(target.numpy(), samples.movedim(0, 1).numpy(), estimator=estimator)
        np.testing.assert_allclose(metrics.energy_score(samples, target, 1, fair=fair), expected, rtol=1e-10)

    def test_a_one_dimensional_event_gives_crps(self):
        samples, target = ensemble(9, 6)
        score = metrics.energy_score(samples[..., None], target[..., None], 1)
        torch.testing.assert_close(score, metrics.crps(samples, target), rtol=1e-12, atol=1e-14)

    def test_converges_to_the_gaussian_value_at_the_mean(self):
        # E||X|| = sqrt(2) Gamma((D+1)/2) / Gamma(D/2) for X ~ N(0, I), and X - X' ~ N(0, 2 I)
        dimension, repeats = 6, 20_000
        norm = math.sqrt(2) * math.gamma((dimension + 1) / 2) / math.gamma(dimension / 2)
        samples = torch.randn(4, repeats, dimension, generator=generator(), dtype=torch.float64)
        score = metrics.energy_score(samples, torch.zeros(repeats, dimension, dtype=torch.float64), 1)
        tolerance = STANDARD_ERRORS * float(score.std()) / math.sqrt(repeats)
        assert float(score.mean()) == pytest.approx(norm * (1 - math.sqrt(2) / 2), abs=tolerance)

    @pytest.mark.parametrize("chunk_elements", [1, 50, 10_000])
    def test_block_size_does_not_matter(self, chunk_elements):
        samples, target = ensemble(5, 4, 3, 11)
        expected = metrics.energy_score(samples, target, 2)
        torch.testing.assert_close(
            metrics.energy_score(samples, target, 2, chunk_elements=chunk_elements), expected, rtol=1e-12, atol=0
        )

    def test_masked_coordinates_leave_the_event_whatever_they_hold(self):
        samples, target = ensemble(5, 3, 8)
        mask = torch.tensor([True, False, True, True, False, True, True, True])
        expected = metrics.energy_score(samples[..., mask], target[..., mask], 1)
        target[..., 1], samples[..., 4] = torch.nan, torch.inf
        torch.testing.assert_close(metrics.energy_score(samples, target, 1, mask=mask), expected, rtol=1e-12, atol=0)

    def test_gradient_is_right_and_zero_where_points_coincide(self):
        rng = generator()
        samples = torch.randn(4, 2, 3, generator=rng, dtype=torch.float64, requires_grad=True)
        target = torch.randn(2, 3, generator=rng, dtype=torch.float64)
        assert torch.autograd.gradcheck(lambda x: metrics.energy_score(x, target, 1), samples)
        together = torch.zeros(4, 2, 3, dtype=torch.float64, requires_grad=True)
        metrics.energy_score(together, torch.zeros(2, 3, dtype=torch.float64), 1).sum().backward()
        assert together.grad is not None
        assert torch.equal(together.grad, torch.zeros_like(together))

    def test_single_precision_is_accurate_for_close_members_far_away(self):
        samples = 1000 + torch.rand(6, 50_000, generator=generator())
        target = 1000 + torch.rand(50_000, generator=generator(1))
        exact = metrics.energy_score(samples.double(), target.double(), 1)
        # a Gram matrix in float32 would lose everything (squares of 1e6 * 50000 beside distances of 90); here only sums
        # over 4096 squares round, by 6e-8 each time
        assert float(metrics.energy_score(samples, target, 1)) == pytest.approx(float(exact), rel=1e-6)

    def test_an_empty_batch_has_no_scores(self):
        assert metrics.energy_score(torch.zeros(3, 0, 4), torch.zeros(0, 4), 1).shape == (0,)

    def test_refuses_an_event_without_axes_and_improper_exponents(self):
        samples, target = ensemble(3, 2, 2)
        for event_dims in (0, 3):
            with pytest.raises(ValueError, match="allows 1 to 2"):
                metrics.energy_score(samples, target, event_dims)
        with pytest.raises(ValueError, match="strictly proper"):
            metrics.energy_score(samples, target, 1, exponent=2.0)

    @pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from Linux's /proc")
    def test_memory_for_20_maps_of_480_x_640_stays_within_one_block(self):
        """An M x M x D tensor would add 491 MB, a second copy of the maps 25 MB; measured: less than 1 MB."""
        script = """
            import re, torch
            from marigold_uq.metrics import energy_score
            torch.set_num_threads(1)

            def peak_mb():
                return int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read()).group(1)) / 1024

            generator = torch.Generator().manual_seed(0)
            samples, target = torch.randn(20, 480, 640, generator=generator), torch.randn(480, 640, generator=generator)
            energy_score(samples[:, :8, :8], target[:8, :8], 2)  # load the kernels
            before = peak_mb()
            assert energy_score(samples, target, 2).isfinite()
            print(peak_mb() - before)
        """
        result = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=True, timeout=120
        )
        assert float(result.stdout) < CHUNK_ELEMENTS * 4 / 2**20


class TestGaussianNll:
    def test_equals_the_normal_density_with_the_members_moments(self):
        samples, target = ensemble(6, 10)
        loc, scale = samples.numpy().mean(0), samples.numpy().std(0, ddof=1)
        expected = -stats.norm.logpdf(target.numpy(), loc, scale)
        np.testing.assert_allclose(metrics.gaussian_nll(samples, target), expected, rtol=1e-12)
        given = metrics.normal_nll(torch.from_numpy(loc), torch.from_numpy(scale), target)
        np.testing.assert_allclose(given, expected, rtol=1e-12)

    def test_zero_spread_is_an_error_unless_floored_or_masked(self):
        samples, target = ensemble(6, 4)
        samples[:, 2] = 0.5
        with pytest.raises(ValueError, match="1 of 4 coordinates have no spread"):
            metrics.gaussian_nll(samples, target)
        mask = torch.tensor([True, True, False, True])
        floored = metrics.gaussian_nll(samples, target, min_scale=0.1)
        expected = -stats.norm.logpdf(float(target[2]), 0.5, 0.1)
        assert float(floored[2]) == pytest.approx(expected, rel=1e-12)
        torch.testing.assert_close(metrics.gaussian_nll(samples, target, mask=mask)[mask], floored[mask])

    def test_tiny_scales_do_not_underflow(self):
        tiny = torch.tensor(1e-30)
        value = metrics.normal_nll(torch.zeros(()), tiny, torch.zeros(()))
        assert float(value) == pytest.approx(0.5 * math.log(2 * math.pi) - 30 * math.log(10), rel=1e-6)


class TestRanks:
    def test_without_ties_rank_counts_the_members_below(self):
        rng = generator()
        samples, target = torch.randn(7, 5, 4, generator=rng), torch.randn(5, 4, generator=rng)
        expected = (samples.numpy() < target.numpy()).sum(axis=0)
        np.testing.assert_array_equal(metrics.ranks(samples, target, generator=rng), expected)

    def test_pit_lies_in_the_bin_of_its_rank(self):
        rng = generator()
        samples, target = torch.randn(7, 500, generator=rng), torch.randn(500, generator=rng)
        value = metrics.pit(samples, target, generator=rng)
        rank = metrics.ranks(samples, target, generator=rng)
        assert bool(((value >= rank / 8) & (value <= (rank + 1) / 8)).all())

    @pytest.mark.parametrize("num_members", [1, 4])
    def test_histogram_is_flat_and_pit_uniform_for_exchangeable_integers_full_of_ties(self, num_members):
        count, rng = 20_000, generator()
        draws = torch.randint(0, 3, (num_members + 1, count), generator=rng).double()
        histogram = metrics.rank_histogram(draws[1:], draws[0], generator=rng)
        share = 1 / (num_members + 1)
        deviation = (histogram / count - share).abs().max()
        assert float(deviation) < STANDARD_ERRORS * math.sqrt(share * (1 - share) / count)
        assert int(histogram.sum()) == count
        values = metrics.pit(draws[1:], draws[0], generator=rng)
        assert stats.kstest(values.numpy(), "uniform").pvalue > 1e-4  # seeded; a wrong law gives 0 at this size

    def test_histogram_of_too_narrow_members_is_u_shaped(self):
        rng = generator()
        samples, target = 0.5 * torch.randn(9, 5000, generator=rng), torch.randn(5000, generator=rng)
        histogram = metrics.rank_histogram(samples, target, generator=rng)
        assert bool((histogram[[0, -1]] > 2 * histogram[1:-1].max()).all())

    def test_masks_and_sample_axes_equal_counting_by_hand(self):
        rng = generator()
        samples, target = torch.randn(3, 2, 5, 4, generator=rng), torch.randn(2, 5, 4, generator=rng)
        mask = torch.rand(2, 5, 4, generator=rng) > 0.3
        counts = metrics.rank_histogram(samples, target, generator=rng, mask=mask, sample_dims=1)
        rank = (samples < target).sum(0)
        expected = [[int(((rank[b] == k) & mask[b]).sum()) for k in range(4)] for b in range(2)]
        assert counts.tolist() == expected
        assert metrics.rank_histogram(samples, target, generator=rng, mask=mask).tolist() == [
            sum(column) for column in zip(*expected, strict=True)
        ]

    def test_all_ties_reach_every_rank_and_the_generator_decides(self):
        samples, target = torch.zeros(3, 400), torch.zeros(400)
        first = metrics.ranks(samples, target, generator=generator(1))
        assert set(first.tolist()) == {0, 1, 2, 3}
        assert torch.equal(first, metrics.ranks(samples, target, generator=generator(1)))


class TestSpreadSkill:
    def test_statistics_are_inflated_variance_and_squared_error(self):
        samples, target = ensemble(4, 6)
        pair = metrics.spread_skill(samples, target)
        variance = samples.numpy().var(0, ddof=1)
        np.testing.assert_allclose(pair["predicted_squared_error"], 5 / 4 * variance, rtol=1e-12)
        np.testing.assert_allclose(pair["squared_error"], (samples.numpy().mean(0) - target.numpy()) ** 2, rtol=1e-12)

    def test_ratio_is_one_for_honest_members_however_few(self):
        count, rng = 40_000, generator()
        samples, target = torch.randn(3, count, generator=rng), torch.randn(count, generator=rng)
        accumulator = metrics.MeanAccumulator()
        accumulator.update(metrics.spread_skill(samples, target), range(count))
        ratio = accumulator.compute()["spread_skill_ratio"]
        assert abs(float(ratio.value) - 1) < STANDARD_ERRORS * float(ratio.standard_error)
        assert float(ratio.standard_error) < 0.01  # without sqrt((M+1)/M) the ratio would be .87


class TestInputs:
    CALLS = (
        metrics.squared_error,
        metrics.absolute_error,
        metrics.crps,
        metrics.gaussian_nll,
        lambda x, y: metrics.energy_score(x, y, 1),
        lambda x, y: metrics.spread_skill(x, y)["predicted_squared_error"],
        lambda x, y: metrics.pit(x, y, generator=generator()),
        lambda x, y: metrics.reliability(x, y, [0.5, 0.9]),
    )

    @pytest.mark.parametrize("call", CALLS)
    def test_half_precision_is_computed_in_float32_and_float64_is_kept(self, call):
        samples, target = ensemble(6, 3, 4)
        rough, rough_target = samples.bfloat16() + torch.arange(6).bfloat16()[:, None, None], target.bfloat16()
        value = call(rough, rough_target)
        assert value.dtype == torch.float32
        torch.testing.assert_close(value, call(rough.float(), rough_target.float()), rtol=0, atol=0)
        assert call(samples + torch.arange(6)[:, None, None], target).dtype == torch.float64

    @pytest.mark.parametrize("call", CALLS)
    def test_members_on_the_wrong_axis_are_refused_with_both_shapes(self, call):
        with pytest.raises(ValueError, match=r"samples \(3, 6\) do not fit target \(3,\)"):
            call(torch.zeros(3, 6), torch.zeros(3))

    def test_interval_ends_never_broadcast_by_accident(self):
        lower, upper = torch.zeros(4), torch.ones(4)
        for score in (metrics.coverage, lambda *ends: metrics.interval_score(*ends, 0.9)):
            with pytest.raises(ValueError, match=r"ends \(4,\) and \(4,\) do not fit target \(4, 1\)"):
                score(lower, upper, torch.zeros(4, 1))

    def test_no_members_and_foreign_masks_are_refused(self):
        with pytest.raises(ValueError, match="at least one member"):
            metrics.crps(torch.zeros(0, 3), torch.zeros(3))
        with pytest.raises(TypeError, match=r"torch\.bool"):
            metrics.energy_score(torch.zeros(2, 3), torch.zeros(3), 1, mask=torch.ones(3))
        with pytest.raises(ValueError, match="does not broadcast"):
            metrics.energy_score(torch.zeros(2, 3), torch.zeros(3), 1, mask=torch.ones(4, dtype=torch.bool))

    def test_panel_agrees_with_the_single_functions(self):
        samples, target = ensemble(6, 3, 4)
        panel = metrics.ensemble_statistics(samples, target, min_scale=1e-3, level=0.8)
        lower, upper = metrics.central_interval(samples, 0.8)
        assert all(value.shape == target.shape for value in panel.values())
        torch.testing.assert_close(panel["crps"], metrics.crps(samples, target))
        torch.testing.assert_close(panel["gaussian_nll"], metrics.gaussian_nll(samples, target, min_scale=1e-3))
        torch.testing.assert_close(panel["coverage"], metrics.coverage(lower, upper, target))
        torch.testing.assert_close(panel["interval_score"], metrics.interval_score(lower, upper, target, 0.8))
