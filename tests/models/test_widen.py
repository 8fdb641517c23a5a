"""Widening a pretrained U-Net: the law's mean stays what the network said, and the way back is exact."""

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel
from support.tiny_unets import EMBEDDING_DIM, run_unet, tiny_unet
from torch import Tensor

from marigold_uq.distributions import (
    FAMILIES,
    HeadOptions,
    LowRankMixtureDistribution,
    MixtureDistribution,
    NoiseDistribution,
)
from marigold_uq.models.widen import add_condition_channels, narrow, widen

HEADS: dict[str, tuple[str, dict[str, int]]] = {
    "point": ("point", {}),
    "gaussian": ("gaussian", {}),
    "mixture-1": ("mixture", {"num_components": 1}),
    "mixture-2": ("mixture", {"num_components": 2}),
    "mixture-3": ("mixture", {"num_components": 3}),
    "mixture-25": ("mixture", {"num_components": 25}),
    "low-rank-0": ("low_rank", {"rank": 0}),
    "low-rank-3": ("low_rank", {"rank": 3}),
    "low-rank-mixture": ("low_rank_mixture", {"num_components": 3, "rank": 2}),
    "sample": ("sample", {}),
}
heads = pytest.mark.parametrize(("family", "sizes"), HEADS.values(), ids=HEADS)


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def law_of(unet: UNet2DConditionModel, family: str, sizes: dict[str, int], x: Tensor) -> NoiseDistribution:
    """The law for input x; a family with a noise channel gets one."""
    extra = FAMILIES[family].noise_channels
    if extra:
        x = torch.cat([x, normal(len(x), extra, *x.shape[2:], dtype=x.dtype, seed=9)], 1)
    return FAMILIES[family].from_raw(run_unet(unet, x), HeadOptions(**sizes), event_shape=(4, *x.shape[2:]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("in_channels", [4, 8])
@heads
def test_the_mean_of_the_widened_law_is_the_pretrained_output(
    family: str, sizes: dict[str, int], in_channels: int, dtype: torch.dtype
) -> None:
    """To the bit where the mean is one block of rows.

    Mixtures average blocks that were each rounded to the network's dtype (magnitude: output + 0.5), and the zero
    weights of a noise channel change the order of sums in the first convolution: a few roundings of that dtype.
    """
    unet, x = tiny_unet(in_channels).to(dtype), normal(2, in_channels, 8, 8, dtype=dtype)
    before = run_unet(unet, x)
    widen(unet, family, **sizes)
    after = law_of(unet, family, sizes, x).mean.to(dtype)
    if family in ("point", "gaussian", "low_rank"):
        assert torch.equal(after, before)
    else:
        tolerance = 8 * torch.finfo(dtype).eps
        torch.testing.assert_close(after, before, rtol=tolerance, atol=tolerance * (before.abs().max().item() + 0.5))


@heads
def test_a_stable_diffusion_unet_becomes_a_conditional_network_of_any_family(
    family: str, sizes: dict[str, int]
) -> None:
    """Condition equal to the target, halved filters: the same output as before; 1e-5 for the order of sums."""
    unet, x = tiny_unet(4), normal(2, 4, 8, 8)
    before = run_unet(unet, x)
    add_condition_channels(unet, 4)
    widen(unet, family, **sizes)
    assert unet.conv_in.in_channels == unet.config.in_channels == 8 + FAMILIES[family].noise_channels
    after = law_of(unet, family, sizes, torch.cat([x, x], 1)).mean
    torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-5)


def test_condition_channels_repeat_and_halve_the_first_filters() -> None:
    unet = tiny_unet(4)
    weight, bias = unet.conv_in.weight.clone(), unet.conv_in.bias.clone()
    add_condition_channels(unet, 4)
    assert torch.equal(unet.conv_in.weight, torch.cat([weight, weight], 1) / 2)
    assert torch.equal(unet.conv_in.bias, bias)
    add_condition_channels(unet, 4)  # a network that has them is left alone
    assert unet.conv_in.in_channels == 8
    three_times = tiny_unet(4)
    add_condition_channels(three_times, 8)
    torch.testing.assert_close(three_times.conv_in.weight, torch.cat([weight] * 3, 1) / 3)


@heads
def test_the_spread_starts_at_the_initial_scale(family: str, sizes: dict[str, int]) -> None:
    unet, x = tiny_unet(8), normal(2, 8, 8, 8)
    widen(unet, family, **sizes, initial_scale=0.3, initial_factor=0.0)
    law = law_of(unet, family, sizes, x)
    if family in ("point", "sample"):
        assert law.variance.max() == 0
    elif isinstance(law, MixtureDistribution | LowRankMixtureDistribution):
        law, count = law.marginal(), sizes["num_components"]
        torch.testing.assert_close(law.scale, torch.full_like(law.scale, 0.3))
        torch.testing.assert_close(law.weights, torch.full_like(law.weights, 1 / count))
        offsets = torch.linspace(-0.3, 0.3, count) if count > 1 else torch.zeros(1)
        spread = law.loc - law.mean.unsqueeze(1)
        torch.testing.assert_close(spread, offsets.reshape(-1, 1, 1, 1).expand_as(spread), rtol=0, atol=1e-5)
    else:
        torch.testing.assert_close(law.stddev, torch.full_like(law.stddev, 0.3))


def test_factors_start_small_but_not_at_zero_and_the_seed_decides_them() -> None:
    first, again, other = (tiny_unet(8) for _ in range(3))
    for unet, seed in ((first, 0), (again, 0), (other, 1)):
        widen(unet, "low_rank", rank=3, initial_factor=0.01, seed=seed)
    assert torch.equal(first.conv_out.weight, again.conv_out.weight)
    assert not torch.equal(first.conv_out.weight, other.conv_out.weight)
    law = law_of(first, "low_rank", {"rank": 3}, normal(2, 8, 8, 8))
    assert (
        0.001 < law.cov_factor.square().mean().sqrt() < 0.03
    )  # activations before conv_out are about 1 after the norm
    assert torch.linalg.matrix_rank(law.cov_factor.flatten(2)).min() == 3


@heads
def test_every_new_weight_can_learn(family: str, sizes: dict[str, int]) -> None:
    """A loss on mean and variance reaches every channel of the last and every input of the first convolution."""
    unet = tiny_unet(8)
    widen(unet, family, **sizes)
    extra = FAMILIES[family].noise_channels
    prompt = torch.zeros(2, 2, EMBEDDING_DIM)
    raw = unet(normal(2, 8 + extra, 8, 8), 500, encoder_hidden_states=prompt, return_dict=False)[0]
    law = FAMILIES[family].from_raw(raw, HeadOptions(**sizes), event_shape=(4, 8, 8))
    ((law.mean - normal(2, 4, 8, 8, seed=3)).square() + law.variance.square()).mean().backward()
    untrained = int((unet.conv_out.weight.grad.flatten(1).abs().sum(1) == 0).sum())
    single = family == "mixture" and sizes["num_components"] == 1  # the weight of a single component is 1: no gradient
    assert untrained == (4 if single else 0)
    assert (unet.conv_in.weight.grad.abs().sum((0, 2, 3)) > 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@heads
def test_narrowing_gives_the_original_back(family: str, sizes: dict[str, int], dtype: torch.dtype) -> None:
    """To the bit, but for the biases of an even number of components: two roundings of bias +- offset (0.5)."""
    original, unet = tiny_unet(8).to(dtype), tiny_unet(8).to(dtype)
    widen(unet, family, **sizes)
    narrow(unet, family, **sizes)
    expected = original.state_dict()
    assert unet.state_dict().keys() == expected.keys()
    for name, value in unet.state_dict().items():
        if name == "conv_out.bias" and sizes.get("num_components", 1) % 2 == 0:
            torch.testing.assert_close(value, expected[name], rtol=0, atol=2 * torch.finfo(dtype).eps)
        else:
            assert torch.equal(value, expected[name]), name
    assert (unet.config.in_channels, unet.config.out_channels) == (8, 4)


@heads
def test_stock_diffusers_loads_a_saved_widened_unet(family: str, sizes: dict[str, int], tmp_path: Path) -> None:
    unet = tiny_unet(8)
    widen(unet, family, **sizes)
    unet.save_pretrained(tmp_path)
    loaded = UNet2DConditionModel.from_pretrained(tmp_path)
    extra = FAMILIES[family].noise_channels
    assert loaded.config.in_channels == loaded.conv_in.in_channels == 8 + extra
    assert (
        loaded.config.out_channels
        == loaded.conv_out.out_channels
        == FAMILIES[family].num_raw_channels(4, HeadOptions(**sizes))
    )
    x = normal(2, 8 + extra, 8, 8)
    assert torch.equal(run_unet(loaded, x), run_unet(unet, x))


@heads
def test_a_model_built_from_the_config_has_the_new_channels(family: str, sizes: dict[str, int]) -> None:
    """EMA weights are saved this way; channel counts that were left at the default of 4 must not fall back to it."""
    settings = {
        k: v for k, v in tiny_unet(4).config.items() if k[0] != "_" and k not in ("in_channels", "out_channels")
    }
    unet = UNet2DConditionModel(**settings)
    add_condition_channels(unet, 4)
    widen(unet, family, **sizes)
    twin = UNet2DConditionModel.from_config(unet.config)
    assert twin.conv_in.weight.shape == unet.conv_in.weight.shape
    assert twin.conv_out.weight.shape == unet.conv_out.weight.shape


def test_widening_touches_nothing_but_the_two_convolutions_and_no_global_random_state() -> None:
    unet = tiny_unet(8).to(torch.float64).requires_grad_(False)
    before = {name: value.clone() for name, value in unet.state_dict().items()}
    state = torch.get_rng_state()
    widen(unet, "low_rank", rank=2)
    assert torch.equal(torch.get_rng_state(), state)
    for name, value in unet.state_dict().items():
        if not name.startswith("conv_out"):
            assert torch.equal(value, before[name])
    assert torch.equal(unet.conv_out.weight[:4], before["conv_out.weight"])
    assert unet.conv_out.weight.dtype == torch.float64
    assert not any(parameter.requires_grad for parameter in unet.parameters())
    assert not any(module.training for module in unet.modules())


def test_a_head_without_a_bias_gets_one_for_its_scales() -> None:
    unet, x = tiny_unet(8), normal(1, 8, 8, 8)
    unet.conv_out = torch.nn.Conv2d(8, 4, 3, padding=1, bias=False)
    before = run_unet(unet, x)
    widen(unet, "gaussian", initial_scale=0.2)
    law = law_of(unet, "gaussian", {}, x)
    assert torch.equal(law.mean, before)
    torch.testing.assert_close(law.stddev, torch.full_like(law.stddev, 0.2))


def test_what_cannot_be_widened_or_narrowed_is_refused_before_anything_changes() -> None:
    unet = tiny_unet(8)
    cases: list[tuple[Any, dict[str, Any], str]] = [
        (widen, {"noise_family": "cholesky"}, "use 'low_rank'"),
        (widen, {"noise_family": "laplace"}, "unknown noise family"),
        (widen, {"noise_family": "gaussian", "initial_scale": 0.0}, "must exceed"),
        (narrow, {"noise_family": "mixture", "num_components": 5}, "not widened for num_components=5"),
        (add_condition_channels, {"condition_channels": 3}, "cannot add 3 condition channels"),
    ]
    for act, arguments, message in cases:
        with pytest.raises(ValueError, match=message):
            act(unet, **arguments)
    assert (unet.conv_in.in_channels, unet.conv_out.out_channels) == (8, 4)
    assert (unet.config.in_channels, unet.config.out_channels) == (8, 4)


def test_condition_channels_come_before_widening() -> None:
    unet = tiny_unet(4)
    widen(unet, "gaussian")
    with pytest.raises(ValueError, match="4 input and 8 output channels"):
        add_condition_channels(unet, 4)
