"""Timesteps: stock spacing for every number of steps, your own ones, and errors for the rest."""

from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DDIMScheduler

from marigold_uq.schedulers import DistributionalDDIMScheduler


def build(**options: Any) -> DistributionalDDIMScheduler:
    return DistributionalDDIMScheduler(noise_family="gaussian", **options)


@pytest.mark.parametrize("spacing", ["trailing", "leading", "linspace"])
def test_every_number_of_steps_gives_that_many_falling_timesteps(spacing: str) -> None:
    """Stock trailing spacing rounds past the end for some numbers and returns one timestep too many, -1."""
    ours, stock = build(timestep_spacing=spacing), DDIMScheduler(timestep_spacing=spacing)
    too_many = 0
    for steps in range(1, 1001):
        ours.set_timesteps(steps)
        stock.set_timesteps(steps)
        used = ours.timesteps
        assert len(used) == steps == ours.num_inference_steps
        assert bool((used[:-1] > used[1:]).all())
        assert 0 <= used[-1] <= used[0] <= 999
        assert torch.equal(used, stock.timesteps[:steps])
        too_many += len(stock.timesteps) - steps
    assert (too_many > 0) == (spacing == "trailing")


@pytest.mark.parametrize("spacing", ["trailing", "leading", "linspace"])
@pytest.mark.parametrize("steps", [1, 4, 7, 50, 999, 1000])
def test_the_previous_timestep_is_the_next_used_one(spacing: str, steps: int) -> None:
    scheduler = build(timestep_spacing=spacing)
    scheduler.set_timesteps(steps)
    used = scheduler.timesteps.tolist()
    assert [scheduler.previous_timestep(t) for t in used] == [*used[1:], -1]


def test_trailing_spacing_is_right_for_other_numbers_of_training_steps() -> None:
    for train in (1, 3, 10, 50, 77):
        scheduler = build(timestep_spacing="trailing", num_train_timesteps=train)
        for steps in range(1, train + 1):
            scheduler.set_timesteps(steps)
            assert len(scheduler.timesteps) == steps
            assert scheduler.timesteps[0] == train - 1


@pytest.mark.parametrize("given", [[900, 400, 3], (900, 400, 3), np.array([900, 400, 3]), torch.tensor([900, 400, 3])])
def test_your_own_timesteps_are_used_as_they_are(given: Any) -> None:
    scheduler = build()
    scheduler.set_timesteps(timesteps=given)
    assert scheduler.timesteps.tolist() == [900, 400, 3]
    assert scheduler.timesteps.dtype == torch.int64
    assert scheduler.num_inference_steps == 3
    assert [scheduler.previous_timestep(t) for t in (900, 400, 3)] == [400, 3, -1]


@pytest.mark.parametrize("bad", [[], [5, 5], [1, 2], [1000, 3], [10, -1]])
def test_timesteps_that_do_not_fall_within_the_training_range_are_refused(bad: list[int]) -> None:
    scheduler = build()
    with pytest.raises(ValueError, match=r"fall strictly within 999\.\.0"):
        scheduler.set_timesteps(timesteps=bad)


@pytest.mark.parametrize("bad", [0, -1, 1001])
def test_impossible_numbers_of_steps_are_refused(bad: int) -> None:
    with pytest.raises(ValueError, match="num_inference_steps"):
        build().set_timesteps(bad)


def test_a_number_of_steps_or_timesteps_but_not_both_and_not_neither() -> None:
    with pytest.raises(ValueError, match="either num_inference_steps or timesteps"):
        build().set_timesteps(3, timesteps=[5, 3, 1])
    with pytest.raises(ValueError, match="either num_inference_steps or timesteps"):
        build().set_timesteps()


def test_an_offset_that_leaves_the_training_range_is_refused_and_no_step_can_follow() -> None:
    """Stable Diffusion's steps_offset = 1 with all 1000 steps would start at t = 1000."""
    scheduler = build(steps_offset=1)
    with pytest.raises(ValueError, match="steps_offset 1"):
        scheduler.set_timesteps(1000)
    with pytest.raises(ValueError, match="set_timesteps"):
        scheduler.step(torch.zeros(1, 2, 3), 10, torch.zeros(1, 1, 3))
    scheduler.set_timesteps(999)
    assert scheduler.timesteps[0] == 999


def test_with_an_offset_the_chain_still_ends_at_the_final_alpha() -> None:
    """Stock, with leading spacing, offset 1 and a stride of 1, would step from t = 1 to t = 0 and stop there."""
    for steps in (50, 999):
        scheduler = build(steps_offset=1)
        scheduler.set_timesteps(steps)
        assert scheduler.timesteps[-1] == 1
        assert scheduler.alpha_bar(scheduler.previous_timestep(1)) == 1


def test_the_final_alpha_is_one_or_that_of_the_first_training_step() -> None:
    for to_one, expected in ((True, 1.0), (False, 1 - 0.0001)):
        scheduler = build(set_alpha_to_one=to_one)
        scheduler.set_timesteps(10)
        assert scheduler.alpha_bar(scheduler.previous_timestep(0)) == pytest.approx(expected, abs=1e-7)


def test_pipelines_of_diffusers_can_hand_over_timesteps() -> None:
    """`retrieve_timesteps`, which stock pipelines call, looks for the argument by name."""
    from diffusers.pipelines.stable_diffusion.pipeline_stable_diffusion import retrieve_timesteps

    timesteps, count = retrieve_timesteps(build(), timesteps=[700, 20])
    assert (timesteps.tolist(), count) == ([700, 20], 2)
