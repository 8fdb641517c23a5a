"""Statistics of depth maps, one number per image, and of how well an uncertainty map ranks the errors.

Maps are (..., H, W), depth in metres (or any unit both share), `mask` is boolean with True where the target is valid;
the result is (...). Names and definitions are Marigold's, per image. Predictions are aligned and clipped before they
come here. An image without a valid pixel gives NaN: leave it out with the reducer's mask.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType
from typing import Literal, get_args

import torch
from torch import Tensor

from marigold_uq.metrics.checks import accumulator_dtype, as_mask, at_least_float32

_ErrorMetric = Literal["abs_rel", "rmse"]
_DepthStatistic = Callable[[Tensor, Tensor, Tensor | None], Tensor]

FRACTIONS: tuple[float, ...] = tuple(step / 100 for step in range(100))
"""Shares of pixels removed for a sparsification curve: 0, 1 %, ..., 99 %."""


def abs_relative_difference(prediction: Tensor, target: Tensor, mask: Tensor | None = None) -> Tensor:
    """AbsRel: mean of |p - d| / d."""
    prediction, target, mask = _depth_pair(prediction, target, mask, positive=("target",))
    return _masked_mean((prediction - target).abs() / target, mask)


def squared_relative_difference(prediction: Tensor, target: Tensor, mask: Tensor | None = None) -> Tensor:
    """SqRel: mean of (p - d)^2 / d, in metres."""
    prediction, target, mask = _depth_pair(prediction, target, mask, positive=("target",))
    return _masked_mean((prediction - target).square() / target, mask)


def rmse_linear(prediction: Tensor, target: Tensor, mask: Tensor | None = None) -> Tensor:
    """Root of the mean of (p - d)^2, in metres, per image."""
    prediction, target, mask = _depth_pair(prediction, target, mask, positive=())
    return _masked_mean((prediction - target).square(), mask).sqrt()


def rmse_log(prediction: Tensor, target: Tensor, mask: Tensor | None = None) -> Tensor:
    """Root of the mean of (ln p - ln d)^2."""
    log_ratio, mask = _log_ratio(prediction, target, mask)
    return _masked_mean(log_ratio.square(), mask).sqrt()


def log10(prediction: Tensor, target: Tensor, mask: Tensor | None = None) -> Tensor:
    """Mean of |log10 p - log10 d|."""
    prediction, target, mask = _depth_pair(prediction, target, mask)
    return _masked_mean((prediction.log10() - target.log10()).abs(), mask)


def delta1(prediction: Tensor, target: Tensor, mask: Tensor | None = None) -> Tensor:
    """Share of pixels with max(p/d, d/p) < 1.25."""
    return _threshold_share(prediction, target, mask, 1.25)


def delta2(prediction: Tensor, target: Tensor, mask: Tensor | None = None) -> Tensor:
    """Share of pixels with max(p/d, d/p) < 1.25^2."""
    return _threshold_share(prediction, target, mask, 1.25**2)


def delta3(prediction: Tensor, target: Tensor, mask: Tensor | None = None) -> Tensor:
    """Share of pixels with max(p/d, d/p) < 1.25^3."""
    return _threshold_share(prediction, target, mask, 1.25**3)


def i_rmse(prediction: Tensor, target: Tensor, mask: Tensor | None = None) -> Tensor:
    """Root of the mean of (1/p - 1/d)^2, in 1/metres."""
    prediction, target, mask = _depth_pair(prediction, target, mask)
    return _masked_mean((prediction.reciprocal() - target.reciprocal()).square(), mask).sqrt()


def silog_rmse(prediction: Tensor, target: Tensor, mask: Tensor | None = None) -> Tensor:
    """SILog: 100 times the standard deviation (divisor n) of ln p - ln d; a common factor does not matter."""
    log_ratio, mask = _log_ratio(prediction, target, mask)
    offset = _masked_mean(log_ratio, mask)[..., None, None]
    return 100 * _masked_mean((log_ratio - offset).square(), mask).sqrt()


DEPTH_STATISTICS: Mapping[str, _DepthStatistic] = MappingProxyType(
    {
        statistic.__name__: statistic
        for statistic in (
            abs_relative_difference,
            squared_relative_difference,
            rmse_linear,
            rmse_log,
            log10,
            delta1,
            delta2,
            delta3,
            i_rmse,
            silog_rmse,
        )
    }
)
"""Marigold's list: name -> function of (prediction, target, mask)."""


def depth_statistics(prediction: Tensor, target: Tensor, mask: Tensor | None = None) -> dict[str, Tensor]:
    """All of `DEPTH_STATISTICS`, each (...)."""
    return {name: statistic(prediction, target, mask) for name, statistic in DEPTH_STATISTICS.items()}


