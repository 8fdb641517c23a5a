"""Load our pipelines by their Hub name, without running code from the Hub.

diffusers treats a component of another package as remote code. It asks for the class's file in the repository and for
trust_remote_code=True, although the class is installed. Here the files are fetched without any code, and the installed
classes make such components. What an index names beyond the libraries of components is not imported, and weights are
read from safetensors alone.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import diffusers.pipelines
import torch
from diffusers.configuration_utils import ConfigMixin
from diffusers.models.modeling_utils import ModelMixin
from diffusers.pipelines.pipeline_utils import DiffusionPipeline
from huggingface_hub import hf_hub_download, snapshot_download
from huggingface_hub.errors import HFValidationError

from marigold_uq.hub import is_own_component

__all__ = ["default_dtype_kept", "fetch_pretrained"]

_FETCH_OPTIONS = ("cache_dir", "revision", "token", "local_files_only", "force_download")
_LIBRARIES = ("diffusers", "transformers", "onnxruntime.training")
_NOT_NEEDED = ["*.py", "*.md", "*.bin", "*.msgpack", "*.onnx", ".eval_results/*"]


@contextmanager
def default_dtype_kept() -> Iterator[None]:
    """diffusers sets torch's default dtype while it builds a model, and leaves it so where that fails."""
    before = torch.get_default_dtype()
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def fetch_pretrained(
    pipeline_class: type[DiffusionPipeline], name: str | os.PathLike[str], options: Mapping[str, Any]
) -> tuple[Path | str, dict[str, Any]]:
    """Folder and own components of a pipeline, which diffusers' `from_pretrained` takes in place of the name.

    Args:
        pipeline_class: The class that will be loaded.
        name: A folder, or a name on the Hub.
        options: Keyword arguments of `from_pretrained`; a component among them is used as it is.

    Returns:
        The folder, and component name -> loaded component. Where no component is ours, diffusers can fetch the
        pipeline itself: then it is the name, and no components.
    """
    index = _read_index(pipeline_class, name, options)
    _check_libraries(index, name)
    ours = {key: value for key, value in index.items() if is_own_component(value) and key not in options}
    if not ours:
        return str(name), {}
    folder = Path(name)
    if not folder.is_dir():
        folder = Path(snapshot_download(str(name), ignore_patterns=_NOT_NEEDED, **_fetch_options(options)))
    return folder, {key: _load(folder, key, value[0], value[1], options) for key, value in ours.items()}


def _read_index(
    pipeline_class: type[DiffusionPipeline], name: str | os.PathLike[str], options: Mapping[str, Any]
) -> dict[str, Any]:
    path = Path(name) / pipeline_class.config_name
    if not Path(name).is_dir():
        try:
            path = Path(hf_hub_download(str(name), pipeline_class.config_name, **_fetch_options(options)))
        except HFValidationError as error:
            raise FileNotFoundError(f"{name} is neither a folder nor a name on the Hub, user/name") from error
    if not path.is_file():
        return {}
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not readable as JSON: {error}") from error
    if not isinstance(index, dict):
        raise ValueError(f"{path} holds a {type(index).__name__}; expected a JSON object")
    return index


def _check_libraries(index: Mapping[str, Any], name: str | os.PathLike[str]) -> None:
    """Refuse components of packages that would be imported only because the index names them: importing runs code."""
    for key, value in index.items():
        if key.startswith("_") or not isinstance(value, list) or len(value) != 2:
            continue
        library = value[0]
        if not isinstance(library, str) or library in _LIBRARIES or library in sys.modules or is_own_component(value):
            continue
        if not hasattr(diffusers.pipelines, library):
            raise ValueError(
                f"{name}: the component {key!r} is of the package {library!r}, which is not imported because a file "
                "names it; import it yourself first if you trust it"
            )


def _fetch_options(options: Mapping[str, Any]) -> dict[str, Any]:
    return {key: options[key] for key in _FETCH_OPTIONS if options.get(key) is not None}


def _load(folder: Path, component: str, module: str, class_name: str, options: Mapping[str, Any]) -> Any:
    """One component by its installed class; networks in the precision that was asked for."""
    try:
        loaded = getattr(import_module(module), class_name)
    except (ImportError, AttributeError, TypeError) as error:
        raise ValueError(
            f"{folder}: the component {component!r} is {module}.{class_name}, which this version lacks"
        ) from error
    if not (isinstance(loaded, type) and issubclass(loaded, ConfigMixin)):
        raise ValueError(f"{folder}: the component {component!r} is {module}.{class_name}, which is no component")
    kind: Any = loaded
    if not issubclass(loaded, ModelMixin):
        return kind.from_pretrained(folder, subfolder=component)
    precision = options.get("dtype", options.get("torch_dtype"))
    if isinstance(precision, dict):
        precision = precision.get(component, precision.get("default"))
    variant = options.get("variant")
    has_variant = variant is not None and any((folder / component).glob(f"*.{variant}.*"))
    extra = {
        "dtype": precision,
        "variant": variant if has_variant else None,
        "use_safetensors": options.get("use_safetensors"),
    }
    return kind.from_pretrained(folder, subfolder=component, **{k: v for k, v in extra.items() if v is not None})
