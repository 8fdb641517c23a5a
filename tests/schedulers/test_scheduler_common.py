"""What diffusers checks on each of its own schedulers, for every family: a pipeline may rely on all of it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers.schedulers.scheduling_utils import SchedulerMixin
from diffusers.utils import DummyObject
from support.oracles import SIZES
from torch import Tensor

from marigold_uq.distributions import FAMILIES
from marigold_uq.schedulers import DistributionalDDIMScheduler

EVENT = (2, 3)
families = pytest.mark.parametrize("family", sorted(FAMILIES))


def build(family: str, **options: Any) -> DistributionalDDIMScheduler:
    return DistributionalDDIMScheduler(noise_family=family, **{**SIZES[family], **options})


def sample(batch: int = 4) -> Tensor:
    return torch.randn(batch, *EVENT, generator=torch.Generator().manual_seed(0))


def raw_output(scheduler: DistributionalDDIMScheduler, batch: int = 4) -> Tensor:
    is_flat = scheduler.config.noise_family == "cholesky"
    shape = (scheduler.num_raw_channels(6),) if is_flat else (scheduler.num_raw_channels(EVENT[0]), EVENT[1])
    return torch.randn(batch, *shape, generator=torch.Generator().manual_seed(1))


def stepped(scheduler: DistributionalDDIMScheduler, t: int, **step: Any) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    return scheduler.step(raw_output(scheduler), t, sample(), generator=generator, **step).prev_sample


@families
def test_it_is_a_scheduler_to_diffusers(family: str) -> None:
    scheduler = build(family)
    assert isinstance(scheduler, SchedulerMixin)
    assert scheduler.has_compatibles
    assert scheduler.order == 1
    assert scheduler.init_noise_sigma == 1.0
    assert len(scheduler) == scheduler.config.num_train_timesteps
    for name in ("scale_model_input", "set_timesteps", "step", "add_noise", "get_velocity"):
        assert callable(getattr(scheduler, name))
    scheduler.set_timesteps(10)
    assert isinstance(scheduler.timesteps, Tensor)
    assert scheduler.timesteps.shape == (10,)
    assert torch.equal(scheduler.scale_model_input(sample(), scheduler.timesteps[0]), sample())


@families
def test_a_saved_and_loaded_scheduler_steps_alike(family: str, tmp_path: Path) -> None:
    scheduler = build(family, eta=0.5, tau=0.7)
    scheduler.save_pretrained(tmp_path)
    loaded = DistributionalDDIMScheduler.from_pretrained(tmp_path)
    for each in (scheduler, loaded):
        each.set_timesteps(10)
    for t in (900, 400, 0):
        assert torch.equal(stepped(loaded, t), stepped(scheduler, t))


@families
def test_arguments_can_be_changed_while_loading(family: str, tmp_path: Path) -> None:
    build(family).save_pretrained(tmp_path)
    changed = DistributionalDDIMScheduler.from_pretrained(tmp_path, num_train_timesteps=27, eta=0.9)
    assert (changed.config.num_train_timesteps, changed.config.eta) == (27, 0.9)
    assert len(changed.betas) == 27
    assert changed.config.noise_family == family


@families
def test_a_round_trip_through_every_compatible_stock_scheduler_keeps_the_config(family: str) -> None:
    scheduler = build(family, beta_start=0.0002, prediction_type="v_prediction", eta=0.3, tau=0.6)
    others = [other for other in scheduler.compatibles if not isinstance(other, DummyObject)]  # dummy: not installed
    assert len(others) > 10
    for other in others:
        back = DistributionalDDIMScheduler.from_config(other.from_config(scheduler.config).config)
        for name, value in scheduler.config.items():
            if not name.startswith("_"):
                assert back.config[name] == value, f"{name} changed on the way through {other.__name__}"


@families
def test_prev_sample_has_the_shape_of_the_sample_at_any_timestep(family: str) -> None:
    scheduler = build(family)
    scheduler.set_timesteps(10)
    shapes = {stepped(scheduler, t, eta=eta).shape for t in (999, 500, 1, 0) for eta in (0.0, 1.0)}
    assert shapes == {sample().shape}


@families
def test_a_timestep_may_be_a_number_or_a_tensor(family: str) -> None:
    scheduler = build(family)
    scheduler.set_timesteps(10)
    assert torch.equal(stepped(scheduler, 500, eta=1.0), stepped(scheduler, torch.tensor(500), eta=1.0))


@families
def test_tuple_and_output_class_say_the_same(family: str) -> None:
    scheduler = build(family)
    scheduler.set_timesteps(10)
    arguments = (raw_output(scheduler), 500, sample())
    named = scheduler.step(*arguments, generator=torch.Generator().manual_seed(2))
    plain = scheduler.step(*arguments, generator=torch.Generator().manual_seed(2), return_dict=False)
    assert isinstance(plain, tuple)
    assert len(plain) == 2
    assert torch.equal(named.prev_sample, plain[0])
    assert torch.equal(named["pred_original_sample"], plain[1])


@families
def test_a_generator_decides_the_draw(family: str) -> None:
    scheduler = build(family)
    scheduler.set_timesteps(10)
    first, again, other = (
        scheduler.step(raw_output(scheduler), 500, sample(), eta=1.0, generator=torch.Generator().manual_seed(seed))
        for seed in (0, 0, 1)
    )
    assert torch.equal(first.prev_sample, again.prev_sample)
    assert not torch.equal(first.prev_sample, other.prev_sample)


@families
def test_without_a_generator_the_global_stream_is_neither_seeded_nor_ignored(family: str) -> None:
    scheduler = build(family)
    scheduler.set_timesteps(10)
    draws = [scheduler.step(raw_output(scheduler), 500, sample(), eta=1.0).prev_sample for _ in range(2)]
    assert not torch.equal(*draws)
    state = torch.get_rng_state()
    stepped(scheduler, 500, eta=1.0)
    assert torch.equal(torch.get_rng_state(), state)


@families
def test_adding_noise_keeps_shape_dtype_and_device(family: str) -> None:
    scheduler = build(family)
    scheduler.set_timesteps(10)
    for dtype in (torch.float32, torch.float16, torch.float64):
        x_0, noise = sample().to(dtype), torch.ones(4, *EVENT, dtype=dtype)
        noised = scheduler.add_noise(x_0, noise, scheduler.timesteps[5].expand(4))
        assert (noised.shape, noised.dtype, noised.device) == (x_0.shape, dtype, x_0.device)
    alpha_bar = scheduler.alphas_cumprod[scheduler.timesteps[5]].double()
    torch.testing.assert_close(noised, alpha_bar.sqrt() * x_0 + (1 - alpha_bar).sqrt(), rtol=1e-6, atol=1e-6)


@families
def test_trained_betas_are_used(family: str) -> None:
    scheduler = build(family, trained_betas=np.array([0.1, 0.3]), num_train_timesteps=2)
    torch.testing.assert_close(scheduler.betas, torch.tensor([0.1, 0.3]))
    torch.testing.assert_close(scheduler.alphas_cumprod, torch.tensor([0.9, 0.63]))


@families
def test_config_entries_read_as_attributes_warn_and_unknown_ones_fail(family: str) -> None:
    scheduler = build(family)
    scheduler.dummy = 5
    scheduler.register_to_config(registered=6)
    assert scheduler.dummy == 5
    with pytest.warns(FutureWarning, match="registered"):
        assert scheduler.registered == 6
    with pytest.raises(AttributeError, match="does_not_exist"):
        _ = scheduler.does_not_exist


@families
@pytest.mark.parametrize("schedule", ["linear", "scaled_linear", "squaredcos_cap_v2"])
def test_a_full_chain_stays_finite_for_every_beta_schedule_and_number_of_training_steps(
    family: str, schedule: str
) -> None:
    for train_steps in (5, 100, 1000):
        scheduler = build(family, beta_schedule=schedule, num_train_timesteps=train_steps, eta=1.0)
        scheduler.set_timesteps(5)
        x_t, generator = sample(), torch.Generator().manual_seed(3)
        for t in scheduler.timesteps:
            x_t = scheduler.step(raw_output(scheduler), t, x_t, generator=generator).prev_sample
        assert torch.isfinite(x_t).all()
