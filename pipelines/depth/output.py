"""What the depth pipeline returns, and how maps of several images become arrays."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from importlib import import_module
from io import BytesIO
from pathlib import Path
from typing import Any, TypeAlias, cast

import numpy as np
import torch
from diffusers.utils import BaseOutput
from PIL import Image
from torch import Tensor

from marigold_uq.alignment import EnsembledDepth
from marigold_uq.calibration import apply_kappa
from marigold_uq.metrics import nested_interval, quantiles
from marigold_uq.novelty import Novelty
from marigold_uq.pipelines.depth.call import DepthCall
from marigold_uq.pipelines.depth.images import resize

Maps: TypeAlias = Any
"""An array or a tensor, a list of them where sizes differ, or None."""
_SHEETS_SHOWN = 8
_DEFAULT_FORMATS = ("npz", "color", "uncertainty", "sheet")


@dataclass(frozen=True)
class ShownWith:
    """What an output is shown and saved with."""

    pictures: tuple[np.ndarray, ...]  # each (H, W, 3) uint8
    prediction_type: str
    units: str
    coverage: float | None


@dataclass
class MarigoldUQDepthOutput(BaseOutput):
    """Maps of N images, channels last for "np" (N, H, W, c) and first for "pt" (N, c, H, W); a list where sizes differ.

    Args:
        prediction: Depth, c = 1; in [0, 1], larger is farther, for affine-invariant models.
        uncertainty: Standard deviation over members, in the prediction's units, c = 1.
        latent: Where the prediction's chains end (N * chains, C, h, w), as the `latents` argument takes them.
        epistemic: The paper's epistemic estimate, a standard deviation in the prediction's units, c = 1.
        quantiles: Those of `quantiles`, c = number of levels.
        samples: Aligned members, c = E.
        interval: Lower and upper end of the central interval that `coverage` asks for, c = 2.
        novelty: How unlike the images of `fit_novelty` each of the N images is; not a map.

    The first three are diffusers' `MarigoldDepthOutput`, so positional use carries over. In a notebook the output of a
    call shows its sheets.
    """

    prediction: Maps
    uncertainty: Maps = None
    latent: Maps = None
    epistemic: Maps = None
    quantiles: Maps = None
    samples: Maps = None
    interval: Maps = None
    novelty: Novelty | None = None

    shown_with = cast("ShownWith | None", None)  # no field: it belongs to calls, and to no tuple

    def as_diffusers_tuple(self) -> tuple[Any, ...]:
        """Prediction, uncertainty and latent, None where they were not asked for, and then what else was."""
        more = [getattr(self, one.name) for one in fields(self)[3:]]
        return (self.prediction, self.uncertainty, self.latent, *(value for value in more if value is not None))

    def records(self) -> list[Any]:
        """One `marigold_uq.depth.export.DepthRecord` per image: picture, maps, and what they mean."""
        shown = self.shown_with
        if shown is None:
            raise ValueError(
                "this output holds no pictures: only the output of a call, with maps, can be shown or saved"
            )
        names = ("uncertainty", "epistemic")
        return [
            _EXPORT.DepthRecord(
                image=picture,
                depth=_channels(self.prediction[i])[0],
                **{name: _channels(maps[i])[0] for name in names if (maps := getattr(self, name)) is not None},
                interval=None if self.interval is None else _channels(self.interval[i]),
                coverage=None if self.interval is None else shown.coverage,
                metadata={"units": shown.units, "prediction_type": shown.prediction_type},
            )
            for i, picture in enumerate(shown.pictures)
        ]

    def sheet(self, index: int = 0) -> Image.Image:
        """Photograph, depth and uncertainty of an image side by side."""
        return _EXPORT.draw_sheet(self.records()[index])

    def save(
        self,
        folder: str | Path,
        *,
        names: Sequence[str] | None = None,
        formats: Sequence[str] | None = None,
        overwrite: bool = False,
    ) -> list[Path]:
        """Write the maps of every image, and return the files.

        Args:
            folder: It is created.
            names: Start of the file names, one per image; by default image_0, image_1, ...
            formats: As of `marigold-uq depth`: npz, color, uncertainty (where there is one) and sheet by default.
            overwrite: Replace existing files.
        """
        records = self.records()
        names = [f"image_{i}" for i in range(len(records))] if names is None else list(names)
        if len(names) != len(records) or len(set(names)) != len(names):
            raise ValueError(f"names must be {len(records)} different ones, one per image; got {names}")
        if formats is None:
            formats = [name for name in _DEFAULT_FORMATS if name != "uncertainty" or self.uncertainty is not None]
        written = (
            _EXPORT.export(record, folder, name, formats, overwrite=overwrite)
            for record, name in zip(records, names, strict=True)
        )
        return [path for paths in written for path in paths]

    def to_pointcloud(
        self,
        index: int = 0,
        *,
        min_confidence: float = 0.0,
        intrinsics: tuple[float, float, float, float] | None = None,
        field_of_view: float = 60.0,
    ) -> Any:
        """An image as points in space: a `marigold_uq.depth.export.PointCloud` with points, colors, uncertainty, save.

        Args:
            index: Of the image.
            min_confidence: A pixel's confidence is the share of pixels that are less certain; 0.9 keeps the tenth that
                is most certain, 0 all.
            intrinsics: (fx, fy, cx, cy) in pixels.
            field_of_view: Degrees across the longer side, where there are no intrinsics.
        """
        if not 0 <= min_confidence < 1:
            raise ValueError(f"min_confidence must be at least 0 and below 1; got {min_confidence}")
        if min_confidence and self.uncertainty is None:
            raise ValueError("min_confidence needs an uncertainty: call the pipeline with uncertainty=...")
        return _EXPORT.point_cloud(
            self.records()[index],
            _EXPORT.ExportOptions(intrinsics=intrinsics, field_of_view=field_of_view, keep_fraction=1 - min_confidence),
        )

    def _repr_png_(self) -> bytes | None:
        """The first sheet, for notebooks."""
        return None if self.shown_with is None else _png(self.sheet())

    def _repr_html_(self) -> str | None:
        """The sheets of the first images, for notebooks."""
        if self.shown_with is None:
            return None
        count = len(self.shown_with.pictures)
        sheets = (base64.b64encode(_png(self.sheet(i))).decode() for i in range(min(count, _SHEETS_SHOWN)))
        rows = [f'<div><img style="max-width: 100%" src="data:image/png;base64,{sheet}"/></div>' for sheet in sheets]
        rest = f"<div>and {count - _SHEETS_SHOWN} more</div>" if count > _SHEETS_SHOWN else ""
        return "".join(rows) + rest


class _Export:
    """`marigold_uq.depth.export` by name: files and figures are above this room, and load when they are asked for."""

    def __getattr__(self, name: str) -> Any:
        return getattr(import_module("marigold_uq.depth.export"), name)


_EXPORT = _Export()


def _channels(maps: Any) -> np.ndarray:
    """(c, H, W) of one image, from channels last (arrays) or first (tensors)."""
    return maps.numpy(force=True) if isinstance(maps, Tensor) else np.moveaxis(np.asarray(maps), -1, 0)


def _png(picture: Image.Image) -> bytes:
    content = BytesIO()
    picture.save(content, format="PNG")
    return content.getvalue()


@dataclass(frozen=True)
class DepthMaps:
    """Results for one image; maps are (c, H, W)."""

    prediction: Tensor
    uncertainty: Tensor | None
    epistemic: Tensor | None
    quantiles: Tensor | None
    samples: Tensor | None
    interval: Tensor | None
    latent: Tensor  # (chains, C, h, w)


def member_statistics(ensemble: EnsembledDepth, epistemic: Tensor | None, latent: Tensor, call: DepthCall) -> DepthMaps:
    """Spread, quantiles and interval of aligned members, stretched around their mean by the stored kappa."""
    prediction, std, members = ensemble.prediction, ensemble.uncertainty, ensemble.members
    kappa = call.calibration.kappas[0]
    if std is not None and kappa != 1.0:
        members, std = apply_kappa(members, kappa), kappa * std
    return DepthMaps(
        prediction=prediction.unsqueeze(0),
        uncertainty=None if std is None or call.mode is None else std.unsqueeze(0),
        epistemic=None if epistemic is None else epistemic.unsqueeze(0),
        quantiles=quantiles(members, list(call.levels)) if call.levels else None,
        samples=members if call.output_samples else None,
        interval=None if call.coverage is None or std is None else _interval(prediction, std, members, call),
        latent=latent,
    )


def quantile_members(prediction: Tensor, maps: Tensor) -> EnsembledDepth:
    """Quantiles (E, H, W) of the distribution of the prediction: they belong together and stay as they are."""
    ones = torch.ones(len(maps), dtype=maps.dtype, device=maps.device)
    return EnsembledDepth(prediction, maps.std(0), maps, ones, torch.zeros_like(ones))


def _interval(prediction: Tensor, std: Tensor, members: Tensor, call: DepthCall) -> Tensor:
    """(2, H, W): calibrated half widths around the prediction, else the members' own interval; both are nested."""
    assert call.coverage is not None
    if call.interval_scale is None:
        return torch.stack(nested_interval(members, call.coverage))
    half_width = call.interval_scale * std
    return torch.stack([prediction - half_width, prediction + half_width])


