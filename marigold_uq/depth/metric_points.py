"""Known distances at some pixels, from a CSV file or a COLMAP model, and depth in their unit by them.

COLMAP's points are in units of its own until its model is scaled; their unit is the unit of the result.
"""

from __future__ import annotations

import csv
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from marigold_uq.alignment import MetricAlignment, fit_metric
from marigold_uq.depth.colors import Intrinsics
from marigold_uq.depth.export import DepthRecord

__all__ = ["MetricPoints", "PointsOfPictures", "read_metric_points", "to_metric"]

_COLUMNS = ("x", "y", "depth")
_CAMERA_PARAMETERS = {
    "SIMPLE_PINHOLE": 3, "PINHOLE": 4, "SIMPLE_RADIAL": 4, "RADIAL": 5, "OPENCV": 8, "OPENCV_FISHEYE": 8,
    "FULL_OPENCV": 12, "FOV": 5, "SIMPLE_RADIAL_FISHEYE": 4, "RADIAL_FISHEYE": 5, "THIN_PRISM_FISHEYE": 12,
}  # fmt: skip
"""COLMAP's models of a camera, in the order of their numbers."""
_NEAREST = 1e-6  # disparity below this is as far as a number can say


@dataclass(frozen=True)
class MetricPoints:
    """Distances along the optical axis at points of a picture.

    Attributes:
        xy: (N, 2), column and row, whole at the centres of pixels.
        depth: (N,), positive.
        size: Width and height of the picture in which the points were found; None: of the picture itself.
        intrinsics: (fx, fy, cx, cy) in that picture, where they are known.
    """

    xy: np.ndarray
    depth: np.ndarray
    size: tuple[int, int] | None = None
    intrinsics: Intrinsics | None = None

    def at_size(self, width: int, height: int) -> MetricPoints:
        """The same in a picture of another size; what lies outside or behind the camera is dropped."""
        across, down = (1.0, 1.0) if self.size is None else (width / self.size[0], height / self.size[1])
        xy = (self.xy + 0.5) * [across, down] - 0.5
        inside = (xy >= -0.5).all(1) & (xy <= [width - 0.5, height - 0.5]).all(1) & (self.depth > 0)
        lens = self.intrinsics
        if lens is not None:
            fx, fy, cx, cy = lens
            lens = (fx * across, fy * down, (cx + 0.5) * across - 0.5, (cy + 0.5) * down - 0.5)
        return MetricPoints(xy[inside], self.depth[inside], (width, height), lens)


@dataclass(frozen=True)
class PointsOfPictures:
    """Points per picture: by file name, by path below the folder of pictures, or without; None serves every picture."""

    path: Path
    by_picture: Mapping[str | None, MetricPoints]

    def of(self, picture: Path) -> MetricPoints:
        """Those of a picture; a ValueError that names some pictures if there are none."""
        names = [picture.as_posix(), *("/".join(picture.parts[-count:]) for count in range(len(picture.parts), 0, -1))]
        for name in [*names, picture.stem, None]:
            if name in self.by_picture:
                return self.by_picture[name]
        known = ", ".join(sorted(str(name) for name in self.by_picture)[:3])
        raise ValueError(f"{self.path} has no metric points of {picture.name}; it has those of {known}, ...")


def read_metric_points(path: Path) -> PointsOfPictures:
    """A CSV file with the columns x, y, depth and, for several pictures, image; or a folder of a COLMAP model.

    Raises:
        FileNotFoundError: Neither is there.
        ValueError: The file has other columns, or damaged numbers.
    """
    path = path.expanduser()
    if path.is_dir():
        return PointsOfPictures(path, _read_colmap(path))
    if not path.is_file():
        raise FileNotFoundError(f"no metric points at {path}: give a CSV file, or a folder with a COLMAP model")
    return PointsOfPictures(path, _read_csv(path))


def to_metric(record: DepthRecord, points: MetricPoints, unit: str) -> DepthRecord:
    """Depth, standard deviation and interval in the unit of the points, from a robust fit of scale and shift.

    Disparity is fitted as such and comes back as depth.
    """
    height, width = record.depth.shape
    own = points.at_size(width, height)
    value, std = torch.from_numpy(record.depth), None
    if record.uncertainty is not None:
        std = torch.from_numpy(record.uncertainty)
    known = torch.from_numpy(own.depth)
    target = 1 / known if record.is_disparity else known
    fit = fit_metric(value, torch.from_numpy(own.xy), target, uncertainty=std)
    depth, spread = fit.apply(value, std)
    if std is not None and not spread.isfinite().all():  # as many points as parameters tell no error of the fit
        spread = fit.scale * std
    interval = None if record.interval is None else _interval(record, fit, depth, spread)
    epistemic = None if record.epistemic is None else fit.scale * torch.from_numpy(record.epistemic)
    if record.is_disparity:
        depth, slope = 1 / depth.clamp(min=_NEAREST), 1 / depth.clamp(min=_NEAREST).square()
        spread, epistemic = slope * spread, None if epistemic is None else slope * epistemic
        interval = None if interval is None else (1 / interval.clamp(min=_NEAREST)).flip(0)
    facts = {"scale": fit.scale, "shift": fit.shift, "points": len(own.depth), "inliers": fit.num_inliers}
    return replace(
        record,
        depth=depth.numpy(),
        uncertainty=None if std is None else spread.numpy(),
        epistemic=None if epistemic is None else epistemic.numpy(),
        interval=None if interval is None else interval.numpy(),
        metadata={**record.metadata, "units": unit, "prediction_type": "depth", "metric_fit": facts},
    )


