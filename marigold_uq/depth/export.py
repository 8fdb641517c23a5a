"""Predictions as files: data first (16-bit PNG with its scale, float TIFF, npz, point cloud), then pictures of them.

Every file is written under a temporary name and renamed, so a reader never sees half a file, and nothing that exists
is replaced unless `overwrite` is set. Uncertainty is written as data wherever depth is.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from marigold_uq.depth.colors import (
    Intrinsics,
    as_map,
    check_map,
    color_depth,
    color_uncertainty,
    colored_points,
    confident,
    picture_at,
    place,
    ply_header,
    ply_vertices,
    resolve_intrinsics,
    row_bands,
    saturation,
    sheet,
)
from marigold_uq.files import atomic_path, make_folder

_PNG16_MAX = 65535
_TIFF_DESCRIPTION = 270  # the tag ImageDescription


def save_png16(
    path: str | Path,
    array: np.ndarray,
    *,
    value_range: tuple[float, float] | None = None,
    units: str = "relative",
    metadata: Mapping[str, str] | None = None,
    overwrite: bool = False,
) -> Path:
    """Write a map (H, W) as 16-bit grey PNG; the text chunks `scale` and `offset` say value = offset + scale * png.

    Values are rounded to the nearest step, so the error is at most scale / 2 = (high - low) / 131070.

    Args:
        path: file to write.
        array: finite values (H, W); PNG has no NaN.
        value_range: (low, high) stored as 0 and 65535, the map's own minimum and maximum by default. The usual
            conventions are ranges: (0, 65.535) in metres makes one step a millimetre, (0, 65535 / 256) is KITTI's.
        units: text chunk `units`.
        metadata: further text chunks.
        overwrite: replace an existing file.
    """
    values = as_map(array)
    bad = int((~np.isfinite(values)).sum())
    if bad:
        raise ValueError(f"{bad} pixels are NaN or infinite, which a 16-bit PNG cannot hold; use tiff or npz")
    low, high = value_range if value_range is not None else (float(values.min()), float(values.max()))
    if not low <= values.min() <= values.max() <= high:
        found = f"[{values.min():.6g}, {values.max():.6g}]"
        raise ValueError(f"values in {found} do not fit value_range=({low:.6g}, {high:.6g}); clip them or widen it")
    scale = (high - low) / _PNG16_MAX or 1.0  # a constant map is all offset
    chunks = {
        "scale": repr(float(scale)),
        "offset": repr(float(low)),
        "units": units,
        "formula": "offset + scale * png",
    }
    text = PngInfo()
    for chunk in {**chunks, **(metadata or {})}.items():
        text.add_text(*chunk)
    pixels = np.clip(np.rint((values - low) / scale), 0, _PNG16_MAX).astype(np.uint16)
    with atomic_path(path, overwrite=overwrite) as temporary:
        Image.fromarray(pixels).save(temporary, format="PNG", pnginfo=text)
    return Path(path)


def load_png16(path: str | Path) -> tuple[np.ndarray, dict[str, str]]:
    """The values (H, W) float32 of a file written by :func:`save_png16`, and its text chunks."""
    with Image.open(path, formats=["PNG"]) as image:
        pixels = np.asarray(image).astype(np.float64)
        text = {str(key): str(value) for key, value in image.info.items() if isinstance(value, str)}
    if "scale" not in text or "offset" not in text:
        raise ValueError(f"{path} records no scale and offset: it was not written by save_png16")
    return (float(text["offset"]) + float(text["scale"]) * pixels).astype(np.float32), text


def save_tiff(path: str | Path, array: np.ndarray, *, description: str = "", overwrite: bool = False) -> Path:
    """Write a map (H, W) as float32 TIFF, without loss (NaN included); `description` goes into ImageDescription."""
    values = as_map(array).astype(np.float32)
    tags = {_TIFF_DESCRIPTION: description} if description else {}
    with atomic_path(path, overwrite=overwrite) as temporary:
        Image.fromarray(values).save(temporary, format="TIFF", compression="tiff_adobe_deflate", tiffinfo=tags)
    return Path(path)


def save_npz(path: str | Path, *, overwrite: bool = False, **arrays: Any) -> Path:
    """Write named arrays as compressed npz, readable with ``numpy.load(path)`` and no pickle."""
    checked: dict[str, Any] = {name: np.asarray(array) for name, array in arrays.items()}
    if any(array.dtype.hasobject for array in checked.values()):
        raise ValueError("python objects cannot be stored without pickle; give arrays of numbers or strings")
    with atomic_path(path, overwrite=overwrite) as temporary, temporary.open("wb") as file:
        np.savez_compressed(file, **checked)
    return Path(path)


def save_image(path: str | Path, picture: np.ndarray | Image.Image, *, overwrite: bool = False) -> Path:
    """Write a picture, (H, W, 3) uint8 or PIL, in the format its suffix names."""
    image = picture if isinstance(picture, Image.Image) else Image.fromarray(picture)
    with atomic_path(path, overwrite=overwrite) as temporary:
        image.save(temporary)
    return Path(path)


def save_ply(
    path: str | Path,
    depth: np.ndarray,
    image: np.ndarray,
    *,
    intrinsics: Intrinsics | None = None,
    field_of_view: float | None = None,
    uncertainty: np.ndarray | None = None,
    max_uncertainty: float | None = None,
    keep_fraction: float | None = None,
    comment: str = "",
    overwrite: bool = False,
) -> Path:
    """Write a binary PLY point cloud: one coloured point per pixel, with its uncertainty as a vertex property.

    Args:
        path: file to write.
        depth: (H, W) distance along the optical axis; pixels that are not finite and positive are left out.
        image: (H, W, 3) uint8 colours.
        intrinsics: (fx, fy, cx, cy) as in :func:`~marigold_uq.depth.colors.colored_points`, which also names the axes.
        field_of_view: degrees across the longer side, instead of intrinsics.
        uncertainty: (H, W) standard deviation of depth.
        max_uncertainty: leave out points above this standard deviation.
        keep_fraction: keep this fraction of the points, the most certain ones (more where values tie).
        comment: one line for the header.
        overwrite: replace an existing file.
    """
    values = check_map(depth)
    keep = confident(uncertainty, np.isfinite(values) & (values > 0), max_uncertainty, keep_fraction)
    if not keep.any():
        raise ValueError("no point left: depth must be positive somewhere, and the uncertainty filter less strict")
    fx, fy, cx, cy = resolve_intrinsics(values.shape, intrinsics, field_of_view)
    pixels = picture_at(image, values.shape)
    with atomic_path(path, overwrite=overwrite) as temporary, temporary.open("wb") as file:
        file.write(ply_header(int(keep.sum()), uncertainty is not None, comment))
        for rows in row_bands(values.shape):
            lens = (fx, fy, cx, cy - rows.start)
            points, colors = colored_points(values[rows], pixels[rows], intrinsics=lens)
            std = None if uncertainty is None else np.asarray(uncertainty)[rows][keep[rows]]
            file.write(ply_vertices(points[keep[rows]], colors[keep[rows]], std))
    return Path(path)


@dataclass(frozen=True)
class DepthRecord:
    """One prediction to be exported. Two keys of `metadata` are read: `units` ("relative" by default, or e.g. "m") and
    `prediction_type` ("depth" by default, or "disparity": larger is nearer). All of it is stored beside the data.
    """

    image: np.ndarray  # (H, W, 3) uint8
    depth: np.ndarray  # (h, w)
    uncertainty: np.ndarray | None = None  # (h, w) standard deviation, as is epistemic
    epistemic: np.ndarray | None = None
    interval: np.ndarray | None = None  # (2, h, w), lower and upper end
    coverage: float | None = None  # of the interval
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.image.ndim != 3 or self.image.shape[2] != 3 or self.image.dtype != np.uint8:
            raise ValueError(f"image must be (H, W, 3) uint8, but is {self.image.shape} {self.image.dtype}")
        if (self.interval is None) != (self.coverage is None):
            raise ValueError("an interval needs its coverage, and a coverage its interval; got one of them")
        if self.interval is not None and len(self.interval) != 2:
            raise ValueError(f"an interval must have shape (2, h, w); got {self.interval.shape}")
        for name, layer in self.layers.items():
            if check_map(layer, name).shape != self.depth.shape:
                raise ValueError(f"{name} has shape {layer.shape}, but depth has {self.depth.shape}")
        json.dumps(dict(self.metadata))  # a TypeError that names the type JSON cannot hold

    @property
    def layers(self) -> dict[str, np.ndarray]:
        """The maps that are present, by name: depth, uncertainty, epistemic, lower, upper."""
        maps = {"depth": self.depth, "uncertainty": self.uncertainty, "epistemic": self.epistemic}
        ends = {} if self.interval is None else {"lower": self.interval[0], "upper": self.interval[1]}
        return {name: layer for name, layer in maps.items() if layer is not None} | ends

    @property
    def units(self) -> str:
        """Unit of depth and uncertainty; "relative" means known up to scale and shift."""
        return str(self.metadata.get("units", "relative"))

    @property
    def is_disparity(self) -> bool:
        """Whether larger values are nearer."""
        return bool(self.metadata.get("prediction_type", "depth") == "disparity")


@dataclass(frozen=True)
class ExportOptions:
    """How to draw and place what is exported; the defaults suit single photographs."""

    depth_range: tuple[float, float] | None = None  # of 16-bit PNG and colours; fix it for a video
    uncertainty_max: float | None = None  # drawn brightest; the 95th percentile by default
    intrinsics: Intrinsics | None = None  # of the point cloud; without them field_of_view counts
    field_of_view: float = 60.0  # degrees across the longer side
    keep_fraction: float = 0.9  # of the points, the most certain ones, where there is an uncertainty
    max_uncertainty: float | None = None  # of a point, in the cloud's units
    relative_range: tuple[float, float] = (1.0, 3.0)  # nearest and farthest distance of a relative point cloud


@dataclass(frozen=True)
class _Job:
    """One file to write."""

    record: DepthRecord
    layer: str
    path: Path
    options: ExportOptions
    overwrite: bool

    @property
    def values(self) -> np.ndarray:
        return self.record.layers[self.layer]

    @property
    def note(self) -> str:
        return json.dumps({"quantity": self.layer, "units": self.record.units, **self.record.metadata})


def _write_png16(job: _Job) -> None:
    values, units, value_range = job.values, job.record.units, job.options.depth_range
    if job.layer in ("uncertainty", "epistemic"):
        value_range = 0.0, float(values.max())
    elif value_range is None and units == "relative" and values.min() >= 0 and values.max() <= 1:
        value_range = 0.0, 1.0  # what readers without our text chunks expect
    text = {"metadata": job.note}
    save_png16(job.path, values, value_range=value_range, units=units, metadata=text, overwrite=job.overwrite)


def _write_tiff(job: _Job) -> None:
    save_tiff(job.path, job.values, description=job.note, overwrite=job.overwrite)


def _write_npz(job: _Job) -> None:
    maps = {name: getattr(job.record, name) for name in ("depth", "uncertainty", "epistemic", "interval")}
    arrays = {name: np.asarray(values, dtype=np.float32) for name, values in maps.items() if values is not None}
    level = {} if job.record.coverage is None else {"coverage": np.array(job.record.coverage)}
    save_npz(job.path, overwrite=job.overwrite, **arrays, **level, metadata=job.note)


def _write_color(job: _Job) -> None:
    picture = color_depth(job.record.depth, value_range=job.options.depth_range, inverse=job.record.is_disparity)
    save_image(job.path, picture, overwrite=job.overwrite)


def _write_uncertainty(job: _Job) -> None:
    shared = saturation(job.record.layers.get("uncertainty", job.values))  # so that total and epistemic compare
    picture = color_uncertainty(job.values, vmax=job.options.uncertainty_max or shared)
    save_image(job.path, picture, overwrite=job.overwrite)


def draw_sheet(record: DepthRecord, options: ExportOptions | None = None, title: str = "") -> Image.Image:
    """Photograph, depth and uncertainty side by side."""
    options = options or ExportOptions()
    look: dict[str, Any] = {"title": title, "units": record.units}
    look |= {"value_range": options.depth_range, "vmax": options.uncertainty_max, "inverse": record.is_disparity}
    return sheet(record.image, record.depth, record.uncertainty, record.epistemic, **look)


def _write_sheet(job: _Job) -> None:
    title = job.path.stem.removesuffix("_sheet").encode("utf-8", "backslashreplace").decode()  # fonts take text alone
    save_image(job.path, draw_sheet(job.record, job.options, title), overwrite=job.overwrite)


def _write_ply(job: _Job) -> None:
    near_far = _near_far(job.record, job.options)
    z, std = place(job.record.depth, job.record.uncertainty, inverse=job.record.is_disparity, near_far=near_far)
    settings: dict[str, Any] = {**_lens(job.options), "uncertainty": std}
    if std is not None:
        settings |= {"keep_fraction": job.options.keep_fraction, "max_uncertainty": job.options.max_uncertainty}
    comment = "relative depth at an assumed distance" if near_far else f"units {job.record.units}"
    save_ply(job.path, z, job.record.image, comment=comment, overwrite=job.overwrite, **settings)


def _near_far(record: DepthRecord, options: ExportOptions) -> tuple[float, float] | None:
    return options.relative_range if record.units == "relative" else None


def _lens(options: ExportOptions) -> dict[str, Any]:
    return {"intrinsics": options.intrinsics} if options.intrinsics else {"field_of_view": options.field_of_view}


@dataclass(frozen=True)
class PointCloud:
    """Points of a picture in space; x to the right, y up, z towards the viewer."""

    points: np.ndarray  # (N, 3)
    colors: np.ndarray  # (N, 3) uint8
    uncertainty: np.ndarray | None = None  # (N,) standard deviation of the distance

    def save(self, path: str | Path, *, overwrite: bool = False) -> Path:
        """Write a binary PLY file."""
        with atomic_path(path, overwrite=overwrite) as temporary:
            header = ply_header(len(self.points), self.uncertainty is not None, "")
            temporary.write_bytes(header + ply_vertices(self.points, self.colors, self.uncertainty))
        return Path(path)


def point_cloud(record: DepthRecord, options: ExportOptions | None = None) -> PointCloud:
    """The points that the format "ply" writes."""
    options = options or ExportOptions()
    near_far = _near_far(record, options)
    z, std = place(record.depth, record.uncertainty, inverse=record.is_disparity, near_far=near_far)
    limits = (None, None) if std is None else (options.max_uncertainty, options.keep_fraction)
    keep = confident(std, np.isfinite(z) & (z > 0), *limits)
    points, colors = colored_points(z, record.image, **_lens(options))
    return PointCloud(points[keep], colors[keep], None if std is None else std[keep])


@dataclass(frozen=True)
class _Format:
    """One entry of :data:`FORMATS`: a file for each of `layers` that the record has (None: all), named by `ending`."""

    description: str
    ending: str
    layers: tuple[str, ...] | None
    write: Callable[[_Job], None]


_DEPTH, _SPREAD = ("depth",), ("uncertainty", "epistemic")
FORMATS: dict[str, _Format] = {
    "png16": _Format("16-bit PNG that records its scale, one per map", "_{layer}_16bit.png", None, _write_png16),
    "tiff": _Format("float32 TIFF, one per map", "_{layer}.tiff", None, _write_tiff),
    "npz": _Format("all maps in one compressed numpy file", ".npz", _DEPTH, _write_npz),
    "color": _Format("coloured depth", "_depth_color.png", _DEPTH, _write_color),
    "uncertainty": _Format("coloured uncertainty", "_{layer}_color.png", _SPREAD, _write_uncertainty),
    "sheet": _Format("photograph, depth and uncertainty side by side", "_sheet.png", _DEPTH, _write_sheet),
    "ply": _Format("point cloud of the most certain points", ".ply", _DEPTH, _write_ply),
}


def output_paths(
    folder: str | Path, stem: str, formats: Sequence[str], layers: Iterable[str] = _DEPTH
) -> dict[Path, tuple[str, str]]:
    """Files that :func:`export` will write for a record with these layers, each with its (format, layer)."""
    if not stem or Path(stem).name != stem:
        raise ValueError(f"stem is the start of a file name, without folders, but got {stem!r}")
    paths = {}
    for name in formats:
        if name not in FORMATS:
            raise ValueError(f"unknown format {name!r}; choose from {', '.join(FORMATS)}")
        wanted = [layer for layer in layers if layer in (FORMATS[name].layers or (layer,))]
        if not wanted:
            raise ValueError(f"format {name!r} needs an uncertainty, but there is none; predict it or drop {name!r}")
        for layer in wanted:
            paths[Path(folder) / (stem + FORMATS[name].ending.format(layer=layer))] = (name, layer)
    return paths


def export(
    record: DepthRecord,
    folder: str | Path,
    stem: str,
    formats: Sequence[str],
    *,
    overwrite: bool = False,
    options: ExportOptions | None = None,
) -> list[Path]:
    """Write a prediction in each of `formats` (see :data:`FORMATS`) as folder/stem...; returns the files written.

    The folder is created. If one of the files exists and `overwrite` is not set, none is written.
    """
    paths = output_paths(folder, stem, formats, record.layers)
    existing = [str(path) for path in paths if path.exists()]
    if existing and not overwrite:
        raise FileExistsError(f"{', '.join(existing)} exist; pass overwrite=True to replace them")
    make_folder(folder)
    for path, (name, layer) in paths.items():
        FORMATS[name].write(_Job(record, layer, path, options or ExportOptions(), overwrite))
    return list(paths)