def resize_maps(maps: DepthMaps, size: tuple[int, int], call: DepthCall) -> DepthMaps:
    """All maps at `size`, by the call's method for the way back; the latent stays."""
    method = call.resample_method_output
    fields = ("prediction", "uncertainty", "epistemic", "quantiles", "samples")
    resized = {name: resize(value, size, method) for name in fields if (value := getattr(maps, name)) is not None}
    for name in {"uncertainty", "epistemic"} & resized.keys():
        resized[name] = resized[name].clamp(min=0)  # bicubic overshoots
    if maps.interval is not None:
        resized["interval"] = _resize_interval(maps.interval, resized, size, call)
    return replace(maps, **resized)


def _resize_interval(interval: Tensor, resized: dict[str, Tensor], size: tuple[int, int], call: DepthCall) -> Tensor:
    """(2, *size), with ends that do not cross where a method overshoots; calibrated intervals stay nested."""
    if call.interval_scale is None:
        centre = resize(interval.mean(0, keepdim=True), size, call.resample_method_output)
        width = resize(interval[1:] - interval[:1], size, call.resample_method_output)
        half_width = width.clamp(min=0) / 2
    else:
        centre, half_width = resized["prediction"], call.interval_scale * resized["uncertainty"]
    return torch.cat([centre - half_width, centre + half_width])


