"""Depth statistics against loops over pixels, scipy, closed forms and published numbers on real files."""

import json
import math
import os
from collections import defaultdict
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from scipy import stats
from support.published_depth import ABS_REL
from torch import Tensor

from marigold_uq.depth import metrics

DATA = Path(os.environ.get("MARIGOLD_UQ_DATA", "")) / "depth_real"


def depth_maps(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Two float64 images with different masks; invalid pixels hold what real files hold: 0, NaN, inf."""
    rng = torch.Generator().manual_seed(seed)
    target = 0.5 + 9 * torch.rand(2, 5, 6, generator=rng, dtype=torch.float64)
    prediction = target * torch.exp(0.4 * torch.randn(2, 5, 6, generator=rng, dtype=torch.float64))
    mask = torch.rand(2, 5, 6, generator=rng) > 0.3
    invalid = torch.tensor([0.0, torch.nan, torch.inf, -1.0], dtype=torch.float64).repeat(15).reshape(2, 5, 6)
    return prediction, torch.where(mask, target, invalid), mask


def brute_force(prediction: np.ndarray, target: np.ndarray) -> dict[str, float]:
    """The list for the valid pixels of one image, one pixel at a time."""
    pairs = list(zip(prediction.tolist(), target.tolist(), strict=True))
    n = len(pairs)
    logs = [math.log(p) - math.log(d) for p, d in pairs]
    ratios = [max(p / d, d / p) for p, d in pairs]
    return {
        "abs_relative_difference": sum(abs(p - d) / d for p, d in pairs) / n,
        "squared_relative_difference": sum((p - d) ** 2 / d for p, d in pairs) / n,
        "rmse_linear": math.sqrt(sum((p - d) ** 2 for p, d in pairs) / n),
        "rmse_log": math.sqrt(sum(x**2 for x in logs) / n),
        "log10": sum(abs(math.log10(p) - math.log10(d)) for p, d in pairs) / n,
        "delta1": sum(r < 1.25 for r in ratios) / n,
        "delta2": sum(r < 1.25**2 for r in ratios) / n,
        "delta3": sum(r < 1.25**3 for r in ratios) / n,
        "i_rmse": math.sqrt(sum((1 / p - 1 / d) ** 2 for p, d in pairs) / n),
        "silog_rmse": 100 * math.sqrt(sum(x**2 for x in logs) / n - (sum(logs) / n) ** 2),
    }


def brute_sparsification(order: np.ndarray, error: np.ndarray, fractions: list[float], repeats: int) -> np.ndarray:
    """Mean error of what is left when the largest `order` goes, averaged over random orders among ties."""
    rng, curves = np.random.default_rng(0), []
    for _ in range(repeats):
        shuffled = rng.permutation(len(order))
        kept_first = shuffled[np.argsort(order[shuffled], kind="stable")]
        curves.append([error[kept_first[: len(error) - math.floor(f * len(error))]].mean() for f in fractions])
    return np.array(curves)


class TestPerImageStatistics:
    def test_each_equals_a_loop_over_valid_pixels(self):
        prediction, target, mask = depth_maps()
        actual = metrics.depth_statistics(prediction, target, mask)
        for image in range(2):
            expected = brute_force(prediction[image][mask[image]].numpy(), target[image][mask[image]].numpy())
            assert actual.keys() == expected.keys()
            for name, value in expected.items():
                assert float(actual[name][image]) == pytest.approx(value, rel=1e-10), name

    def test_without_a_mask_all_pixels_count(self):
        prediction, target, mask = depth_maps()
        target = torch.where(mask, target, 2.0)
        everywhere = torch.ones_like(mask)
        for name, statistic in metrics.DEPTH_STATISTICS.items():
            torch.testing.assert_close(
                statistic(prediction, target, None), statistic(prediction, target, everywhere), msg=name
            )

    def test_perfect_prediction_is_zero_error_and_full_delta(self):
        _, target, mask = depth_maps()
        for name, value in metrics.depth_statistics(target, target, mask).items():
            assert value.tolist() == ([1.0, 1.0] if name.startswith("delta") else [0.0, 0.0]), name

    def test_a_constant_factor_is_known_and_leaves_silog_at_zero(self):
        _, target, mask = depth_maps()
        values = metrics.depth_statistics(1.3 * target, target, mask)
        for name, expected in {
            "abs_relative_difference": 0.3,
            "rmse_log": math.log(1.3),
            "log10": math.log10(1.3),
            "delta1": 0.0,
            "delta2": 1.0,
            "silog_rmse": 0.0,
        }.items():
            assert float(values[name][0]) == pytest.approx(expected, abs=1e-12), name

    def test_half_precision_is_computed_in_float32(self):
        prediction, target, mask = depth_maps()
        rough = metrics.depth_statistics(prediction.bfloat16(), target.bfloat16(), mask)
        exact = metrics.depth_statistics(prediction.bfloat16().float(), target.bfloat16().float(), mask)
        assert all(value.dtype == torch.float32 and torch.equal(value, exact[name]) for name, value in rough.items())

    def test_an_image_without_valid_pixels_is_nan_and_leaves_the_other_alone(self):
        prediction, target, mask = depth_maps()
        mask = mask.clone()
        mask[1] = False
        for name, value in metrics.depth_statistics(prediction, target, mask).items():
            assert [bool(v) for v in value.isnan()] == [False, True], name

    def test_depths_that_are_not_positive_are_named_instead_of_counted_as_right(self):
        prediction, target, mask = depth_maps()
        prediction = torch.where(mask, -prediction, prediction)
        for name in ("delta1", "rmse_log", "log10", "i_rmse", "silog_rmse"):
            with pytest.raises(ValueError, match=r"prediction has \d+ valid pixels that are not positive"):
                metrics.DEPTH_STATISTICS[name](prediction, target, mask)
        with pytest.raises(ValueError, match="target has"):
            metrics.DEPTH_STATISTICS["abs_relative_difference"](prediction, target, None)

    def test_maps_of_two_shapes_are_refused(self):
        with pytest.raises(ValueError, match=r"prediction \(1, 4, 4\) and target \(4, 4\)"):
            metrics.DEPTH_STATISTICS["delta1"](torch.ones(1, 4, 4), torch.ones(4, 4), None)


class TestSparsification:
    FRACTIONS = (0.0, 0.1, 0.25, 0.5, 0.9)

    @pytest.mark.parametrize("error_metric", ["abs_rel", "rmse"])
    def test_curves_equal_removing_pixels_by_hand(self, error_metric):
        prediction, target, mask = depth_maps()
        uncertainty = torch.rand(2, 5, 6, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
        curve, oracle = metrics.sparsification_curve(
            uncertainty, prediction, target, mask, error_metric=error_metric, fractions=self.FRACTIONS, normalize=False
        )
        for i in range(2):
            p, d, u = (x[i][mask[i]].numpy() for x in (prediction, target, uncertainty))
            error = abs(p - d) / d if error_metric == "abs_rel" else (p - d) ** 2
            root = np.sqrt if error_metric == "rmse" else np.asarray
            expected = root(brute_sparsification(u, error, list(self.FRACTIONS), 1)[0])
            best = root(brute_sparsification(error, error, list(self.FRACTIONS), 1)[0])
            np.testing.assert_allclose(curve[i], expected, rtol=1e-12)
            np.testing.assert_allclose(oracle[i], best, rtol=1e-12)

    def test_ties_give_the_average_over_random_orders(self):
        prediction, target, _ = depth_maps()
        target = torch.where(target > 0, target, 1.0).nan_to_num(1.0, 1.0)
        uncertainty = torch.arange(30).remainder(3).double().reshape(1, 5, 6)
        curve, _ = metrics.sparsification_curve(
            uncertainty, prediction[:1], target[:1], fractions=self.FRACTIONS, normalize=False
        )
        error = ((prediction - target).abs() / target)[0].flatten().numpy()
        draws = brute_sparsification(uncertainty.flatten().numpy(), error, list(self.FRACTIONS), 2000)
        tolerance = 5 * draws.std(axis=0) / math.sqrt(2000) + 1e-12  # five standard errors
        assert bool((abs(curve[0].numpy() - draws.mean(axis=0)) <= tolerance).all())

    def test_normalised_curves_start_at_one_and_no_order_beats_the_oracle(self):
        prediction, target, mask = depth_maps()
        uncertainty = torch.rand(2, 5, 6, generator=torch.Generator().manual_seed(3))
        for error_metric in ("abs_rel", "rmse"):
            curve, oracle = metrics.sparsification_curve(
                uncertainty, prediction, target, mask, error_metric=error_metric
            )
            assert curve[..., 0].tolist() == oracle[..., 0].tolist() == [1.0, 1.0]
            assert bool((curve >= oracle - 1e-12).all())

    def test_area_for_evenly_spread_errors_is_known(self):
        """Errors uniform on [0, 1]: the oracle's curve is 1 - f, a constant map's 1, the reversed order's 1 + f."""
        target = torch.ones(1, 100, 100, dtype=torch.float64)
        error = torch.arange(10_000, dtype=torch.float64).reshape(1, 100, 100) / 10_000
        areas = [
            float(metrics.ause(uncertainty, target + error, target))
            for uncertainty in (error, torch.ones_like(error), -error)
        ]
        # the gap is set to 0 when nothing is left, which removes at most one trapezoid of half width .005 and height 2
        np.testing.assert_allclose(areas, [0.0, 0.5, 1.0], atol=0.012)
        assert areas[0] == pytest.approx(0.0, abs=1e-9)

    def test_area_is_the_trapezoid_of_the_gap(self):
        prediction, target, mask = depth_maps()
        uncertainty = torch.rand(2, 5, 6, generator=torch.Generator().manual_seed(3))
        curve, oracle = metrics.sparsification_curve(uncertainty, prediction, target, mask, fractions=self.FRACTIONS)
        area = metrics.ause(uncertainty, prediction, target, mask, fractions=self.FRACTIONS)
        gap = np.concatenate([(curve - oracle).numpy(), np.zeros((2, 1))], axis=1)
        np.testing.assert_allclose(area, np.trapezoid(gap, [*self.FRACTIONS, 1.0], axis=1), rtol=1e-12)

    def test_only_the_order_of_the_uncertainty_matters(self):
        prediction, target, mask = depth_maps()
        uncertainty = torch.rand(2, 5, 6, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
        torch.testing.assert_close(
            metrics.ause(uncertainty, prediction, target, mask),
            metrics.ause(uncertainty.exp(), prediction, target, mask),
        )

    def test_perfect_predictions_have_no_area_and_empty_images_are_nan(self):
        prediction, target, mask = depth_maps()
        uncertainty = torch.rand(2, 5, 6, generator=torch.Generator().manual_seed(3))
        assert metrics.ause(uncertainty, target, target, mask).tolist() == [0.0, 0.0]
        mask = mask.clone()
        mask[0] = False
        assert metrics.ause(uncertainty, prediction, target, mask).isnan().tolist() == [True, False]

    def test_bad_requests_are_refused(self):
        prediction, target, mask = depth_maps()
        uncertainty = torch.ones_like(prediction)
        with pytest.raises(ValueError, match="ascending shares"):
            metrics.sparsification_curve(uncertainty, prediction, target, mask, fractions=[0.0, 1.0])
        with pytest.raises(ValueError, match="begin with 0"):
            metrics.ause(uncertainty, prediction, target, mask, fractions=[0.1, 0.5])
        with pytest.raises(ValueError, match="error_metric is 'mae'"):
            metrics.ause(uncertainty, prediction, target, mask, error_metric="mae")
        with pytest.raises(ValueError, match="uncertainty is NaN"):
            metrics.ause(uncertainty * torch.nan, prediction, target, mask)
        with pytest.raises(ValueError, match="expected one per pixel"):
            metrics.ause(uncertainty[0], prediction, target, mask)


class TestSpearman:
    def test_equals_scipy_with_ties_and_masks(self):
        rng = torch.Generator().manual_seed(0)
        uncertainty = torch.randint(0, 5, (2, 3, 8, 9), generator=rng).double()
        error = uncertainty + 3 * torch.rand(2, 3, 8, 9, generator=rng).double().round(decimals=1)
        mask = torch.rand(2, 3, 8, 9, generator=rng) > 0.4
        actual = metrics.spearman(uncertainty, error, mask)
        assert actual.shape == (2, 3)
        for index in np.ndindex(2, 3):
            valid = mask[index]
            expected = stats.spearmanr(uncertainty[index][valid].numpy(), error[index][valid].numpy()).statistic
            assert float(actual[index]) == pytest.approx(expected, rel=1e-12)

    def test_monotone_maps_give_one_and_constants_nan(self):
        error = torch.arange(12.0).reshape(3, 4)
        assert float(metrics.spearman(error.exp(), error)) == pytest.approx(1.0, rel=1e-12)
        assert float(metrics.spearman(-error, error)) == pytest.approx(-1.0, rel=1e-12)
        assert math.isnan(float(metrics.spearman(torch.ones(3, 4), error)))


# ABS_REL: of a constant and of a vertical ramp after least squares, three digits; `aligned` is the protocol behind it.


def read_depth(entry: dict[str, object]) -> np.ndarray:
    """Depth in metres (or 1/disparity), 0 where invalid."""
    raw = cv2.imread(str(DATA / "depth" / f"{entry['name']}.png"), cv2.IMREAD_UNCHANGED).astype(np.float64)
    value = raw / float(entry["depth_scale"])  # type: ignore[arg-type]
    return np.divide(1, value, out=np.zeros_like(value), where=value > 0) if entry["kind"] == "disparity_px" else value


def aligned(predictor: str, depth: np.ndarray) -> np.ndarray:
    """A constant, or minus the row index, fitted to the valid pixels by least squares and clipped to [min/2, 2 max]."""
    valid = depth > 0
    ramp = -np.broadcast_to(np.arange(depth.shape[0], dtype=np.float64)[:, None], depth.shape)
    columns = [np.ones_like(depth)] + ([ramp] if predictor == "ramp" else [])
    coefficients = np.linalg.lstsq(np.stack([c[valid] for c in columns], axis=1), depth[valid], rcond=None)[0]
    fitted = sum(k * c for k, c in zip(coefficients, columns, strict=True))
    return np.clip(fitted, 0.5 * depth[valid].min(), 2 * depth[valid].max())


@pytest.mark.skipif(not (DATA / "index.json").is_file(), reason="set MARIGOLD_UQ_DATA to a folder with depth_real/")
class TestRealDepth:
    @pytest.mark.parametrize(("predictor", "abs_rel", "delta1"), [("constant", 0.432, 0.470), ("ramp", 0.267, 0.622)])
    def test_simple_predictors_score_as_published(self, predictor, abs_rel, delta1):
        groups: dict[str, list[tuple[float, float]]] = defaultdict(list)
        for entry in json.loads((DATA / "index.json").read_text()):
            depth = read_depth(entry)
            maps = torch.from_numpy(aligned(predictor, depth)), torch.from_numpy(depth)
            scores = metrics.depth_statistics(*maps, maps[1] > 0)
            groups[entry["group"]].append((float(scores["abs_relative_difference"]), float(scores["delta1"])))
        means = {group: np.mean(values, axis=0) for group, values in groups.items()}
        overall = np.mean(list(means.values()), axis=0)
        np.testing.assert_allclose(overall, [abs_rel, delta1], atol=6e-4)  # three published digits
        column = 0 if predictor == "constant" else 1
        for group, published in ABS_REL.items():
            assert means[group][0] == pytest.approx(published[column], abs=6e-4), group
