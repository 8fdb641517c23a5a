"""What the depth pipeline returns, and how maps of several images become arrays."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import torch
from diffusers.utils import BaseOutput
from torch import Tensor

from marigold_uq.alignment import EnsembledDepth
from marigold_uq.calibration import Calibration, apply_kappa
from marigold_uq.images import resize
from marigold_uq.metrics import central_interval, quantiles
from marigold_uq.pipelines.depth_call import DepthCall

Maps: TypeAlias = Any
"""An array or a tensor, a list of them where sizes differ, or None."""


@dataclass
class MarigoldUQDepthOutput(BaseOutput):
    """Maps of N images, channels last for "np" (N, H, W, c) and first for "pt" (N, c, H, W); a list where sizes differ.

    Args:
        prediction: Depth, c = 1; in [0, 1], larger is farther, for affine-invariant models.
        uncertainty: Standard deviation over members, in the prediction's units, c = 1.
        latent: Members' latents (N * E, C, h, w), as the `latents` argument takes them.
        epistemic: The paper's epistemic estimate, a standard deviation in the prediction's units, c = 1.
        quantiles: c = number of levels: those of `quantiles`, then the two ends of `coverage`.
        samples: Aligned members, c = E.

    The first three are diffusers' `MarigoldDepthOutput`, so positional use carries over.
    """

    prediction: Maps
    uncertainty: Maps = None
    latent: Maps = None
    epistemic: Maps = None
    quantiles: Maps = None
    samples: Maps = None

    def to_tuple_with_none(self) -> tuple[Any, ...]:
        """All six fields in order; `BaseOutput.to_tuple` leaves out those that are None."""
        return (self.prediction, self.uncertainty, self.latent, self.epistemic, self.quantiles, self.samples)


@dataclass(frozen=True)
class DepthMaps:
    """Results for one image; maps are (c, H, W)."""

    prediction: Tensor
    uncertainty: Tensor | None
    epistemic: Tensor | None
    quantiles: Tensor | None
    samples: Tensor | None
    latent: Tensor  # (E, C, h, w)


def member_statistics(ensemble: EnsembledDepth, epistemic: Tensor | None, latent: Tensor, call: DepthCall) -> DepthMaps:
    """Spread, quantiles and interval of aligned members, stretched around their mean by the stored kappa."""
    prediction, std, members = ensemble.prediction, ensemble.uncertainty, ensemble.members
    kappa = call.calibration.kappa
    if std is not None and kappa != 1.0:
        members, std = apply_kappa(members, kappa), kappa * std
    levels = []
    if call.levels:
        levels.append(quantiles(members, list(call.levels)))
    if call.coverage is not None and std is not None:
        levels.append(torch.stack(_interval(prediction, std, members, call.coverage, call.calibration)))
    return DepthMaps(
        prediction=prediction.unsqueeze(0),
        uncertainty=None if std is None or call.mode is None else std.unsqueeze(0),
        epistemic=None if epistemic is None else epistemic.unsqueeze(0),
        quantiles=torch.cat(levels) if levels else None,
        samples=members if call.output_samples else None,
        latent=latent,
    )


def quantile_members(maps: Tensor) -> EnsembledDepth:
    """The map of a law's mean and those of its quantiles, (1 + E, H, W): they belong together, nothing is aligned."""
    members = maps[1:]
    ones = torch.ones(len(members), dtype=maps.dtype, device=maps.device)
    return EnsembledDepth(maps[0], members.std(0), members, ones, torch.zeros_like(ones))


def _interval(
    prediction: Tensor, std: Tensor, members: Tensor, coverage: float, calibration: Calibration
) -> tuple[Tensor, Tensor]:
    """Conformal where calibrated for this coverage; else quantiles of the members, Student's t where these are too few.

    M members have no quantile beyond their extremes, which hold (M - 1)/(M + 1) of the truth.
    """
    calibrated = calibration.coverage is not None and abs(calibration.coverage - coverage) < 1e-9
    if calibrated and calibration.conformal_scale is not None:
        return calibration.interval(prediction, std)
    too_few = (len(members) - 1) / (len(members) + 1) < coverage - 1e-9
    lower, upper = central_interval(members, coverage, "student_t" if too_few else "weibull")
    margin = float(calibration.conformal_margin) if calibrated else 0.0  # type: ignore[arg-type]
    return lower - margin, upper + margin


def resize_maps(maps: DepthMaps, size: tuple[int, int], method: str) -> DepthMaps:
    """All maps at `size`; the latent stays."""
    fields = ("prediction", "uncertainty", "epistemic", "quantiles", "samples")
    resized = {name: resize(value, size, method) for name in fields if (value := getattr(maps, name)) is not None}
    for name in {"uncertainty", "epistemic"} & resized.keys():
        resized[name] = resized[name].clamp(min=0)  # bicubic overshoots
    return replace(maps, **resized)


def collect_output(results: list[DepthMaps], call: DepthCall, *, output_latent: bool) -> MarigoldUQDepthOutput:
    """Stack the maps of all images, or list them where their sizes differ."""

    def collect(name: str) -> Maps:
        maps = [getattr(result, name) for result in results]
        if maps[0] is None:
            return None
        if call.output_type == "np":
            maps = [one.permute(1, 2, 0).float().cpu().numpy() for one in maps]
        if len({one.shape for one in maps}) > 1:
            return maps
        return np.stack(maps) if call.output_type == "np" else torch.stack(maps)

    return MarigoldUQDepthOutput(
        prediction=collect("prediction"),
        uncertainty=collect("uncertainty"),
        latent=_collect_latents(results) if output_latent else None,
        epistemic=collect("epistemic"),
        quantiles=collect("quantiles"),
        samples=collect("samples"),
    )


def _collect_latents(results: list[DepthMaps]) -> Maps:
    latents = [result.latent for result in results]
    if len({latent.shape for latent in latents}) > 1:
        return latents
    return torch.cat(latents)
