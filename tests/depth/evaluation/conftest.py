"""One small data set for all evaluation tests, and the shortest way to score it."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from support.depth_scenes import write_predictions, write_scenes

from marigold_uq.depth.evaluation import DataOptions, DepthEvaluation, FileOptions

Options = Callable[..., DepthEvaluation]


@pytest.fixture(scope="session")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five images in two groups."""
    return write_scenes(tmp_path_factory.mktemp("scenes"))


@pytest.fixture(scope="session")
def members_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six members for each of them."""
    return write_predictions(tmp_path_factory.mktemp("members"), "samples")


@pytest.fixture
def options(scenes: Path, members_folder: Path, tmp_path: Path) -> Options:
    """Options to score files on the scenes without figures; keywords change fields."""

    def make(folder: Path = members_folder, **changes: object) -> DepthEvaluation:
        base = DepthEvaluation(
            predictor="files",
            files=FileOptions(folder=folder),
            data=DataOptions(root=str(scenes)),
            output=tmp_path / "evaluation",
            figures=False,
        )
        return replace(base, **changes)

    return make
