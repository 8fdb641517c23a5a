"""Predictions aligned to ground truth and to metric points."""

import itertools
import time

import numpy as np
import pytest
import torch
from torch import Tensor

from marigold_uq.alignment import (
    apply_alignment,
    fit_metric,
    least_squares_alignment,
)


class TestLeastSquares:
    def test_recovers_a_known_affine_map_on_valid_pixels(self) -> None:
        prediction = torch.rand(3, 20, 30, generator=torch.Generator().manual_seed(0))
        target = (
            prediction * torch.tensor([2.0, 3.0, 0.5])[:, None, None] + torch.tensor([1.0, -1.0, 4.0])[:, None, None]
        )
        mask = torch.rand(20, 30, generator=torch.Generator().manual_seed(1)) > 0.3
        target[:, ~mask] = float("nan")
        scale, shift = least_squares_alignment(prediction, target, mask)
        assert scale.dtype == torch.float64
        torch.testing.assert_close(scale, torch.tensor([2.0, 3.0, 0.5]).double(), rtol=1e-6, atol=0)  # float32 maps
        torch.testing.assert_close(shift, torch.tensor([1.0, -1.0, 4.0]).double(), rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(apply_alignment(prediction, scale, shift)[:, mask], target[:, mask])

    def test_equals_numpy_polyfit_with_weights(self) -> None:
        rng = np.random.default_rng(0)
        x, y, w = rng.normal(size=(3, 12, 9))
        w = w**2
        scale, shift = least_squares_alignment(*map(torch.from_numpy, (x, y)), weights=torch.from_numpy(w))
        expected = np.polyfit(x.ravel(), y.ravel(), 1, w=np.sqrt(w.ravel()))
        np.testing.assert_allclose([float(scale), float(shift)], expected, rtol=1e-10)

    def test_one_fit_applies_to_all_members(self) -> None:
        members = torch.rand(5, 6, 7)
        aligned = apply_alignment(members, torch.tensor(2.0).double(), torch.tensor(0.5).double())
        torch.testing.assert_close(aligned, 2 * members + 0.5)

    def test_disparity_is_fitted_to_inverse_depth_and_clipped_before_inversion(self) -> None:
        depth = 1 + 9 * torch.rand(20, 30, generator=torch.Generator().manual_seed(0)).double()
        prediction = (1 / depth - 0.2) / 3
        scale, shift = least_squares_alignment(prediction, depth, space="disparity")
        torch.testing.assert_close(apply_alignment(prediction, scale, shift, space="disparity"), depth)
        far = apply_alignment(torch.full((1, 1), -100.0), scale, shift, space="disparity")
        assert float(far) == pytest.approx(1000)  # 1 / 1e-3, Marigold's clipping

    @pytest.mark.parametrize("value", [0.0, 0.1, 1e6])
    def test_constant_prediction_gives_the_mean(self, value: float) -> None:
        target = torch.rand(10, 10).double()
        scale, shift = least_squares_alignment(torch.full((10, 10), value), target)
        assert float(scale) == 0
        assert float(shift) == pytest.approx(float(target.mean()))

    def test_max_resolution_fits_on_the_nearest_pixels(self) -> None:
        generator = torch.Generator().manual_seed(0)
        prediction, target = torch.rand(2, 40, 60, generator=generator).double()
        thin = least_squares_alignment(prediction, target, max_resolution=30)
        assert thin == least_squares_alignment(prediction[::2, ::2], target[::2, ::2])
        assert least_squares_alignment(prediction, target, max_resolution=60) == least_squares_alignment(
            prediction, target
        )

    def test_bad_input_is_explained(self) -> None:
        maps, mask = torch.rand(4, 5), torch.zeros(4, 5)
        mask[0, 0] = 1
        with pytest.raises(ValueError, match="at least 2 valid"):
            least_squares_alignment(maps, maps, mask)
        with pytest.raises(ValueError, match="equal shapes"):
            least_squares_alignment(maps, maps.T)
        with pytest.raises(ValueError, match="NaN"):
            least_squares_alignment(maps, maps.new_full((4, 5), float("nan")))
        with pytest.raises(ValueError, match="> 0"):
            least_squares_alignment(maps, maps - 2, space="disparity")
        with pytest.raises(ValueError, match="space"):
            least_squares_alignment(maps, maps, space="log")


HEIGHT, WIDTH, SCALE, SHIFT = 40, 50, 4.0, 2.0
RAMP = torch.linspace(0, 1, HEIGHT * WIDTH, dtype=torch.float64).view(HEIGHT, WIDTH)


def metric_points(
    num_points: int, generator: torch.Generator, *, noise: float = 0.05, outliers: int = 0
) -> tuple[Tensor, Tensor]:
    """Sub-pixel points (x, y) on RAMP and their noisy metric depths; the first `outliers` depths are nonsense.

    RAMP is linear in the pixel index row * WIDTH + column, so its bilinear values are known in closed form.
    """
    xy = torch.rand(num_points, 2, generator=generator, dtype=torch.float64) * torch.tensor([WIDTH - 1, HEIGHT - 1])
    ramp = (xy[:, 1] * WIDTH + xy[:, 0]) / (HEIGHT * WIDTH - 1)
    depth = SCALE * ramp + SHIFT + noise * torch.randn(num_points, generator=generator, dtype=torch.float64)
    depth[:outliers] = 0.1 + 20 * torch.rand(outliers, generator=generator, dtype=torch.float64)
    return xy, depth


class TestMetricAlignment:
    def test_exact_points_give_the_exact_line_between_pixels(self) -> None:
        xy, depth = metric_points(6, torch.Generator().manual_seed(0), noise=0.0)
        for robust, order in itertools.product([True, False], ["xy", "rowcol"]):
            fit = fit_metric(RAMP, xy if order == "xy" else xy.flip(1), depth, robust=robust, order=order)
            assert (fit.scale, fit.shift) == pytest.approx((SCALE, SHIFT), abs=1e-9)
            assert fit.residual_std < 1e-9
            assert fit.num_inliers == 6

    @pytest.mark.parametrize("share", [0.1, 0.25, 0.4])
    def test_outliers_do_not_matter(self, share: float) -> None:
        outliers = int(40 * share)
        xy, depth = metric_points(40, torch.Generator().manual_seed(1), outliers=outliers)
        fit = fit_metric(RAMP, xy, depth)
        error = torch.tensor([fit.scale - SCALE, fit.shift - SHIFT]).double()
        assert float(error @ torch.linalg.inv(fit.covariance) @ error) < 13.8  # 99.9 % of chi^2 with 2 degrees
        assert 40 - outliers - 2 <= fit.num_inliers <= 40 - outliers + 3
        ramp = (xy[:, 1] * WIDTH + xy[:, 0]) / (HEIGHT * WIDTH - 1)
        least_squares = np.polyfit(ramp, depth, 1)
        assert abs(least_squares[1] - SHIFT) > 3 * abs(fit.shift - SHIFT)

    @pytest.mark.parametrize(("robust", "outliers"), [(False, 0), (True, 0), (True, 6)])
    def test_covariance_agrees_with_monte_carlo(self, robust: bool, outliers: int) -> None:
        generator = torch.Generator().manual_seed(2)
        fits = [fit_metric(RAMP, *metric_points(30, generator, outliers=outliers), robust=robust) for _ in range(200)]
        errors = torch.tensor([[fit.scale - SCALE, fit.shift - SHIFT] for fit in fits]).double()
        claimed = torch.stack([fit.covariance for fit in fits]).mean(dim=0)
        whitened = torch.linalg.solve_triangular(torch.linalg.cholesky(claimed), errors.T, upper=False)
        observed = whitened @ whitened.T / len(fits)
        # standard error of a variance ratio from 200 draws is sqrt(2 / 200) = 0.1; four of them
        torch.testing.assert_close(observed, torch.eye(2).double(), rtol=0, atol=0.4)
        assert errors.mean(dim=0).abs().max() < 4 * float(claimed.diag().max() / len(fits)) ** 0.5

    def test_reported_standard_deviation_covers_the_true_metres(self) -> None:
        """Independent prediction errors of known sigma: 95 % of the pixels within 1.96 reported deviations."""
        generator = torch.Generator().manual_seed(3)
        covered = []
        for _ in range(60):
            sigma = 0.02 + 0.06 * torch.rand(HEIGHT, WIDTH, generator=generator, dtype=torch.float64)
            prediction = RAMP + sigma * torch.randn(HEIGHT, WIDTH, generator=generator, dtype=torch.float64)
            pixels = torch.randint(HEIGHT * WIDTH, (25,), generator=generator)
            xy = torch.stack([pixels % WIDTH, pixels // WIDTH], dim=1)
            fit = fit_metric(prediction, xy, SCALE * RAMP.flatten()[pixels] + SHIFT, uncertainty=sigma)
            metres, std = fit.apply(prediction, sigma)
            covered.append(float(((metres - SCALE * RAMP - SHIFT).abs() < 1.96 * std).double().mean()))
        # the 60 fits are independent and their coverages scatter by about 0.02; t- instead of normal law takes 0.01
        assert np.mean(covered) == pytest.approx(0.95, abs=0.02)

    def test_apply_is_the_propagation_formula(self) -> None:
        fit = fit_metric(RAMP, *metric_points(9, torch.Generator().manual_seed(4)))
        prediction, sigma = torch.rand(2, 5, 6, dtype=torch.float64)
        metres, std = fit.apply(prediction, sigma)
        rows = torch.stack([prediction, torch.ones_like(prediction)], dim=-1)  # (5, 6, 2)
        variance = torch.einsum("hwi,ij,hwj->hw", rows, fit.covariance, rows) + fit.scale**2 * sigma**2
        torch.testing.assert_close(std, variance.sqrt())
        torch.testing.assert_close(metres, fit.scale * prediction + fit.shift)
        torch.testing.assert_close(fit.apply(prediction)[1], (variance - fit.scale**2 * sigma**2).sqrt())

    def test_uncertain_points_count_less(self) -> None:
        generator = torch.Generator().manual_seed(5)
        sigma = torch.where(RAMP > 0.5, 0.2, 0.002)
        errors: dict[bool, list[float]] = {True: [], False: []}
        for _ in range(30):
            prediction = RAMP + sigma * torch.randn(HEIGHT, WIDTH, generator=generator, dtype=torch.float64)
            pixels = torch.randint(HEIGHT * WIDTH, (20,), generator=generator)
            xy, depth = torch.stack([pixels % WIDTH, pixels // WIDTH], dim=1), SCALE * RAMP.flatten()[pixels] + SHIFT
            for weighted, found in errors.items():
                found.append(fit_metric(prediction, xy, depth, uncertainty=sigma if weighted else None).scale - SCALE)
        assert np.square(errors[True]).mean() < 0.25 * np.square(errors[False]).mean()

    def test_scale_only_fit_has_no_shift(self) -> None:
        xy, depth = metric_points(30, torch.Generator().manual_seed(6), outliers=6)
        fit = fit_metric(SCALE * RAMP + SHIFT, xy, depth / 2, shift_invariant=False)
        assert fit.scale == pytest.approx(0.5, abs=4 * float(fit.covariance[0, 0]) ** 0.5)
        assert fit.shift == 0
        assert not fit.covariance[1].any()

    def test_as_many_points_as_parameters_fit_exactly_and_leave_the_error_unknown(self) -> None:
        fit = fit_metric(RAMP, torch.tensor([[0.0, 0.0], [49.0, 39.0]]), torch.tensor([2.0, 6.0]))
        assert (fit.scale, fit.shift) == pytest.approx((4, 2))
        assert np.isnan(fit.residual_std)
        assert fit.covariance.isnan().all()
        assert fit.apply(RAMP)[1].isnan().all()

    def test_thousands_of_points_are_quick(self) -> None:
        points = metric_points(20000, torch.Generator().manual_seed(7), outliers=4000)
        start = time.process_time()
        fit = fit_metric(RAMP, *points)
        assert time.process_time() - start < 5
        assert fit.scale == pytest.approx(SCALE, abs=4 * float(fit.covariance[0, 0]) ** 0.5)

    @pytest.mark.parametrize(
        ("points", "depth", "message"),
        [
            ([[1.0, 1.0]], [1.0], "1 points cannot determine 2"),
            ([[1.0, 1.0], [60.0, 2.0]], [1.0, 2.0], r"point 1 .* outside the image of 50 x 40"),
            ([[1.0, 1.0], [2.0, 2.0]], [1.0, -2.0], "point 1 .* not a positive depth"),
            ([[1.0, 1.0], [2.0, float("nan")]], [1.0, 2.0], "point 1 .* NaN"),
            ([[1.0, 1.0], [2.0, 2.0]], [float("nan"), 2.0], "point 0 .* NaN"),
            ([[7.0, 7.0], [7.0, 7.0], [7.0, 7.0]], [1.0, 2.0, 3.0], "same predicted depth"),
            ([[0.0, 0.0], [0.0, 39.0]], [6.0, 2.0], "inside out"),
            ([[0.0, 0.0], [0.0, 39.0]], [6.0], r"points \(N, 2\)"),
        ],
    )
    def test_impossible_points_are_explained(self, points: list, depth: list, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            fit_metric(RAMP, torch.tensor(points), torch.tensor(depth))

    def test_other_bad_input_is_explained(self) -> None:
        xy, depth = metric_points(5, torch.Generator().manual_seed(8))
        with pytest.raises(ValueError, match="NaN or infinite at some"):
            fit_metric(RAMP * float("nan"), xy, depth)
        with pytest.raises(ValueError, match="must have the shape"):
            fit_metric(RAMP, xy, depth, uncertainty=RAMP[1:])
        with pytest.raises(ValueError, match=">= 0"):
            fit_metric(RAMP, xy, depth, uncertainty=RAMP - 2)
        with pytest.raises(ValueError, match="order"):
            fit_metric(RAMP, xy, depth, order="yx")
        with pytest.raises(ValueError, match="> 0 at the points"):
            fit_metric(RAMP - 2, xy, depth, shift_invariant=False)
