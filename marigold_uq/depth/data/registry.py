"""Data sets by name: one registry for training, validation, evaluation and calibration."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset

from marigold_uq.depth.data.folder import ImageDepthFolder
from marigold_uq.depth.data.huggingface import HuggingFaceDepth
from marigold_uq.depth.data.listed import ListedDepth
from marigold_uq.depth.data.sample import DepthSample
from marigold_uq.depth.data.shards import LatentShards, RenderedScenes
from marigold_uq.depth.data.specs import SPECS

Builder = Callable[..., Dataset[Any]]  # (root, filenames, **options)
DATASETS: dict[str, Builder] = {}


def register_dataset(name: str) -> Callable[[Builder], Builder]:
    """Decorator that makes `builder(root, filenames, **options)` known as `name`."""

    def register(builder: Builder) -> Builder:
        if name in DATASETS:
            raise ValueError(f"a data set called {name!r} is already registered")
        DATASETS[name] = builder
        return builder

    return register


def build_dataset(
    name: str, root: str | Path | None = None, filenames: str | Path | None = None, **options: Any
) -> Dataset[Any]:
    """The data set called `name`.

    Args:
        name: a key of `DATASETS`.
        root: its folder or tar (for "huggingface" the name on the Hub); None for sets that need no files.
        filenames: its filename list (for "folder" the index file).
        options: `on_error` and whatever the data set's class takes.
    """
    if name not in DATASETS:
        raise ValueError(f"unknown data set {name!r}; known: {', '.join(sorted(DATASETS))}")
    return DATASETS[name](root, filenames, **options)


def _needs_root(name: str, root: str | Path | None) -> str | Path:
    if root is None:
        raise ValueError(f"data set {name!r} needs root, the folder or tar with its files")
    return root


def _takes_no_list(name: str, filenames: str | Path | None, instead: str) -> None:
    if filenames is not None:
        raise ValueError(f"{name} takes no filename list; {instead}")


def _listed(name: str, root: str | Path | None, filenames: str | Path | None, **options: Any) -> ListedDepth:
    return ListedDepth(SPECS[name], _needs_root(name, root), filenames, **options)


for _name in SPECS:
    register_dataset(_name)(partial(_listed, _name))


@register_dataset("folder")
def _folder(root: str | Path | None, filenames: str | Path | None, **options: Any) -> ImageDepthFolder:
    return ImageDepthFolder(_needs_root("folder", root), filenames, **options)


@register_dataset("scenes")
def _scenes(root: str | Path | None, filenames: str | Path | None, **options: Any) -> RenderedScenes:
    _takes_no_list("scenes", filenames, "choose samples with start and length")
    return RenderedScenes(_needs_root("scenes", root), **options)


@register_dataset("latents")
def _latents(root: str | Path | None, filenames: str | Path | None, **options: Any) -> LatentShards:
    """Encoded samples (scripts/encode_latents.py), for training alone."""
    _takes_no_list("latents", filenames, "choose samples with start and length")
    return LatentShards(_needs_root("latents", root), **options)


@register_dataset("procedural")
def _procedural(root: str | Path | None, filenames: str | Path | None, **options: Any) -> Dataset[DepthSample]:
    """Scenes rendered as they are read."""
    from marigold_uq.depth.scenes import ProceduralScenes

    if root is not None:
        raise ValueError("procedural scenes are rendered, not read: give no root, but options such as length and seed")
    _takes_no_list("procedural", filenames, "choose scenes with length, seed and split")
    return ProceduralScenes(**{name: value for name, value in options.items() if name != "on_error"})  # none breaks


@register_dataset("huggingface")
def _huggingface(root: str | Path | None, filenames: str | Path | None, **options: Any) -> HuggingFaceDepth:
    _takes_no_list("huggingface", filenames, "choose rows with split, e.g. split='train[:100]'")
    return HuggingFaceDepth.from_hub(_needs_root("huggingface", root), **options)
