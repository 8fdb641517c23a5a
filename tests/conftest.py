"""What all tests share: helper modules of this folder, the real data, one thread."""

import os
from pathlib import Path

import pytest
import torch

DATA_VARIABLE = "MARIGOLD_UQ_DATA"


def pytest_configure(config: pytest.Config) -> None:
    """The tensors here are small: more threads only wait for each other."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def data_root() -> Path:
    """Folder of the real data sets; without it the test is skipped."""
    folder = os.environ.get(DATA_VARIABLE)
    if not folder:
        pytest.skip(f"real data not available: {DATA_VARIABLE} is not set")
    if not Path(folder).is_dir():
        pytest.skip(f"real data not available: {DATA_VARIABLE}={folder} is not a folder")
    return Path(folder)
