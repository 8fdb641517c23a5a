"""Relative depth to metres, from a handful of metric points, with the uncertainty carried through."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from marigold_uq.precision import at_least_float32

BIWEIGHT = 4.685  # Tukey's biweight has 95 % efficiency for Gaussian residuals with this constant
INLIER = 3.0  # residuals below so many robust standard deviations count as inliers
MAX_START_POINTS = 512  # the robust start looks at all pairs of at most so many points


@dataclass(frozen=True)
class MetricAlignment:
    """metres = scale * prediction + shift, as fitted to a few metric points.

    `covariance` (2, 2) is that of the estimates (scale, shift); `residual_std` is the standard deviation in metres of
    inliers of average weight. Both are NaN when there are only as many points as parameters: nothing is left to tell.
    """

    scale: float
    shift: float
    covariance: Tensor
    residual_std: float
    num_inliers: int

    def apply(self, prediction: Tensor, uncertainty: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Metres and their standard deviation, sqrt(scale^2 sigma^2 + [p, 1] C [p, 1]^T), shapes as `prediction` p.

        Without `uncertainty` (sigma, in the prediction's units) only the error of the fit is counted.
        """
        prediction = at_least_float32(prediction)
        (a, b), (_, c) = self.covariance.tolist()
        pivot = -b / a if a else 0.0  # the fit is surest at p = pivot: a (p - pivot)^2 + rest has no cancellation
        variance = a * (prediction - pivot).square() + max(c + b * pivot, 0.0)
        if uncertainty is not None:
            variance = variance + (self.scale * uncertainty.to(prediction)).square()
        return self.scale * prediction + self.shift, variance.sqrt()


def fit_metric(
    prediction: Tensor,
    points: Tensor,
    metric_depth: Tensor,
    *,
    uncertainty: Tensor | None = None,
    robust: bool = True,
    shift_invariant: bool = True,
    order: Literal["xy", "rowcol"] = "xy",
) -> MetricAlignment:
    """Turn relative depth (H, W) into metres from metric depths (N,) at points (N, 2), for example LiDAR or SfM.

    Points are (x, y) = (column, row), or (row, column) with order="rowcol", in pixels with pixel centres at integers;
    the prediction is read there bilinearly. `robust` starts from the repeated median (half of the points may be wrong)
    and ends with Tukey's biweight; otherwise least squares. `uncertainty` (H, W), the prediction's standard deviation,
    weights the points by 1 / sigma^2. For a model that predicts disparity pass 1 / metric_depth, and invert the result.
    """
    if order not in ("xy", "rowcol"):
        raise ValueError(f"unknown order {order!r} of coordinates; choose 'xy' or 'rowcol'")
    if uncertainty is not None and uncertainty.shape != prediction.shape:
        raise ValueError(f"uncertainty {tuple(uncertainty.shape)} must have the shape {tuple(prediction.shape)}")
    xy = torch.as_tensor(points).detach().cpu().double()
    xy = xy.flip(-1) if order == "rowcol" else xy
    depth = torch.as_tensor(metric_depth).detach().cpu().double()
    _check_points(prediction, xy, depth, 1 + shift_invariant)
    value = _sample(prediction, xy)
    noise = torch.ones_like(value) if uncertainty is None else _relative_noise(_sample(uncertainty, xy))
    _check_sampled(value, noise, shift_invariant)
    design = torch.stack([value, torch.ones_like(value)], dim=1)[:, : 1 + shift_invariant]  # (N, 1 or 2)
    start = _repeated_median(value, depth, shift_invariant) if robust else None
    estimate, covariance, residual_std, num_inliers = _regress(design / noise[:, None], depth / noise, start)
    if estimate[0] <= 0:
        raise ValueError(
            f"the points ask for scale {float(estimate[0]):.4g}, which would turn the scene inside out; is the "
            "prediction a disparity (then pass 1 / metric_depth), or the order of coordinates another?"
        )
    full = torch.zeros(2, 2, dtype=torch.float64)
    full[: 1 + shift_invariant, : 1 + shift_invariant] = covariance
    shift = float(estimate[1]) if shift_invariant else 0.0
    return MetricAlignment(float(estimate[0]), shift, full, residual_std, num_inliers)


def _check_points(prediction: Tensor, xy: Tensor, depth: Tensor, num_parameters: int) -> None:
    if prediction.ndim != 2 or xy.ndim != 2 or xy.shape[1] != 2 or depth.shape != xy.shape[:1]:
        shapes = [tuple(t.shape) for t in (prediction, xy, depth)]
        raise ValueError(f"expected prediction (H, W), points (N, 2) and metric_depth (N,), got {shapes}")
    if len(xy) < num_parameters:
        raise ValueError(f"{len(xy)} points cannot determine {num_parameters} parameters; give at least as many points")
    height, width = prediction.shape
    limit = torch.tensor([width, height]) - 0.5
    for what, bad in (
        ("NaN or infinite", ~(xy.isfinite().all(dim=1) & depth.isfinite())),
        ("not a positive depth", depth <= 0),
        (f"outside the image of {width} x {height} pixels", ((xy < -0.5) | (xy > limit)).any(dim=1)),
    ):
        if bad.any():
            i = int(bad.nonzero()[0])
            raise ValueError(f"point {i} (x, y) = {tuple(xy[i].tolist())}, depth {float(depth[i])}: {what}")


