"""Figures: drawn from what they are given, written once, and refused where the numbers do not fit."""

import math

import numpy as np
import pytest
from PIL import Image

from marigold_uq import plotting

LEVELS = [0.1, 0.5, 0.9]


def ink(path) -> float:
    """Share of pixels that are not white."""
    return float((np.asarray(Image.open(path).convert("L")) < 250).mean())


@pytest.mark.parametrize(
    "figure",
    [
        plotting.reliability_diagram(LEVELS, {"a": [0.1, 0.4, 0.7], "b": [0.2, 0.6, 0.95]}, expected=[0.1, 0.5, 0.85]),
        plotting.sparsification_plot([0.0, 0.5, 0.9], {"ours": [1.0, 0.7, 0.4]}, oracle=[1.0, 0.5, 0.1]),
        plotting.pit_histogram([3, 1, 1, 3]),
        plotting.spread_plot([0.1, 0.5], [0.2, 0.4]),
        plotting.group_bars({"crps": {"desk": (0.2, 0.1), "street": (0.4, math.nan)}}, {"crps": 0.3}),
    ],
    ids=["reliability", "sparsification", "pit", "spread", "groups"],
)
def test_every_figure_is_written_and_shows_something(figure, tmp_path):
    path = plotting.save_figure(figure, tmp_path / "figure.png")
    assert 0.01 < ink(path) < 0.7
    with pytest.raises(FileExistsError, match="exists"):
        plotting.save_figure(figure, path)


def test_a_histogram_is_a_density_whatever_the_counts_add_up_to():
    axes = plotting.pit_histogram([30, 10, 10, 30]).axes[0]
    assert [bar.get_height() for bar in axes.patches] == pytest.approx([1.5, 0.5, 0.5, 1.5])


def test_curves_of_another_length_are_refused_by_name():
    with pytest.raises(ValueError, match="'ours' has 2 points; expected 3"):
        plotting.reliability_diagram(LEVELS, {"ours": [0.1, 0.2]})
    with pytest.raises(ValueError, match="'oracle' has 1 points"):
        plotting.sparsification_plot([0.0, 0.5], {"ours": [1.0, 0.5]}, oracle=[1.0])
