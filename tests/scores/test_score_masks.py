"""Masks: a masked coordinate leaves a joint event exactly, and the average of coordinate-wise scores."""

import math

import pytest
import torch
from support.laws import (
    BATCH,
    FAMILY_NAMES,
    FAMILY_SCORES,
    JOINT_DENSITY_NAMES,
    JOINT_NAMES,
    generator,
    is_flat,
    law_from,
    random_law,
    random_raw,
    random_value,
    scores_of,
)
from support.references import restricted
from torch import Tensor

from marigold_uq.distributions import FAMILIES
from marigold_uq.scores import (
    SCORES,
    crps,
    energy_score,
    kernel_score,
    log_score,
    masked_mean,
    mean_score,
    projected_crps,
    projected_score,
    sample_scores,
)
from marigold_uq.scores.directions import box_directions, isotropic_directions
from marigold_uq.scores.energy import projection_constant

SHAPE = (2, 3, 2)


def random_mask() -> Tensor:
    """About half of the coordinates, different ones in each sample."""
    keep = torch.rand(BATCH, *SHAPE, generator=generator(11)) < 0.5
    assert all(0 < int(k.sum()) < k.numel() for k in keep)
    return keep


def options_of(score: str) -> dict[str, torch.Generator]:
    """The same directions at every call."""
    return {"generator": generator(5)} if score in ("energy", "projected") else {}


def kept(values: Tensor, index: int, keep: Tensor) -> Tensor:
    return values[index][keep[index]][None]  # (1, number kept)


@pytest.mark.parametrize("name", JOINT_DENSITY_NAMES)
def test_the_masked_log_score_is_that_of_the_law_of_the_kept_coordinates(name: str) -> None:
    law, keep = random_law(name, SHAPE), random_mask()
    value = random_value(law).where(keep, math.nan)
    score = log_score(law, value, mask=keep)
    for b in range(BATCH):
        torch.testing.assert_close(score[b : b + 1], log_score(restricted(law, b, keep[b]), kept(value, b, keep)))


@pytest.mark.parametrize("per_dimension", [True, False])
@pytest.mark.parametrize("name", JOINT_NAMES)
def test_the_masked_kernel_score_is_that_of_the_law_of_the_kept_coordinates(name: str, per_dimension: bool) -> None:
    """With a bandwidth per dimension, only the kept dimensions count."""
    law, keep = random_law(name, SHAPE), random_mask()
    value = random_value(law).where(keep, math.nan)
    options = {"bandwidth": 0.9, "per_dimension": per_dimension}
    score = kernel_score(law, value, mask=keep, **options)
    for b in range(BATCH):
        alone = kernel_score(restricted(law, b, keep[b]), kept(value, b, keep), **options)
        torch.testing.assert_close(score[b : b + 1], alone)


@pytest.mark.parametrize("name", JOINT_DENSITY_NAMES)
def test_the_masked_energy_score_is_that_of_the_kept_coordinates_along_the_same_directions(name: str) -> None:
    """Zeros added to a vector do not change its norm, so the constant is that of the whole event."""
    law, keep, dim = random_law(name, SHAPE), random_mask(), math.prod(SHAPE)
    value = random_value(law).where(keep, math.nan)
    score = energy_score(law, value, mask=keep, num_directions=30, generator=generator(5))
    directions = isotropic_directions((dim,), 30, like=value, generator=generator(5))
    for b in range(BATCH):
        rows = directions[:, keep[b].flatten()]
        along = projected_crps(restricted(law, b, keep[b]), kept(value, b, keep), rows)
        torch.testing.assert_close(score[b], projection_constant(dim) * along.mean())