def _check_sampled(value: Tensor, noise: Tensor, shift_invariant: bool) -> None:
    if not (value.isfinite().all() and noise.isfinite().all()):
        raise ValueError("the prediction or its uncertainty is NaN or infinite at some of the points")
    if shift_invariant and value.max() - value.min() <= 1e-6 * value.abs().max():
        raise ValueError(
            f"all points have the same predicted depth {float(value[0]):.6g}, so scale and shift cannot be told apart; "
            "add points at another depth, or set shift_invariant=False"
        )
    if not shift_invariant and value.min() <= 0:
        raise ValueError("a scale-invariant prediction must be > 0 at the points; set shift_invariant=True")


def _sample(plane: Tensor, xy: Tensor) -> Tensor:
    """Bilinear values (N,) of a plane (H, W) at xy (N, 2); the outer half pixel takes the border's value."""
    plane = plane.detach().cpu().double()
    last = torch.tensor([plane.shape[1] - 1, plane.shape[0] - 1])
    xy = xy.clamp(min=torch.zeros(2), max=last)
    low = xy.floor().long()
    high = (low + 1).minimum(last)
    (x0, y0), (x1, y1), (fx, fy) = low.T, high.T, (xy - low).T
    upper = plane[y0, x0].lerp(plane[y0, x1], fx)
    return upper.lerp(plane[y1, x0].lerp(plane[y1, x1], fx), fy)


def _relative_noise(sigma: Tensor) -> Tensor:
    """Noise levels (N,) relative to a point of average weight; below a tenth of the median counts as that tenth."""
    if (sigma < 0).any():
        raise ValueError("uncertainty must be a standard deviation >= 0")
    sigma = sigma.clamp(min=max(0.1 * float(sigma.median()), 1e-3 * float(sigma.max())))
    return sigma * sigma.pow(-2).mean().sqrt() if sigma.max() > 0 else torch.ones_like(sigma)


def _repeated_median(x: Tensor, y: Tensor, shift_invariant: bool) -> Tensor:
    """Siegel's line: slope = median_i median_j (y_j - y_i) / (x_j - x_i); through the origin: median y / x."""
    if not shift_invariant:
        return (y / x).median()[None]
    chosen = x.argsort()[torch.linspace(0, len(x) - 1, min(len(x), MAX_START_POINTS)).long()]
    x, y = x[chosen], y[chosen]
    slopes = ((y - y[:, None]) / (x - x[:, None])).where(x != x[:, None], torch.nan)  # NaN is not counted
    slope = slopes.nanmedian(dim=1).values.nanmedian()
    return torch.stack([slope, (y - slope * x).median()])


def _regress(design: Tensor, target: Tensor, start: Tensor | None) -> tuple[Tensor, Tensor, float, int]:
    """Estimate (P,), its covariance (P, P), residual standard deviation and number of inliers.

    Least squares, or an M-estimate with Tukey's biweight from `start`. Its scale is the median residual at the start
    (counted after the P points that a line can always meet) with Rousseeuw and Leroy's correction for few points; its
    covariance is Huber's (1981, section 7.6).
    """
    size, num_parameters = design.shape
    freedom, inlier = size - num_parameters, torch.ones(size, dtype=torch.bool)
    estimate, factor = _solve(design, target), torch.tensor(torch.nan)
    if start is not None and freedom > 0:
        spread = (target - design @ start).abs().kthvalue((size + num_parameters + 1) // 2).values
        scale = (1.4826 * (1 + 5 / freedom) * spread).maximum(1e-6 * target.abs().median())
        estimate, z = _biweight(design, target, start, scale)
        inlier = z.abs() < INLIER
        factor = _biweight_variance(z, num_parameters) * scale.square()
    if torch.linalg.matrix_rank(design[inlier]) < num_parameters:
        raise ValueError(
            f"the {int(inlier.sum())} consistent points have the same predicted depth; add points elsewhere"
        )
    residual = (target - design @ estimate)[inlier]
    left = len(residual) - num_parameters
    residual_variance = residual.square().sum() / left if left > 0 else torch.tensor(torch.nan)
    variance = residual_variance if factor.isnan() else factor
    covariance = variance * torch.linalg.inv(design.T @ design)
    return estimate, covariance, float(residual_variance.sqrt()), len(residual)


def _solve(design: Tensor, target: Tensor) -> Tensor:
    return torch.linalg.lstsq(design, target[:, None]).solution[:, 0]


def _biweight(design: Tensor, target: Tensor, estimate: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Iteratively reweighted least squares from a start: the estimate, and its residuals in units of `scale` (N,)."""
    for _ in range(100):
        z = (target - design @ estimate) / scale
        root_weight = (1 - (z / BIWEIGHT).square()).clamp(min=0)  # the weight is its square
        previous, estimate = estimate, _solve(root_weight[:, None] * design, root_weight * target)
        if torch.allclose(estimate, previous, rtol=1e-8, atol=0):
            break
    return estimate, (target - design @ estimate) / scale


def _biweight_variance(z: Tensor, num_parameters: int) -> Tensor:
    """K^2 [sum psi(z)^2 / (N - P)] / [mean psi'(z)]^2 with Huber's K = 1 + P / N var(psi') / mean(psi')^2."""
    u = (z / BIWEIGHT).square().clamp(max=1)
    influence, slope = z * (1 - u).square(), (1 - u) * (1 - 5 * u)
    correction = 1 + num_parameters / len(z) * slope.var(correction=0) / slope.mean().square()
    return (correction / slope.mean()).square() * influence.square().sum() / (len(z) - num_parameters)
