"""Field pipelines with EDM and flow matching: forecasts, training, calibration, coloured noise."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.tiny_field import tiny_pipeline, tiny_trajectories
from support.toy_task import metrics_of, toy_config

from marigold_uq.calibration import Calibration
from marigold_uq.field.calibrate import CalibrationOptions, calibrate_field
from marigold_uq.field.data import Trajectories, Transitions
from marigold_uq.field.encoding import fit_color, fit_encoder
from marigold_uq.field.task import FieldTask
from marigold_uq.models.noise_color import NoiseColor
from marigold_uq.pipelines.field import FieldForecastPipeline
from marigold_uq.schedulers import DistributionalEDMScheduler, DistributionalFlowMatchScheduler
from marigold_uq.training.config import OptimizerConfig
from marigold_uq.training.loop import Trainer
from marigold_uq.training.objective import ObjectiveConfig

KINDS = {"edm": DistributionalEDMScheduler, "flow": DistributionalFlowMatchScheduler}
every_kind = pytest.mark.parametrize("kind", KINDS)


def build(kind: str) -> FieldForecastPipeline:
    return tiny_pipeline(scheduler=KINDS[kind](noise_family="gaussian", eta=1.0))


def forecast(pipeline: FieldForecastPipeline, **options: Any) -> Any:
    states = torch.stack([tiny_trajectories().read(i, 0, 2) for i in range(2)])
    return pipeline(states, 2, ensemble_size=4, generator=torch.Generator().manual_seed(0), **options)


@every_kind
def test_forecasts_do_not_depend_on_the_batch_and_survive_saving(kind: str, tmp_path: Path) -> None:
    pipeline = build(kind)
    expected = forecast(pipeline, output_epistemic=True)
    assert expected.samples.isfinite().all()
    assert expected.epistemic.isfinite().all()
    assert float(expected.samples.std(0).min()) > 0
    torch.testing.assert_close(forecast(pipeline, batch_size=3).samples, expected.samples, rtol=1e-4, atol=1e-4)
    pipeline.save_pretrained(tmp_path)
    loaded = FieldForecastPipeline.from_pretrained(tmp_path)
    assert type(loaded.scheduler) is KINDS[kind]
    torch.testing.assert_close(forecast(loaded).samples, expected.samples, rtol=1e-5, atol=1e-5)


@every_kind
def test_training_lowers_the_loss_on_held_out_windows(kind: str, tmp_path: Path) -> None:
    windows = Transitions(tiny_trajectories(), num_history=2)
    objective = ObjectiveConfig(score="kernel")
    task = FieldTask(build(kind), windows, objective, validation=windows, validation_samples=16)
    optimizer = OptimizerConfig(learning_rate=2e-3, warmup_steps=0, decay="constant")
    length = {"max_steps": 48, "validate_every": 8, "checkpoint_every": 48}
    Trainer(task, toy_config(tmp_path, optimizer=optimizer, **length)).run()
    losses = [record["validation/loss"] for record in metrics_of(tmp_path) if "validation/loss" in record]
    assert losses[-1] < 0.98 * losses[0]
    assert forecast(FieldForecastPipeline.from_pretrained(tmp_path / "model")).samples.isfinite().all()


@every_kind
def test_calibration_compares_white_and_coloured_noise(kind: str, tmp_path: Path) -> None:
    pipeline = build(kind)
    pipeline.register_to_config(default_denoising_steps=2)
    options = CalibrationOptions(
        steps=[1], tau_evaluations=0, num_windows=4, fit_windows=4, interval_windows=0, ensemble_size=4,
        choice_size=4, num_leads=1,
    )  # fmt: skip
    found = calibrate_field(pipeline, tiny_trajectories(), options)
    tried = [(one["steps"], one["colored"]) for one in found["candidates"]]
    assert tried == [(1, False), (1, True), (2, False), (2, True)]
    assert all(one["score"] is not None for one in found["candidates"])
    assert (pipeline.noise_color is not None) == found["best"]["colored"]


@every_kind
def test_coloured_noise_has_the_variance_of_white_noise(kind: str) -> None:
    """Over three steps, tau = .5, at every point; 4.5 standard errors of 4000 members."""
    pipeline, count = build(kind), 4000
    pipeline.calibrate(Calibration(tau=0.5))
    state = tiny_trajectories().read(0, 0, 2)[None]
    many = {"ensemble_size": count, "num_inference_steps": 3, "batch_size": count}
    plain = pipeline(state, generator=torch.Generator().manual_seed(0), **many).samples
    pipeline.register_modules(noise_color=NoiseColor(50, [1, 16]))
    colored = pipeline(state, generator=torch.Generator().manual_seed(0), **many).samples
    assert float((plain - colored).abs().max()) > 0.1
    variances = [members.var(0) for members in (plain, colored)]
    error = math.sqrt(2 * 2 / (count - 1)) * (variances[0] + variances[1]) / 2
    assert float(((variances[0] - variances[1]) / error).abs().max()) < 4.5


def test_the_colour_of_each_noise_level_is_that_of_the_residual_there() -> None:
    """A network that knows nothing leaves EDM's target: white noise where there is little, at the start the data.

    All increments are multiples of one wave.
    """
    pipeline = build("edm")
    wave = torch.sin(2 * torch.pi * 3 * torch.arange(16) / 16)
    signs = torch.randn(64, 8, 1, generator=torch.Generator().manual_seed(0))
    data = Trajectories((signs * wave).cumsum(1), np.arange(16.0), 0.5 * np.arange(8.0))
    pipeline.register_modules(encoder=fit_encoder(data))
    pipeline.denoiser = lambda condition: lambda x, t: torch.zeros(len(x), 2, 16)  # type: ignore[method-assign]
    color = fit_color(pipeline, Transitions(data, num_history=2), range(256))
    assert len(color.amplitude) == 50
    power = color.amplitude[:, 0].square()  # (50, waves)
    share = power[:, 3] / power.sum(-1)
    assert float(share[0]) < 0.25
    assert float(share[-1]) > 0.99
