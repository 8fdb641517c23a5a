"""Field pipelines with EDM and flow matching: forecasts, training, calibration, and what they refuse."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny_field import tiny_pipeline, tiny_trajectories
from support.toy_task import metrics_of, toy_config

from marigold_uq.field.calibrate import CalibrationOptions, calibrate_field
from marigold_uq.field.data import Transitions
from marigold_uq.field.encoding import fit_color
from marigold_uq.field.task import FieldTask
from marigold_uq.models.noise_color import NoiseColor
from marigold_uq.pipelines.field import FieldForecastPipeline
from marigold_uq.schedulers import DistributionalEDMScheduler, DistributionalFlowMatchScheduler
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
    Trainer(task, toy_config(tmp_path, max_steps=16, validate_every=8, checkpoint_every=16)).run()
    losses = [record["validation/loss"] for record in metrics_of(tmp_path) if "validation/loss" in record]
    assert losses[-1] < losses[0]
    assert forecast(FieldForecastPipeline.from_pretrained(tmp_path / "model")).samples.isfinite().all()


@every_kind
def test_calibration_tries_no_colour_and_gives_finite_numbers(kind: str) -> None:
    pipeline = build(kind)
    pipeline.register_to_config(default_denoising_steps=2)
    options = CalibrationOptions(
        steps=[1], tau_evaluations=0, num_windows=4, fit_windows=4, interval_windows=0, ensemble_size=4,
        choice_size=4, num_leads=1,
    )  # fmt: skip
    found = calibrate_field(pipeline, tiny_trajectories(), options)
    assert [one["colored"] for one in found["candidates"]] == [False, False]
    assert pipeline.noise_color is None
    assert all(one["score"] is not None for one in found["candidates"])


@every_kind
def test_coloured_noise_is_refused(kind: str) -> None:
    pipeline, windows = build(kind), Transitions(tiny_trajectories(), num_history=2)
    with pytest.raises(ValueError, match="colours of noise need the timesteps"):
        fit_color(pipeline, windows, range(4))
    pipeline.register_modules(noise_color=NoiseColor(10, [1, 16]))
    with pytest.raises(ValueError, match="colours of noise need the timesteps"):
        forecast(pipeline)
