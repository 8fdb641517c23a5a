"""Your own data: a folder of images and a folder of depth files, matched by name or by an index file."""

import csv
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from marigold_uq.depth.data.base import DepthDataset
from marigold_uq.depth.data.decoding import FORMAT_OF_SUFFIX, decode_depth, decode_image, format_of
from marigold_uq.depth.data.sample import KINDS, DepthDataError, DepthSample, assemble_sample, to_depth
from marigold_uq.depth.data.storage import FolderStorage

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".ppm")
_IMAGE_FOLDERS = ("rgb", "images", "image")
_DEPTH_FOLDERS = ("depth", "depths")
_INDEX_FILES = ("index.json", "index.csv")


@dataclass(frozen=True)
class FolderRecord:
    """One row: paths relative to the root (None if the partner is missing), and how to read the depth."""

    name: str
    image: str | None
    depth: str | None
    depth_scale: float | None = None
    kind: str = "depth_m"
    group: str = ""


class ImageDepthFolder(DepthDataset):
    """Pairs of an image and a depth file below `root`.

    Without an index, files with the same path and stem below the two folders belong together
    (`rgb/a/7.jpg` and `depth/a/7.png`). An index is a JSON list of objects or a CSV with a header; its columns are
    `image` and `depth` (paths relative to `root`), or `name` (the stem in both folders), and optionally
    `depth_scale`, `kind` and `group`; other columns are ignored.

    Args:
        root: the folder that paths are relative to.
        index: the index file, relative to `root` or absolute; by default `index.json` or `index.csv` if there is one.
        images, depths: the two folders; by default the first that exists of rgb, images, image and of depth, depths.
        depth_scale: depth = stored value / depth_scale. Integer files (16-bit PNG) need it, here or in the index; float
            files (npy, npz, EXR, TIFF) default to 1.
        kind: "depth_m", or "disparity_px": then depth is 1 / disparity, right up to a factor.
        min_depth, max_depth: a pixel is valid if its depth is finite and strictly between them.
        on_error: "raise" or "skip", see `DepthDataset`.
    """

    def __init__(
        self,
        root: str | Path,
        index: str | Path | None = None,
        *,
        images: str | None = None,
        depths: str | None = None,
        depth_scale: float | None = None,
        kind: str = "depth_m",
        min_depth: float = 0.0,
        max_depth: float = float("inf"),
        on_error: str = "raise",
    ) -> None:
        self.storage = FolderStorage(_existing_folder(Path(root)))
        self.min_depth, self.max_depth = min_depth, max_depth
        folders = _Folders(self.storage.root, images, depths)
        index_file = _find_index(self.storage.root, index)
        if index_file is None:
            self.records = folders.pair_by_stem(depth_scale, kind)
        else:
            rows = _read_index(index_file)
            self.records = [_record(row, i, index_file, folders, depth_scale, kind) for i, row in enumerate(rows)]
        if not self.records:
            raise DepthDataError("no sample found", str(index_file or self.storage.root))
        super().__init__(len(self.records), on_error)

    def name_of(self, index: int) -> str:
        """The index's `name`, or the image's path without its ending."""
        return self.records[index].name

    @property
    def groups(self) -> dict[str, str]:
        """Sample name -> the index's `group` ("" without one), for averages per source."""
        return {record.name: record.group for record in self.records}

    def read(self, index: int) -> DepthSample:
        """Decode the files of sample `index`."""
        record = self.records[index]
        if record.image is None or record.depth is None:
            raise DepthDataError(f"missing {'image' if record.image is None else 'depth'} file", record.name)
        image = decode_image(self.storage.read(record.image), record.image)  # (3, H, W)
        data = self.storage.read(record.depth)
        values = decode_depth(data, format_of(record.depth), record.depth, (image.shape[1], image.shape[2]))
        depth = to_depth(values, record.depth_scale, record.kind, record.depth)
        return assemble_sample(record.name, image, depth, min_depth=self.min_depth, max_depth=self.max_depth)


