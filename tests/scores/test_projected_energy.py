"""The projected energy score: exact values, Monte Carlo, scoringrules along a direction, patches by brute force."""

import math

import pytest
import scoringrules
import torch
from support.laws import BATCH, FAMILY_NAMES, JOINT_DENSITY_NAMES, generator, random_law, random_value
from support.references import (
    STANDARD_ERRORS,
    Component,
    dense_components,
    expected_norm,
    mean_and_error,
    patch_masks,
)
from torch import Tensor

from marigold_uq.distributions import (
    CholeskyDistribution,
    HeadOptions,
    LowRankDistribution,
    LowRankMixtureDistribution,
)
from marigold_uq.scores import crps, energy_score, projected_crps, projected_score
from marigold_uq.scores.directions import box_directions, isotropic_directions
from marigold_uq.scores.energy import projection_constant

LIKE = torch.zeros((), dtype=torch.float64)
joint_density = pytest.mark.parametrize("name", JOINT_DENSITY_NAMES)


def dense_projected_crps(parts: list[Component], value: Tensor, direction: Tensor) -> float:
    """CRPS of a . X at a . y, from dense covariances and scoringrules' mixture of normal laws."""
    a = direction.flatten()
    means = [float(a @ p.mean) for p in parts]
    scales = [math.sqrt(float(a @ p.covariance @ a)) for p in parts]
    weights = [p.weight for p in parts]
    y = float(a @ value.flatten())
    return float(scoringrules.crps_mixnorm(y, means, scales, weights, backend="numpy"))


def isotropic_gaussian(shape: tuple[int, ...], scale: float) -> LowRankDistribution:
    loc = torch.randn(BATCH, *shape, generator=generator(), dtype=torch.float64)
    return LowRankDistribution(loc, torch.full_like(loc, scale**2), loc.new_zeros(BATCH, 0, *shape))


def exact_isotropic_energy(gap: Tensor, scale: float) -> float:
    """Energy score of N(mu, scale^2 I) at mu + gap."""
    return expected_norm(gap, scale) - 0.5 * expected_norm(torch.zeros(len(gap)), math.sqrt(2) * scale)


@pytest.mark.parametrize(("dim", "expected"), [(1, 1.0), (2, math.pi / 2), (3, 2.0), (4, 3 * math.pi / 4)])
def test_the_projection_constant_is_one_over_the_mean_of_a_coordinate_on_the_sphere(dim: int, expected: float) -> None:
    """E|a_1| on the unit sphere is 1, 2/pi, 1/2 and 4/(3 pi) in 1 to 4 dimensions."""
    assert projection_constant(dim) == pytest.approx(expected)


def test_the_projection_constant_does_not_overflow() -> None:
    assert projection_constant(307_200) == pytest.approx(math.sqrt(math.pi / 2 * 307_200), rel=1e-5)


@joint_density
def test_along_a_direction_the_score_is_the_crps_of_the_projected_law(name: str) -> None:
    law = random_law(name, (2, 3))
    value = random_value(law)
    directions = torch.randn(4, 2, 3, generator=generator(3), dtype=torch.float64)
    along = projected_crps(law, value, directions)
    assert along.shape == (BATCH, 4)
    for b in range(BATCH):
        for n in range(4):
            expected = dense_projected_crps(dense_components(law, b), value[b], directions[n])
            assert float(along[b, n]) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("shape", [(2,), (1, 5), (2, 2, 2)])
def test_many_directions_give_the_exact_energy_score_of_an_isotropic_gaussian(shape: tuple[int, ...]) -> None:
    law = isotropic_gaussian(shape, scale=0.8)
    value, dim = random_value(law), math.prod(shape)
    rng = generator(4)
    blocks = torch.stack([energy_score(law, value, num_directions=dim, generator=rng) for _ in range(1000)])
    mean, error = mean_and_error(blocks)
    for b in range(BATCH):
        exact = exact_isotropic_energy((value - law.loc)[b].flatten(), 0.8)
        assert abs(float(mean[b]) - exact) < STANDARD_ERRORS * float(error[b])
        assert float(mean[b]) == pytest.approx(exact, rel=0.02)  # so that the error bar is not an excuse


