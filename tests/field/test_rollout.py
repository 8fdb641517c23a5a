"""Training over several steps: states fed back are the model's own, gradients are those asked for, errors fall."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import brentq
from torch import Tensor, nn
from torch.utils.data import default_collate

from marigold_uq.field.config import FieldData, FieldModel, FieldTrainConfig, PdeData
from marigold_uq.field.data import Trajectories, Transitions, write_trajectories
from marigold_uq.field.rollout import Rollout, RolloutConfig, Start, own_starts
from marigold_uq.field.run import new_pipeline, train_field
from marigold_uq.field.task import FieldTask
from marigold_uq.pipelines.field import FieldForecastPipeline
from marigold_uq.training.config import OptimizerConfig, TrainingConfig
from marigold_uq.training.objective import ObjectiveConfig

POINTS = 8
UNET = {"block_out_channels": [8, 8], "layers_per_block": 1, "embedding_channels": 8, "dropout": 0.0}
ONE_CALL = {
    "noise_family": "point", "prediction_type": "sample", "num_train_timesteps": 1, "beta_start": 0.9999,
    "beta_end": 0.9999, "unet": UNET,
}  # fmt: skip
FACTOR = 0.9


def observed(noise: float, count: int = 60, num_states: int = 5) -> Trajectories:
    """x_s = FACTOR x_{s-1} from N(0, 1), seen with noise of this deviation."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(count, 1, POINTS, generator=generator)
    states = start * FACTOR ** torch.arange(num_states)[:, None]
    states = states + noise * torch.randn(states.shape, generator=generator)
    return Trajectories(states, np.arange(float(POINTS)), np.arange(float(num_states)))


class Multiplier(nn.Module):
    """A network of one weight b, whose next state is b times the last one."""

    def __init__(self, pipeline: FieldForecastPipeline, factor: float) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(float(factor)))
        self.statistics = pipeline.encoder.statistics["u"]

    def forward(self, x: Tensor, timestep: Tensor) -> Tensor:
        one = self.statistics
        last = x[:, 1:2] * one.std + one.mean
        return ((self.factor - 1) * last - one.increment_mean) / one.increment_std


def toy(noise: float, factor: float, **rollout: Any) -> tuple[FieldTask, Multiplier, dict[str, Any]]:
    """A task with this network, and all windows of the toy in one batch."""
    data = observed(noise)
    pipeline = new_pipeline(FieldModel(**ONE_CALL), data)
    config = RolloutConfig(**rollout)
    windows = Transitions(data, num_leads=config.num_leads)
    task = FieldTask(pipeline, windows, ObjectiveConfig(), rollout=config)
    batch = default_collate([windows[index] for index in range(len(windows))])
    return task, Multiplier(pipeline, factor), batch


def generators(batch: dict[str, Any]) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(index) for index in range(len(batch["name"]))]


def at_length(task: FieldTask, length: int) -> FieldTask:
    """The task at a step whose rollout is so long."""
    for step in range(100):
        task.rollout.step = step
        if task.rollout.length() == length:
            return task
    raise AssertionError(f"no rollout of {length} steps in 100 steps of training")


@pytest.mark.parametrize("feedback", ["mean", "sample"])
def test_a_perfect_network_feeds_back_the_truth(feedback: str) -> None:
    task, network, batch = toy(0.0, FACTOR, num_leads=3, feedback=feedback)
    start = Start(batch["history"], batch["time"])
    starts = list(own_starts(task.pipeline, network, start, 3, generators(batch), task.rollout.config))
    truth = torch.cat([batch["history"], batch["future"]], 1)
    for lead, one in enumerate(starts):
        torch.testing.assert_close(one.history, truth[:, lead : lead + 2], atol=1e-5, rtol=1e-5)
        assert one.time is not None
        torch.testing.assert_close(one.time, batch["time"] + lead)
    with torch.no_grad():
        assert float(at_length(task, 3).losses(network, batch, generators(batch)).max()) < 1e-8


@pytest.mark.parametrize("gradient", ["last", "all"])
def test_loss_and_gradient_of_two_steps_are_those_of_the_formula(gradient: str) -> None:
    """Squared errors of b^2 y_0; through the last step alone, the state fed back is a constant."""
    b = 0.6
    task, network, batch = toy(0.5, b, num_leads=2, gradient=gradient)
    loss = at_length(task, 2).losses(network, batch, generators(batch)).mean()
    loss.backward()
    scale = task.pipeline.encoder.statistics["u"].increment_std ** 2
    y_0, (y_1, y_2) = batch["history"][:, -1].double(), batch["future"].double().unbind(1)
    second = (b**2 * y_0 - y_2).square().mean() / scale
    through_last = 2 * ((b**2 * y_0 - y_2) * b * y_0).mean() / scale
    if gradient == "last":
        expected, slope = second, through_last
    else:
        expected = (second + (b * y_0 - y_1).square().mean() / scale) / 2
        slope = (2 * through_last + 2 * ((b * y_0 - y_1) * y_0).mean() / scale) / 2
    assert float(loss) == pytest.approx(float(expected), rel=1e-4)
    assert float(network.factor.grad) == pytest.approx(float(slope), rel=1e-3)


