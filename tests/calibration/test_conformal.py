"""Conformal numbers against decimal arithmetic, brute force and simulated coverage."""

import math
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from marigold_uq.calibration import (
    IntervalGrid,
    conformal_images,
    conformal_rows,
    interval_grid_images,
    interval_grid_rows,
    residual_ratio,
    stack_grids,
)


@pytest.mark.parametrize(
    ("num_rows", "coverage", "rank"),
    [
        *[(19, 0.95, 19), (20, 0.95, 20), (39, 0.95, 38), (9, 0.9, 9), (99, 0.9, 90), (29, 0.9, 27), (1, 0.5, 1)],
        *[(9, 1 - 0.1, 9), (99, 1 - 0.1, 90), (29, 1 - 0.1, 27), (19, 1 - 0.05, 19), (9, 0.7 + 0.2, 9)],
    ],
)
def test_the_conformal_rank_is_exact_also_where_floats_round_up(num_rows: int, coverage: float, rank: int) -> None:
    """ceil((n + 1) coverage) in decimal arithmetic; 30 * 0.9 or 100 * 0.9 may exceed 27 and 90 in floats."""
    scores = torch.randperm(num_rows, generator=torch.Generator().manual_seed(0)).double() + 1
    assert conformal_rows(scores, coverage) == rank