def _interval(record: DepthRecord, fit: MetricAlignment, centre: Tensor, spread: Tensor) -> Tensor:
    """Ends moved by the fit, and apart by as much as its error widens the standard deviation; (2, H, W)."""
    assert record.interval is not None
    assert record.uncertainty is not None
    ends = torch.from_numpy(np.ascontiguousarray(record.interval)) * fit.scale + fit.shift
    before = fit.scale * torch.from_numpy(record.uncertainty)
    wider = torch.where(before > 0, spread / before.clamp(min=torch.finfo(before.dtype).tiny), 1.0)
    return centre + (ends - centre) * wider


# --------------------------------------------------------------------------------------------------------------- CSV


def _read_csv(path: Path) -> dict[str | None, MetricPoints]:
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            found = _rows_by_picture(path, csv.DictReader(file, skipinitialspace=True))
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path} is no CSV file: {error}") from error
    if not found:
        raise ValueError(f"{path} has no points")
    return {name: _points(values, path, name) for name, values in found.items()}


def _rows_by_picture(path: Path, rows: csv.DictReader[str]) -> dict[str | None, list[tuple[float, ...]]]:
    missing = [name for name in _COLUMNS if name not in (rows.fieldnames or [])]
    if missing:
        raise ValueError(
            f"{path} needs the columns {', '.join(_COLUMNS)}, and image for several pictures; it has "
            f"{', '.join(rows.fieldnames or ['none'])}"
        )
    found: dict[str | None, list[tuple[float, ...]]] = {}
    for row in rows:
        try:
            found.setdefault(row.get("image") or None, []).append(tuple(float(row[name]) for name in _COLUMNS))
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path}, line {rows.line_num}: {error}") from error
    return found


def _points(values: Sequence[tuple[float, ...]], path: Path, name: str | None) -> MetricPoints:
    numbers = np.asarray(values)
    if not np.isfinite(numbers).all() or (numbers[:, 2] <= 0).any():
        raise ValueError(f"{path}: points of {name or 'the pictures'} must be finite, with positive depth")
    return MetricPoints(numbers[:, :2], numbers[:, 2])


# ------------------------------------------------------------------------------------------------------------ COLMAP


def _read_colmap(folder: Path) -> dict[str | None, MetricPoints]:
    """A model in its binary or its text form, in the folder or in its sparse/0."""
    for place in (folder, folder / "sparse" / "0", folder / "sparse"):
        for suffix, readers in ((".bin", _BINARY), (".txt", _TEXT)):
            files = [place / f"{name}{suffix}" for name in ("cameras", "images", "points3D")]
            if all(file.is_file() for file in files):
                parts = [_parsed(reader, file) for reader, file in zip(readers, files, strict=True)]
                return _colmap_points(place, *parts)
    raise FileNotFoundError(f"{folder} holds no COLMAP model: cameras, images and points3D, as .bin or .txt")


def _parsed(reader: Any, path: Path) -> Any:
    try:
        with path.open("rb") as file:
            return reader(file)
    except (struct.error, ValueError, LookupError, OverflowError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error


def _colmap_points(
    folder: Path,
    cameras: dict[int, tuple[str, int, int, list[float]]],
    images: list[tuple[str, int, np.ndarray, np.ndarray]],
    points: dict[int, np.ndarray],
) -> dict[str | None, MetricPoints]:
    found: dict[str | None, MetricPoints] = {}
    for name, camera, pose, seen in images:
        if camera not in cameras:
            raise ValueError(f"{folder} is damaged: {name} is of camera {camera}, which is not among its cameras")
        model, width, height, parameters = cameras[camera]
        if len(parameters) < 4 - ("SIMPLE" in model):
            raise ValueError(f"{folder} is damaged: camera {camera}, a {model}, has {len(parameters)} parameters only")
        rows = [row for row in seen if int(row[2]) in points]
        world = np.array([points[int(row[2])] for row in rows]).reshape(-1, 3)
        turn, shift = _rotation(pose[:4]), pose[4:]
        depth = world @ turn[2] + shift[2]
        xy = np.array([row[:2] for row in rows]).reshape(-1, 2) - 0.5  # COLMAP's first pixel has its centre at (.5, .5)
        lens = _lens(model, parameters)
        numbers = np.concatenate([turn.ravel(), xy.ravel(), depth, np.asarray(lens or (), float)])
        if min(width, height) < 1 or not np.isfinite(numbers).all():
            raise ValueError(f"{folder} is damaged: the size, pose, lens or points of {name} are no finite numbers")
        found[name] = MetricPoints(xy, depth, (width, height), lens)
    return found


def _rotation(quaternion: np.ndarray) -> np.ndarray:
    """(3, 3) of (w, x, y, z)."""
    with np.errstate(all="ignore"):  # one of length 0 turns to NaN
        w, x, y, z = quaternion / np.linalg.norm(quaternion)
    return np.array([
        [1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y)],
        [2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x)],
        [2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)],
    ])  # fmt: skip


