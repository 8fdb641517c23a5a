"""What the depth pipeline returns, and how maps of several images become arrays."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from diffusers.utils import BaseOutput
from torch import Tensor

from marigold_uq.alignment import EnsembledDepth
from marigold_uq.images import resize
from marigold_uq.metrics import quantiles
from marigold_uq.pipelines.depth_call import DepthCall

Maps = np.ndarray | Tensor | list[Any] | None


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


def member_statistics(
    ensemble: EnsembledDepth, epistemic: Tensor | None, latent: Tensor, call: DepthCall, calibration: dict[str, Any]
) -> DepthMaps:
    """Spread, quantiles and intervals of aligned members, with the stored kappa applied to their deviations."""
    kappa = float(calibration.get("kappa", 1.0))
    prediction, std, members = ensemble.prediction, ensemble.uncertainty, ensemble.members
    if kappa != 1.0 and std is not None:
        members, std = prediction + kappa * (members - prediction), kappa * std
    levels = None
    if std is not None and (call.levels or call.coverage is not None):
        levels = torch.cat([_levels(members, call.levels), _interval(prediction, std, members, call, calibration)])
    return DepthMaps(
        prediction=prediction.unsqueeze(0),
        uncertainty=None if std is None or call.mode is None else std.unsqueeze(0),
        epistemic=None if epistemic is None else epistemic.unsqueeze(0),
        quantiles=levels,
        samples=members if call.output_samples else None,
        latent=latent,
    )


def _levels(members: Tensor, levels: tuple[float, ...]) -> Tensor:
    return quantiles(members, list(levels)) if levels else members[:0]


def _interval(prediction: Tensor, std: Tensor, members: Tensor, call: DepthCall, calibration: dict[str, Any]) -> Tensor:
    """(2, H, W): conformal, prediction +- scale * std, where calibrated for this coverage; else member quantiles."""
    if call.coverage is None:
        return members[:0]
    scale = calibration.get("conformal_scale")
    if scale is not None and abs(float(calibration.get("coverage", 0)) - call.coverage) < 1e-9:
        return torch.stack([prediction - float(scale) * std, prediction + float(scale) * std])
    return _levels(members, ((1 - call.coverage) / 2, (1 + call.coverage) / 2))


def resize_maps(maps: DepthMaps, size: tuple[int, int], method: str) -> DepthMaps:
    """All maps at `size`; the latent stays."""
    fields = ("prediction", "uncertainty", "epistemic", "quantiles", "samples")
    resized = {name: resize(value, size, method) for name in fields if (value := getattr(maps, name)) is not None}
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