@pytest.mark.parametrize("name", ["sample", "point"])
def test_the_masked_energy_score_of_draws_is_that_of_the_kept_coordinates(name: str) -> None:
    law, keep = random_law(name, SHAPE), random_mask()
    value = random_value(law).where(keep, math.nan)
    score = energy_score(law, value, mask=keep)
    for b in range(BATCH):
        torch.testing.assert_close(score[b : b + 1], energy_score(restricted(law, b, keep[b]), kept(value, b, keep)))


@pytest.mark.parametrize("name", JOINT_DENSITY_NAMES)
def test_the_masked_recipe_averages_over_kept_coordinates_and_projects_the_others_out(name: str) -> None:
    law, keep = random_law(name, SHAPE), random_mask()
    value = random_value(law).where(keep, math.nan)
    marginals = projected_score(law, value, mask=keep, patch_size=0, num_boxes=0, num_isotropic=0)
    options = {"patch_size": 0, "num_boxes": 9, "num_isotropic": 0}
    both = projected_score(law, value, mask=keep, **options, generator=generator(5))
    boxes = box_directions(SHAPE, 9, like=value, generator=generator(5)).flatten(1)
    for b in range(BATCH):
        alone, target = restricted(law, b, keep[b]), kept(value, b, keep)
        torch.testing.assert_close(marginals[b], crps(alone, target).mean())
        along = projected_crps(alone, target, boxes[:, keep[b].flatten()])
        torch.testing.assert_close(both[b], marginals[b] + along.mean())


@pytest.mark.parametrize(("name", "score"), FAMILY_SCORES)
def test_nan_targets_under_the_mask_leave_loss_and_gradient_finite_and_change_nothing(name: str, score: str) -> None:
    keep = random_mask()
    results = []
    for hidden in (math.nan, math.inf, 0.0, 1e6):
        raw = random_raw(name, SHAPE).requires_grad_()
        law = law_from(name, raw, SHAPE)
        value = random_value(law).where(keep, hidden)
        loss = mean_score(law, value, score, mask=keep, **options_of(score))
        loss.backward()
        assert raw.grad is not None
        assert bool(loss.isfinite())
        assert bool(raw.grad.isfinite().all())
        results.append((loss.detach(), raw.grad))
    for loss, gradient in results[1:]:
        assert torch.equal(loss, results[0][0])
        assert torch.equal(gradient, results[0][1])


@pytest.mark.parametrize("name", JOINT_NAMES)
def test_event_scores_called_with_a_mask_have_finite_gradients_beside_nan_targets(name: str) -> None:
    keep = random_mask()
    for score in {"energy", "kernel", "log", "projected"} & set(scores_of(name)):
        raw = random_raw(name, SHAPE).requires_grad_()
        law = law_from(name, raw, SHAPE)
        SCORES[score](law, random_value(law).where(keep, math.nan), mask=keep, **options_of(score)).sum().backward()
        assert raw.grad is not None
        assert bool(raw.grad.isfinite().all()), score


@pytest.mark.parametrize(("name", "score"), [pair for pair in FAMILY_SCORES if not is_flat(pair[0])])
def test_raw_output_at_masked_positions_gets_no_gradient_unless_it_is_shared(name: str, score: str) -> None:
    """The weights of a joint mixture belong to whole samples and are an average over positions: they are shared."""
    keep = torch.ones(BATCH, 1, *SHAPE[1:], dtype=torch.bool)
    keep[:, :, 1, 0] = False
    raw = random_raw(name, SHAPE).requires_grad_()
    law = law_from(name, raw, SHAPE)
    mean_score(law, random_value(law), score, mask=keep, **options_of(score)).backward()
    assert raw.grad is not None
    hidden = raw.grad[..., 1, 0]
    if name == "low_rank_mixture":
        channels = 3 * SHAPE[0]
        hidden = torch.cat([hidden[:, : 2 * channels], hidden[:, 3 * channels :]], 1)
    assert bool((hidden == 0).all())
    assert bool((raw.grad[..., 0, 0] != 0).any())