def _lens(model: str, parameters: Sequence[float]) -> Intrinsics | None:
    """Without distortion; a fish-eye has no lens of this kind."""
    if "FISHEYE" in model or model == "FOV":
        return None
    single = model in ("SIMPLE_PINHOLE", "SIMPLE_RADIAL", "RADIAL")
    fx, fy, cx, cy = (parameters[0], *parameters[:3]) if single else parameters[:4]
    return fx, fy, cx - 0.5, cy - 0.5


def _lines(file: IO[bytes]) -> Iterator[list[str]]:
    """Words of the lines that are no comments; empty lines count, they are images without points."""
    for line in file.read().decode("utf-8").splitlines():
        if not line.startswith("#"):
            yield line.split()


def _text_cameras(file: IO[bytes]) -> dict[int, tuple[str, int, int, list[float]]]:
    return {int(w[0]): (w[1], int(w[2]), int(w[3]), [float(one) for one in w[4:]]) for w in _lines(file) if w}


def _text_images(file: IO[bytes]) -> list[tuple[str, int, np.ndarray, np.ndarray]]:
    lines, found = list(_lines(file)), []
    for head, seen in zip(lines[::2], [*lines[1::2], []], strict=False):
        pose, points = np.array([float(one) for one in head[1:8]]), np.array(seen, dtype=float).reshape(-1, 3)
        if not np.isfinite(points).all():
            raise ValueError(f"points of image {head[0]} are no finite numbers")
        found.append((" ".join(head[9:]), int(head[8]), pose, points))
    return found


def _text_points(file: IO[bytes]) -> dict[int, np.ndarray]:
    return {int(words[0]): np.array([float(words[i]) for i in (1, 2, 3)]) for words in _lines(file) if words}


def _numbers(file: IO[bytes], layout: str) -> tuple[Any, ...]:
    return struct.unpack("<" + layout, _bytes(file, struct.calcsize("<" + layout)))


def _bytes(file: IO[bytes], size: int) -> bytes:
    """So many more bytes; a count that claims more than there are takes no memory."""
    left = os.fstat(file.fileno()).st_size - file.tell()
    if size > left:
        raise ValueError(f"{size} bytes are announced, {left} follow")
    return file.read(size)


def _binary_cameras(file: IO[bytes]) -> dict[int, tuple[str, int, int, list[float]]]:
    found, names = {}, list(_CAMERA_PARAMETERS)
    for _ in range(_numbers(file, "Q")[0]):
        number, model, width, height = _numbers(file, "iiQQ")
        if not 0 <= model < len(names):
            raise ValueError(f"camera model {model} is not one of {len(names)}")
        parameters = list(_numbers(file, f"{_CAMERA_PARAMETERS[names[model]]}d"))
        found[number] = (names[model], width, height, parameters)
    return found


def _binary_images(file: IO[bytes]) -> list[tuple[str, int, np.ndarray, np.ndarray]]:
    found = []
    for _ in range(_numbers(file, "Q")[0]):
        _, *pose, camera = _numbers(file, "i7di")
        name = b""
        while (letter := _numbers(file, "c")[0]) != b"\0":
            name += letter
        (count,) = _numbers(file, "Q")
        seen = np.frombuffer(
            _bytes(file, 24 * count), dtype=[("x", "<f8"), ("y", "<f8"), ("point", "<i8")], count=count
        )
        rows = np.stack([seen["x"], seen["y"], seen["point"].astype(float)], 1)
        found.append((name.decode("utf-8"), camera, np.array(pose), rows))
    return found


def _binary_points(file: IO[bytes]) -> dict[int, np.ndarray]:
    found = {}
    for _ in range(_numbers(file, "Q")[0]):
        number, *values = _numbers(file, "Q3d3Bd")
        found[number] = np.array(values[:3])
        (seen_by,) = _numbers(file, "Q")
        _numbers(file, f"{2 * seen_by}i")
    return found


_TEXT = (_text_cameras, _text_images, _text_points)
_BINARY = (_binary_cameras, _binary_images, _binary_points)