def sparsification_curve(
    uncertainty: Tensor,
    prediction: Tensor,
    target: Tensor,
    mask: Tensor | None = None,
    *,
    error_metric: _ErrorMetric = "abs_rel",
    fractions: Sequence[float] = FRACTIONS,
    normalize: bool = True,
) -> tuple[Tensor, Tensor]:
    """Error of the pixels that remain when the most uncertain ones are removed, and the same for an oracle.

    The oracle removes the largest errors first, so no uncertainty does better. Pixels of equal uncertainty share their
    mean error (what a random order among them gives on average): a constant map yields a flat curve.

    Args:
        uncertainty: (..., H, W); only its order matters.
        prediction: (..., H, W).
        target: (..., H, W).
        mask: (..., H, W), True where the target is valid.
        error_metric: `abs_rel`, mean of |p - d| / d, or `rmse`, root of the mean of (p - d)^2.
        fractions: F shares of removed pixels within [0, 1), ascending; floor(share * n) pixels go.
        normalize: divide both curves by the error of all pixels, as Ilg et al. (2018) do; False keeps the units, as
            Poggi et al. (2020) do.

    Returns:
        Two float64 tensors (..., F): the curve and the oracle's. NaN without a valid pixel.
    """
    _check_fractions(fractions)
    error, valid = _pixel_error(prediction, target, mask, error_metric)
    _check_uncertainty(uncertainty, valid)
    curves = [
        torch.stack([_remaining_error(order[keep], values[keep], fractions) for order in (unsure, values)])
        for unsure, values, keep in zip(*map(_flat_images, (uncertainty, error, valid)), strict=True)
    ]
    both = torch.stack(curves).reshape(*error.shape[:-2], 2, len(fractions))
    both = both.sqrt() if error_metric == "rmse" else both
    curve, oracle = both.unbind(dim=-2)
    if normalize:
        whole = curve[..., :1]  # a perfect prediction has nothing to sort: both curves are then 0, not 0/0
        curve, oracle = (torch.where(whole == 0, 0.0, c / whole) for c in (curve, oracle))
    return curve, oracle


def ause(
    uncertainty: Tensor,
    prediction: Tensor,
    target: Tensor,
    mask: Tensor | None = None,
    *,
    error_metric: _ErrorMetric = "abs_rel",
    fractions: Sequence[float] = FRACTIONS,
    normalize: bool = True,
) -> Tensor:
    """Area between the sparsification curve and the oracle's, (...): 0 if uncertainty orders pixels as the error does.

    Trapezoids over the removed share from 0 to 1; with nothing left both curves are 0. Arguments as
    `sparsification_curve`, and `fractions` starts at 0.
    """
    if not fractions or fractions[0] != 0:
        raise ValueError(f"fractions start at {list(fractions)[:1]}; the area needs the whole range, so begin with 0.")
    curve, oracle = sparsification_curve(
        uncertainty, prediction, target, mask, error_metric=error_metric, fractions=fractions, normalize=normalize
    )
    gap = torch.cat([curve - oracle, torch.zeros_like(curve[..., :1])], dim=-1)  # (..., F + 1)
    shares = torch.tensor([*fractions, 1.0], dtype=gap.dtype, device=gap.device)
    return torch.trapezoid(gap, shares, dim=-1)


def spearman(uncertainty: Tensor, error: Tensor, mask: Tensor | None = None) -> Tensor:
    """Spearman's rank correlation of uncertainty and error, (...); ties share their mean rank, a constant gives NaN."""
    if error.ndim < 2:
        raise ValueError(f"error has shape {tuple(error.shape)}; expected maps (..., H, W).")
    valid = as_mask(mask, error.shape)
    valid = torch.ones_like(error, dtype=torch.bool) if valid is None else valid
    _check_uncertainty(uncertainty, valid)
    images = zip(*map(_flat_images, (uncertainty, error, valid)), strict=True)
    values = [_correlation(_mean_ranks(unsure[keep]), _mean_ranks(wrong[keep])) for unsure, wrong, keep in images]
    return torch.stack(values).reshape(error.shape[:-2])


