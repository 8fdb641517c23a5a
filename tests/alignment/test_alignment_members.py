"""Members aligned to each other."""

import itertools
from collections.abc import Callable

import numpy as np
import pytest
import torch
from support.ensembles import (
    diffusers_aligned,
    make_ensemble,
    make_scene,
    mean_pairwise_rmse,
    proper_median,
    speed_ratio,
)
from torch import Tensor

from marigold_uq.alignment import (
    align_members,
    apply_alignment,
    ensemble_members,
    least_squares_alignment,
    member_moments,
    members,
    pairwise_rmse,
)


class TestObjective:
    def test_gram_objective_equals_the_objective_over_pixels(self) -> None:
        maps = make_ensemble(5, noise=0.1).double()
        scale, shift = np.array([0.3, 1.0, 2.0, 0.7, 1.4]), np.array([0.1, -0.2, 0.0, 0.5, -1.0])
        covariance, mean = member_moments(maps.flatten(1))
        aligned = maps * torch.from_numpy(scale)[:, None, None] + torch.from_numpy(shift)[:, None, None]
        brute = [[float((a - b).square().mean().sqrt()) for b in aligned] for a in aligned]
        # float64 sums over 3072 pixels
        np.testing.assert_allclose(pairwise_rmse(covariance, mean, scale, shift), brute, rtol=1e-10, atol=1e-8)

    def test_float32_products_lose_nothing_that_matters_far_from_zero(self) -> None:
        maps = (make_ensemble(4, 120, 160, noise=0.01) + 100).flatten(1)
        exact, mean = member_moments(maps, torch.float64)
        single, single_mean = member_moments(maps, torch.float32)
        # uncentred float32 sums would lose 1e4 * 6e-8 of a variance near 0.1, that is 6e-3
        np.testing.assert_allclose(single, exact, rtol=0, atol=1e-6 * exact.max())
        np.testing.assert_allclose(single_mean, mean, rtol=1e-6)

    @pytest.mark.parametrize("reduction", ["median", "mean"])
    @pytest.mark.parametrize("shift_invariant", [True, False])
    def test_gradients_of_both_parts_equal_finite_differences(self, reduction: str, shift_invariant: bool) -> None:
        rng = np.random.default_rng(0)
        pixels = rng.normal(size=(5, 30)) + rng.normal(size=30) + 3
        similarity = np.corrcoef(pixels)

        def check(function: Callable[..., tuple[float, np.ndarray, np.ndarray]]) -> None:
            weight, offset = rng.uniform(0.5, 2, 5), rng.normal(size=5)
            _, by_weight, by_offset = function(weight, offset)
            for i, step in enumerate(1e-6 * np.eye(5)):
                numeric = (function(weight + step, offset)[0] - function(weight - step, offset)[0]) / 2e-6
                assert numeric == pytest.approx(by_weight[i], abs=1e-7)  # central differences: h^2 and eps / h
                numeric = (function(weight, offset + step)[0] - function(weight, offset - step)[0]) / 2e-6
                assert numeric == pytest.approx(by_offset[i], abs=1e-7)

        check(lambda w, c: members._log_spread(similarity, w, c))
        check(lambda w, c: members._log_span(pixels, w, c, reduction, shift_invariant))

    def test_collapsed_scales_would_have_the_smaller_raw_objective(self) -> None:
        """The reason for the gauge: Marigold's raw objective prefers what we must not return."""
        maps = make_ensemble(4)
        covariance, mean = member_moments(maps.flatten(1))
        result = align_members(maps)
        ours = pairwise_rmse(covariance, mean, result.scale.numpy(), result.shift.numpy()).sum()
        assert pairwise_rmse(covariance, mean, 1e-3 * result.scale.numpy(), np.zeros(4)).sum() < ours

    @pytest.mark.parametrize("num_members", [1, 2, 3, 4, 5, 7, 8, 10, 17, 32])
    def test_median_network_is_the_median(self, num_members: int) -> None:
        maps = torch.randn(num_members, 7, 11, generator=torch.Generator().manual_seed(num_members))
        torch.testing.assert_close(members._reduce(maps, "median").double(), proper_median(maps), rtol=0, atol=1e-6)


