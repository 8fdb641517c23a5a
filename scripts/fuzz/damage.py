"""Ways to damage bytes and values, and an object whose unpickling leaves a trace."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

WRONG_VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 1, 3, 10**9, -0.5, 1e308, "", "x", "../../etc/passwd", "<script>", [], [1], [[0]], {}, {"a": 1},
    "NaN", [None], 2**70,
)  # fmt: skip


class Bomb:
    """Unpickling it makes a folder."""

    def __init__(self, witness: Path) -> None:
        self.witness = witness

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.witness),)


def damaged(content: bytes, rng: np.random.Generator) -> bytes:
    """Some bytes changed, cut, doubled, inserted or zeroed."""
    data, kind = bytearray(content), rng.integers(6)
    size = len(data)
    if size == 0:
        return bytes(rng.integers(0, 256, 20, dtype=np.uint8))
    at = int(rng.integers(size))
    span = int(min(size - at, rng.integers(1, 40)))
    if kind == 0:
        for place in rng.integers(0, size, rng.integers(1, 9)):
            data[place] = rng.integers(256)
    elif kind == 1:
        del data[at:]
    elif kind == 2:
        data[at:at] = data[at : at + span]
    elif kind == 3:
        data[at:at] = rng.integers(0, 256, span, dtype=np.uint8).tobytes()
    elif kind == 4:
        data[at : at + span] = bytes(span)
    else:
        head = min(size, 64)  # headers decide most
        data[int(rng.integers(head))] ^= 1 << int(rng.integers(8))
    return bytes(data)


def with_wrong_value(content: Any, rng: np.random.Generator) -> Any:
    """JSON or YAML content in which one value is replaced, removed or renamed."""
    places = list(_places(content, ()))
    if not places:
        return _wrong(rng)
    place = places[int(rng.integers(len(places)))]
    copy = _copied(content)
    holder = copy
    for key in place[:-1]:
        holder = holder[key]
    kind = rng.integers(8)
    if kind == 0:
        del holder[place[-1]]
    elif kind == 1 and isinstance(holder, dict):
        holder[f"{place[-1]}x"] = holder.pop(place[-1])
    else:
        holder[place[-1]] = _wrong(rng)
    return copy


def _wrong(rng: np.random.Generator) -> Any:
    return _copied(WRONG_VALUES[int(rng.integers(len(WRONG_VALUES)))])


def _places(content: Any, path: tuple[Any, ...]) -> Any:
    items = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for key, value in items:
        yield (*path, key)
        yield from _places(value, (*path, key))


def _copied(content: Any) -> Any:
    if isinstance(content, dict):
        return {key: _copied(value) for key, value in content.items()}
    return [_copied(value) for value in content] if isinstance(content, list) else content
