"""Data sets by name."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset

from marigold_uq.depth.data.folder import ImageDepthFolder
from marigold_uq.depth.data.huggingface import HuggingFaceDepth
from marigold_uq.depth.data.listed import ListedDepth
from marigold_uq.depth.data.rendered import RenderedScenes
from marigold_uq.depth.data.sample import DepthSample
from marigold_uq.depth.data.specs import SPECS

Builder = Callable[..., Dataset[DepthSample]]  # (root, filenames, **options)
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
) -> Dataset[DepthSample]:
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


def _listed(name: str, root: str | Path | None, filenames: str | Path | None, **options: Any) -> ListedDepth:
    return ListedDepth(SPECS[name], _needs_root(name, root), filenames, **options)


for _name in SPECS:
    register_dataset(_name)(partial(_listed, _name))


@register_dataset("folder")
def _folder(root: str | Path | None, filenames: str | Path | None, **options: Any) -> ImageDepthFolder:
    return ImageDepthFolder(_needs_root("folder", root), filenames, **options)


@register_dataset("scenes")
def _scenes(root: str | Path | None, filenames: str | Path | None, **options: Any) -> RenderedScenes:
    if filenames is not None:
        raise ValueError("scenes takes no filename list; choose samples with start and length")
    return RenderedScenes(_needs_root("scenes", root), **options)


@register_dataset("huggingface")
def _huggingface(root: str | Path | None, filenames: str | Path | None, **options: Any) -> HuggingFaceDepth:
    if filenames is not None:
        raise ValueError("huggingface takes no filename list; choose rows with split, e.g. split='train[:100]'")
    return HuggingFaceDepth.from_hub(_needs_root("huggingface", root), **options)