@joint_density
def test_many_directions_give_the_energy_score_of_many_draws(name: str) -> None:
    law = random_law(name, (2, 3), batch=1)
    value, (first, second) = random_value(law), law.rsample((2, 50_000), generator(5)).flatten(3)
    pairs = (first - value.flatten(1)).norm(dim=2) - 0.5 * (first - second).norm(dim=2)  # (N, 1)
    rng = generator(6)
    blocks = torch.stack([energy_score(law, value, num_directions=6, generator=rng) for _ in range(1000)])
    (drawn, drawn_error), (projected, projected_error) = mean_and_error(pairs), mean_and_error(blocks)
    error = float(torch.hypot(drawn_error, projected_error))
    assert abs(float(drawn - projected)) < STANDARD_ERRORS * error
    assert error < 0.01 * float(drawn)


@pytest.mark.parametrize("space", [(4,), (5,), (4, 4), (5, 3), (3, 2)])
@pytest.mark.parametrize("masked", [False, True], ids=["all", "masked"])
@joint_density
def test_patches_are_scored_one_by_one_with_the_law_of_their_coordinates(
    name: str, space: tuple[int, ...], masked: bool
) -> None:
    """Sizes that the patch does not divide, and masks, leave coordinates out of a patch; empty patches do not count."""
    shape, size, num_directions = (2, *space), 2, 3
    law = random_law(name, shape)
    value, keep = random_value(law), torch.ones(BATCH, *shape, dtype=torch.bool)
    if masked:
        keep = torch.rand(BATCH, *shape, generator=generator(9)) < 0.6
        keep[0, :, :size] = False  # whole patches are empty
        value = torch.where(keep, value, math.nan)
    score = energy_score(law, value, patch_size=size, num_directions=num_directions, mask=keep, generator=generator(7))
    patch_shape = (2, *[size] * len(space))
    directions = isotropic_directions(patch_shape, num_directions, like=LIKE, generator=generator(7))
    for b in range(BATCH):
        expected = brute_patch_scores(dense_components(law, b), value[b], keep[b], size, directions)
        assert float(score[b]) == pytest.approx(sum(expected) / len(expected), rel=1e-9)


def brute_patch_scores(
    parts: list[Component], value: Tensor, keep: Tensor, size: int, directions: Tensor
) -> list[float]:
    """The projected energy score of every patch with a coordinate left; directions beyond the event are cut off."""
    scores = []
    for inside in patch_masks(value.shape, size):
        counted = inside & keep
        if not bool(counted.any()):
            continue
        extent = [len(set(inside.nonzero()[:, axis].tolist())) for axis in range(inside.ndim)]
        along = []
        for direction in directions:
            placed = torch.zeros_like(value)
            placed[inside] = direction[tuple(slice(0, length) for length in extent)].flatten()
            placed = torch.where(counted, placed, 0.0)
            along.append(dense_projected_crps(parts, value.nan_to_num(), placed))
        scores.append(projection_constant(directions[0].numel()) * sum(along) / len(along))
    return scores


def test_many_directions_in_patches_give_the_mean_of_exact_patch_scores() -> None:
    """A 3 x 3 map in patches of 2: coordinates 4, 2, 2 and 1, each an isotropic Gaussian with an exact score."""
    law = isotropic_gaussian((1, 3, 3), scale=0.8)
    value, rng = random_value(law), generator(4)
    blocks = torch.stack([energy_score(law, value, patch_size=2, num_directions=4, generator=rng) for _ in range(500)])
    mean, error = mean_and_error(blocks)
    for b in range(BATCH):
        gaps = [(value - law.loc)[b][inside] for inside in patch_masks((1, 3, 3), 2)]
        exact = sum(exact_isotropic_energy(gap, 0.8) for gap in gaps) / len(gaps)
        assert abs(float(mean[b]) - exact) < STANDARD_ERRORS * float(error[b])


@joint_density
def test_a_patch_as_large_as_the_event_is_the_whole_event(name: str) -> None:
    law = random_law(name, (2, 3, 3))
    value = random_value(law)
    whole, patch = (energy_score(law, value, patch_size=p, generator=generator(2)) for p in (None, 3))
    torch.testing.assert_close(whole, patch)


@pytest.mark.parametrize("name", [n for n in FAMILY_NAMES if n not in JOINT_DENSITY_NAMES])
def test_patches_of_families_without_a_joint_density_are_refused(name: str) -> None:
    law = random_law(name, (1, 4))
    with pytest.raises(ValueError, match=rf"(?s)patch_size=2 needs the projected closed form.*{name}"):
        energy_score(law, random_value(law), patch_size=2)


