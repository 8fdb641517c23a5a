"""Timesteps of a batch; multi-resolution noise against Marigold's description of it."""

import pytest
import torch
from torch import Tensor

from marigold_uq.schedulers import DistributionalDDIMScheduler
from marigold_uq.training.noise import multiresolution_noise, training_noise, training_timesteps

SHAPE = (2, 16, 24)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def described_noise(count: int, strength: float, seed: int) -> Tensor:
    """The recipe word for word, `count` samples with one sequence of grids each; (count, *SHAPE)."""
    torch_generator, samples = generator(seed), []
    for _ in range(count):
        height, width = SHAPE[1:]
        noise = torch.randn(1, *SHAPE, generator=torch_generator)
        for i in range(10):
            r = 2 + 2 * torch.rand(1, generator=torch_generator).item()
            height, width = max(1, int(height / r**i)), max(1, int(width / r**i))
            coarse = torch.randn(1, SHAPE[0], height, width, generator=torch_generator)
            noise = noise + strength**i * torch.nn.functional.interpolate(coarse, SHAPE[1:], mode="bilinear")
            if height == 1 or width == 1:
                break
        samples.append(noise / noise.std())
    return torch.cat(samples)


def correlations(noise: Tensor) -> Tensor:
    """Mean product of neighbours at horizontal distances 1, 2, 4, 8 per sample, (B, 4)."""
    products = [(noise[..., :-lag] * noise[..., lag:]).flatten(1).mean(1) for lag in (1, 2, 4, 8)]
    return torch.stack(products, 1)


@pytest.mark.parametrize("strength", [0.0, 0.3, 0.9])
def test_every_sample_has_unit_standard_deviation(strength: float) -> None:
    for seed in range(5):
        noise = multiresolution_noise(SHAPE, strength, generator(seed))
        assert noise.shape == SHAPE
        assert noise.std() == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize("strength", [0.3, 0.9])
def test_its_correlations_are_those_of_the_description(strength: float) -> None:
    count = 600
    ours = correlations(torch.stack([multiresolution_noise(SHAPE, strength, generator(s)) for s in range(count)]))
    theirs = correlations(described_noise(count, strength, seed=10**6))
    error = (ours.var(0) / count + theirs.var(0) / count).sqrt()
    assert ((ours.mean(0) - theirs.mean(0)).abs() < 4 * error).all()  # 4 standard errors, 8 comparisons
    assert ours.mean(0)[0] > 10 * error[0]  # and there is something to compare


def test_strength_zero_is_white() -> None:
    count = 400
    values = correlations(torch.stack([multiresolution_noise(SHAPE, 0.0, generator(s)) for s in range(count)]))
    error = values.std(0) / count**0.5
    assert (values.mean(0).abs() < 4 * error + 2e-3).all()  # dividing by a sample's own std biases by 1/(2 * 768)


def test_the_strength_is_annealed_with_each_samples_own_timestep() -> None:
    timesteps = torch.tensor([0, 500, 999])
    noise = training_noise(SHAPE, timesteps, 1000, 0.9, [generator(s) for s in range(3)])
    for index, t in enumerate(timesteps.tolist()):
        assert torch.equal(noise[index], multiresolution_noise(SHAPE, 0.9 * t / 1000, generator(index)))


def test_a_samples_noise_does_not_depend_on_its_company() -> None:
    timesteps = torch.tensor([10, 600, 999])
    together = training_noise(SHAPE, timesteps, 1000, 0.9, [generator(s) for s in range(3)])
    alone = training_noise(SHAPE, timesteps[1:2], 1000, 0.9, [generator(1)])
    assert torch.equal(together[1], alone[0])


def test_without_strength_it_is_torchs_own_normal_noise() -> None:
    noise = training_noise(SHAPE, torch.tensor([999]), 1000, 0.0, [generator(7)])
    assert torch.equal(noise[0], torch.randn(SHAPE, generator=generator(7)))


def test_half_of_the_timesteps_can_be_the_last() -> None:
    scheduler, generators = DistributionalDDIMScheduler(), [generator(seed) for seed in range(400)]
    often = training_timesteps(scheduler, generators, uniform=False)
    assert 160 < int((often == 999).sum()) < 240  # 200 expected, 4 standard deviations of 10
    uniform = training_timesteps(scheduler, [generator(seed) for seed in range(400)], uniform=True)
    assert int((uniform == 999).sum()) < 5
    assert float(uniform.double().mean()) == pytest.approx(499.5, abs=4 * 289 / 20)
    assert torch.equal(often[often != 999], uniform[often != 999])


def test_integer_timesteps_are_the_recorded_ones_with_a_coin_after_each() -> None:
    """What a sample draws decides whether a resumed run equals an uninterrupted one."""
    streams = [generator(seed) for seed in range(20)]
    drawn = training_timesteps(DistributionalDDIMScheduler(), streams, uniform=False)
    for seed, stream in enumerate(streams):
        own = generator(seed)
        t, is_last = torch.randint(1000, (1,), generator=own), torch.rand(1, generator=own) < 0.5
        assert int(drawn[seed]) == (999 if is_last else int(t))
        assert torch.equal(stream.get_state(), own.get_state())
