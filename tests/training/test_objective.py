"""The objective that all tasks share, against its parts put together by hand."""

from typing import Any

import pytest
import torch
from accelerate import PartialState
from torch import Tensor

from marigold_uq.distributions import GaussianDistribution
from marigold_uq.schedulers import DistributionalDDIMScheduler
from marigold_uq.scores import sample_scores
from marigold_uq.training.objective import Objective, ObjectiveConfig

BATCH, CHANNELS, SIZE = 6, 2, 4


def scheduler(family: str = "gaussian", **options: Any) -> DistributionalDDIMScheduler:
    return DistributionalDDIMScheduler(num_train_timesteps=50, noise_family=family, **options)


def generators(first: int = 0, count: int = BATCH) -> list[torch.Generator]:
    """One per sample, by its place in the batch."""
    return [torch.Generator().manual_seed(100 + first + i) for i in range(count)]


def clean(count: int = BATCH) -> Tensor:
    return torch.randn(count, CHANNELS, SIZE, SIZE, generator=torch.Generator().manual_seed(0))


def denoiser(x: Tensor, t: Tensor | int) -> Tensor:
    """Mean and rho that depend on the input and the timestep."""
    level = torch.as_tensor(t).reshape(-1, 1, 1, 1) / 50
    return torch.cat([0.5 * x[:, :CHANNELS], 0.1 * x[:, :CHANNELS].square() + level], 1)


def test_a_loss_is_the_score_of_the_predicted_noise_at_a_drawn_timestep() -> None:
    """The draws of each sample in their order: timestep, the coin for the last one, noise."""
    chain = scheduler()
    losses, rows = Objective(ObjectiveConfig(score="crps"), chain).losses(denoiser, clean(), generators())
    for i, own in enumerate(generators()):
        t = torch.randint(50, (1,), generator=own)
        torch.rand(1, generator=own)
        noise = torch.randn(CHANNELS, SIZE, SIZE, generator=own)[None]
        law = GaussianDistribution.from_raw(denoiser(chain.add_noise(clean()[i : i + 1], noise, t), t))
        torch.testing.assert_close(losses[i], sample_scores(law, noise, "crps")[0])
        square = (noise - law.mean).square().sum()
        torch.testing.assert_close(rows[i], torch.stack([t[0].float(), square, torch.tensor(2.0 * 16)]))


def test_the_family_chooses_the_score_unless_the_config_does() -> None:
    assert Objective(ObjectiveConfig(), scheduler()).score == scheduler().family.default_score
    assert Objective(ObjectiveConfig(score="log"), scheduler()).score == "log"


def joint_denoiser(x: Tensor, t: Tensor | int) -> Tensor:
    """With a factor of covariance besides."""
    return torch.cat([denoiser(x, t), 0.3 * x[:, :CHANNELS]], 1)


@pytest.mark.parametrize("score", ["crps", "energy", "projected", "kernel"])
def test_micro_batches_of_whole_groups_have_the_losses_of_one_batch(score: str) -> None:
    chain = scheduler("low_rank", rank=1)
    objective = Objective(ObjectiveConfig(score=score), chain, direction_group=2)
    whole, rows = objective.losses(joint_denoiser, clean(), generators())
    parts = [objective.losses(joint_denoiser, clean()[i : i + 2], generators(i, 2)) for i in (0, 2, 4)]
    torch.testing.assert_close(torch.cat([losses for losses, _ in parts]), whole)
    torch.testing.assert_close(torch.cat([found for _, found in parts]), rows)


def test_every_sample_has_random_directions_of_its_own_unless_they_are_shared() -> None:
    chain = scheduler("low_rank", rank=1)
    alone = Objective(ObjectiveConfig(score="projected"), chain)
    shared = Objective(ObjectiveConfig(score="projected"), chain, direction_group=BATCH)
    one, other = (objective.losses(joint_denoiser, clean(), generators())[0] for objective in (alone, shared))
    assert not torch.allclose(one[1:], other[1:])