def _depth_pair(
    prediction: Tensor, target: Tensor, mask: Tensor | None, *, positive: Sequence[str] = ("prediction", "target")
) -> tuple[Tensor, Tensor, Tensor]:
    """Both maps in at least float32 with ones where invalid, and the mask; depths named in `positive` must be > 0."""
    if prediction.shape != target.shape or target.ndim < 2:
        raise ValueError(
            f"prediction {tuple(prediction.shape)} and target {tuple(target.shape)} must both be (..., H, W)."
        )
    valid = as_mask(mask, target.shape)
    valid = torch.ones_like(target, dtype=torch.bool) if valid is None else valid
    maps = {"prediction": at_least_float32(prediction), "target": at_least_float32(target)}
    for name in positive:
        if (bad := int((valid & ~(maps[name] > 0)).sum())) > 0:
            raise ValueError(
                f"{name} has {bad} valid pixels that are not positive depths; this metric divides by depth or takes its"
                " logarithm. Mask invalid targets; clip predictions, after alignment, to the range of the data set."
            )
    # Ones are harmless in every formula, so whatever invalid pixels hold (0, NaN, inf) cannot leak in.
    return torch.where(valid, maps["prediction"], 1.0), torch.where(valid, maps["target"], 1.0), valid


def _log_ratio(prediction: Tensor, target: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Map ln p - ln d (0 where invalid) and the mask."""
    prediction, target, valid = _depth_pair(prediction, target, mask)
    return prediction.log() - target.log(), valid


def _masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean over the valid pixels of each image, (...)."""
    total = torch.where(mask, values, 0.0).sum(dim=(-2, -1), dtype=accumulator_dtype(values.device))
    return (total / mask.sum(dim=(-2, -1))).to(values.dtype)


def _threshold_share(prediction: Tensor, target: Tensor, mask: Tensor | None, threshold: float) -> Tensor:
    """Share of valid pixels whose ratio to the target, either way, is below `threshold`."""
    prediction, target, valid = _depth_pair(prediction, target, mask)
    within = torch.maximum(prediction / target, target / prediction) < threshold
    return _masked_mean(within.to(prediction.dtype), valid)


def _pixel_error(
    prediction: Tensor, target: Tensor, mask: Tensor | None, error_metric: _ErrorMetric
) -> tuple[Tensor, Tensor]:
    """What each pixel adds to `error_metric` (before a root), and the mask."""
    if error_metric not in get_args(_ErrorMetric):
        raise ValueError(f"error_metric is {error_metric!r}; expected one of {get_args(_ErrorMetric)}.")
    relative = error_metric == "abs_rel"
    prediction, target, valid = _depth_pair(prediction, target, mask, positive=("target",) if relative else ())
    difference = (prediction - target).abs()
    return (difference / target if relative else difference.square()), valid


def _check_uncertainty(uncertainty: Tensor, valid: Tensor) -> None:
    if uncertainty.shape != valid.shape:
        raise ValueError(
            f"uncertainty has shape {tuple(uncertainty.shape)}, the error {tuple(valid.shape)}; expected one per pixel."
        )
    if missing := int((uncertainty.isnan() & valid).sum()):
        raise ValueError(f"uncertainty is NaN at {missing} valid pixels, so they cannot be ordered; mask or fill them.")


def _check_fractions(fractions: Sequence[float]) -> None:
    ascending = all(a < b for a, b in pairwise(fractions))
    if not fractions or not ascending or not (fractions[0] >= 0 and fractions[-1] < 1):
        raise ValueError(f"fractions are {list(fractions)}; expected ascending shares of removed pixels within [0, 1).")


def _flat_images(maps: Tensor) -> Tensor:
    """(..., H, W) as (N, H * W)."""
    return maps.reshape(-1, maps.shape[-2] * maps.shape[-1])


def _remaining_error(order: Tensor, error: Tensor, fractions: Sequence[float]) -> Tensor:
    """Mean of `error` (n,) over the pixels that are left after the largest `order` (n,) went, (F,)."""
    dtype = accumulator_dtype(error.device)
    if error.numel() == 0:
        return error.new_full((len(fractions),), torch.nan, dtype=dtype)
    _, group, size = torch.unique(order, return_inverse=True, return_counts=True)  # groups ascend
    group_error = torch.zeros(size.shape, dtype=dtype, device=error.device).index_add_(0, group, error.to(dtype)) / size
    running = torch.repeat_interleave(group_error, size).cumsum(dim=0)  # ties share their mean error
    # 1e-9: 0.29 * 100 is 28.999999999999996 in floating point, and 29 pixels are meant.
    left = torch.tensor([error.numel() - int(f * error.numel() + 1e-9) for f in fractions], device=error.device)
    return running[left - 1] / left


def _mean_ranks(values: Tensor) -> Tensor:
    """Ranks from 1, ties averaged, (n,)."""
    _, group, size = torch.unique(values, return_inverse=True, return_counts=True)
    size = size.to(accumulator_dtype(values.device))
    return (size.cumsum(dim=0) - (size - 1) / 2)[group]


def _correlation(first: Tensor, second: Tensor) -> Tensor:
    """Pearson's correlation of two vectors (n,)."""
    first, second = first - first.mean(), second - second.mean()
    return (first @ second) / (first.norm() * second.norm())
