"""Cells of a table of results: (preset, family, data set, epochs) -> scores of every split, one JSON file each."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from marigold_uq.files import atomic_path, make_folder, require_same
from marigold_uq.tabular.scores import SplitScores, Spread, summarize_splits
from marigold_uq.tabular.uci import UCIDataset

_FORMAT = "marigold_uq tabular cell 1"
_OLD_NAMES = {"num_samples": "ensemble_size", "num_members": "num_models", "fold_members": "validation_folds"}
"""Facts in published cells -> their names today."""


@dataclass(frozen=True, order=True)
class CellKey:
    """What a cell is about.

    `epochs` is the number asked for, 0 where a preset has its own rule, and of a peer the number of splits.
    """

    preset: str
    family: str
    dataset: str
    epochs: int

    @property
    def name(self) -> str:
        """The name of its files."""
        return f"{self.preset}-{self.family}-{self.dataset}-{self.epochs}"


@dataclass(frozen=True)
class Cell:
    """A finished cell.

    Attributes:
        key: What it is about.
        published_epochs: Epochs of the published recipe for this set; None where a preset has its own rule.
        splits: Scores of every split, in order.
        facts: How it was made: recipe, seed, ensemble size, seconds, versions, `identity` of data and settings.
    """

    key: CellKey
    published_epochs: int | None
    splits: list[SplitScores]
    facts: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Facts as a file gives them back: lists for tuples."""
        object.__setattr__(self, "facts", json.loads(json.dumps(self.facts)))

    @property
    def summary(self) -> dict[str, Spread]:
        """Mean, standard deviation and standard error over splits of every metric."""
        return summarize_splits(self.splits)

    @property
    def is_partial(self) -> bool:
        """Whether it was trained for fewer epochs than published."""
        return self.published_epochs is not None and self.key.epochs < self.published_epochs


class CellStore:
    """A folder of cells: `cells` holds finished ones, `unfinished` the splits of those that are being made."""

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root)
        self.finished, self.unfinished = self.root / "cells", self.root / "unfinished"

    def load(self, key: CellKey, identity: Mapping[str, Any] | None = None) -> Cell | None:
        """A finished cell, None if there is none; one that was made with another `identity` is an error."""
        path = self.finished / f"{key.name}.json"
        if not path.exists():
            return None
        cell = _read_cell(path)
        if identity is not None:
            require_same(path, cell.facts["identity"], identity)
        return cell

    def save(self, cell: Cell) -> Path:
        """Write a finished cell and forget its parts; a cell that exists is never replaced."""
        make_folder(self.finished)
        summary = {name: asdict(spread) for name, spread in cell.summary.items()}
        content = {"format": _FORMAT, **asdict(cell), "summary": summary}
        path = self.finished / f"{cell.key.name}.json"
        _write(path, content, overwrite=False)
        (self.unfinished / path.name).unlink(missing_ok=True)
        return path

    def load_splits(self, key: CellKey, identity: Mapping[str, Any]) -> list[SplitScores]:
        """Splits of an unfinished cell that were made with the same settings; other settings are an error."""
        path = self.unfinished / f"{key.name}.json"
        if not path.exists():
            return []
        content = json.loads(path.read_text(encoding="utf-8"))
        require_same(path, content["identity"], identity)
        return content["splits"]

    def save_splits(self, key: CellKey, identity: Mapping[str, Any], splits: list[SplitScores]) -> None:
        """Keep the splits of an unfinished cell."""
        make_folder(self.unfinished)
        _write(self.unfinished / f"{key.name}.json", {"identity": identity, "splits": splits}, overwrite=True)

    def __iter__(self) -> Iterator[Cell]:
        """All finished cells, by name."""
        return (_read_cell(path) for path in sorted(self.finished.glob("*.json")))

    def furthest(self) -> dict[tuple[str, str, str], Cell]:
        """(preset, family, data set) -> its finished cell with the most epochs."""
        best: dict[tuple[str, str, str], Cell] = {}
        for cell in self:
            place = (cell.key.preset, cell.key.family, cell.key.dataset)
            if place not in best or cell.key.epochs > best[place].key.epochs:
                best[place] = cell
        return best


def dataset_digest(dataset: UCIDataset) -> str:
    """A hash of all rows and splits, as published cells state it."""
    digest = hashlib.blake2b(digest_size=8)
    for array in (dataset.features, dataset.targets, *(index for pair in dataset.indices for index in pair)):
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def _renamed(facts: Any) -> Any:
    """Facts under today's names."""
    if not isinstance(facts, dict):
        return facts
    return {_OLD_NAMES.get(name, name): _renamed(value) for name, value in facts.items()}


def _read_cell(path: Path) -> Cell:
    content = json.loads(path.read_text(encoding="utf-8"))
    if content.get("format") != _FORMAT:
        raise ValueError(f"{path} is not a cell: expected format {_FORMAT!r}, found {content.get('format')!r}")
    return Cell(CellKey(**content["key"]), content["published_epochs"], content["splits"], _renamed(content["facts"]))


def _write(path: Path, content: Mapping[str, Any], *, overwrite: bool) -> None:
    with atomic_path(path, overwrite=overwrite) as temporary:
        temporary.write_text(json.dumps(content, allow_nan=False) + "\n", encoding="utf-8")
