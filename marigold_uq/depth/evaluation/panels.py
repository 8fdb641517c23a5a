"""Statistics of one image, by panel: each takes an aligned prediction and gives numbers () and curves (K,).

A panel leaves out what the kind of prediction cannot have (no coverage of a confidence map) and what is undefined for
the image (no rank correlation with a constant).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from marigold_uq.depth.evaluation.options import ScoreOptions
from marigold_uq.depth.evaluation.prediction import Members, Prediction
from marigold_uq.depth.evaluation.protocol import Aligned
from marigold_uq.depth.metrics import ause, depth_statistics, sparsification_curve, spearman
from marigold_uq.metrics import coverage, energy_score, interval_width
from marigold_uq.randomness import member_seed

Statistics = dict[str, Tensor]
_Panel = Callable[[Aligned, str, ScoreOptions], Statistics]  # (prediction and target, sample name, options)

RELIABILITY_LEVELS = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
CHUNK = 1 << 18
"""Pixels that per-pixel statistics of members are computed for at once, in float64."""

PANELS: dict[str, _Panel] = {}


def register_panel(name: str) -> Callable[[_Panel], _Panel]:
    """Decorator that makes a panel known as `name`."""

    def register(panel: _Panel) -> _Panel:
        if name in PANELS:
            raise ValueError(f"a panel called {name!r} is already registered")
        PANELS[name] = panel
        return panel

    return register


def check_panels(names: Sequence[str]) -> None:
    """Refuse unknown names, and a list without any."""
    unknown = [name for name in names if name not in PANELS]
    if unknown or not names:
        raise ValueError(f"unknown metrics {unknown or 'of an empty list'}; known: {', '.join(PANELS)}")


def image_statistics(aligned: Aligned, name: str, options: ScoreOptions) -> Statistics:
    """All panels of `options.metrics` for the sample called `name`, in float64."""
    check_panels(options.metrics)
    found: Statistics = {}
    for panel in options.metrics:
        found |= PANELS[panel](aligned, name, options)
    return {key: value.double() for key, value in found.items()}


@register_panel("depth")
def _depth_panel(aligned: Aligned, name: str, options: ScoreOptions) -> Statistics:
    """Marigold's list, of the point prediction."""
    return depth_statistics(aligned.prediction.point.double(), aligned.target)


@register_panel("probabilistic")
def _probabilistic_panel(aligned: Aligned, name: str, options: ScoreOptions) -> Statistics:
    """CRPS, NLL, interval and what spread/skill is made of, each a mean over pixels."""
    floor = options.min_scale * float(aligned.target.median())
    sums: Statistics = {}
    for part, target in _chunks(aligned):
        found = part.statistics(target, level=options.level, method=options.interval, min_scale=floor)
        if "crps" in found:
            found["relative_crps"] = found["crps"] / target
        for key, value in found.items():
            sums[key] = sums.get(key, torch.zeros((), dtype=torch.float64)) + value.sum()
    means = {key: value / aligned.target.numel() for key, value in sums.items()}
    if aligned.prediction.has_law:
        expected = aligned.prediction.expected_coverage(options.level, options.interval)
        means["expected_coverage"] = torch.tensor(expected, dtype=torch.float64)
    return means


@register_panel("calibrated")
def _calibrated_panel(aligned: Aligned, name: str, options: ScoreOptions) -> Statistics:
    """Coverage and width of the model's calibrated interval at the level; coverage at `CALIBRATED_LEVELS`."""
    bounds = aligned.prediction.bounds if isinstance(aligned.prediction, Members) else None
    if bounds is None:
        return {}
    lower, upper = bounds.double().sort(dim=1).values.unbind(1)  # (L, 1, N); a disparity turns them around
    covered = coverage(lower, upper, aligned.target).double().mean(dim=(-2, -1))
    return {
        "calibrated_coverage": covered[0],
        "calibrated_width": interval_width(lower[0], upper[0]).double().mean(),
        "calibrated_reliability": covered[1:],
    }


@register_panel("energy_score")
def _energy_panel(aligned: Aligned, name: str, options: ScoreOptions) -> Statistics:
    """Fair energy score of the image as one event: a Euclidean norm over its valid pixels."""
    if not isinstance(aligned.prediction, Members):
        return {}
    return {"energy_score": energy_score(aligned.prediction.samples, aligned.target.float(), event_dims=2)}


@register_panel("ranking")
def _ranking_panel(aligned: Aligned, name: str, options: ScoreOptions) -> Statistics:
    """Does the uncertainty find the errors? Areas under sparsification, the curves, and rank correlation."""
    uncertainty = aligned.prediction.uncertainty
    if uncertainty is None:
        return {}
    point, target = aligned.prediction.point.double(), aligned.target
    curve, oracle = sparsification_curve(uncertainty, point, target)
    found = {"sparsification": curve, "sparsification_oracle": oracle}
    found["ause_abs_rel"] = ause(uncertainty, point, target)
    found["ause_rmse"] = ause(uncertainty, point, target, error_metric="rmse")
    correlation = spearman(uncertainty, (point - target).abs())
    return found if bool(correlation.isnan()) else {**found, "spearman": correlation}


@register_panel("reliability")
def _reliability_panel(aligned: Aligned, name: str, options: ScoreOptions) -> Statistics:
    """Observed coverage of central intervals, and what calibrated intervals of this kind reach, per nominal level."""
    if not aligned.prediction.has_law:
        return {}
    inside = torch.zeros(len(RELIABILITY_LEVELS), dtype=torch.float64)
    for part, target in _chunks(aligned):
        lower, upper = part.interval(RELIABILITY_LEVELS, options.interval)
        inside += coverage(lower, upper, target).sum(dim=(-2, -1))
    expected = [aligned.prediction.expected_coverage(level, options.interval) for level in RELIABILITY_LEVELS]
    return {
        "reliability": inside / aligned.target.numel(),
        "expected_reliability": torch.tensor(expected, dtype=torch.float64),
    }


@register_panel("pit")
def _pit_panel(aligned: Aligned, name: str, options: ScoreOptions) -> Statistics:
    """Shares of the PIT in equal bins: flat if calibrated, a U if over-confident, a hump if under-confident."""
    if not aligned.prediction.has_law:
        return {}
    generator = torch.Generator().manual_seed(member_seed(options.seed, zlib.crc32(name.encode())))
    counts = torch.zeros(options.num_bins, dtype=torch.float64)
    for part, target in _chunks(aligned):
        bins = (part.pit(target, generator) * options.num_bins).long().clamp(max=options.num_bins - 1)
        counts += torch.bincount(bins.flatten(), minlength=options.num_bins)
    return {"pit": counts / counts.sum()}


def _chunks(aligned: Aligned) -> Iterator[tuple[Prediction, Tensor]]:
    """Prediction and target of at most CHUNK pixels at a time, in float64."""
    for start in range(0, aligned.target.shape[-1], CHUNK):
        columns = slice(start, start + CHUNK)
        yield aligned.prediction.select(partial(_double, columns)), aligned.target[..., columns]


def _double(columns: slice, maps: Tensor) -> Tensor:
    return maps[..., columns].double()
