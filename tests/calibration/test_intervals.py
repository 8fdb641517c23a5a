"""The grid of half widths: exact at its coverages, rising between them, a warning beyond."""

import json
import math
import warnings

import numpy as np
import pytest
from scipy.stats import norm

from marigold_uq.calibration import COVERAGES, IntervalGrid, check_coverage

GRID = IntervalGrid((0.5, 0.8, 0.9, 0.95), ((0.4, 1.0), (1.1, 1.0), (2.5, 1.0), (2.5, 7.0)))


@pytest.mark.parametrize("index", range(4))
def test_a_calibrated_coverage_has_its_own_half_widths(index: int) -> None:
    assert GRID.scale(GRID.coverages[index]) == GRID.scales[index]


def test_every_coverage_of_a_long_grid_is_met_to_the_bit() -> None:
    scales = np.sort(np.random.default_rng(0).exponential(size=len(COVERAGES)))
    grid = IntervalGrid(COVERAGES, tuple((float(s),) for s in scales))
    assert [grid.scale(c)[0] for c in COVERAGES] == scales.tolist()


def test_coverages_are_decimal_numbers_however_they_were_computed() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert GRID.scale(1 - 0.05) == pytest.approx(GRID.scale(0.95))
        assert GRID.scale(0.8 + 0.15) == pytest.approx(GRID.scale(0.95))
        assert GRID.scale(0.5 - 1e-12) == pytest.approx(GRID.scale(0.5))


def test_half_widths_rise_over_all_coverages_also_beyond_the_grid() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scales = np.array([GRID.scale(c) for c in np.linspace(0.001, 0.999, 4001)])
    assert (np.diff(scales, axis=0) >= 0).all()
    assert (scales >= 0).all()


def test_between_two_coverages_a_gaussian_is_met_exactly() -> None:
    coverages = COVERAGES
    grid = IntervalGrid(coverages, tuple((3 * norm.ppf((1 + c) / 2),) for c in coverages))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for coverage in (0.05, 0.33, 0.61, 0.777, 0.91, 0.993, 0.999):
            assert grid.scale(coverage)[0] == pytest.approx(3 * norm.ppf((1 + coverage) / 2), rel=1e-12)


@pytest.mark.parametrize("coverage", [0.3, 0.99])
def test_outside_the_grid_it_warns_and_follows_the_gaussian(coverage: float) -> None:
    nearest = 0.5 if coverage < 0.5 else 0.95
    with pytest.warns(UserWarning, match=rf"from 0\.5 to 0\.95; the one for {coverage:g} is extrapolated"):
        scale = GRID.scale(coverage)
    factor = norm.ppf((1 + coverage) / 2) / norm.ppf((1 + nearest) / 2)
    assert scale == pytest.approx([factor * s for s in GRID.scale(nearest)])


def test_within_the_grid_there_is_no_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for coverage in (0.5, 0.6, 0.85, 0.95):
            GRID.scale(coverage)


def test_one_coverage_is_a_grid_too() -> None:
    grid = IntervalGrid((0.9,), ((2.0,),))
    assert grid.scale(0.9) == (2.0,)
    with pytest.warns(UserWarning, match="extrapolated"):
        assert grid.scale(0.95)[0] > 2.0


def test_it_survives_json() -> None:
    assert IntervalGrid.from_dict(json.loads(json.dumps(GRID.to_dict()))) == GRID
    assert GRID.num_outputs == 2


@pytest.mark.parametrize(
    ("coverages", "scales", "message"),
    [
        ((), (), "one row of half widths per coverage"),
        ((0.5,), ((1.0,), (2.0,)), "1 coverages and 2 rows"),
        ((0.9, 0.5), ((1.0,), (2.0,)), "must rise"),
        ((0.5, 0.5), ((1.0,), (2.0,)), "must rise"),
        ((50,), ((1.0,),), r"within \(0, 1\)"),
        ((0.5, 0.9), ((1.0, 2.0), (2.0,)), "one half width per output"),
        ((0.5,), ((),), "one half width per output"),
        ((0.5,), ((math.inf,),), "finite"),
        ((0.5,), ((math.nan,),), "finite"),
        ((0.5,), ((-1.0,),), "not negative"),
        ((0.5, 0.9), ((1.0, 2.0), (2.0, 1.9)), "would not be nested"),
    ],
)
def test_a_grid_that_cannot_give_nested_intervals_is_refused(coverages, scales, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        IntervalGrid(coverages, scales)


@pytest.mark.parametrize("coverage", [0, 1, 95, -0.1, math.nan])
def test_a_coverage_is_a_share(coverage: float) -> None:
    for check in (check_coverage, GRID.scale):
        with pytest.raises(ValueError, match=r"strictly between 0 and 1, 0\.95 for 95 %"):
            check(coverage)


@pytest.mark.parametrize("coverage", [math.nextafter(0.0, 1.0), 1e-17, math.nextafter(1.0, 0.0)])
@pytest.mark.filterwarnings("ignore:intervals were calibrated for coverages")
def test_the_most_extreme_coverages_have_finite_half_widths(coverage: float) -> None:
    exact, wide = IntervalGrid((0.5, 0.9), ((0.0, 1.0), (0.0, 2.0))).scale(coverage)
    assert exact == 0.0
    assert 0 <= wide <= 2.0 * 8.3 / 1.6
