"""`marigold-uq info`: what is installed and which model would be used."""

from __future__ import annotations

import json
import platform
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import marigold_uq
from marigold_uq.commands.runner import Invocation

__all__ = ["InfoOptions", "run_info"]

_PACKAGES = ("diffusers", "transformers", "accelerate", "safetensors", "huggingface-hub", "numpy", "scipy")


@dataclass(frozen=True)
class InfoOptions:
    """Show what is installed and which model would be used."""


def run_info(options: InfoOptions, invocation: Invocation | None = None) -> int:
    """Print versions, devices and the embedded model."""
    import torch

    print(f"marigold_uq {marigold_uq.__version__}, Python {platform.python_version()}, {platform.platform()}")
    print(", ".join([f"torch {torch.__version__}", *(f"{name} {_installed_version(name)}" for name in _PACKAGES)]))
    print(f"devices: {', '.join(_devices())}; torch threads: {torch.get_num_threads()}")
    print(f"model: {_describe_embedded()}")
    return 0


def _installed_version(name: str) -> str:
    """Version of a package, or that it is missing."""
    try:
        return version(name)
    except PackageNotFoundError:
        return "(missing)"


def _devices() -> list[str]:
    """Where a model could run, best first."""
    import torch

    found = [f"cuda:{i} ({torch.cuda.get_device_name(i)})" for i in range(torch.cuda.device_count())]
    return [*found, *(["mps"] if torch.backends.mps.is_available() else []), "cpu"]


def _describe_embedded() -> str:
    """One line on the model that `depth` uses by default."""
    from marigold_uq.pipelines.depth.starting_point import embedded_path

    try:
        path = embedded_path()
    except FileNotFoundError as error:
        return str(error)
    scheduler = json.loads((path / "scheduler" / "scheduler_config.json").read_text(encoding="utf-8"))
    size = sum(file.stat().st_size for file in Path(path).rglob("*") if file.is_file())
    return f"embedded, family {scheduler['noise_family']}, {size / 1e6:.1f} MB, {path}"