def trained(**rollout: Any) -> tuple[float, FieldTask, dict[str, Any]]:
    """The weight after training on the toy with noise of deviation 1, all windows in every batch."""
    task, network, batch = toy(1.0, 0.7, **rollout)
    optimizer = torch.optim.Adam(network.parameters(), lr=0.02)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 150)
    for step in range(150):
        optimizer.zero_grad()
        task.losses(network, batch, generators(batch)).mean().backward()
        optimizer.step()
        schedule.step()
        task.after_step(step + 1)
    return float(network.factor.detach()), task, batch


def test_training_over_three_steps_finds_the_known_answer_and_lowers_the_rollout_error() -> None:
    """Noise in what is seen makes the best one-step factor too small: its powers die out before the signal does.

    The best b of the mean error of b^n y_0 over n = 1, 2, 3 solves sum_n n b^(n-1) (b^n S - C_n) = 0 with the moments
    S = <y_0 y_0> and C_n = <y_0 y_n>; of one step it is C_1 / S.
    """
    short, _, _ = trained(num_leads=1)
    long, _, batch = trained(num_leads=3, gradient="all")
    y_0, futures = batch["history"][:, -1].double(), batch["future"].double().unbind(1)
    square = float(y_0.square().mean())
    moments = [float((y_0 * future).mean()) for future in futures]
    best = brentq(lambda b: sum(n * b ** (n - 1) * (b**n * square - c) for n, c in enumerate(moments, 1)), 0.3, 1.0)
    all_data, _, windows = toy(1.0, 0.7, num_leads=1)
    assert all_data.rollout.length() == 1
    y = windows["history"][:, -1]
    assert short == pytest.approx(float((y * windows["future"][:, 0]).mean() / y.square().mean()), abs=5e-3)
    assert long == pytest.approx(best, abs=5e-3)
    errors = [float((b**3 * y_0 - futures[2]).square().mean()) for b in (short, long)]
    floor = float((moments[2] / square * y_0 - futures[2]).square().mean())  # of the best multiple at that lead time
    assert errors[1] - floor < 0.5 * (errors[0] - floor)


def test_the_curriculum_starts_with_one_step_and_grows() -> None:
    config = RolloutConfig(num_leads=5, start_step=10, grow_steps=30, gradient="all")
    assert [config.longest(step) for step in (0, 9, 10, 25, 32, 40, 1000)] == [1, 1, 2, 3, 3, 5, 5]
    assert RolloutConfig(num_leads=4).longest(0) == 4
    assert RolloutConfig().longest(100) == 1
    drawn = {Rollout(RolloutConfig(num_leads=3), seed=1, step=step).length() for step in range(60)}
    assert drawn == {1, 2, 3}
    resumed = Rollout(config)
    resumed.load_state_dict(Rollout(config, step=25).state_dict())
    assert resumed.length() == 3


def test_a_model_that_does_not_predict_its_whole_state_cannot_be_trained_on_rollouts() -> None:
    data = observed(0.1)
    pipeline = new_pipeline(FieldModel(**ONE_CALL), data)
    pipeline.encoder.register_to_config(variables=["u", "v"])
    with pytest.raises(ValueError, match="feeds forecasts back"):
        FieldTask(pipeline, Transitions(data), ObjectiveConfig(), rollout=RolloutConfig(num_leads=2))


@pytest.mark.parametrize("wrong", [{"num_leads": 0}, {"grow_steps": -1}, {"denoising_steps": 0}])
def test_settings_without_meaning_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="at least"):
        RolloutConfig(**wrong)


def _config(data: Path, output: Path, max_steps: int) -> FieldTrainConfig:
    training = TrainingConfig(
        output=output, max_steps=max_steps, batch_size=8, checkpoint_every=2, validate_every=0, tracker="none",
        cpu=True, optimizer=OptimizerConfig(learning_rate=5e-3, warmup_steps=1, decay="constant"),
    )  # fmt: skip
    rollout = RolloutConfig(num_leads=3, start_step=1, grow_steps=2, feedback="sample", gradient="all")
    model = FieldModel(num_train_timesteps=10, prediction_type="v_prediction", zero_terminal_snr=True, unet=UNET)
    return FieldTrainConfig(FieldData(pde=PdeData(str(data))), model=model, training=training, rollout=rollout)


def test_a_resumed_training_on_rollouts_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    pytest.importorskip("h5py", reason="field files are HDF5")
    path, data = tmp_path / "toy.h5", observed(0.1)
    write_trajectories(path, [(0, data.states.numpy())], tuple(data.states.shape), data.x, data.t, {})
    for output, lengths in (("whole", [4]), ("parts", [2, 4])):
        for steps in lengths:
            assert train_field(_config(path, tmp_path / output, steps)).finished
    models = [FieldForecastPipeline.from_pretrained(tmp_path / name / "model") for name in ("whole", "parts")]
    one, other = (model.unet.state_dict() for model in models)
    assert all(torch.equal(one[name], other[name]) for name in one)
    with pytest.raises(ValueError, match="one_time_per_epoch"):
        replace(_config(path, tmp_path, 1), one_time_per_epoch=True)
