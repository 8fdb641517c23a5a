"""What all training tests share: helper modules of the data tests, and a fresh accelerate for every test."""

from collections.abc import Iterator

import pytest
from accelerate.state import AcceleratorState, GradientState


@pytest.fixture(autouse=True)
def fresh_accelerate() -> Iterator[None]:
    """accelerate keeps precision and device for the life of a process; a test must not inherit another's."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
