"""What comes in: integers and mixed precision, graphs that compile whole, randomness that is handed over."""

from typing import Any

import pytest
import torch
from support.laws import (
    DENSITY_NAMES,
    FAMILY_SCORES,
    HEAD,
    JOINT_DENSITY_NAMES,
    generator,
    has_density,
    is_flat,
    law_from,
    random_law,
    random_raw,
)
from torch import Tensor

from marigold_uq import metrics
from marigold_uq.distributions import FAMILIES, SampleDistribution
from marigold_uq.precision import full_precision
from marigold_uq.schedulers import FRAMEWORKS
from marigold_uq.scores import (
    SCORES,
    crps,
    energy_score,
    kernel_score,
    projected_score,
    random_directions,
    sample_scores,
)
from marigold_uq.scores.directions import isotropic_directions

SHAPE = (2, 5)
every_score = pytest.mark.parametrize(("name", "score"), FAMILY_SCORES)


def options_of(score: str) -> dict[str, Any]:
    return {"generator": generator(5)} if score in ("energy", "projected") else {}


@every_score
@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.float16, torch.float32])
def test_a_target_takes_the_precision_of_the_distribution(name: str, score: str, dtype: torch.dtype) -> None:
    law = random_law(name, SHAPE)
    value = torch.randint(3, law.shape, generator=generator(1)).to(dtype)
    expected = SCORES[score](law, value.double(), **options_of(score))
    assert expected.dtype == torch.float64
    torch.testing.assert_close(SCORES[score](law, value, **options_of(score)), expected)


@pytest.mark.parametrize("name", ["gaussian", "low_rank"])
def test_the_bandwidth_is_not_rounded_to_the_type_of_the_target(name: str) -> None:
    law, value = random_law(name, SHAPE), torch.ones(2, *SHAPE, dtype=torch.int64)
    for bandwidth in (0.5, 1.5):
        expected = kernel_score(law, value.double(), bandwidth=bandwidth)
        torch.testing.assert_close(kernel_score(law, value, bandwidth=bandwidth), expected)


QUICK = {("gaussian", "crps"), ("low_rank", "kernel"), ("low_rank", "projected")}
CLOSED = [(name, score) for name, score in FAMILY_SCORES if has_density(name)]
COMPILED = [pytest.param(*pair, marks=[] if pair in QUICK else pytest.mark.slow) for pair in CLOSED]


def drawn_directions(name: str, score: str, shape: tuple[int, ...]) -> dict[str, Any]:
    """What a score that looks along random lines needs instead of a generator, which no graph can hold."""
    like = torch.empty(())
    if score == "projected":
        return {"directions": random_directions(shape, like=like, patch_size=2, generator=generator(5))}
    if score == "energy" and FAMILIES[name].joint:
        return {"directions": isotropic_directions(shape, 6, like=like, generator=generator(5))}
    return {}


@pytest.mark.parametrize(("name", "score"), COMPILED)
def test_raw_output_score_and_gradient_compile_into_one_graph(name: str, score: str) -> None:
    shape = (4,) if is_flat(name) else SHAPE
    raw = random_raw(name, shape, dtype=torch.float32)
    value, bandwidth = torch.randn(2, *shape, generator=generator(1)), torch.tensor([0.5, 2.0])
    options = {"bandwidth": bandwidth} if score == "kernel" else drawn_directions(name, score, shape)

    def loss(raw: Tensor) -> Tensor:
        return SCORES[score](FAMILIES[name].from_raw(raw, HEAD, event_shape=shape), value, **options).mean()

    torch.compiler.reset()
    gradients = []
    for function in (loss, torch.compile(loss, fullgraph=True, backend="aot_eager")):
        leaf = raw.clone().requires_grad_()
        function(leaf).backward()
        gradients.append(leaf.grad)
    torch.testing.assert_close(gradients[1], gradients[0])


@pytest.mark.parametrize("name", JOINT_DENSITY_NAMES)
def test_given_directions_are_those_that_a_generator_draws(name: str) -> None:
    law = random_law(name, SHAPE)
    value = law.mean + 0.5
    along = random_directions(SHAPE, like=value, patch_size=2, generator=generator(5))
    expected = projected_score(law, value, patch_size=2, generator=generator(5))
    assert torch.equal(projected_score(law, value, directions=along), expected)
    for size, shape in ((None, SHAPE), (2, (SHAPE[0], 2))):
        directions = isotropic_directions(shape, 64, like=value, generator=generator(5))
        expected = energy_score(law, value, patch_size=size, generator=generator(5))
        assert torch.equal(energy_score(law, value, patch_size=size, directions=directions), expected)
    with pytest.raises(ValueError, match=r"with event \(2, 5\); got \(3, 4\)"):
        energy_score(law, value, directions=torch.ones(3, 4))


