"""`predict_noise`: the one seam between a network and everything that needs its law."""

from typing import Any

import pytest
import torch
from support.oracles import SIZES
from torch import Tensor

from marigold_uq.denoising import predict_noise
from marigold_uq.distributions import FAMILIES, SampleDistribution
from marigold_uq.randomness import member_generators
from marigold_uq.schedulers import DistributionalDDIMScheduler

EVENT = (2, 3)


class Recorder:
    """A network that remembers its inputs; channel c puts out weight_c times the sum of the input channels."""

    def __init__(self, channels: int, dtype: torch.dtype = torch.float32, *, flat: bool = False) -> None:
        self.calls: list[tuple[Tensor, Any]] = []
        self.weight = torch.linspace(-1, 1, channels, dtype=dtype).requires_grad_()
        self.flat = flat

    def __call__(self, x: Tensor, timestep: Tensor | int) -> Tensor:
        self.calls.append((x, timestep))
        total = x.sum(1, keepdim=True).to(self.weight.dtype)  # (B, 1, L)
        return total.sum(2) * self.weight if self.flat else total * self.weight.reshape(1, -1, 1)


def build(family: str, **options: Any) -> DistributionalDDIMScheduler:
    return DistributionalDDIMScheduler(noise_family=family, **SIZES[family], **options)


def network_for(scheduler: DistributionalDDIMScheduler, dtype: torch.dtype = torch.float32) -> Recorder:
    flat = scheduler.config.noise_family == "cholesky"
    return Recorder(scheduler.num_raw_channels(6 if flat else EVENT[0]), dtype, flat=flat)


def noisy_sample(batch: int = 4) -> Tensor:
    return torch.randn(batch, *EVENT, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - {"sample"}))
def test_a_closed_form_family_asks_the_network_once_and_reads_its_raw_output(family: str) -> None:
    scheduler = build(family)
    network, x_t = network_for(scheduler), noisy_sample()
    law = predict_noise(network, scheduler, x_t, 7, num_draws=5)
    ((seen, timestep),) = network.calls
    assert torch.equal(seen, x_t)
    assert timestep == 7
    assert type(law) is FAMILIES[family]
    expected = scheduler.noise_distribution(network(x_t, 7), EVENT)
    assert torch.equal(law.mean, expected.mean)
    assert torch.equal(law.variance, expected.variance)


def test_an_implicit_family_sees_fresh_standard_normal_noise_after_the_sample() -> None:
    scheduler = build("sample")
    network, x_t = network_for(scheduler), torch.zeros(2000, *EVENT)
    law = predict_noise(network, scheduler, x_t, 7, num_draws=3, generator=torch.Generator().manual_seed(0))
    assert isinstance(law, SampleDistribution)
    assert law.draws.shape == (3, 2000, *EVENT)
    inputs = torch.stack([x for x, _ in network.calls])  # (M, B, C + 1, L)
    assert inputs.shape == (3, 2000, EVENT[0] + 1, EVENT[1])
    assert torch.equal(inputs[:, :, : EVENT[0]], x_t.expand(3, *x_t.shape))
    noise = inputs[:, :, EVENT[0]].flatten()  # 18000 numbers; 5 standard errors
    assert abs(float(noise.mean())) < 5 / 18000**0.5
    assert abs(float(noise.var()) - 1) < 5 * (2 / 18000) ** 0.5
    assert len(noise.unique()) > 17900  # every draw and every element gets its own
    for draw, (x, t) in zip(law.draws, list(network.calls), strict=True):
        assert torch.equal(draw, network(x, t))


def test_every_member_has_its_own_noise_whatever_the_batch() -> None:
    scheduler, x_t = build("sample"), noisy_sample()
    together = predict_noise(network_for(scheduler), scheduler, x_t, 7, num_draws=2, generator=member_generators(3, 4))
    for m in (2, 0):
        alone = predict_noise(
            network_for(scheduler),
            scheduler,
            x_t[m : m + 1],
            7,
            num_draws=2,
            generator=[member_generators(3, 4)[m]],
        )
        torch.testing.assert_close(alone.draws[:, 0], together.draws[:, m])


@pytest.mark.parametrize("prediction_type", ["epsilon", "v_prediction", "sample"])
def test_the_law_is_that_of_the_output_whatever_it_stands_for(prediction_type: str) -> None:
    scheduler = build("gaussian", prediction_type=prediction_type)
    network, x_t = network_for(scheduler), noisy_sample()
    assert torch.equal(predict_noise(network, scheduler, x_t, 7).mean, network(x_t, 7)[:, : EVENT[0]])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_half_precision_network_gives_a_law_in_float32(family: str, dtype: torch.dtype) -> None:
    scheduler = build(family)
    network = network_for(scheduler, dtype)
    law = predict_noise(network, scheduler, noisy_sample().to(dtype), 7, generator=torch.Generator().manual_seed(0))
    assert network.calls[0][0].dtype == dtype
    assert law.mean.dtype == law.variance.dtype == torch.float32


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_gradients_reach_the_network(family: str) -> None:
    scheduler = build(family)
    network = network_for(scheduler)
    predict_noise(network, scheduler, noisy_sample(), 7, num_draws=2).mean.square().sum().backward()
    assert network.weight.grad is not None
    assert network.weight.grad.abs().sum() > 0


def test_a_network_of_another_family_is_refused() -> None:
    with pytest.raises(ValueError, match=r"2 x 2 = 4 channels on axis 1; got 6"):
        predict_noise(Recorder(6), build("gaussian"), noisy_sample(), 7)


@pytest.mark.parametrize("family", ["gaussian", "sample"])
def test_no_draws_are_refused(family: str) -> None:
    scheduler = build(family)
    with pytest.raises(ValueError, match="num_draws must be at least 1; got 0"):
        predict_noise(network_for(scheduler), scheduler, noisy_sample(), 7, num_draws=0)