@pytest.mark.parametrize(("name", "score"), FAMILY_SCORES)
def test_a_mask_that_keeps_everything_changes_nothing(name: str, score: str) -> None:
    law = random_law(name, SHAPE)
    value, everything = random_value(law), torch.ones(BATCH, *SHAPE, dtype=torch.bool)
    plain = mean_score(law, value, score, **options_of(score))
    torch.testing.assert_close(mean_score(law, value, score, mask=everything, **options_of(score)), plain)


@pytest.mark.parametrize(("name", "score"), FAMILY_SCORES)
def test_masks_broadcast_over_batch_channels_and_space(name: str, score: str) -> None:
    law = random_law(name, SHAPE)
    value = random_value(law)
    small = torch.ones(1, 1, *SHAPE[1:], dtype=torch.bool)
    small[..., 0, 1] = False
    full = small.expand(BATCH, *SHAPE)
    expected = mean_score(law, value, score, mask=full, **options_of(score))
    for mask in (small, small[0], small[0, 0]):
        torch.testing.assert_close(mean_score(law, value, score, mask=mask, **options_of(score)), expected)


@pytest.mark.parametrize(("name", "score"), FAMILY_SCORES)
def test_a_sample_without_any_valid_coordinate_scores_zero(name: str, score: str) -> None:
    raw, keep = random_raw(name, SHAPE, batch=3), torch.ones(3, *SHAPE, dtype=torch.bool)
    keep[1] = False
    law = law_from(name, raw.requires_grad_(), SHAPE)
    value = random_value(law).where(keep, math.nan)
    loss = mean_score(law, value, score, mask=keep, **options_of(score))
    loss.backward()
    axis = 1 if FAMILIES[name].noise_channels else 0
    both = law_from(name, raw.detach().index_select(axis, torch.tensor([0, 2])), SHAPE)
    torch.testing.assert_close(3 * loss, 2 * mean_score(both, value[[0, 2]], score, **options_of(score)))
    assert raw.grad is not None
    assert bool((raw.grad.select(axis, 1) == 0).all())


@pytest.mark.parametrize(("name", "score"), FAMILY_SCORES)
def test_a_batch_without_any_valid_coordinate_has_loss_zero(name: str, score: str) -> None:
    raw = random_raw(name, SHAPE).requires_grad_()
    law = law_from(name, raw, SHAPE)
    nothing = torch.zeros(BATCH, *SHAPE, dtype=torch.bool)
    loss = mean_score(law, torch.full_like(law.mean, math.nan), score, mask=nothing, **options_of(score))
    loss.backward()
    assert loss.item() == 0
    assert raw.grad is not None
    assert bool((raw.grad == 0).all())


@pytest.mark.parametrize("mask", [torch.ones(2, 2, 3, 2), torch.ones(2, 2, 3, 2, dtype=torch.uint8)])
def test_a_mask_must_be_boolean(mask: Tensor) -> None:
    law = random_law("low_rank", SHAPE)
    with pytest.raises(TypeError, match="a mask must be boolean, True where a coordinate counts"):
        mean_score(law, random_value(law), mask=mask)


def test_a_mask_of_another_shape_is_an_error_that_gives_both_shapes() -> None:
    law = random_law("low_rank", SHAPE)
    with pytest.raises(ValueError, match=r"mask of shape \(2, 2, 3, 5\) does not broadcast to \(2, 2, 3, 2\)"):
        mean_score(law, random_value(law), mask=torch.ones(2, 2, 3, 5, dtype=torch.bool))


# The one reduction


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_without_a_name_the_family_chooses_the_score(name: str) -> None:
    law = random_law(name, SHAPE)
    value, chosen = random_value(law), FAMILIES[name].default_score
    plain = mean_score(law, value, **options_of(chosen))
    torch.testing.assert_close(plain, SCORES[chosen](law, value, **options_of(chosen)).mean())