@every_score
@pytest.mark.parametrize("masked", [False, True], ids=["all", "masked"])
def test_no_loss_looks_at_a_number(name: str, score: str, masked: bool) -> None:
    """On the meta device there are none: a score that waited for the device, or moved something to it, would raise."""
    raw = random_raw(name, SHAPE, dtype=torch.float32).to("meta").requires_grad_()
    value = torch.empty(2, *SHAPE, device="meta")
    mask = torch.empty(2, *SHAPE, device="meta", dtype=torch.bool) if masked else None
    scores = sample_scores(law_from(name, raw, SHAPE), value, score, mask=mask, **options_of(score))
    assert scores.shape == (2,)
    scores.mean().backward()
    assert raw.grad is not None


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_noise_and_targets_of_a_training_step_look_at_no_number(framework: str, family: str) -> None:
    scheduler = FRAMEWORKS[framework](noise_family=family, num_components=3, rank=2)
    original, noise = torch.empty(2, 2, *SHAPE, device="meta").unbind(0)
    timesteps = scheduler.sample_timesteps(2, generator()).to("meta")
    x_t = scheduler.add_noise(original, noise, timesteps)
    scaled = scheduler.scale_model_input(x_t, timesteps)
    assert scaled.shape == scheduler.training_target(original, noise, timesteps).shape == original.shape


@pytest.mark.parametrize("score", ["crps", "kernel", "log", "squared_error"])
@pytest.mark.parametrize("name", DENSITY_NAMES)
def test_vmap_maps_raw_output_to_scores_and_gradients(name: str, score: str) -> None:
    """Over an axis of models, 3 here, as a loop does."""
    shape = (4,) if is_flat(name) else SHAPE
    raw = torch.stack([random_raw(name, shape, seed=seed) for seed in range(3)])
    value = torch.randn(3, 2, *shape, generator=generator(1), dtype=torch.float64)

    def loss(raw: Tensor, value: Tensor) -> Tensor:
        return SCORES[score](FAMILIES[name].from_raw(raw, HEAD, event_shape=shape), value).mean()

    for function in (loss, torch.func.grad(loss)):
        looped = torch.stack([function(*pair) for pair in zip(raw, value, strict=True)])
        torch.testing.assert_close(torch.func.vmap(function)(raw, value), looped)


@pytest.mark.parametrize("name", JOINT_DENSITY_NAMES)
def test_scores_that_draw_want_a_generator_and_repeat_with_it(name: str) -> None:
    law = random_law(name, SHAPE)
    for score in (energy_score, projected_score):
        with pytest.raises(ValueError, match=r"pass generator=torch.Generator\(\)"):
            score(law, law.mean)
        assert torch.equal(*(score(law, law.mean, generator=generator(3)) for _ in range(2)))
    with pytest.raises(ValueError, match="estimated from draws"):
        energy_score(random_law("gaussian", SHAPE), law.mean, exponent=0.5)


def test_one_draw_has_no_fair_score() -> None:
    law = SampleDistribution(torch.zeros(1, 2, 3))
    for score in (crps, energy_score, kernel_score):
        with pytest.raises(ValueError, match="needs at least 2; got 1"):
            score(law, torch.zeros(2, 3))


def test_vmap_maps_the_sample_crps() -> None:
    samples = torch.randn(7, 5, 4, generator=generator())  # 7 ensembles of 5 members
    target = torch.randn(7, 4, generator=generator(1))
    expected = torch.stack([metrics.crps(*pair) for pair in zip(samples, target, strict=True)])
    torch.testing.assert_close(torch.func.vmap(metrics.crps)(samples, target), expected)


@pytest.mark.parametrize("device", ["cuda", "cpu", "mps", "xpu"])
def test_autocast_of_every_device_is_off_inside_full_precision(device: str) -> None:
    torch.set_autocast_enabled(device, True)
    try:
        assert full_precision(lambda: torch.is_autocast_enabled(device))() is False
        assert torch.is_autocast_enabled(device)
    finally:
        torch.set_autocast_enabled(device, False)


@every_score
def test_float32_distributions_are_scored_at_float64_targets(name: str, score: str) -> None:
    raw = random_raw(name, SHAPE, dtype=torch.float32)
    law = law_from(name, raw, SHAPE)
    value = law.mean.double() + 0.5
    assert SCORES[score](law, value, **options_of(score)).dtype == torch.float32
