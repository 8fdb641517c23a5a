"""A published depth data set: one reader for every `DepthSpec`, over a folder or a tar, with or without a list."""

import dataclasses
import posixpath
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from marigold_uq.depth.data.base import DepthDataset
from marigold_uq.depth.data.decoding import Size, decode_depth, decode_image
from marigold_uq.depth.data.sample import DepthDataError, DepthSample, assemble_sample, to_depth
from marigold_uq.depth.data.specs import DepthSpec
from marigold_uq.depth.data.storage import Storage, open_storage

_NO_DEPTH = "None"  # what a list says where a frame has no ground truth


@dataclasses.dataclass(frozen=True)
class ListEntry:
    """The files of one sample, relative to the data set's root."""

    image: str
    depth: str
    mask: str | None = None

    @property
    def name(self) -> str:
        """The image's path without its ending."""
        return posixpath.splitext(self.image)[0]

    def files(self) -> Iterator[tuple[str, str]]:
        """("image" | "depth" | "mask", path) of each file."""
        yield "image", self.image
        yield "depth", self.depth
        if self.mask is not None:
            yield "mask", self.mask


class ListedDepth(DepthDataset):
    """A depth data set in its published file format.

    Args:
        spec: the format, e.g. `SPECS["nyu"]`.
        root: a folder, or an uncompressed tar.
        filenames: a text file with one sample per line, `image depth [mask or further columns]`, relative to `root`.
            Without it, all images below `root` that match the spec are taken: then the number of samples is what is
            there, which need not be the published split.
        on_error: "raise" or "skip", see `DepthDataset`.
        overrides: fields of the spec to replace, e.g. `mask="kitti_garg"` or `resize=None`.

    Attributes:
        entries: the files of every sample.
        lines_without_depth: images that have no ground truth (KITTI) and are therefore not in the set.
    """

    def __init__(
        self,
        spec: DepthSpec,
        root: str | Path,
        filenames: str | Path | None = None,
        *,
        on_error: str = "raise",
        **overrides: object,
    ) -> None:
        self.spec = _override(spec, overrides)
        self.storage: Storage = open_storage(root)
        rows = _discover(self.spec, self.storage) if filenames is None else _read_list(self.spec, Path(filenames))
        absent = _NO_DEPTH if self.spec.depth_may_be_absent else None
        self.lines_without_depth = [row[0] for row in rows if row[1] == absent]
        self.entries = [ListEntry(*row) for row in rows if row[1] != absent]
        if not self.entries:
            raise DepthDataError(_nothing_found(self.spec, filenames), str(root))
        super().__init__(len(self.entries), on_error)

    def name_of(self, index: int) -> str:
        """The image's path without its ending."""
        return self.entries[index].name

    def read(self, index: int) -> DepthSample:
        """Decode the files of sample `index`."""
        entry, spec = self.entries[index], self.spec
        image = decode_image(self.storage.read(entry.image), entry.image)  # (3, H, W)
        size: Size = (image.shape[1], image.shape[2])
        values = decode_depth(self.storage.read(entry.depth), spec.depth_format, entry.depth, size)
        return assemble_sample(
            entry.name,
            image,
            to_depth(values, spec.depth_scale, "depth_m", entry.depth),
            measured=self._measured(entry, size),
            min_depth=spec.min_depth,
            max_depth=spec.max_depth,
            crop=spec.crop,
            mask=spec.mask,
            resize=spec.resize,
        )

    def _measured(self, entry: ListEntry, size: Size) -> NDArray[np.bool_] | None:
        """(H, W), True where the mask file is positive; None for sets without mask files."""
        if entry.mask is None:
            return None
        return decode_depth(self.storage.read(entry.mask), "npy", entry.mask, size).astype(np.float32) > 0


def _override(spec: DepthSpec, overrides: dict[str, object]) -> DepthSpec:
    known = {field.name for field in dataclasses.fields(DepthSpec)}
    unknown = sorted(set(overrides) - known)
    if unknown:
        raise ValueError(f"unknown option {', '.join(unknown)} of {spec.name}; known: {', '.join(sorted(known))}")
    return dataclasses.replace(spec, **overrides)  # type: ignore[arg-type]


def _read_list(spec: DepthSpec, path: Path) -> list[tuple[str, ...]]:
    """(image, depth[, mask]) per line of a filename list; empty lines are passed over."""
    if not path.is_file():
        raise DepthDataError("the filename list does not exist", str(path))
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        columns = line.split()
        if not columns:
            continue
        absent = spec.depth_may_be_absent and columns[1:2] == [_NO_DEPTH]
        if len(columns) < spec.num_columns and not absent:
            raise DepthDataError(
                f"line {number} has {len(columns)} columns, {spec.title} needs {spec.num_columns}: {spec.example!r}",
                str(path),
            )
        folder = posixpath.dirname(columns[0])
        rows.append((columns[0], *(_beside(folder, name) for name in columns[1 : spec.num_columns])))
    return rows


def _beside(folder: str, name: str) -> str:
    """A bare file name means the image's folder."""
    return name if name == _NO_DEPTH or "/" in name else posixpath.join(folder, name)


def _discover(spec: DepthSpec, storage: Storage) -> list[tuple[str, ...]]:
    """(image, depth[, mask]) of all images in the storage that match the spec."""
    rows = []
    for image in storage.names():
        match = spec.match(image)
        if match is None:
            continue
        depth = match.expand(spec.depth_template)
        if spec.depth_may_be_absent and not storage.contains(depth):
            depth = _NO_DEPTH
        rows.append((image, depth, *([match.expand(spec.mask_template)] if spec.mask_template else [])))
    return rows


def _nothing_found(spec: DepthSpec, filenames: str | Path | None) -> str:
    where = f"the list {filenames} names no sample" if filenames else f"no image matches {spec.image_pattern}"
    return f"{where}; expected files like {spec.example!r}. Get them from: {spec.source}"