def test_the_mean_is_over_valid_coordinates_of_a_sample_and_then_over_samples() -> None:
    law, keep = random_law("gaussian", SHAPE), random_mask()
    value, weight = random_value(law), torch.tensor([0.5, 2.0], dtype=torch.float64)
    first, second = (crps(law, value)[b][keep[b]].mean() for b in range(BATCH))
    torch.testing.assert_close(mean_score(law, value, "crps", mask=keep), (first + second) / 2)
    expected = (0.5 * first + 2 * second) / 2.5
    torch.testing.assert_close(mean_score(law, value, "crps", mask=keep, weight=weight), expected)


@pytest.mark.parametrize(("name", "score"), FAMILY_SCORES)
def test_the_documented_loss_is_the_trained_one(name: str, score: str) -> None:
    """Trainers average `sample_scores`, which processes and micro batches can add up."""
    law, keep = random_law(name, SHAPE), random_mask()
    keep[1] = False
    value = random_value(law).where(keep, math.nan)
    loss = mean_score(law, value, score, mask=keep, **options_of(score))
    assert torch.equal(loss, sample_scores(law, value, score, mask=keep, **options_of(score)).mean())


@pytest.mark.parametrize(("name", "score"), FAMILY_SCORES)
def test_every_score_takes_a_mask_and_sees_nothing_of_what_it_hides(name: str, score: str) -> None:
    law, keep = random_law(name, SHAPE), random_mask()
    value = random_value(law)
    seen = SCORES[score](law, value.where(keep, math.nan), mask=keep, **options_of(score))
    torch.testing.assert_close(seen, SCORES[score](law, value.where(keep, 7.0), mask=keep, **options_of(score)))
    if seen.ndim > 1:
        assert bool((seen[~keep] == 0).all())
        torch.testing.assert_close(seen[keep], SCORES[score](law, value, **options_of(score))[keep])


def test_the_mean_of_event_scores_weighs_samples() -> None:
    law = random_law("low_rank", SHAPE)
    value, weight = random_value(law), torch.tensor([0.5, 2.0], dtype=torch.float64)
    scores = kernel_score(law, value)
    torch.testing.assert_close(mean_score(law, value, weight=weight), (weight * scores).sum() / 2.5)


@pytest.mark.parametrize(("name", "score"), FAMILY_SCORES)
def test_the_score_of_a_sample_is_the_mean_score_of_a_batch_of_one(name: str, score: str) -> None:
    raw, keep = random_raw(name, SHAPE), random_mask()
    axis = 1 if FAMILIES[name].noise_channels else 0
    law = law_from(name, raw, SHAPE)
    value = random_value(law).where(keep, math.nan)
    scores = sample_scores(law, value, score, mask=keep, **options_of(score))
    plain = sample_scores(law, value.nan_to_num(), score, **options_of(score))
    assert scores.shape == plain.shape == (BATCH,)
    for b in range(BATCH):
        one, target = law_from(name, raw.narrow(axis, b, 1), SHAPE), value[b : b + 1]
        alone = mean_score(one, target, score, mask=keep[b : b + 1], **options_of(score))
        torch.testing.assert_close(scores[b], alone)
        torch.testing.assert_close(plain[b], mean_score(one, target.nan_to_num(), score, **options_of(score)))


def test_a_masked_mean_does_not_see_nan_under_the_mask() -> None:
    values = torch.tensor([[1.0, math.nan], [3.0, 5.0]])
    assert masked_mean(values, torch.tensor([[True, False], [True, True]])).tolist() == [1.0, 4.0]
    assert masked_mean(values, torch.tensor([[False, False], [True, False]])).tolist() == [0.0, 3.0]


def test_an_unknown_score_is_an_error_that_lists_the_known_ones() -> None:
    law = random_law("gaussian", (3,))
    with pytest.raises(ValueError, match=r"'nll'.*crps, energy, kernel, log, projected, squared_error"):
        mean_score(law, random_value(law), "nll")