def test_masked_coordinates_change_neither_loss_nor_residual() -> None:
    mask = torch.ones(BATCH, 1, SIZE, SIZE, dtype=torch.bool)
    mask[:, :, 0] = False
    objective, x_0 = Objective(ObjectiveConfig(score="crps"), scheduler()), clean()
    changed = torch.where(mask, x_0, 100.0)
    losses, rows = objective.losses(denoiser, x_0, generators(), mask)
    other, other_rows = objective.losses(denoiser, changed, generators(), mask)
    torch.testing.assert_close(losses, other)
    torch.testing.assert_close(rows, other_rows)
    assert rows[:, 2].tolist() == [CHANNELS * 3 * SIZE] * BATCH


def test_an_adaptive_bandwidth_follows_the_residuals_after_each_step() -> None:
    PartialState(cpu=True)
    objective = Objective(ObjectiveConfig(score="kernel"), scheduler())
    before, rows = objective.losses(denoiser, clean(), generators())
    objective.note(rows)
    again, _ = objective.losses(denoiser, clean(), generators())
    torch.testing.assert_close(before, again, rtol=0, atol=0)  # nothing is learned within a step
    saved = {name: value.clone() for name, value in objective.scale.state_dict().items()}
    objective.update()
    after, _ = objective.losses(denoiser, clean(), generators())
    assert not torch.allclose(before, after)
    objective.scale.load_state_dict(saved)
    torch.testing.assert_close(objective.losses(denoiser, clean(), generators())[0], before)


def test_held_out_losses_do_not_move_with_the_bandwidth() -> None:
    PartialState(cpu=True)
    kernel = Objective(ObjectiveConfig(score="kernel"), scheduler())
    crps = Objective(ObjectiveConfig(score="crps"), scheduler())
    expected = crps.held_out(denoiser, clean(), generators())
    torch.testing.assert_close(kernel.held_out(denoiser, clean(), generators()), expected)
    torch.testing.assert_close(crps.losses(denoiser, clean(), generators())[0], expected)
    fixed = ObjectiveConfig(score="kernel", adaptive_bandwidth=False, score_options={"bandwidth": 1.0})
    objective = Objective(fixed, scheduler())
    objective.note(objective.losses(denoiser, clean(), generators())[1])
    objective.update()
    found = objective.held_out(denoiser, clean(), generators())
    torch.testing.assert_close(found, objective.losses(denoiser, clean(), generators())[0])


def test_an_implicit_family_is_asked_for_several_draws() -> None:
    calls = []

    def implicit(x: Tensor, t: Tensor | int) -> Tensor:
        calls.append(x.shape[1])
        return 0.5 * x[:, :CHANNELS] + x[:, CHANNELS:]

    config = ObjectiveConfig(num_draws=3)
    losses, _ = Objective(config, scheduler("sample")).losses(implicit, clean(), generators())
    assert calls == [CHANNELS + 1] * 3
    assert losses.shape == (BATCH,)


def test_multi_resolution_noise_and_early_timesteps_can_be_asked_for() -> None:
    plain, _ = Objective(ObjectiveConfig(), scheduler()).losses(denoiser, clean(), generators())
    coarse, _ = Objective(ObjectiveConfig(noise_strength=0.9), scheduler()).losses(denoiser, clean(), generators())
    assert not torch.allclose(plain, coarse)
    _, rows = Objective(ObjectiveConfig(uniform_timesteps=False), scheduler()).losses(denoiser, clean(), generators())
    assert 1 <= int((rows[:, 0] == 49).sum()) < BATCH


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"score": "mse"}, "unknown score 'mse'; choose one of crps"),
        ({"num_draws": 1}, "num_draws must be at least 2"),
        ({"noise_strength": -0.1}, "noise_strength must be at least 0"),
        ({"noise_strength": float("nan")}, "noise_strength must be at least 0"),
    ],
)
def test_an_objective_that_cannot_mean_anything_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ObjectiveConfig(**settings)
