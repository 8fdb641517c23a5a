"""Checkpoints of versions before the first release load, with the numbers that their own code gave.

tests/checkpoints/field holds two pipelines, saved at revision bc558dc by its `set_calibration` and `save_pretrained`:
`weather` with every entry that there was (coloured noise, season, kappas, dampings, shares and an interval per lead
time), `line` with one kappa. The sums below were printed by that revision's `pipeline(...).members` and `.interval`.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from support.tiny_field import tiny_pipeline, tiny_trajectories
from support.weather_records import record

from marigold_uq.calibration import Calibration
from marigold_uq.field.data import WeatherSequences
from marigold_uq.pipelines.field import FieldForecastPipeline

CHECKPOINTS = Path(__file__).parents[2] / "checkpoints" / "field"


def test_a_weather_model_with_every_old_entry_forecasts_as_it_did() -> None:
    pipeline = FieldForecastPipeline.from_pretrained(CHECKPOINTS / "weather")
    data = WeatherSequences(record(step=20.0), ("2m_temperature",), ("land_sea_mask",))
    states, time = data.read(0, 3, 5).unsqueeze(0), data.times(0)[4:5]
    found = pipeline(states, 3, time=time, generator=torch.Generator().manual_seed(0))
    assert found.samples.shape == (4, 1, 3, 1, 3, 9)
    expected = [281.63647, 281.79202, 287.30087, 281.79047, 279.17926, 282.7724]
    np.testing.assert_allclose(found.samples[:, 0, :, 0, 1, 2].flatten()[::2], expected, rtol=1e-5)
    assert float(found.samples.double().sum()) == pytest.approx(91094.81414794922, rel=1e-6)
    found = pipeline(states, 2, time=time, generator=torch.Generator().manual_seed(0), coverage=0.9)
    assert found.interval is not None
    sums = found.interval.double().flatten(1).sum(1).tolist()
    assert sums == pytest.approx([14962.013641357422, 15404.676544189453], rel=1e-6)
    assert pipeline.config.default_denoising_steps == 3


def test_a_model_with_one_kappa_forecasts_as_it_did() -> None:
    pipeline = FieldForecastPipeline.from_pretrained(CHECKPOINTS / "line")
    states = torch.stack([tiny_trajectories().read(i, 0, 2) for i in range(2)])
    samples = pipeline(states, 2, generator=torch.Generator().manual_seed(0)).samples
    assert samples.shape == (5, 2, 2, 1, 16)
    assert float(samples.double().abs().sum()) == pytest.approx(485.6547478288412, rel=1e-5)


def test_kappas_without_a_record_belong_to_the_tau_of_the_scheduler(tmp_path: Path) -> None:
    """The model above, in the older layout that kept tau in the scheduler alone (there it is 0.7)."""
    shutil.copytree(CHECKPOINTS / "line", tmp_path, dirs_exist_ok=True)
    index = json.loads((tmp_path / "model_index.json").read_text())
    del index["calibration"]
    (tmp_path / "model_index.json").write_text(json.dumps({**index, "lead_kappas": [1.4]}))
    pipeline = FieldForecastPipeline.from_pretrained(tmp_path)
    assert pipeline.calibration_for().tau == pipeline.scheduler.config.tau == 0.7
    states = torch.stack([tiny_trajectories().read(i, 0, 2) for i in range(2)])
    samples = pipeline(states, 2, ensemble_size=5, generator=torch.Generator().manual_seed(0)).samples
    assert float(samples.double().abs().sum()) == pytest.approx(485.6547478288412, rel=1e-5)


def test_old_kappas_without_a_record_take_the_tau_of_their_scheduler(tmp_path: Path) -> None:
    tiny_pipeline("gaussian").calibrate(Calibration(tau=0.5)).save_pretrained(tmp_path)
    index = json.loads((tmp_path / "model_index.json").read_text())
    (tmp_path / "model_index.json").write_text(json.dumps({**index, "calibration": None, "lead_kappas": [1.5, 2.0]}))
    loaded = FieldForecastPipeline.from_pretrained(tmp_path)
    assert loaded.calibration_for() == Calibration(tau=0.5, kappa=(1.5, 2.0))
