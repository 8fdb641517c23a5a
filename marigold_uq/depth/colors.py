"""What people look at: depth and uncertainty as colours, coloured points in space, and a sheet with all side by side.

No function here touches pyplot or any other global state, so all of them are safe in servers and worker threads.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import ArrayLike
from PIL import Image

_DEPTH_CMAP = "Spectral"  # Marigold's choice: near is warm, far is cold
_UNCERTAINTY_CMAP = "magma"  # dark is certain
_BAND_PIXELS = 2**20
_SHEET_EDGE = 2048  # of what a sheet is drawn from: more would be lost at its resolution
INVALID_COLOR = (128, 128, 128)  # pixels that are NaN or infinite


def color_depth(
    depth: ArrayLike, *, value_range: tuple[float, float] | None = None, inverse: bool = False, cmap: str = _DEPTH_CMAP
) -> np.ndarray:
    """(H, W) -> (H, W, 3) uint8; near is warm.

    Args:
        depth: the map; NaN and infinite pixels become grey.
        value_range: values drawn with the two ends of the colour map, the map's own minimum and maximum by default.
            Give it for a video, so that colours keep their meaning from frame to frame.
        inverse: larger values are nearer (disparity).
        cmap: any matplotlib colour map whose low end is the one for near.
    """
    values = check_map(depth, "depth")
    low, high = value_range if value_range is not None else _finite_range(values)
    return _colorize(values, low, high, _depth_cmap(cmap, inverse))


def color_uncertainty(
    std: ArrayLike, *, vmax: float | None = None, percentile: float = 95.0, cmap: str = _UNCERTAINTY_CMAP
) -> np.ndarray:
    """(H, W) -> (H, W, 3) uint8; zero is dark, `vmax` and above are bright.

    Args:
        std: standard deviation per pixel, not negative; NaN and infinite pixels become grey.
        vmax: standard deviation drawn with the brightest colour. Give it to compare pictures.
        percentile: without `vmax`, this percentile of the map takes its place, so that a few wild pixels do not
            darken the rest. An all-zero map is drawn all dark.
        cmap: any matplotlib colour map.
    """
    values = check_map(std, "uncertainty")
    _check_not_negative(values)
    return _colorize(values, 0.0, saturation(values, percentile) if vmax is None else vmax, cmap)


def as_map(array: ArrayLike, name: str = "the array") -> np.ndarray:
    """`array` as float64, which must be (H, W) and not empty."""
    return check_map(array, name).astype(np.float64, copy=False)


def check_map(array: ArrayLike, name: str = "the array") -> np.ndarray:
    """`array` in its own precision, which must be (H, W) and not empty."""
    values = np.asarray(array)
    if values.ndim != 2 or values.size == 0:
        raise ValueError(f"{name} must be a map (H, W) with at least one pixel, but has shape {values.shape}")
    return values


def _check_not_negative(values: np.ndarray) -> None:
    low = np.min(values, where=np.isfinite(values), initial=0.0)
    if low < 0:
        raise ValueError(f"uncertainty is a standard deviation and cannot be negative, but its minimum is {low:.6g}")


def _finite_range(values: np.ndarray) -> tuple[float, float]:
    finite = _finite(values)
    return (float(finite.min()), float(finite.max())) if finite.size else (0.0, 1.0)


def _finite(values: np.ndarray) -> np.ndarray:
    """Without NaN and infinity; no copy where there are none."""
    finite = np.isfinite(values)
    return values if finite.all() else values[finite]


def saturation(std: ArrayLike, percentile: float = 95.0) -> float:
    """The standard deviation to draw brightest: a percentile, or the maximum where that is zero (most is certain)."""
    finite = _finite(check_map(std, "uncertainty"))
    if not finite.size:
        return 1.0
    return float(np.percentile(finite, percentile)) or float(finite.max())


def _depth_cmap(cmap: str, inverse: bool) -> str:
    return cmap if not inverse else cmap.removesuffix("_r") if cmap.endswith("_r") else f"{cmap}_r"


def _colorize(values: np.ndarray, low: float, high: float, cmap: str) -> np.ndarray:
    if not (np.isfinite(low) and np.isfinite(high) and low <= high):
        raise ValueError(f"the colour range must be finite and ordered, but is {low} to {high}")
    span = high - low or 1.0  # a constant map gets the colour of the low end
    colors = np.empty((*values.shape, 3), dtype=np.uint8)
    for rows in row_bands(values.shape):
        band = values[rows].astype(np.float64)
        valid = np.isfinite(band)
        unit = np.clip((np.where(valid, band, low) - low) / span, 0.0, 1.0)
        drawn = matplotlib.colormaps[cmap](unit, bytes=True)[..., :3]  # (h, W, 3)
        colors[rows] = np.where(valid[..., None], drawn, np.array(INVALID_COLOR, dtype=np.uint8))
    return colors


def row_bands(shape: tuple[int, ...]) -> Iterator[slice]:
    """Rows of a map (H, W), as many at a time as make about a million pixels."""
    rows = max(1, _BAND_PIXELS // shape[1])
    yield from (slice(first, min(first + rows, shape[0])) for first in range(0, shape[0], rows))


# ------------------------------------------------------------------------------------------------------ coloured points

Intrinsics = tuple[float, float, float, float]  # fx, fy, cx, cy in pixels; the centre of the first pixel is (0, 0)


def colored_points(
    depth: ArrayLike,
    image: np.ndarray,
    *,
    intrinsics: Intrinsics | None = None,
    field_of_view: float | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """A depth map as points in space, (H, W, 3), and their colours, (H, W, 3) uint8.

    Pixel (u, v) at depth z becomes x = (u - cx) z / fx to the right, y = -(v - cy) z / fy up, and -z forward: the axes
    of OpenGL and glTF, so that viewers show it upright. Multiply y and z by -1 for OpenCV's axes.

    Args:
        depth: (H, W) distance along the optical axis.
        image: (H', W', 3) uint8; resized if its size differs from the depth's.
        intrinsics: (fx, fy, cx, cy) in pixels of `depth`.
        field_of_view: instead of intrinsics, the angle in degrees across the longer side of a camera with square pixels
            and its axis in the centre.
    """
    z = as_map(depth, "depth")
    fx, fy, cx, cy = resolve_intrinsics(z.shape, intrinsics, field_of_view)
    v, u = np.indices(z.shape)
    points = np.stack([(u - cx) / fx * z, -(v - cy) / fy * z, -z], axis=-1)  # (H, W, 3)
    return points, picture_at(image, z.shape)


def picture_at(image: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """(H', W', 3) uint8 at the size (H, W) of a map."""
    if image.shape[:2] == shape:
        return image
    return np.asarray(Image.fromarray(image).resize((shape[1], shape[0]), Image.Resampling.BOX))


def place(
    values: ArrayLike,
    std: ArrayLike | None = None,
    *,
    inverse: bool = False,
    near_far: tuple[float, float] | None = None,
) -> tuple[np.ndarray, np.ndarray | None]:
    """Distances z, (H, W), from depth or disparity, and their standard deviation to first order, |dz/dvalue| std.

    Metric depth is z and metric disparity 1 / z. Relative values in [0, 1] know neither scale nor shift: they are put
    between `near_far`, with z affine in relative depth, and 1 / z affine in relative disparity.

    Args:
        values: (H, W).
        std: (H, W) standard deviation of `values`.
        inverse: `values` are disparities.
        near_far: distances of the nearest and farthest relative value; None for metric values.
    """
    raw = _in_own_precision(values)
    if near_far is not None and not 0 < near_far[0] < near_far[1] < np.inf:
        raise ValueError(f"near_far must be two distances, 0 < near < far, but got {near_far}")
    low, high = (0.0, 1.0) if near_far is None else (1 / near_far[1], 1 / near_far[0]) if inverse else near_far
    placed = low + (high - low) * raw
    if not inverse:
        return placed, None if std is None else (high - low) * _in_own_precision(std)
    with np.errstate(divide="ignore"):  # disparity 0 is infinitely far
        z = 1.0 / placed
    return z, None if std is None else (high - low) * z**2 * _in_own_precision(std)


def _in_own_precision(values: ArrayLike) -> np.ndarray:
    """A map that stays float32 if it is: a large one is held only once."""
    found = check_map(values)
    return found if found.dtype == np.float32 else found.astype(np.float64)


def resolve_intrinsics(
    shape: tuple[int, ...], intrinsics: Intrinsics | None, field_of_view: float | None
) -> Intrinsics:
    if (intrinsics is None) == (field_of_view is None):
        raise ValueError("give either intrinsics=(fx, fy, cx, cy) or field_of_view in degrees")
    if intrinsics is not None:
        if len(intrinsics) != 4 or min(intrinsics[:2]) <= 0:
            raise ValueError(f"intrinsics are (fx, fy, cx, cy) with positive fx and fy, but got {intrinsics}")
        return intrinsics
    if field_of_view is None or not 0 < field_of_view < 180:
        raise ValueError(f"field_of_view is an angle in degrees between 0 and 180, but got {field_of_view}")
    focal = max(shape) / 2 / float(np.tan(np.radians(field_of_view) / 2))
    return focal, focal, (shape[1] - 1) / 2, (shape[0] - 1) / 2


def confident(
    uncertainty: np.ndarray | None, valid: np.ndarray, max_uncertainty: float | None, keep_fraction: float | None
) -> np.ndarray:
    """Those of the `valid` pixels, (H, W), that are certain enough; the fraction is counted among them."""
    if uncertainty is None:
        if max_uncertainty is not None or keep_fraction is not None:
            raise ValueError("filtering by max_uncertainty or keep_fraction needs an uncertainty map")
        return valid
    if uncertainty.shape != valid.shape:
        raise ValueError(f"uncertainty has shape {uncertainty.shape}, but depth has {valid.shape}")
    if keep_fraction is not None and not 0 < keep_fraction <= 1:
        raise ValueError(f"keep_fraction must be in (0, 1], but got {keep_fraction}")
    limit = np.inf if max_uncertainty is None else max_uncertainty
    if keep_fraction is not None and valid.any():
        limit = min(limit, _quantile(uncertainty if valid.all() else uncertainty[valid], keep_fraction))
    return np.asarray(valid & (uncertainty <= limit))


def _quantile(values: np.ndarray, level: float) -> float:
    """The smallest value that this share of all do not exceed."""
    rank = max(0, math.ceil(values.size * level) - 1)
    return float(np.partition(values, rank, axis=None)[rank])


def ply_header(count: int, has_uncertainty: bool, comment: str) -> bytes:
    """What comes before the vertices of a binary little-endian PLY file."""
    layout = _ply_layout(has_uncertainty)
    properties = [f"property {'uchar' if kind == 'u1' else 'float'} {name}" for name, kind in layout]
    comments = ["comment x right, y up, z backward"] + ([f"comment {' '.join(comment.split())}"] if comment else [])
    lines = ["ply", "format binary_little_endian 1.0", *comments, f"element vertex {count}", *properties]
    return "\n".join([*lines, "end_header", ""]).encode("ascii", "replace")


def ply_vertices(points: np.ndarray, colors: np.ndarray, uncertainty: np.ndarray | None) -> bytes:
    """Points (N, 3), colours (N, 3) uint8 and standard deviations (N,) as they follow the header."""
    layout = _ply_layout(uncertainty is not None)
    columns = [*points.T, *colors.T, *([] if uncertainty is None else [uncertainty])]
    vertices = np.empty(len(points), dtype=layout)
    for (name, _), column in zip(layout, columns, strict=True):
        vertices[name] = column
    return vertices.tobytes()


def _ply_layout(has_uncertainty: bool) -> list[tuple[str, str]]:
    spread = [("uncertainty", "<f4")] if has_uncertainty else []
    return [*((name, "<f4") for name in "xyz"), *((name, "u1") for name in ("red", "green", "blue")), *spread]


# ------------------------------------------------------------------------------------------------------------- sheet

_FAINT = "#6b7280"
_PLAIN: dict[str, Any] = {"color": "#1f2430", "parse_math": False}  # a file name may hold dollars
# Inches: height of a panel in a row, width of a stacked panel; then margins, heading of a panel, room for its scale.
_ROW_HEIGHT, _COLUMN_WIDTH = 3.4, 9.0
_MARGIN, _GAP, _TITLE, _HEAD, _SCALE = 0.25, 0.25, 0.36, 0.30, 0.42


@dataclass(frozen=True)
class _Panel:
    """One picture of the sheet, with the colour scale below it (none for the photograph)."""

    title: str
    note: str
    pixels: np.ndarray  # (H, W, 3) uint8
    cmap: str = ""
    limits: tuple[float, float] = (0.0, 1.0)
    ends: tuple[str, str] | None = None  # words instead of numbers at the ends of the scale
    saturated: bool = False


def sheet(
    image: np.ndarray,
    depth: ArrayLike,
    uncertainty: ArrayLike | None = None,
    epistemic: ArrayLike | None = None,
    *,
    title: str = "",
    units: str = "relative",
    value_range: tuple[float, float] | None = None,
    vmax: float | None = None,
    inverse: bool = False,
    dpi: int = 150,
) -> Image.Image:
    """Photograph, depth, uncertainty and (if given) its epistemic part side by side, each with its colour scale.

    Both uncertainties share one colour scale, so that they can be compared. Panoramas are stacked instead.

    Args:
        image: (H, W, 3) uint8.
        depth: (H, W); its size may differ from the photograph's.
        uncertainty: (H, W) standard deviation of the depth.
        epistemic: (H, W) standard deviation of its epistemic part.
        title: printed on top, for example the file's name.
        units: "relative", or the unit of depth and uncertainty, for example "m".
        value_range: as in :func:`color_depth`.
        vmax: as in :func:`color_uncertainty`.
        inverse: as in :func:`color_depth`.
        dpi: resolution; a row of panels is about 4 inches high.
    """
    panels = [_Panel("Input", f"{image.shape[1]} x {image.shape[0]}", _shrunk(np.asarray(image, dtype=np.uint8)))]
    panels.append(_depth_panel(check_map(depth, "depth"), units, value_range, inverse))
    panels += _uncertainty_panels(uncertainty, epistemic, units, vmax)
    return _draw(panels, title, dpi)


def _shrunk(pixels: np.ndarray) -> np.ndarray:
    """A picture (H, W, 3) uint8 or a map (H, W) at the size that a sheet is drawn from."""
    factor = _SHEET_EDGE / max(pixels.shape[:2])
    if factor >= 1:
        return pixels
    size = max(1, round(pixels.shape[1] * factor)), max(1, round(pixels.shape[0] * factor))
    picture = Image.fromarray(pixels if pixels.dtype == np.uint8 else pixels.astype(np.float32, copy=False))
    return np.asarray(picture.resize(size, Image.Resampling.BOX))


def _depth_panel(depth: np.ndarray, units: str, value_range: tuple[float, float] | None, inverse: bool) -> _Panel:
    low, high = value_range if value_range is not None else _finite_range(depth)
    name = "Disparity" if inverse else "Depth"
    high = high if high > low else low + 1.0  # a constant map still gets a scale with two ends
    ends = (("far", "near") if inverse else ("near", "far")) if units == "relative" else None
    pixels = color_depth(_shrunk(depth), value_range=(low, high), inverse=inverse)
    return _Panel(name, units, pixels, _depth_cmap(_DEPTH_CMAP, inverse), (low, high), ends)


def _uncertainty_panels(
    uncertainty: ArrayLike | None, epistemic: ArrayLike | None, units: str, vmax: float | None
) -> list[_Panel]:
    note = "std" if units == "relative" else f"std, {units}"
    given = [("Uncertainty", uncertainty), ("Epistemic part", epistemic)]
    maps = [(name, check_map(values, name.lower())) for name, values in given if values is not None]
    if not maps:
        return []
    top = saturation(maps[0][1]) if vmax is None else vmax
    return [_uncertainty_panel(name, note, values, top) for name, values in maps]


def _uncertainty_panel(name: str, note: str, std: np.ndarray, top: float) -> _Panel:
    saturated = bool(_finite_range(std)[1] > top)
    pixels = color_uncertainty(_shrunk(std), vmax=top)
    return _Panel(name, note, pixels, _UNCERTAINTY_CMAP, (0.0, top or 1.0), saturated=saturated)


def _draw(panels: list[_Panel], title: str, dpi: int) -> Image.Image:
    """Lay the panels out in a row, or in a column if they are very wide, and render them."""
    height, width = panels[0].pixels.shape[:2]
    aspect = float(np.clip(width / height, 0.5, 12.0))  # beyond these the picture is stretched, or it would be a line
    stacked = aspect > 2.5
    size = (_COLUMN_WIDTH, _COLUMN_WIDTH / aspect) if stacked else (_ROW_HEIGHT * aspect, _ROW_HEIGHT)
    places, (figure_w, figure_h) = _place(panels, size, stacked, _MARGIN + (_TITLE if title else 0.0))
    figure = Figure(figsize=(figure_w, figure_h), dpi=dpi, facecolor="white")
    canvas = FigureCanvasAgg(figure)
    if title:
        figure.text(_MARGIN / figure_w, 1 - _MARGIN / figure_h, title, size=13, weight="bold", va="top", **_PLAIN)
    for panel, (left, top) in zip(panels, places, strict=True):
        _draw_panel(figure, panel, left, figure_h - top - size[1], *size)
    canvas.draw()
    return Image.fromarray(np.asarray(canvas.buffer_rgba())[..., :3].copy())


def _place(
    panels: list[_Panel], size: tuple[float, float], stacked: bool, top: float
) -> tuple[list[tuple[float, float]], tuple[float, float]]:
    """Left and top of every panel and width and height of the whole, in inches from the upper left corner."""
    width, height = size
    if not stacked:
        places = [(_MARGIN + index * (width + _GAP), top + _HEAD) for index in range(len(panels))]
        return places, (places[-1][0] + width + _MARGIN, top + _HEAD + height + _SCALE + _MARGIN / 2)
    places = []
    for panel in panels:
        places.append((_MARGIN, top + _HEAD))
        top += _HEAD + height + (_SCALE if panel.cmap else 0.0) + _GAP / 2
    return places, (width + 2 * _MARGIN, top)


def _draw_panel(figure: Figure, panel: _Panel, left: float, bottom: float, width: float, height: float) -> None:
    """One picture at (left, bottom), in inches, its title above and its colour scale below."""
    figure_w, figure_h = figure.get_size_inches()
    axes = figure.add_axes((left / figure_w, bottom / figure_h, width / figure_w, height / figure_h))
    axes.imshow(panel.pixels, aspect="auto", interpolation="antialiased")
    axes.set(xticks=[], yticks=[])
    axes.spines[:].set_visible(False)
    line = (bottom + height + 0.08) / figure_h
    figure.text(left / figure_w, line, panel.title, size=10.5, weight="bold", **_PLAIN)
    figure.text((left + width) / figure_w, line, panel.note, size=8.5, ha="right", **(_PLAIN | {"color": _FAINT}))
    if panel.cmap:
        rectangle = (left / figure_w, (bottom - 0.16) / figure_h, width / figure_w, 0.09 / figure_h)
        _draw_scale(figure.add_axes(rectangle), panel, width)


def _draw_scale(axes: Axes, panel: _Panel, width: float) -> None:
    """A thin horizontal colour bar in `axes`, which is `width` inches wide."""
    bar = axes.figure.colorbar(
        ScalarMappable(Normalize(*panel.limits), panel.cmap),
        cax=axes,
        orientation="horizontal",
        extend="max" if panel.saturated else "neither",
        extendfrac=0.1 / width,
    )
    bar.outline.set_visible(False)
    low, high = panel.limits
    if panel.ends is not None:
        bar.set_ticks([low, high], labels=list(panel.ends))
    else:
        ticks = MaxNLocator(nbins=4 if width > 2.2 else 2).tick_values(low, high)
        bar.set_ticks([tick for tick in ticks if low <= tick <= high])
    axes.tick_params(length=0 if panel.ends else 2.5, width=0.6, pad=2.5, labelsize=8, color=_FAINT, labelcolor=_FAINT)
    for tick, label in zip(bar.get_ticks(), axes.get_xticklabels(), strict=True):  # labels stay within the panel
        near_end = (tick - low) / ((high - low) or 1.0)
        label.set_horizontalalignment("left" if near_end < 0.05 else "right" if near_end > 0.95 else "center")
