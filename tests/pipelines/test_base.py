"""The calibration contract of all pipelines, held by the smallest of them."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny_depth import tiny_pipeline
from support.tiny_field import tiny_pipeline as tiny_field_pipeline
from support.tiny_uncertainty import TinyUncertaintyPipeline, tiny_uncertainty_pipeline

from marigold_uq import FieldForecastPipeline, MarigoldUQDepthPipeline
from marigold_uq.calibration import Calibration, IntervalGrid

TESTS = Path(__file__).parents[1]
ENSEMBLE = Calibration(
    tau=0.25,
    kappa=0.8,
    interval=IntervalGrid((0.5, 0.9), ((0.7,), (2.0,))),
    uncertainty="ensemble",
    num_inference_steps=4,
    ensemble_size=10,
    num_calibration=120,
)
TRAJECTORY = Calibration(tau=0.25, kappa=1.5, uncertainty="trajectory")


def calibrated() -> TinyUncertaintyPipeline:
    return tiny_uncertainty_pipeline().calibrate(ENSEMBLE).calibrate(TRAJECTORY)


def test_a_pipeline_without_a_calibration_has_one_without_effect() -> None:
    pipeline = tiny_uncertainty_pipeline()
    assert pipeline.calibrations == ()
    assert pipeline.calibration_for("ensemble", num_inference_steps=3) == Calibration(uncertainty="ensemble")
    pipeline.scheduler.calibrate(0.5)
    assert pipeline.calibration_for("ensemble").tau == 0.5


def test_each_way_to_uncertainty_has_its_own_record_and_tau_goes_to_the_scheduler() -> None:
    pipeline = calibrated()
    assert pipeline.calibrations == (ENSEMBLE, TRAJECTORY)
    assert pipeline.calibration_for("ensemble") == ENSEMBLE
    assert pipeline.calibration_for("trajectory") == TRAJECTORY
    assert pipeline.scheduler.config.tau == 0.25


def test_a_way_that_the_pipeline_does_not_have_is_refused() -> None:
    with pytest.raises(ValueError, match=r"\['ensemble', 'trajectory'\] for a TinyUncertaintyPipeline; got None"):
        tiny_uncertainty_pipeline().calibrate(Calibration())


def test_another_tau_for_a_second_way_is_refused_and_changes_nothing() -> None:
    pipeline = calibrated()
    with pytest.raises(ValueError, match="tau must be the same"):
        pipeline.calibrate(Calibration(tau=0.5, uncertainty="trajectory"))
    assert pipeline.scheduler.config.tau == 0.25
    assert pipeline.calibrations == (ENSEMBLE, TRAJECTORY)


def test_a_call_under_other_conditions_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline, warned = calibrated(), []
    monkeypatch.setattr("marigold_uq.pipelines.base.logger.warning", warned.append)
    pipeline.calibration_for("ensemble", num_inference_steps=4, ensemble_size=10)
    assert warned == []
    pipeline.calibration_for("ensemble", num_inference_steps=8, ensemble_size=10)
    assert warned == ["calibrated with num_inference_steps=4, called with 8: kappa and intervals may not hold"]


def test_a_changed_tau_is_refused() -> None:
    pipeline = calibrated()
    pipeline.scheduler.calibrate(0.5)
    with pytest.raises(ValueError, match=r"made with tau = 0\.25, but the scheduler has tau = 0\.5"):
        pipeline.calibration_for("ensemble")


def test_saving_and_loading_keeps_everything(tmp_path: Path) -> None:
    calibrated().save_pretrained(tmp_path)
    loaded = TinyUncertaintyPipeline.from_pretrained(tmp_path)
    assert loaded.calibrations == (ENSEMBLE, TRAJECTORY)
    assert loaded.scheduler.config.tau == 0.25
    loaded.save_pretrained(tmp_path / "again")
    assert TinyUncertaintyPipeline.from_pretrained(tmp_path / "again").calibrations == (ENSEMBLE, TRAJECTORY)


def test_a_fresh_process_gets_the_same_intervals(tmp_path: Path) -> None:
    calibrated().save_pretrained(tmp_path)
    code = (
        "import sys; from support.tiny_uncertainty import TinyUncertaintyPipeline as P; "
        "print(P.from_pretrained(sys.argv[1]).calibration_for('ensemble').interval.scale(0.7))"
    )
    environment = {**os.environ, "PYTHONPATH": str(TESTS)}
    run = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], env=environment, capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == str(ENSEMBLE.interval.scale(0.7))  # type: ignore[union-attr]


def test_recalibrating_a_loaded_pipeline_is_kept_too(tmp_path: Path) -> None:
    """diffusers forgets changes of entries that were left at their default."""
    tiny_uncertainty_pipeline().save_pretrained(tmp_path / "plain")
    loaded = TinyUncertaintyPipeline.from_pretrained(tmp_path / "plain").calibrate(ENSEMBLE)
    loaded.save_pretrained(tmp_path / "calibrated")
    again = TinyUncertaintyPipeline.from_pretrained(tmp_path / "calibrated")
    assert again.calibrations == (ENSEMBLE,)
    assert again.scheduler.config.tau == 0.25


def test_a_shared_scheduler_or_components_bring_no_foreign_calibration() -> None:
    pipeline = calibrated()
    other = TinyUncertaintyPipeline(**pipeline.components)
    assert other.calibrations == ()


def test_old_entries_are_translated_while_loading(tmp_path: Path) -> None:
    tiny_uncertainty_pipeline().save_pretrained(tmp_path)
    index = json.loads((tmp_path / "model_index.json").read_text())
    del index["default_denoising_steps"]
    old = {"tau": 1.0, "kappa": 2.0, "conformal_scale": 1.5, "coverage": 0.9, "num_steps": 3, "num_members": 7}
    index |= {"default_num_inference_steps": 3, "calibration": {"ensemble": old}}
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    loaded = TinyUncertaintyPipeline.from_pretrained(tmp_path)
    assert loaded.config.default_denoising_steps == 3
    record = loaded.calibration_for("ensemble")
    assert record.interval == IntervalGrid((0.9,), ((1.5,),))
    assert (record.kappa, record.num_inference_steps, record.ensemble_size) == (2.0, 3, 7)


@pytest.mark.parametrize(
    ("kind", "make"),
    [(MarigoldUQDepthPipeline, tiny_pipeline), (FieldForecastPipeline, tiny_field_pipeline)],
    ids=["depth", "field"],
)
def test_a_model_that_fails_to_load_leaves_the_default_dtype_alone(kind: Any, make: Any, tmp_path: Path) -> None:
    """diffusers sets it while it makes a network: everything after the failure would come out in float64."""
    make().save_pretrained(tmp_path)
    config = tmp_path / "unet" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "_class_name": 3}))
    with pytest.raises(ValueError, match="_class_name"):
        kind.from_pretrained(tmp_path, dtype=torch.float64)
    assert torch.get_default_dtype() == torch.float32
