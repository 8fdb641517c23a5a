"""DDIM, EDM and flow matching learn through the one loop, on a problem of known answer in one dimension."""

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import PartialState
from support.toy_task import toy_config
from torch import Tensor, nn

from marigold_uq.sampling import initial_noise, reverse_diffusion
from marigold_uq.schedulers import (
    DistributionalDDIMScheduler,
    DistributionalEDMScheduler,
    DistributionalFlowMatchScheduler,
    DistributionalScheduler,
)
from marigold_uq.training.config import OptimizerConfig
from marigold_uq.training.loop import Trainer
from marigold_uq.training.noise import training_timesteps
from marigold_uq.training.objective import Objective, ObjectiveConfig
from marigold_uq.training.task import TrainingTask

SLOPE, SPREAD = 0.8, 0.3
ZERO_SNR = {"prediction_type": "v_prediction", "rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}
SCHEDULERS: dict[str, tuple[type[Any], dict[str, Any], float]] = {
    "ddim": (DistributionalDDIMScheduler, ZERO_SNR, 1 / 1000),
    "edm": (DistributionalEDMScheduler, {"sigma_max": 20.0}, 1.0),
    "flow": (DistributionalFlowMatchScheduler, {}, 1 / 1000),
}
"""Class, options, and what makes a timestep about 1."""
every_framework = pytest.mark.parametrize("framework", SCHEDULERS)


def build(framework: str, family: str = "gaussian", **options: Any) -> DistributionalScheduler:
    kind, own, _ = SCHEDULERS[framework]
    return kind(noise_family=family, eta=1.0, **{**own, **options})


def generators(count: int) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(seed) for seed in range(count)]


def data(count: int) -> tuple[Tensor, Tensor]:
    """y given x is N(0.8 x, 0.3^2)."""
    generator = torch.Generator().manual_seed(0)
    x = 2 * torch.rand(count, 1, generator=generator) - 1
    return x, SLOPE * x + SPREAD * torch.randn(count, 1, generator=generator)


class Network(nn.Module):
    """Raw channels of a Gaussian for [x, y_t, t]."""

    def __init__(self, time_scale: float) -> None:
        super().__init__()
        self.time_scale = time_scale
        self.layers = nn.Sequential(nn.Linear(3, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 2))

    def forward(self, x: Tensor, y_t: Tensor, t: Tensor | int) -> Tensor:
        time = self.time_scale * torch.as_tensor(t, dtype=torch.float32).reshape(-1, 1).expand(len(x), 1)
        return self.layers(torch.cat([x, y_t, time], 1))


class LineTask(TrainingTask):
    """Learns y given x with any scheduler."""

    def __init__(self, scheduler: DistributionalScheduler, time_scale: float) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.network: nn.Module = Network(time_scale)
        self.objective = Objective(ObjectiveConfig(uniform_timesteps=False), scheduler)
        self.dataset: Any = [{"name": i, "x": x, "y": y} for i, (x, y) in enumerate(zip(*data(2048), strict=True))]

    def losses(self, network: nn.Module, batch: dict[str, Any], generators: list[torch.Generator]) -> Tensor:
        return self.objective.losses(lambda y_t, t: network(batch["x"], y_t, t), batch["y"], generators)[0]

    def save(self, network: nn.Module, folder: Path) -> None:
        torch.save(network.state_dict(), folder / "weights.pt")


def moments(network: nn.Module, scheduler: DistributionalScheduler, steps: int) -> list[tuple[float, float]]:
    """Mean and standard deviation of samples at x = -0.6 and x = 0.6."""
    scheduler.set_timesteps(steps)
    found = []
    for place in (-0.6, 0.6):
        generator, x = torch.Generator().manual_seed(1), torch.full((4000, 1), place)
        y_T = initial_noise((4000, 1), like=x, generator=generator)
        y = reverse_diffusion(lambda y_t, t, x=x: network(x, y_t, t), scheduler, y_T, generator=generator)
        found.append((float(y.mean()), float(y.std())))
    return found


@every_framework
def test_a_model_of_every_framework_learns_the_mean_and_the_spread(framework: str, tmp_path: Path) -> None:
    scheduler, time_scale = build(framework), SCHEDULERS[framework][2]
    task = LineTask(scheduler, time_scale)
    optimizer = OptimizerConfig(learning_rate=1e-2, warmup_steps=10, decay="cosine")
    many = {"max_steps": 400, "batch_size": 128, "checkpoint_every": 400, "log_every": 100, "ema_decay": 0.9}
    Trainer(task, toy_config(tmp_path, optimizer=optimizer, **many)).run()
    task.network.load_state_dict(torch.load(tmp_path / "model" / "weights.pt"))
    task.network.eval()
    for steps in (1, 4):
        for place, (mean, std) in zip((-0.6, 0.6), moments(task.network, scheduler, steps), strict=True):
            assert mean == pytest.approx(SLOPE * place, abs=0.06), steps
            assert std == pytest.approx(SPREAD, abs=0.06), steps


@every_framework
def test_timesteps_are_drawn_as_the_framework_does_and_half_can_be_the_noisiest(framework: str) -> None:
    scheduler = build(framework)
    own = training_timesteps(scheduler, generators(400), uniform=True)
    assert torch.equal(own, scheduler.sample_timesteps(400, generators(400)))
    often = training_timesteps(scheduler, generators(400), uniform=False)
    last = often == scheduler.noisiest_timestep
    assert 160 < int(last.sum()) < 240  # 200 expected, 4 standard deviations of 10
    assert torch.equal(often[~last], own[~last])


@every_framework
def test_sampling_starts_at_the_noisiest_timestep(framework: str) -> None:
    scheduler = build(framework)
    scheduler.set_timesteps(2)
    assert float(scheduler.timesteps[0]) == pytest.approx(float(scheduler.noisiest_timestep), rel=1e-6)


@every_framework
def test_noise_indices_rise_with_the_noise_through_the_whole_table(framework: str) -> None:
    scheduler = build(framework)
    scheduler.set_timesteps(50)
    index = scheduler.noise_index(scheduler.timesteps)
    assert index.dtype == torch.int64
    assert (index.diff() <= 0).all()
    assert 900 < int(index[0]) < 1000
    assert 0 <= int(index[-1]) < 50


@every_framework
@pytest.mark.parametrize("options", [{"score": "kernel"}, {"score": "crps", "noise_strength": 0.9}])
def test_the_bandwidth_and_coarse_noise_follow_the_noise_level(framework: str, options: dict[str, Any]) -> None:
    PartialState(cpu=True)
    objective = Objective(ObjectiveConfig(**options), build(framework))
    x_0 = torch.randn(32, 2, 8, 8, generator=torch.Generator().manual_seed(0))

    def denoiser(x: Tensor, t: Tensor | int) -> Tensor:
        return torch.cat([0.5 * x, 0.1 * x], 1)

    losses, rows = objective.losses(denoiser, x_0, generators(32))
    assert losses.isfinite().all()
    assert rows[:, 0].unique().numel() > 10
    objective.note(rows)
    objective.update()
    changed = int((objective.scale.mean_square != 1).sum())
    assert changed > 3 if options["score"] == "kernel" else changed == 0
