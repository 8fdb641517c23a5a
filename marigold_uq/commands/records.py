"""NAME.json beside the outputs of a picture or a video: what was asked for, of which file, and which files it gave.

It is written before the first output and again after the last. A later run skips what it finds finished and asked for
in the same way, finishes what was begun, and refuses the rest: results of other settings are neither taken for those
asked for nor replaced without a word.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from marigold_uq.files import differences, fingerprint, remove
from marigold_uq.results import write_json

__all__ = ["OutputRecord", "describe_source", "identify_model"]

_FORMAT = 1


@dataclass(frozen=True)
class OutputRecord:
    """What NAME.json holds.

    Attributes:
        path: Of the record.
        source: Of the picture or video: path, bytes, modified, hash.
        asked: Everything that the outputs depend on.
        files: Names of the outputs, beside the record.
        complete: Whether all of them are there.
    """

    path: Path
    source: Mapping[str, Any]
    asked: Mapping[str, Any]
    files: Sequence[str] = ()
    complete: bool = False
    more: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> OutputRecord | None:
        """The record at `path`; None where there is none, or what is there is none."""
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            if content["format"] != _FORMAT:
                return None
            return cls(path, content["source"], content["asked"], content["files"], content["complete"])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def write(self) -> None:
        """Replace the record."""
        content = {
            "format": _FORMAT, "complete": self.complete, "source": self.source, "files": sorted(self.files),
            "asked": self.asked, **self.more,
        }  # fmt: skip
        write_json(self.path, content, overwrite=True)

    def conflicts(self, source: Path, asked: Mapping[str, Any]) -> list[str]:
        """What differs from what is asked for now, one phrase each."""
        other_file = [] if _is_same_file(self.source, source) else [f"it was made of {self.source.get('path')}, "
            "whose content was another"]  # fmt: skip
        return other_file + differences(self.asked, asked)

    def remove_files(self, keep: Sequence[str] = ()) -> None:
        """Delete what was recorded, but for some names."""
        for name in set(self.files) - set(keep):
            remove(self.path.parent / Path(name).name)


def describe_source(path: Path) -> dict[str, Any]:
    """A file by its place, size, time and content; a folder of frames by those of all of them."""
    stamps = [_stamp(file) for file in _parts(path)]
    return {
        "path": os.path.abspath(path),
        "bytes": sum(size for size, _ in stamps),
        "modified": max((time for _, time in stamps), default=0),
        "hash": _content_hash(path),
    }


def _is_same_file(described: Mapping[str, Any], path: Path) -> bool:
    """Size and time decide where they agree, else the content: a copy is as good as the file."""
    stamps = [_stamp(file) for file in _parts(path)]
    if sum(size for size, _ in stamps) != described.get("bytes"):
        return False
    same_time = max((time for _, time in stamps), default=0) == described.get("modified")
    return (same_time and path.is_file()) or _content_hash(path) == described.get("hash")


def _parts(path: Path) -> list[Path]:
    return sorted(one for one in path.iterdir() if one.is_file()) if path.is_dir() else [path]


def _stamp(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns


def _content_hash(path: Path) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for part in _parts(path):
        with part.open("rb") as content:
            digest.update(hashlib.file_digest(content, "blake2b").digest())
    return digest.hexdigest()


def identify_model(name: str, variant: str | None = None) -> str:
    """A model by what it is, not by where it lies: a hash of a folder's content, or the revision on the Hub."""
    from marigold_uq.pipelines.depth.starting_point import embedded_path

    folder = embedded_path() if name == "embedded" else Path(name).expanduser()
    if folder.is_dir():
        return f"content {fingerprint(folder)}"
    from huggingface_hub import try_to_load_from_cache

    index = try_to_load_from_cache(name, "model_index.json")
    revision = Path(index).parent.name if isinstance(index, str) else "unknown"
    return f"{name} at revision {revision}" + (f", {variant}" if variant else "")