def collect_output(results: list[DepthMaps], call: DepthCall) -> MarigoldUQDepthOutput:
    """Stack the maps of all images, or list them where their sizes differ."""

    def collect(name: str) -> Maps:
        maps = [getattr(result, name) for result in results]
        if maps[0] is None:
            return None
        if call.output_type == "np":
            maps = [one.permute(1, 2, 0).float().cpu().numpy() for one in maps]
        if len(maps) == 1:  # a view: those of a large picture are held once
            return maps[0][None]
        if len({one.shape for one in maps}) > 1:
            return maps
        return np.stack(maps) if call.output_type == "np" else torch.stack(maps)

    return MarigoldUQDepthOutput(
        prediction=collect("prediction"),
        uncertainty=collect("uncertainty"),
        latent=_collect_latents([result.latent for result in results]) if call.output_latent else None,
        epistemic=collect("epistemic"),
        quantiles=collect("quantiles"),
        samples=collect("samples"),
        interval=collect("interval"),
    )


def latent_output(latents: list[Tensor], call: DepthCall) -> MarigoldUQDepthOutput:
    """What output_type="latent" returns: latents in place of the depth map."""
    together = _collect_latents(latents)
    return MarigoldUQDepthOutput(together, latent=together if call.output_latent else None)


def _collect_latents(latents: list[Tensor]) -> Maps:
    if len({latent.shape for latent in latents}) > 1:
        return latents
    return torch.cat(latents)