@pytest.mark.parametrize("options", [{"exponent": 0.5}, {"lam": 0.5}])
def test_patches_with_another_exponent_or_lambda_are_refused(options: dict[str, float]) -> None:
    law = random_law("low_rank", (1, 4))
    with pytest.raises(ValueError, match="patch_size=2 needs the projected closed form"):
        energy_score(law, random_value(law), patch_size=2, **options)


def test_a_patch_has_at_least_one_coordinate() -> None:
    law = random_law("low_rank", (1, 4))
    with pytest.raises(ValueError, match="patch_size must be a positive number of coordinates; got 0"):
        energy_score(law, random_value(law), patch_size=0)


# Degenerate limits


@joint_density
def test_in_one_dimension_the_energy_score_is_the_crps(name: str) -> None:
    law = random_law(name, (1,))
    value = random_value(law)
    torch.testing.assert_close(energy_score(law, value, generator=generator()), crps(law, value)[:, 0])


@pytest.mark.parametrize("name", ["gaussian", "mixture"])
def test_the_energy_score_of_independent_coordinates_is_their_crps(name: str) -> None:
    law = random_law(name, (2, 5))
    value = random_value(law)
    torch.testing.assert_close(energy_score(law, value), crps(law, value))


@pytest.mark.parametrize("exponent", [0.5, 1.0, 1.5])
def test_the_energy_score_of_a_point_is_the_distance(exponent: float) -> None:
    law = random_law("point", (2, 5))
    value = random_value(law)
    distance = (value - law.mean).flatten(1).norm(dim=1)
    torch.testing.assert_close(energy_score(law, value, exponent=exponent), distance**exponent)


def test_families_that_say_the_same_law_get_the_same_score_along_the_same_directions() -> None:
    """Rank 0 is diagonal, one component is low rank, a full-rank factor is cholesky."""
    raw = torch.randn(BATCH, 6 * 4, generator=generator(), dtype=torch.float64)
    law = LowRankDistribution.from_raw(raw, HeadOptions(rank=4), event_shape=(4,))
    covariance = torch.stack([dense_components(law, b)[0].covariance for b in range(BATCH)])
    parameters = (law.loc[:, None], law.cov_diag[:, None], law.cov_factor[:, None], law.loc.new_zeros(BATCH, 1))
    same = [CholeskyDistribution(law.loc, torch.linalg.cholesky(covariance)), LowRankMixtureDistribution(*parameters)]
    value = random_value(law)
    for other in same:
        left, right = (energy_score(d, value, num_directions=9, generator=generator(1)) for d in (law, other))
        torch.testing.assert_close(left, right)


def test_along_the_coordinate_axes_the_score_is_the_marginal_crps() -> None:
    for name in JOINT_DENSITY_NAMES:
        law = random_law(name, (2, 3))
        value, axes = random_value(law), torch.eye(6, dtype=torch.float64).reshape(6, 2, 3)
        torch.testing.assert_close(projected_crps(law, value, axes), crps(law, value).flatten(1))


# Directions


def test_isotropic_directions_are_unit_vectors_in_complete_orthonormal_blocks() -> None:
    directions = isotropic_directions((5,), 12, like=LIKE, generator=generator())
    assert directions.shape == (12, 5)
    torch.testing.assert_close(directions.norm(dim=1), torch.ones(12, dtype=torch.float64))
    for block in directions[:10].split(5):
        torch.testing.assert_close(block @ block.T, torch.eye(5, dtype=torch.float64))


def test_isotropic_directions_have_no_preferred_axis() -> None:
    """E a a^T = I / D over 2000 directions that do not come in complete blocks, and over blocks."""
    for num_directions, repeats in [(3, 700), (4, 500)]:
        rng = generator(1)
        a = torch.cat([isotropic_directions((4,), num_directions, like=LIKE, generator=rng) for _ in range(repeats)])
        mean, error = mean_and_error(a[:, :, None] * a[:, None, :])
        assert float(((mean - torch.eye(4) / 4).abs() / error).max()) < STANDARD_ERRORS


@pytest.mark.parametrize("shape", [(3,), (2, 7), (1, 5, 6)])
def test_boxes_are_unit_vectors_constant_over_a_box(shape: tuple[int, ...]) -> None:
    boxes = box_directions(shape, 200, like=LIKE, generator=generator())
    torch.testing.assert_close(boxes.flatten(1).norm(dim=1), torch.ones(200, dtype=torch.float64))
    for box in boxes:
        support = (box != 0).any(0)
        where = support.nonzero()
        if support.ndim:
            extent = where.amax(0) - where.amin(0) + 1
            assert int(support.sum()) == int(extent.prod())  # a full box
        inside = box[:, support] if support.ndim else box[:, None]
        torch.testing.assert_close(inside, inside[:, :1].expand_as(inside))
    assert bool((boxes != 0).any(0).all()), "some coordinate is in no box"


