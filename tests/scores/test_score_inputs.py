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
    is_flat,
    law_from,
    random_law,
    random_raw,
)
from torch import Tensor

from marigold_uq import metrics
from marigold_uq.distributions import FAMILIES, SampleDistribution
from marigold_uq.precision import full_precision
from marigold_uq.scores import SCORES, crps, energy_score, kernel_score, projected_score

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


QUICK = {("gaussian", "crps"), ("mixture", "crps"), ("low_rank", "kernel"), ("cholesky", "log")}
COMPILED = [
    pytest.param(name, score, marks=[] if (name, score) in QUICK else pytest.mark.slow)
    for name in DENSITY_NAMES
    for score in ("crps", "kernel", "log", "squared_error")
]


@pytest.mark.parametrize(("name", "score"), COMPILED)
def test_raw_output_score_and_gradient_compile_into_one_graph(name: str, score: str) -> None:
    shape = (4,) if is_flat(name) else SHAPE
    raw = random_raw(name, shape, dtype=torch.float32)
    value, bandwidth = torch.randn(2, *shape, generator=generator(1)), torch.tensor([0.5, 2.0])
    options: dict[str, Any] = {"bandwidth": bandwidth} if score == "kernel" else {}

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
