"""What a command leaves behind: metrics.json with its command, config and versions, and tables in Markdown."""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from marigold_uq.files import atomic_path, make_folder
from marigold_uq.metrics import Estimate

__all__ = [
    "METRICS_FILE",
    "as_json",
    "make_results",
    "markdown_table",
    "number",
    "read_results",
    "versions",
    "write_json",
    "write_results",
]

METRICS_FILE = "metrics.json"
_PACKAGES = ("marigold_uq", "torch", "diffusers", "transformers", "accelerate", "safetensors", "numpy", "peft")


def versions() -> dict[str, str]:
    """Versions of what a result depends on."""
    found = {"python": platform.python_version(), "platform": platform.platform()}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def as_json(estimates: Mapping[str, Estimate]) -> dict[str, Any]:
    """Estimates as plain numbers and lists, None for NaN, which JSON does not know."""
    return {name: _without_nan(estimate.to_dict()) for name, estimate in estimates.items()}


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nan(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_without_nan(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_results(
    folder: str | Path,
    task: str,
    metrics: Mapping[str, Any],
    *,
    command: str | None = None,
    config: Any = None,
    reports: Mapping[str, str] | None = None,
    overwrite: bool = False,
    **facts: Any,
) -> dict[str, Any]:
    """Write metrics.json and the reports of a finished evaluation, and return what metrics.json holds.

    metrics.json comes last, so it marks a folder whose files are all there.

    Args:
        folder: Where to write; it is created.
        task: depth, field or tabular.
        metrics: Name -> number, or name -> {"value", "standard_error", ...}; undefined ones are None, never NaN.
        command: The command as it can be typed again.
        config: All options of the command: a dataclass, a mapping, or YAML text.
        reports: File name -> text, for instance report.md.
        overwrite: Replace the results of an earlier evaluation.
        facts: What else the file holds, for instance data={"name": ...}.
    """
    folder = Path(folder)
    if (folder / METRICS_FILE).exists() and not overwrite:
        raise FileExistsError(f"{folder} already holds an evaluation; choose another output, or overwrite it")
    content = make_results(task, metrics, command=command, config=config, **facts)
    make_folder(folder)
    for name, text in (reports or {}).items():
        _write_text(folder / name, text)
    write_json(folder / METRICS_FILE, content, overwrite=True)
    return content


def make_results(
    task: str, metrics: Mapping[str, Any], *, command: str | None = None, config: Any = None, **facts: Any
) -> dict[str, Any]:
    """What metrics.json holds, as plain JSON; see `write_results`."""
    content = {
        "task": task,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command,
        **facts,
        "metrics": metrics,
        "config": config,
        "versions": versions(),
    }
    return json.loads(_as_json(content))


def read_results(path: str | Path) -> dict[str, Any]:
    """The content of a metrics.json, given the file or its folder."""
    path = Path(path)
    path = path / METRICS_FILE if path.is_dir() else path
    if not path.is_file():
        raise FileNotFoundError(f"there are no results at {path}; run the evaluation first")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not readable as JSON: {error}") from error
    if not isinstance(content, dict) or not isinstance(content.get("metrics"), dict):
        raise ValueError(f"{path} is no evaluation: expected a JSON object with `metrics`, name -> number")
    return content


def write_json(path: str | Path, content: Any, *, overwrite: bool = False) -> None:
    """Write JSON as a whole or not at all; dataclasses, paths, tuples and numbers of numpy and torch become plain."""
    _write_text(Path(path), _as_json(content), overwrite=overwrite)


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A table; floats get four digits, and what is missing an empty cell."""
    lines = ["| " + " | ".join(header) + " |", "|---" * len(header) + "|"]
    for row in rows:
        if len(row) != len(header):
            raise ValueError(f"a row has {len(row)} cells, the header {len(header)}: {list(row)}")
        lines.append("| " + " | ".join(number(cell) if _is_number(cell) else _text(cell) for cell in row) + " |")
    return "\n".join(lines)


def number(value: float | None, standard_error: float | None = None) -> str:
    """Four digits, and the standard error where there is one; nothing for what is undefined."""
    if value is None or math.isnan(value):
        return ""
    text = str(value) if isinstance(value, int) else f"{value:.4g}"
    return text if standard_error is None or math.isnan(standard_error) else f"{text} ± {standard_error:.1g}"


def _is_number(cell: Any) -> bool:
    return isinstance(cell, int | float) and not isinstance(cell, bool)


def _text(cell: Any) -> str:
    return "" if cell is None else str(cell).replace("|", "\\|").replace("\n", " ")


def _write_text(path: Path, text: str, *, overwrite: bool = True) -> None:
    with atomic_path(path, overwrite=overwrite) as temporary:
        temporary.write_text(text, encoding="utf-8")


def _as_json(content: Any) -> str:
    """JSON without NaN: a number that is undefined must be None on purpose."""
    return json.dumps(content, indent=1, allow_nan=False, default=_plain) + "\n"


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "tolist"):  # arrays and tensors
        return value.tolist()
    raise TypeError(f"a {type(value).__name__} cannot be written as JSON")
