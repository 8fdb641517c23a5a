"""Gradients of every score of every family: against finite differences, at extreme raw output, in every precision."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.laws import (
    BATCH,
    FAMILY_NAMES,
    FAMILY_SCORES,
    JOINT_DENSITY_NAMES,
    generator,
    is_flat,
    law_from,
    random_raw,
    random_value,
    raw_shape,
)
from torch import Tensor

from marigold_uq.distributions import HeadOptions, LowRankDistribution
from marigold_uq.scores import SCORES, kernel_score, log_score, projected_crps

EXTREME = 50.0
Shape = tuple[int, ...]

every_score = pytest.mark.parametrize(("name", "score"), FAMILY_SCORES)


def evaluate(
    name: str, score: str, raw: Tensor, value: Tensor, event_shape: Shape, mask: Tensor | None = None
) -> Tensor:
    """The score of the law that raw output stands for, along the same directions at every call."""
    options: dict[str, Any] = {"generator": generator(5)} if score in ("energy", "projected") else {}
    if score not in ("crps", "squared_error"):  # these are masked when they are averaged
        options["mask"] = mask
    return SCORES[score](law_from(name, raw, event_shape), value, **options)


@every_score
def test_gradients_are_those_of_finite_differences(name: str, score: str) -> None:
    shape = (1, 2)
    raw = random_raw(name, shape, seed=3)
    value = random_value(law_from(name, raw, shape))
    inputs = (raw.requires_grad_(), value.requires_grad_())
    assert torch.autograd.gradcheck(lambda r, v: evaluate(name, score, r, v, shape), inputs)


@pytest.mark.parametrize("options", [{"exponent": 0.5}, {"exponent": 1.5}, {"lam": 0.4}])
@pytest.mark.parametrize("name", ["gaussian", "low_rank", "cholesky", "sample", "point"])
def test_gradients_through_draws_are_those_of_finite_differences(name: str, options: dict[str, float]) -> None:
    """Mixtures are left out: the choice of a component has no gradient."""
    shape = (1, 2)
    raw = random_raw(name, shape, seed=3).requires_grad_()
    value = random_value(law_from(name, raw, shape))

    def score(r: Tensor) -> Tensor:
        law = law_from(name, r, shape)
        return SCORES["energy"](law, value, num_draws=4, generator=generator(5), **options)

    assert torch.autograd.gradcheck(score, (raw,))


@pytest.mark.parametrize("shape", [(1,), (2, 3), (1, 2, 3)], ids=["scalar", "line", "map"])
@pytest.mark.parametrize(("name", "score"), [pair for pair in FAMILY_SCORES if pair[1] != "squared_error"])
def test_every_raw_channel_gets_a_gradient(name: str, score: str, shape: Shape) -> None:
    """Squared error sees the mean only; the CRPS no correlations, which have raw channels of their own in cholesky."""
    raw = random_raw(name, shape).requires_grad_()
    value = random_value(law_from(name, raw, shape))
    evaluate(name, score, raw, value, shape).sum().backward()
    assert raw.grad is not None
    gradient = raw.grad.transpose(0, 1) if raw.grad.ndim > len(shape) + 1 else raw.grad
    channels = gradient.transpose(0, 1).flatten(1).abs().amax(1)  # over the batch and space
    seen = channels[: math.prod(shape)] if is_flat(name) and score == "crps" else channels
    assert bool((seen > 1e-9).all())


def extreme_raws(name: str, shape: Shape) -> list[Tensor]:
    """All +50, all -50, and random signs."""
    ones = torch.ones(raw_shape(name, shape))
    signs = [torch.randn(ones.shape, generator=generator(seed)).sign() for seed in range(6)]
    return [EXTREME * pattern for pattern in [ones, -ones, *signs]]


@pytest.mark.parametrize("shape", [(1,), (1, 2, 3)], ids=["scalar", "map"])
@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_extreme_raw_output_has_finite_moments_draws_and_quantiles(name: str, shape: Shape) -> None:
    for raw in extreme_raws(name, shape):
        law = law_from(name, raw, shape)
        for tensor in (law.mean, law.variance, law.rsample((10,), generator()), law.quantile([0.01, 0.99])):
            assert tensor.dtype == torch.float32
            assert bool(tensor.isfinite().all())
        for other in (law.affine(-0.3, 1.0), law.scaled(0.01), law.convolved(1e-4), law.convolved(1.0)):
            assert bool(other.rsample((10,), generator()).isfinite().all())


@pytest.mark.parametrize("masked", [False, True], ids=["all", "masked"])
@pytest.mark.parametrize("shape", [(1,), (1, 2, 3)], ids=["scalar", "map"])
@every_score
def test_extreme_raw_output_has_finite_scores_and_gradients(name: str, score: str, shape: Shape, masked: bool) -> None:
    """Float32. Targets a few units away, as noise is, and far away.

    A triangle of +-50 has a condition number of about 50^D: beyond D = 4 the gradient of the *true* log density of a
    cholesky law leaves the range of float32, so there the map is 2 x 2.
    """
    shape = (1, 2, 2) if is_flat(name) and len(shape) > 1 else shape
    for raw in extreme_raws(name, shape):
        for distance in (1.0, 100.0):
            raw = raw.detach().requires_grad_()
            value = distance * torch.randn(BATCH, *shape, generator=generator(7))
            mask = torch.arange(math.prod(shape)).reshape(shape) != 1 if masked else None
            result = evaluate(name, score, raw, value, shape, mask)
            result.sum().backward()
            assert bool(result.isfinite().all())
            assert raw.grad is not None
            assert bool(raw.grad.isfinite().all())


@pytest.mark.parametrize(
    ("score", "options"), [(log_score, {}), (kernel_score, {"bandwidth": 1.0}), (kernel_score, {"bandwidth": 0.01})]
)
def test_large_parallel_factors_are_no_problem_in_float32(
    score: Callable[..., Tensor], options: dict[str, float]
) -> None:
    """Factors of 50 beside a variance of 1e-6, all parallel: I + U^T D^-1 U is singular in float32."""
    loc, rho = torch.randn(2, 6, generator=generator()), torch.full((2, 6), math.log(1e-6))
    factor = EXTREME * torch.randn(2, 6, generator=generator(1)).sign()
    raw = torch.cat([loc, rho, factor, factor, -factor], 1)
    value = loc + factor * torch.tensor([[1.5], [0.3]])
    single, double = (
        score(
            LowRankDistribution.from_raw(raw.to(dtype), HeadOptions(rank=3), event_shape=(6,)),
            value.to(dtype),
            **options,
        )
        for dtype in (torch.float32, torch.float64)
    )
    # float32 knows a residual of 75 to 4e-6, which is 0.004 standard deviations of 1e-3, squared and summed over six
    torch.testing.assert_close(single.double(), double, rtol=1e-3, atol=1e-3)


def draws_directions(name: str, score: str) -> bool:
    """Whether a score is random; the same seed gives other numbers in float32 than in float64."""
    return score in ("energy", "projected") and name in JOINT_DENSITY_NAMES


@pytest.mark.parametrize(("name", "score"), [pair for pair in FAMILY_SCORES if not draws_directions(*pair)])
def test_float32_scores_are_float64_scores_to_single_precision(name: str, score: str) -> None:
    shape = (2, 5)
    raw = random_raw(name, shape)
    value = random_value(law_from(name, raw, shape))
    single = evaluate(name, score, raw.float(), value.float(), shape)
    assert single.dtype == torch.float32
    torch.testing.assert_close(single.double(), evaluate(name, score, raw, value, shape), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", JOINT_DENSITY_NAMES)
def test_along_given_directions_float32_is_float64_to_single_precision(name: str) -> None:
    shape = (2, 5)
    raw, directions = random_raw(name, shape), torch.randn(7, *shape, generator=generator(), dtype=torch.float64)
    value = random_value(law_from(name, raw, shape))
    single = projected_crps(law_from(name, raw.float(), shape), value.float(), directions.float())
    double = projected_crps(law_from(name, raw, shape), value, directions)
    torch.testing.assert_close(single.double(), double, rtol=2e-5, atol=2e-5)


@every_score
def test_inside_bfloat16_autocast_scores_and_gradients_are_those_of_float32(name: str, score: str) -> None:
    shape = (2, 5)
    raw = random_raw(name, shape, dtype=torch.float32)
    value = random_value(law_from(name, raw, shape))
    results = []
    for enabled in (False, True):
        leaf = raw.clone().requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            result = evaluate(name, score, leaf, value, shape)
        result.sum().backward()
        results.append((result.detach(), leaf.grad))
    assert results[1][0].dtype == torch.float32
    assert torch.equal(*(result for result, _ in results))
    assert torch.equal(*(gradient for _, gradient in results))


@every_score
def test_bfloat16_raw_output_is_scored_in_float32(name: str, score: str) -> None:
    shape = (2, 5)
    raw = random_raw(name, shape, dtype=torch.float32).bfloat16()
    value = random_value(law_from(name, raw, shape))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half = evaluate(name, score, raw, value, shape)
        half_target = evaluate(name, score, raw, value.bfloat16(), shape)
    assert half.dtype == half_target.dtype == torch.float32
    assert torch.equal(half, evaluate(name, score, raw.float(), value, shape))
    assert torch.equal(half_target, evaluate(name, score, raw.float(), value.bfloat16().float(), shape))


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_draws_inside_autocast_are_those_of_float32(name: str) -> None:
    law = law_from(name, random_raw(name, (2, 5), dtype=torch.float32), (2, 5))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside, noisy = law.rsample((3,), generator(1)), law.convolved(0.3).variance
    assert torch.equal(inside, law.rsample((3,), generator(1)))
    assert torch.equal(noisy, law.convolved(0.3).variance)