def test_boxes_of_every_size_occur_at_every_place() -> None:
    """All ten intervals of a line of four: without one of them some correlation would stay unseen."""
    boxes = box_directions((1, 4), 1000, like=LIKE, generator=generator()) != 0
    assert len({tuple(support) for support in boxes[:, 0].tolist()}) == 10


def test_directions_come_from_the_generator_alone() -> None:
    law = random_law("low_rank", (1, 8, 8))
    value, before = random_value(law), torch.get_rng_state()
    for score in (energy_score, projected_score):
        first, again = (score(law, value, generator=generator(3)) for _ in range(2))
        assert torch.equal(first, again)
        assert not torch.equal(first, score(law, value, generator=generator(4)))
    assert torch.equal(before, torch.get_rng_state())


# The recipe: marginals + patches + boxes + isotropic directions


@joint_density
def test_the_recipe_is_the_sum_of_its_parts(name: str) -> None:
    law = random_law(name, (2, 5, 3))
    value = random_value(law)
    parts = {"patch_size": 2, "num_directions": 4, "num_boxes": 6, "num_isotropic": 5}
    score = projected_score(law, value, **parts, generator=generator(5))
    rng = generator(5)
    patches = energy_score(law, value, patch_size=2, num_directions=4, generator=rng) / projection_constant(8)
    boxes = projected_crps(law, value, box_directions((2, 5, 3), 6, like=value, generator=rng)).mean(1)
    sphere = isotropic_directions((2, 5, 3), 5, like=value, generator=rng)
    isotropic = projected_crps(law, value, sphere).mean(1)
    torch.testing.assert_close(score, crps(law, value).flatten(1).mean(1) + patches + boxes + isotropic)
    bare = projected_score(law, value, patch_size=0, num_boxes=0, num_isotropic=0)
    torch.testing.assert_close(bare, crps(law, value).flatten(1).mean(1))


@pytest.mark.parametrize("name", [n for n in FAMILY_NAMES if n not in JOINT_DENSITY_NAMES])
def test_the_recipe_needs_a_joint_gaussian_family(name: str) -> None:
    law = random_law(name, (1, 4))
    with pytest.raises(TypeError, match=rf"family '{name}' is not a joint Gaussian one"):
        projected_score(law, random_value(law))


def test_boxes_on_a_map_see_the_two_diagonals_of_a_rectangle_only_together_and_the_other_parts_tell_them_apart() -> (
    None
):
    """Boxes are products of intervals, so Var(a . X) does not change when a partner moves along one axis."""
    corners = torch.eye(4, dtype=torch.float64)
    falling, rising = corners[0] + corners[3], corners[1] + corners[2]
    laws = [
        LowRankDistribution(
            torch.zeros(1, 1, 2, 2, dtype=torch.float64),
            (1.5 - factor).reshape(1, 1, 2, 2),
            factor.reshape(1, 1, 1, 2, 2),
        )
        for factor in (falling, rising)
    ]
    value = torch.tensor([[[[1.0, -0.5], [0.3, 0.9]]]], dtype=torch.float64)

    def both(patch_size: int, num_isotropic: int) -> list[torch.Tensor]:
        options = {"patch_size": patch_size, "num_isotropic": num_isotropic}
        return [projected_score(law, value, **options, generator=generator(1)) for law in laws]

    torch.testing.assert_close(*both(patch_size=0, num_isotropic=0))
    assert not torch.allclose(*both(patch_size=2, num_isotropic=0))
    assert not torch.allclose(*both(patch_size=0, num_isotropic=8))


def test_small_boxes_are_as_frequent_as_large_ones_on_a_logarithmic_scale() -> None:
    """P(size <= 8 of 64) = ln 8.5 / ln 64 = .515; with sizes uniform it would be .13."""
    boxes = box_directions((1, 64), 2000, like=LIKE, generator=generator())
    share = float(((boxes != 0).sum((1, 2)) <= 8).double().mean())
    assert abs(share - math.log(8.5) / math.log(64)) < STANDARD_ERRORS * 0.5 / math.sqrt(2000)