class _Folders:
    """The image and the depth folder, listed once: path without ending -> path relative to the root."""

    def __init__(self, root: Path, images: str | None, depths: str | None) -> None:
        self.root = root
        self.images = self._stems(images, _IMAGE_FOLDERS, IMAGE_SUFFIXES)
        self.depths = self._stems(depths, _DEPTH_FOLDERS, tuple(FORMAT_OF_SUFFIX))

    def _stems(self, given: str | None, usual: tuple[str, ...], suffixes: tuple[str, ...]) -> dict[str, str]:
        names = [given] if given is not None else [name for name in usual if (self.root / name).is_dir()]
        if not names:
            return {}  # an index with full paths needs no folder
        folder = _existing_folder(self.root / names[0])
        stems: dict[str, str] = {}
        for name in FolderStorage(folder).names():
            path = Path(name)
            if path.suffix.lower() not in suffixes or path.name.startswith("."):
                continue
            stem = path.with_suffix("").as_posix()
            if stem in stems:
                raise DepthDataError(
                    f"two files have the stem {stem!r}: {stems[stem]} and {names[0]}/{name}", str(folder)
                )
            stems[stem] = f"{names[0]}/{name}"
        return stems

    def pair_by_stem(self, depth_scale: float | None, kind: str) -> list[FolderRecord]:
        """One record per stem found in either folder, sorted."""
        if not self.images or not self.depths:
            missing = "image" if not self.images else "depth"
            raise DepthDataError(
                f"no {missing} files found; expected the folders {' | '.join(_IMAGE_FOLDERS)} and "
                f"{' | '.join(_DEPTH_FOLDERS)}, or an index ({' | '.join(_INDEX_FILES)})",
                str(self.root),
            )
        stems = sorted(set(self.images) | set(self.depths))
        return [FolderRecord(s, self.images.get(s), self.depths.get(s), depth_scale, kind) for s in stems]


def _existing_folder(folder: Path) -> Path:
    if not folder.is_dir():
        raise DepthDataError("is not a folder", str(folder))
    return folder


def _find_index(root: Path, index: str | Path | None) -> Path | None:
    if index is None:
        return next((root / name for name in _INDEX_FILES if (root / name).is_file()), None)
    path = root / index
    if not path.is_file():
        raise DepthDataError("the index file does not exist", str(path))
    return path


def _read_index(path: Path) -> list[dict[str, Any]]:
    """Rows of a JSON list or a CSV."""
    try:
        if path.suffix.lower() == ".csv":
            with path.open(newline="", encoding="utf-8") as file:
                return list(csv.DictReader(file))
        rows = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, csv.Error) as error:
        raise DepthDataError(f"is not a readable index (JSON list or CSV): {error}", str(path)) from error
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise DepthDataError("must hold a list of objects, one per sample", str(path))
    return rows


def _record(
    row: dict[str, Any], number: int, index: Path, folders: _Folders, depth_scale: float | None, kind: str
) -> FolderRecord:
    """One row of the index; empty cells count as absent."""
    cells = {key: value for key, value in row.items() if value not in (None, "")}
    name = str(cells["name"]) if "name" in cells else None
    image = cells.get("image", folders.images.get(name) if name else None)
    depth = cells.get("depth", folders.depths.get(name) if name else None)
    if name is None:
        if image is None:
            raise DepthDataError(f"row {number} needs image and depth, or name; it has {sorted(row)}", str(index))
        name = Path(image).with_suffix("").as_posix()
    kind = cells.get("kind", kind)
    if kind not in KINDS:
        raise DepthDataError(f"row {number}: unknown kind {kind!r}; known: {', '.join(KINDS)}", str(index))
    scale = _number(cells.get("depth_scale", depth_scale), number, index)
    return FolderRecord(name, image, depth, scale, kind, str(cells.get("group", "")))


def _number(value: Any, number: int, index: Path) -> float | None:
    try:
        return None if value is None else float(value)
    except (TypeError, ValueError):
        raise DepthDataError(f"row {number}: depth_scale {value!r} is not a number", str(index)) from None