@pytest.mark.parametrize("tied", [False, True])
def test_the_row_scale_is_the_smallest_that_holds_on_the_calibration_rows(tied: bool) -> None:
    """Brute force: the smallest score s such that at least (n + 1) coverage scores are at most s."""
    scores = torch.rand(37, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    scores = (5 * scores).round() if tied else scores
    for tenths in range(1, 10):
        enough = [s for s in scores.tolist() if int((scores <= s).sum()) >= Fraction(tenths, 10) * 38]
        assert conformal_rows(scores, tenths / 10) == min(enough)


def test_rows_are_covered_as_promised_on_average_over_calibration_sets() -> None:
    """The exact mean coverage of split conformal is k/(n + 1) for continuous scores, whatever their distribution."""
    generator = torch.Generator().manual_seed(0)
    trials, num_rows, coverage = 20_000, 30, 0.9
    heavy = torch.randn(num_rows + 1, trials, generator=generator, dtype=torch.float64).exp()  # log-normal ratios
    calibration, new = heavy[:-1], heavy[-1]
    covered = (new <= conformal_rows(calibration, coverage)).double()
    expected = math.ceil(31 * 0.9) / 31
    assert abs(covered.mean().item() - expected) < 4 * math.sqrt(expected * (1 - expected) / trials)
    assert expected >= coverage


def test_outputs_get_their_own_scale() -> None:
    scores = torch.stack([torch.arange(19.0), 10 * torch.arange(19.0)], 1)
    assert conformal_rows(scores, 0.95).tolist() == [18.0, 180.0]


def test_too_few_rows_are_an_error_or_an_infinite_scale() -> None:
    with pytest.raises(ValueError, match=r"18 calibration rows cannot promise a coverage of 0\.95: at least 19"):
        conformal_rows(torch.zeros(18), 0.95)
    assert conformal_rows(torch.zeros(18, 2), 0.95, too_few="inf").tolist() == [math.inf] * 2
    assert conformal_rows(torch.zeros(19), 0.95) == 0


def simulate_images(num: int, pixels: int, generator: torch.Generator) -> Tensor:
    """Ratios whose pixels share an image-wide offset and scale: strongly dependent within an image."""
    offset = 1.5 * torch.randn(num, 1, generator=generator)
    scale = (0.5 * torch.randn(num, 1, generator=generator)).exp()
    return (offset + scale * torch.randn(num, pixels, generator=generator)).abs()


def test_images_keep_the_promised_share_of_pixels_on_average() -> None:
    generator = torch.Generator().manual_seed(0)
    trials, num_images, pixels, alpha = 500, 25, 30, 0.1
    losses = torch.empty(trials)
    for trial in range(trials):
        images = simulate_images(num_images + 1, pixels, generator)
        scale = conformal_images(list(images[:-1]), 1 - alpha)
        losses[trial] = (images[-1] > scale).float().mean()
    error = losses.std() / math.sqrt(trials)
    assert losses.mean() < alpha + 3 * error
    # Conformal risk control is also tight: at least alpha - 2/(n + 1).
    assert losses.mean() > alpha - 2 / (num_images + 1) - 3 * error


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("coverage", [0.3, 0.5, 0.8, 1 - 0.2, 0.9])
def test_the_image_scale_is_the_smallest_that_satisfies_the_inequality(tied: bool, coverage: float) -> None:
    """Brute force in exact arithmetic: try every ratio, every midpoint and zero."""
    generator = torch.Generator().manual_seed(1)
    images = [torch.rand(size, generator=generator, dtype=torch.float64) for size in (3, 7, 1, 5, 4, 6, 2, 9, 3, 8, 5)]
    images = [(4 * image).round() if tied else image for image in images]
    groups = list("aabcdeefghi")
    alpha = 1 - Fraction(str(round(coverage, 12)))

    def average_loss(scale: float) -> Fraction:
        per_scene: dict[str, list[Fraction]] = {}
        for group, image in zip(groups, images, strict=True):
            per_scene.setdefault(group, []).append(Fraction(int((image > scale).sum()), len(image)))
        means = [sum(values) / len(values) for values in per_scene.values()]
        return (sum(means) + 1) / (len(means) + 1)

    candidates = sorted({0.0, *torch.cat(images).tolist()})
    candidates += [(a + b) / 2 for a, b in pairwise(candidates)]
    possible = [scale for scale in candidates if average_loss(scale) <= alpha]
    expected = min(possible) if possible else math.inf
    assert conformal_images(images, coverage, groups=groups, too_few="inf") == expected


def test_an_inequality_that_is_met_exactly_is_met() -> None:
    """9 images, coverage 0.9: no pixel of any may stay outside. 99 images: 9 whole images may, whatever they are."""
    nine = [torch.full((7,), float(i)) for i in range(1, 10)]
    assert conformal_images(nine, 0.9) == 9.0
    many = [torch.full((7,), float(i)) for i in range(1, 100)]
    assert conformal_images(many, 1 - 0.1) == 90.0


def test_with_19_images_five_percent_needs_every_pixel_inside() -> None:
    images = [torch.rand(10, generator=torch.Generator().manual_seed(i)) for i in range(19)]
    assert conformal_images(images, 0.95) == max(float(image.max()) for image in images)
    with pytest.raises(ValueError, match="at least 19"):
        conformal_images(images[:18], 0.95)
    assert conformal_images(images[:18], 0.95, too_few="inf") == math.inf
    with pytest.raises(ValueError, match="2 calibration scenes"):
        conformal_images(images, 0.95, groups=[0] * 10 + [1] * 9)


def test_an_image_that_nothing_can_cover_has_an_infinite_scale() -> None:
    images = [torch.tensor([1.0, math.inf])] * 9
    assert conformal_images(images, 0.9) == math.inf
    assert conformal_images(images, 0.3) == 1.0


def test_images_are_sorted_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Depth maps of a whole calibration set do not fit into the memory a second time."""
    sizes = []
    sort = Tensor.sort

    def watched(self: Tensor, *args: object, **options: object) -> object:
        sizes.append(self.numel())
        return sort(self, *args, **options)

    monkeypatch.setattr(Tensor, "sort", watched)
    monkeypatch.setattr(torch, "cat", lambda *_: pytest.fail("all pixels were put into one tensor"))
    images = (torch.rand(1000, generator=torch.Generator().manual_seed(i)) for i in range(40))  # read once
    grid = interval_grid_images(images)
    assert grid is not None
    assert sizes == [1000] * 40


def test_a_grid_of_rows_holds_what_the_rows_can_promise() -> None:
    scores = torch.rand(39, 2, generator=torch.Generator().manual_seed(0))
    grid = interval_grid_rows(scores)
    assert grid is not None
    assert grid.coverages[-1] == 0.97  # 39 rows promise at most 39/40
    assert grid.num_outputs == 2
    for coverage in (0.1, 0.5, 0.95):
        assert grid.scale(coverage) == pytest.approx(conformal_rows(scores, coverage).tolist())
    one = interval_grid_rows(scores[:, 0], [0.9])
    assert one == IntervalGrid((0.9,), ((float(conformal_rows(scores[:, 0], 0.9)),),))
    assert interval_grid_rows(torch.zeros(0, 2)) is None


def test_a_grid_of_images_is_one_search_per_coverage() -> None:
    images = list(simulate_images(30, 20, torch.Generator().manual_seed(3)))
    scenes = [i // 2 for i in range(30)]
    grid = interval_grid_images(images, [0.9, 0.5, 0.99], groups=scenes)
    assert grid is not None
    assert grid.coverages == (0.5, 0.9)  # 15 scenes cannot promise 0.99
    assert grid.scales == tuple((conformal_images(images, c, groups=scenes),) for c in (0.5, 0.9))
    assert interval_grid_images(images[:3], [0.9]) is None


def test_an_output_that_some_rows_can_never_cover_leaves_out_those_coverages() -> None:
    scores = torch.arange(1.0, 100.0)
    scores[-20:] = math.inf  # predictions without spread that miss
    grid = interval_grid_rows(scores)
    assert grid is not None
    assert max(grid.coverages) == 0.75


def test_lead_times_are_stacked_at_the_coverages_that_all_of_them_have() -> None:
    near = IntervalGrid((0.5, 0.8, 0.9), ((1.0,), (2.0,), (3.0,)))
    far = IntervalGrid((0.5, 0.9, 0.95), ((4.0,), (6.0,), (7.0,)))
    assert stack_grids([near, far]) == IntervalGrid((0.5, 0.9), ((1.0, 4.0), (3.0, 6.0)))
    assert stack_grids([near, None]) is None
    assert stack_grids([]) is None
    assert stack_grids([near, IntervalGrid((0.6,), ((1.0,),))]) is None


def test_calibrated_intervals_cover_new_gaussian_rows_at_coverages_between_those_of_the_grid() -> None:
    generator = np.random.default_rng(0)
    grid = interval_grid_rows(torch.from_numpy(np.abs(2 * generator.normal(size=4000))))  # std is too small by 2
    assert grid is not None
    fresh = np.abs(2 * generator.normal(size=100_000))
    for coverage in (0.5, 0.63, 0.87, 0.985):
        # 4,000 rows know a coverage to sqrt(.25/4000) = .8 %.
        assert np.mean(fresh <= grid.scale(coverage)[0]) == pytest.approx(coverage, abs=4 * 0.008)


def test_residual_ratio_knows_exact_and_hopeless_pixels() -> None:
    mean, std = torch.tensor([0.0, 1.0, 1.0, 5.0]), torch.tensor([1.0, 0.0, 0.0, 2.0])
    target, mask = torch.tensor([2.0, 1.0, 3.0, float("nan")]), torch.tensor([True, True, True, False])
    assert residual_ratio(mean, std, target, mask).tolist() == [2.0, 0.0, math.inf]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: conformal_rows(torch.zeros(50), 95), "strictly between 0 and 1"),
        (lambda: conformal_rows(torch.full((50,), math.nan), 0.95), "scores contain NaN"),
        (lambda: conformal_rows(torch.tensor(1.0), 0.95), "single number"),
        (lambda: interval_grid_rows(torch.tensor(1.0)), "single number"),
        (lambda: conformal_images([torch.ones(3), torch.ones(0)], 0.5), "image 1 has no valid pixel"),
        (lambda: conformal_images([torch.ones(3), torch.full((3,), math.nan)], 0.5), "image 1 contain NaN"),
        (lambda: conformal_images([torch.ones(3)] * 3, 0.5, groups=[1]), "one scene per image"),
        (lambda: conformal_images([], 0.95), "0 calibration images"),
        (lambda: residual_ratio(torch.zeros(2), torch.zeros(3), torch.zeros(2)), "one shape"),
        (lambda: residual_ratio(torch.zeros(2), -torch.ones(2), torch.zeros(2)), "negative"),
    ],
)
def test_bad_input_is_an_error_that_says_what_to_do(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