class TestAgainstDiffusers:
    @pytest.mark.parametrize("outliers", [0, 1])
    @pytest.mark.parametrize("noise", [0.005, 0.03, 0.1])
    @pytest.mark.parametrize("num_members", [3, 5, 10])
    def test_pairwise_rmse_is_no_larger(
        self, num_members: int, noise: float, outliers: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        maps = make_ensemble(num_members, noise=noise, outliers=outliers, seed=num_members)
        ours = mean_pairwise_rmse(align_members(maps).maps)
        stock = mean_pairwise_rmse(diffusers_aligned(maps, monkeypatch))
        print(f"\nE={num_members} noise={noise} outliers={outliers}: ours {ours:.5f}, diffusers {stock:.5f}")
        assert ours <= stock

    @pytest.mark.parametrize("num_members", [3, 10])
    def test_scale_only_pairwise_rmse_is_no_larger(self, num_members: int, monkeypatch: pytest.MonkeyPatch) -> None:
        maps = make_ensemble(num_members, seed=num_members)
        aligned = diffusers_aligned(maps, monkeypatch, shift_invariant=False)

        def relative(members: Tensor) -> float:
            median = proper_median(members)
            return mean_pairwise_rmse(members) * float((median.max() - median.min()) / median.max())

        assert relative(align_members(maps, shift_invariant=False).maps) <= relative(aligned)

    def test_is_much_faster_on_small_maps(self) -> None:
        assert speed_ratio(make_ensemble(10, 120, 160)) > 20  # about 100 on an idle core; full size is the slow test

    @pytest.mark.slow
    @pytest.mark.parametrize("seed", [0, 1])
    def test_is_a_hundred_times_faster_at_full_size(self, seed: int) -> None:
        assert speed_ratio(make_ensemble(10, 480, 640, seed=seed)) >= 100

    @pytest.mark.slow
    def test_pairwise_rmse_is_rarely_and_barely_larger_over_many_ensembles(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The range of a median map hangs on single noisy pixels, so that chance wins at times: seldom, by little."""
        ratios = []
        for seed, (num_members, noise) in enumerate(itertools.product([3, 5, 10], 10 * [0.005, 0.01, 0.02, 0.05, 0.1])):
            maps = make_ensemble(num_members, noise=noise, outliers=int(seed % 7 == 0), seed=seed)
            with monkeypatch.context() as patch:
                stock = mean_pairwise_rmse(diffusers_aligned(maps, patch))
            ratios.append(mean_pairwise_rmse(align_members(maps).maps) / stock)
        print(f"\nratio of pairwise RMSE: mean {np.mean(ratios):.3f}, largest {max(ratios):.4f}")
        assert np.mean(ratios) < 0.95
        assert np.mean(np.array(ratios) > 1) <= 0.02


class TestMutualAlignment:
    def test_reduced_map_spans_the_unit_interval(self) -> None:
        for reduction in ("median", "mean"):
            result = ensemble_members(make_ensemble(6), reduction=reduction)
            assert result.prediction.aminmax() == (0.0, 1.0)

    def test_members_are_affine_maps_of_the_inputs_and_reduce_to_the_prediction(self) -> None:
        maps = make_ensemble(6)
        result = ensemble_members(maps)
        expected = maps * result.scale[:, None, None] + result.shift[:, None, None]
        torch.testing.assert_close(result.members.double(), expected, rtol=0, atol=1e-5)  # float32 maps
        torch.testing.assert_close(result.prediction.double(), proper_median(result.members), rtol=0, atol=1e-6)
        torch.testing.assert_close(result.uncertainty, result.members.std(dim=0), rtol=1e-4, atol=1e-6)
        mean = ensemble_members(maps, reduction="mean")
        torch.testing.assert_close(mean.prediction, mean.members.mean(dim=0), rtol=0, atol=1e-6)

    @pytest.mark.parametrize("noise", [0.01, 0.1])
    def test_affine_changes_and_order_of_the_members_do_not_matter(self, noise: float) -> None:
        maps = make_ensemble(7, noise=noise, outliers=1).double()
        generator = torch.Generator().manual_seed(5)
        order = torch.randperm(7, generator=generator)
        scale = 10 ** (4 * torch.rand(7, 1, 1, generator=generator, dtype=torch.float64) - 2)
        shift = 20 * torch.rand(7, 1, 1, generator=generator, dtype=torch.float64) - 10
        plain, changed = ensemble_members(maps), ensemble_members((maps * scale + shift)[order])
        # L-BFGS-B stops at a relative decrease of 1e-9 of the objective, about 1e-5 in its arguments
        torch.testing.assert_close(changed.prediction, plain.prediction, rtol=0, atol=1e-4)
        torch.testing.assert_close(changed.members, plain.members[order], rtol=0, atol=1e-4)

    def test_recovers_the_members_affine_maps_without_noise(self) -> None:
        maps = make_ensemble(5, noise=0.0)
        result = ensemble_members(maps)
        scene = (maps[0] - maps[0].min()) / (maps[0].max() - maps[0].min())
        torch.testing.assert_close(result.members, scene.expand(5, -1, -1), rtol=0, atol=1e-5)
        assert result.uncertainty.max() < 1e-5

    def test_reduced_map_is_closer_to_the_scene_than_single_members(self) -> None:
        maps = make_ensemble(10, noise=0.05, seed=3)
        scene = make_scene(48, 64, torch.Generator().manual_seed(3))

        def error(prediction: Tensor) -> float:
            return float(
                (apply_alignment(prediction, *least_squares_alignment(prediction, scene)) - scene).square().mean()
            )

        single = np.mean([error(member) for member in maps])
        assert error(ensemble_members(maps).prediction) < 0.3 * single  # independent errors: a tenth, more for a median

    @pytest.mark.parametrize("noise", [0.0, 0.05, 0.5, 5.0])
    @pytest.mark.parametrize("num_members", [2, 3, 10])
    def test_scales_are_positive_and_no_member_collapses(self, num_members: int, noise: float) -> None:
        result = align_members(make_ensemble(num_members, noise=noise, outliers=1))
        spread = result.maps.flatten(1).std(dim=1)
        assert (result.scale > 0).all()
        assert spread.min() > spread.max() / 8  # 2 ** 2 by step 1, and what step 2 may add

    def test_an_inverted_member_keeps_a_positive_scale(self) -> None:
        maps = make_ensemble(5)
        maps[2] = 1 - maps[2]
        result = ensemble_members(maps)
        assert (result.scale > 0).all()
        others = ensemble_members(maps[[0, 1, 3, 4]])
        correlation = np.corrcoef(result.prediction.flatten(), others.prediction.flatten())[0, 1]
        assert correlation > 0.99  # one of five is outvoted
        assert result.uncertainty.mean() > 3 * others.uncertainty.mean()  # and the disagreement shows

    def test_two_exactly_opposite_members_give_a_flat_map_and_honest_uncertainty(self) -> None:
        scene = make_scene(20, 30, torch.Generator().manual_seed(0))
        result = ensemble_members(torch.stack([scene, 1 - scene]))
        assert result.prediction.std() < 1e-3
        assert result.uncertainty.max() > 0.3
        assert (result.scale > 0).all()

    def test_two_members_have_uncertainty(self) -> None:
        """With diffusers' lower median it is identically zero."""
        result = ensemble_members(make_ensemble(2))
        assert result.uncertainty.mean() > 1e-3
        first, second = result.members
        torch.testing.assert_close(result.uncertainty, (first - second).abs() / 2**0.5, rtol=1e-3, atol=1e-6)

    def test_one_member_is_returned_as_it_is_without_uncertainty(self) -> None:
        maps = make_ensemble(1)
        result = ensemble_members(maps)
        assert torch.equal(result.prediction, maps[0])
        assert result.uncertainty is None
        assert result.scale.tolist() == [1.0]

    def test_identical_members_agree_exactly(self) -> None:
        result = ensemble_members(make_ensemble(1).expand(4, -1, -1))
        assert result.uncertainty.max() < 1e-6
        assert result.prediction.aminmax() == (0.0, 1.0)

    @pytest.mark.parametrize("value", [0.0, 0.1, 1234.5])
    def test_constant_maps_give_zeros(self, value: float) -> None:
        result = ensemble_members(torch.full((3, 8, 9), value))
        assert not result.prediction.any()
        assert not result.uncertainty.any()
        assert (result.scale > 0).all()

    def test_one_constant_member_moves_to_the_common_mean_and_the_rest_align(self) -> None:
        maps = make_ensemble(5)
        maps[1] = 0.3
        result = align_members(maps)
        means, spread = result.maps.mean(dim=(1, 2)), result.maps.flatten(1).std(dim=1)
        assert spread[1] < 1e-6
        assert (result.scale > 0).all()
        assert (means - means[1]).abs().max() < 0.05  # step 2 may shift by a tenth of the spread
        assert result.maps.isfinite().all()

    @pytest.mark.parametrize("value", [float("nan"), float("inf")])
    def test_nan_and_infinity_are_errors_that_name_the_member(self, value: float) -> None:
        maps = make_ensemble(4)
        maps[2, 3, 4] = value
        for flags in ((True, True), (True, False), (False, False)):
            with pytest.raises(ValueError, match=r"member 2 \(1 pixels\)"):
                ensemble_members(maps, scale_invariant=flags[0], shift_invariant=flags[1])

    def test_masked_pixels_do_not_count(self) -> None:
        maps = make_ensemble(4)
        mask = torch.ones(48, 64, dtype=torch.bool)
        mask[:, :20] = False
        clean = ensemble_members(maps[:, :, 20:])
        maps[:, :10, :20] = 1e6
        maps[1, 20:, :20] = float("nan")
        result = ensemble_members(maps, mask=mask)
        torch.testing.assert_close(result.prediction[:, 20:], clean.prediction, rtol=0, atol=1e-5)
        torch.testing.assert_close(result.uncertainty[:, 20:], clean.uncertainty, rtol=0, atol=1e-5)

    def test_scale_only_keeps_zero_and_reaches_one(self) -> None:
        maps = make_ensemble(5).clamp(min=0)
        result = ensemble_members(maps, shift_invariant=False)
        assert result.prediction.max() == 1
        assert not result.shift.any()
        torch.testing.assert_close(result.members.double(), maps * result.scale[:, None, None], rtol=1e-5, atol=1e-6)
        scaled = ensemble_members(maps * torch.tensor([1.0, 2, 3, 4, 50])[:, None, None], shift_invariant=False)
        torch.testing.assert_close(scaled.prediction, result.prediction, rtol=0, atol=1e-4)

    def test_metric_maps_are_not_changed(self) -> None:
        maps = 3 + 2 * make_ensemble(4)
        result = ensemble_members(maps, scale_invariant=False, shift_invariant=False)
        assert torch.equal(result.members, maps)
        torch.testing.assert_close(result.prediction.double(), proper_median(maps), rtol=0, atol=1e-5)
        torch.testing.assert_close(result.uncertainty, maps.std(dim=0), rtol=1e-4, atol=1e-5)

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
    def test_other_precisions_agree_with_float32(self, dtype: torch.dtype) -> None:
        maps = make_ensemble(5).to(dtype)
        result, expected = ensemble_members(maps), ensemble_members(maps.float())
        assert result.prediction.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        torch.testing.assert_close(result.prediction.float(), expected.prediction, rtol=0, atol=1e-4)

    def test_inputs_are_left_untouched(self) -> None:
        maps = make_ensemble(4)
        before = maps.clone()
        ensemble_members(maps)
        assert torch.equal(maps, before)

    @pytest.mark.parametrize(
        ("kwargs", "message"),
        [
            ({"maps": torch.zeros(4, 1, 8, 8)}, r"\(E, H, W\)"),
            ({"maps": torch.zeros(0, 8, 8)}, r"\(E, H, W\)"),
            ({"maps": torch.zeros(2, 8, 8, dtype=torch.int64)}, "floating-point"),
            ({"reduction": "max"}, "reduction"),
            ({"scale_invariant": False}, "shift-invariant but not scale-invariant"),
            ({"mask": torch.zeros(8, 8, dtype=torch.bool)}, "at least one True"),
            ({"mask": torch.ones(8, 7, dtype=torch.bool)}, "boolean mask"),
            ({"maps": -torch.rand(2, 8, 8) - 1, "shift_invariant": False}, "positive somewhere"),
        ],
    )
    def test_bad_arguments_are_explained(self, kwargs: dict, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            ensemble_members(**{"maps": torch.rand(2, 8, 8), **kwargs})
