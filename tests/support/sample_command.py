"""A command for the tests of the runner."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from marigold_uq.commands.runner import Invocation

calls: list[tuple[SampleOptions, Invocation]] = []


@dataclass(frozen=True)
class Part:
    """A part.

    Args:
        size: How large.
        tidy: A switch inside.
    """

    size: int = 1
    tidy: bool = False

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"size must be at least 1; got {self.size}")


@dataclass(frozen=True)
class SampleOptions:
    """Do nothing, and remember how.

    Args:
        inputs: What to read.
        output: Folder for the results.
        steps: A number or none.
        levels: Several numbers.
        formats: Several names.
        part: Options of a part.
        parts: Several parts.
        tags: Several names or none.
        overwrite: Replace results that are there.
        fail: What goes wrong.
    """

    inputs: list[Path] = field(default_factory=list)
    output: Path = Path("out")
    steps: int | None = None
    levels: list[float] = field(default_factory=lambda: [0.5])
    formats: list[Literal["npz", "png"]] = field(default_factory=list)
    part: Part = field(default_factory=Part)
    parts: list[Part] = field(default_factory=list)
    tags: list[str] | None = None
    overwrite: bool = False
    fail: str | None = None


def run_sample(options: SampleOptions, invocation: Invocation) -> int:
    """Remember the call."""
    calls.append((options, invocation))
    errors = {
        "value": ValueError("steps must be at least 1"),
        "file": FileNotFoundError("no such folder: x"),
        "interrupt": KeyboardInterrupt(),
        "bug": RuntimeError("a bug"),
    }
    if options.fail is not None:
        raise errors[options.fail]
    return 0
