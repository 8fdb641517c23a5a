"""Results of single images: kept in memory as dataclasses, on disk as one small JSON each, so that a run can resume."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import yaml

from marigold_uq.depth.evaluation.options import DepthEvaluation, decisive, plain
from marigold_uq.files import atomic_path, discard, make_folder
from marigold_uq.folder_lock import folder_lock
from marigold_uq.results import METRICS_FILE

TABLE_FILE = "per_image.csv"
_CONFIG_FILE = "config.yaml"
_IMAGES_FOLDER = "images"
_FIGURES_FOLDER = "figures"


@dataclass(frozen=True)
class ImageRecord:
    """What one image gave.

    Attributes:
        name: The sample's name.
        group: Its group in the data set's index, "" without one.
        kind: What was predicted: point, members, mean and std, mean and confidence.
        identity: The predictor's mark of this prediction.
        num_valid: Pixels with a true depth.
        scale, shift: The alignment.
        statistics: Name -> number.
        curves: Name -> numbers.
    """

    name: str
    group: str
    kind: str
    identity: str
    num_valid: int
    scale: float
    shift: float
    statistics: dict[str, float]
    curves: dict[str, list[float]]


@dataclass(frozen=True)
class Failure:
    """An image that could not be scored, and why."""

    name: str
    reason: str


class ResultFolder:
    """The output folder of an evaluation; all but `load` and `store` is for the main process."""

    def __init__(self, root: Path) -> None:
        self.root = Path(root)
        self.images = self.root / _IMAGES_FOLDER
        self.figures = self.root / _FIGURES_FOLDER

    def check(self, options: DepthEvaluation) -> None:
        """Refuse to replace anything but an unfinished evaluation of the same options, which is then resumed."""
        if options.overwrite:
            return
        if (self.root / METRICS_FILE).exists():
            raise FileExistsError(f"{self.root} holds a finished evaluation; choose another output, or overwrite=true")
        if not any(self.images.glob("*.json")):
            return
        previous, config = decisive(self._previous_config()), decisive(plain(options))
        if previous != config:
            raise FileExistsError(
                f"{self.root} holds an unfinished evaluation with other options "
                f"({', '.join(_differences(previous, config))}); choose another output, or overwrite=true"
            )

    def open(self, options: DepthEvaluation) -> None:
        """Make the folder ready; `check` has been passed."""
        if options.overwrite:
            self._remove_results()
        make_folder(self.images)
        self.write_text(_CONFIG_FILE, yaml.safe_dump(plain(options), sort_keys=False))

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Make the folder and keep other evaluations out of it."""
        make_folder(self.root)
        with folder_lock(self.root):
            yield

    def _previous_config(self) -> dict[str, Any]:
        path = self.root / _CONFIG_FILE
        found = yaml.safe_load(path.read_text(encoding="utf-8")) if path.exists() else None
        return found if isinstance(found, dict) else {}

    def _remove_results(self) -> None:
        """Only what an evaluation writes: a folder may hold other things of the user's."""
        for name in (METRICS_FILE, TABLE_FILE, _CONFIG_FILE):  # first of all the mark of a finished evaluation
            (self.root / name).unlink(missing_ok=True)
        for folder in (self.images, self.figures):
            if folder.is_dir():
                discard(folder)

    def write_text(self, name: str, text: str) -> Path:
        """Write a file of this folder; `check` has made sure that it may be replaced."""
        with atomic_path(self.root / name, overwrite=True) as temporary:
            temporary.write_text(text, encoding="utf-8")
        return self.root / name

    def _record_path(self, name: str) -> Path:
        return self.images / f"{quote(name, safe='')}.json"

    def load(self, name: str, identity: str) -> ImageRecord | None:
        """The stored result of an image, None if there is none or the prediction has changed since."""
        path = self._record_path(name)
        if not path.exists():
            return None
        record = ImageRecord(**json.loads(path.read_text(encoding="utf-8")))
        return record if record.identity == identity else None

    def store(self, record: ImageRecord) -> None:
        """Keep the result of an image."""
        with atomic_path(self._record_path(record.name), overwrite=True) as temporary:
            temporary.write_text(json.dumps(asdict(record)), encoding="utf-8")


def _differences(left: dict[str, Any], right: dict[str, Any], prefix: str = "") -> list[str]:
    """Names of the options in which two configs differ."""
    found = []
    for key in sorted(set(left) | set(right)):
        one, other = left.get(key), right.get(key)
        if isinstance(one, dict) and isinstance(other, dict):
            found += _differences(one, other, f"{prefix}{key}.")
        elif one != other:
            found.append(f"{prefix}{key}")
    return found
