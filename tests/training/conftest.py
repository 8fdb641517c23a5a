"""What all training tests share: helper modules of the data tests, and a fresh accelerate for every test."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from accelerate.state import AcceleratorState, GradientState

sys.path.insert(0, str(Path(__file__).parents[1] / "data"))  # `from depth_files import ...`


@pytest.fixture(autouse=True)
def fresh_accelerate() -> Iterator[None]:
    """accelerate keeps precision and device for the life of a process; a test must not inherit another's."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
