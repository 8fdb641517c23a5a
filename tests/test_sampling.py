"""The reverse loop: one stream of noise per member, observers, callbacks, the progress bar."""

import io
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from support.oracles import SIZES, TARGETS, Network, perfect_network
from torch import Tensor

from marigold_uq.distributions import FAMILIES
from marigold_uq.randomness import Generators, member_generators
from marigold_uq.sampling import ReverseStep, initial_noise, reverse_diffusion
from marigold_uq.schedulers import DistributionalDDIMScheduler

families = pytest.mark.parametrize("family", sorted(FAMILIES))


def build(family: str, steps: int = 4, **options: Any) -> DistributionalDDIMScheduler:
    settings = {"timestep_spacing": "trailing", "prediction_type": "v_prediction", "eta": 1.0, "clip_sample": False}
    scheduler = DistributionalDDIMScheduler(noise_family=family, **{**SIZES[family], **settings, **options})
    scheduler.set_timesteps(steps)
    return scheduler


def network_for(family: str, scheduler: DistributionalDDIMScheduler) -> Network:
    target = TARGETS.get(family, TARGETS["gaussian"])
    network = perfect_network(family, target, scheduler.alphas_cumprod, "v_prediction")
    return lambda x, t: network(x.double(), t).to(x.dtype)


def start(family: str, generator: Generators, batch: int, dtype: torch.dtype = torch.float32) -> Tensor:
    event = TARGETS.get(family, TARGETS["gaussian"]).event_shape
    return initial_noise((batch, *event), like=torch.zeros((), dtype=dtype), generator=generator)


def run_members(family: str, members: Sequence[int], steps: int = 4) -> tuple[Tensor, list[Tensor]]:
    """x_0 of these members, run as one batch in this order, and where their random streams stand afterwards."""
    every, scheduler = member_generators(11, 6), build(family, steps)
    generators = [every[m] for m in members]
    x_T = start(family, generators, len(members))
    x_0 = reverse_diffusion(network_for(family, scheduler), scheduler, x_T, generator=generators)
    return x_0, [generator.get_state() for generator in generators]


@families
def test_a_member_is_the_same_alone_in_any_batch_and_in_any_order(family: str) -> None:
    """1e-5: the network and the law are computed for the whole batch, in float32."""
    members = [0, 1, 2, 3, 4, 5]
    everybody, states = run_members(family, members)
    assert not torch.allclose(everybody[0], everybody[1])
    for batch in ([3], [5, 0], [4, 2, 1, 3, 0, 5]):
        x_0, after = run_members(family, batch)
        for row, m in enumerate(batch):
            torch.testing.assert_close(x_0[row], everybody[m], rtol=1e-5, atol=1e-5)
            assert torch.equal(after[row], states[m])


@families
def test_a_member_draws_the_same_numbers_to_the_bit(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All random numbers of the run are recorded with the generator that they came from."""
    drawn: dict[int, list[Tensor]] = {}

    def record(name: str) -> None:
        source = getattr(torch, name)

        def draw(*args: Any, generator: torch.Generator | None = None, **kwargs: Any) -> Tensor:
            assert generator is not None, "somebody draws from the global stream"
            numbers = source(*args, generator=generator, **kwargs)
            drawn.setdefault(generator.initial_seed(), []).append(numbers)
            return numbers

        monkeypatch.setattr(torch, name, draw)

    record("randn")
    record("rand")
    seeds = [generator.initial_seed() for generator in member_generators(11, 6)]
    run_members(family, [0, 1, 2, 3, 4, 5])
    together = dict(drawn)
    assert set(together) == set(seeds)
    assert len(together[seeds[2]]) > 4  # the start and at least one draw per step
    for batch in ([2], [5, 2, 0]):
        drawn.clear()
        run_members(family, batch)
        assert len(drawn[seeds[2]]) == len(together[seeds[2]])
        for here, there in zip(drawn[seeds[2]], together[seeds[2]], strict=True):
            assert torch.equal(here, there)


@families
def test_the_global_random_stream_is_left_alone(family: str) -> None:
    state = torch.get_rng_state()
    run_members(family, [0, 1])
    assert torch.equal(torch.get_rng_state(), state)


@families
def test_generators_may_come_as_a_tuple_and_must_be_as_many_as_the_batch(family: str) -> None:
    scheduler = build(family)
    network, x_T = network_for(family, scheduler), start(family, member_generators(11, 2), 2)
    listed = reverse_diffusion(network, scheduler, x_T, generator=member_generators(5, 2))
    assert torch.equal(reverse_diffusion(network, scheduler, x_T, generator=tuple(member_generators(5, 2))), listed)
    with pytest.raises(ValueError, match="3 generators for a batch of 2"):
        reverse_diffusion(network, scheduler, x_T, generator=member_generators(5, 3))


@families
def test_the_loop_is_the_scheduler_step_after_step(family: str) -> None:
    scheduler = build(family)
    network, x_T = network_for(family, scheduler), start(family, torch.Generator().manual_seed(0), 3)
    looped = reverse_diffusion(network, scheduler, x_T, generator=torch.Generator().manual_seed(1))
    x_t, generator = x_T, torch.Generator().manual_seed(1)
    for t in scheduler.timesteps:
        x_in = x_t
        if FAMILIES[family].noise_channels:
            x_in = torch.cat([x_t, torch.randn(3, 1, *x_t.shape[2:], generator=generator)], 1)
        x_t = scheduler.step(network(x_in, t), t, x_t, generator=generator).prev_sample
    assert torch.equal(looped, x_t)


@families
def test_observers_see_every_step_before_it_is_drawn_and_cost_no_network_call(family: str) -> None:
    scheduler = build(family)
    calls: list[int] = []
    exact = network_for(family, scheduler)

    def network(x: Tensor, t: Tensor | int) -> Tensor:
        calls.append(int(t))
        return exact(x, t)

    seen: list[ReverseStep] = []
    schedulers: list[DistributionalDDIMScheduler] = []
    stepped: list[Tensor] = []

    def observe(one: DistributionalDDIMScheduler, step: ReverseStep) -> None:
        schedulers.append(one)
        seen.append(step)

    def keep(index: int, timestep: int, x_prev: Tensor) -> Tensor:
        assert (index, timestep) == (len(stepped), int(scheduler.timesteps[index]))
        stepped.append(x_prev)
        return x_prev

    x_T, twice = start(family, torch.Generator().manual_seed(0), 2), []
    x_0 = reverse_diffusion(
        network,
        scheduler,
        x_T,
        generator=torch.Generator().manual_seed(1),
        observers=(each for each in (observe, lambda _, step: twice.append(step.index))),  # any iterable will do
        callback=keep,
    )
    assert calls == [999, 749, 499, 249]
    assert twice == [0, 1, 2, 3]
    assert [(step.index, step.timestep) for step in seen] == list(enumerate(calls))
    assert all(one is scheduler for one in schedulers)
    assert torch.equal(seen[0].x_t, x_T)
    assert all(torch.equal(step.x_t, before) for step, before in zip(seen[1:], stepped, strict=False))
    assert torch.equal(stepped[-1], x_0)
    assert all(type(step.law) is FAMILIES[family] and step.law.mean.shape == x_T.shape for step in seen)
    assert all(not step.law.mean.requires_grad for step in seen)


def test_a_callback_replaces_the_sample_that_the_next_step_starts_from() -> None:
    scheduler, seen = build("gaussian"), []
    x_T = start("gaussian", torch.Generator().manual_seed(0), 2)
    x_0 = reverse_diffusion(
        network_for("gaussian", scheduler),
        scheduler,
        x_T,
        observers=[lambda _, step: seen.append(step.x_t)],
        callback=lambda index, timestep, x_prev: torch.full_like(x_prev, float(index)),
    )
    assert [float(x_t.unique()) for x_t in seen[1:]] == [0.0, 1.0, 2.0]
    assert torch.equal(x_0, torch.full_like(x_T, 3.0))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@families
def test_the_network_always_gets_the_dtype_of_the_start(family: str, dtype: torch.dtype) -> None:
    scheduler, dtypes = build(family), []
    exact = network_for(family, scheduler)

    def network(x: Tensor, t: Tensor | int) -> Tensor:
        dtypes.append(x.dtype)
        return exact(x, t)

    x_T = start(family, torch.Generator().manual_seed(0), 2, dtype)
    x_0 = reverse_diffusion(network, scheduler, x_T, generator=torch.Generator().manual_seed(0))
    assert set(dtypes) == {x_0.dtype} == {dtype}
    assert torch.isfinite(x_0).all()


def test_no_gradient_is_kept() -> None:
    scheduler, weight = build("gaussian"), torch.ones((), requires_grad=True)
    exact = network_for("gaussian", scheduler)
    x_0 = reverse_diffusion(lambda x, t: weight * exact(x, t), scheduler, start("gaussian", None, 2))
    assert not x_0.requires_grad


def test_timesteps_must_be_set_first() -> None:
    scheduler = DistributionalDDIMScheduler(noise_family="gaussian")
    with pytest.raises(ValueError, match="set_timesteps"):
        reverse_diffusion(lambda x, t: x, scheduler, torch.zeros(1, 2, 3))


def test_the_progress_bar_shows_when_asked_for_and_takes_the_options_of_tqdm(
    capsys: pytest.CaptureFixture[str],
) -> None:
    scheduler = build("gaussian")
    network, x_T = network_for("gaussian", scheduler), start("gaussian", None, 2)
    reverse_diffusion(network, scheduler, x_T)
    assert capsys.readouterr().err == ""
    reverse_diffusion(network, scheduler, x_T, progress=True)
    assert "/4" in capsys.readouterr().err
    stream = io.StringIO()
    reverse_diffusion(network, scheduler, x_T, progress={"file": stream, "desc": "members", "leave": True})
    assert "members: 100%" in stream.getvalue()
    assert "4/4" in stream.getvalue()


def test_the_initial_noise_is_standard_normal_with_one_stream_per_member() -> None:
    like = torch.zeros((), dtype=torch.float64)
    x_T = initial_noise((6, 2, 500), like=like, generator=member_generators(11, 6))
    assert x_T.dtype == torch.float64
    assert abs(float(x_T.mean())) < 5 / 6000**0.5  # 5 standard errors
    assert abs(float(x_T.var()) - 1) < 5 * (2 / 6000) ** 0.5
    alone = initial_noise((1, 2, 500), like=like, generator=[member_generators(11, 6)[4]])
    assert torch.equal(alone[0], x_T[4])


@pytest.mark.parametrize("spacing", ["leading", "linspace"])
def test_a_chain_whose_first_timestep_is_mostly_signal_is_refused(spacing: str) -> None:
    """One step with stock's default spacing starts at t = 0 or 1: it would hand back the noise that it starts from."""
    scheduler = build("gaussian", 1, timestep_spacing=spacing)
    with pytest.raises(ValueError, match=rf"starts from pure noise.*mostly noise.*trailing.*{spacing}"):
        reverse_diffusion(network_for("gaussian", scheduler), scheduler, torch.zeros(2, 2, 2))


def test_following_the_mean_is_the_ordinary_diffusion_model_of_that_mean() -> None:
    """A point scheduler on the mean takes the same steps and draws the same noise."""
    wide, narrow = build("gaussian", eta=0.7), build("point", eta=0.7)
    network = network_for("gaussian", wide)
    x_T = start("gaussian", torch.Generator().manual_seed(0), 3)
    followed = reverse_diffusion(network, wide, x_T, generator=torch.Generator().manual_seed(1), follow_mean=True)
    plain = reverse_diffusion(
        lambda x, t: network(x, t)[:, :2], narrow, x_T, generator=torch.Generator().manual_seed(1)
    )
    torch.testing.assert_close(followed, plain, rtol=1e-5, atol=1e-5)
    drawn = reverse_diffusion(network, wide, x_T, generator=torch.Generator().manual_seed(1))
    assert not torch.allclose(followed, drawn)
