"""Variables that are missing at some points, like those of the ocean: training, forecasts, scores and calibration."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.tiny_field import tiny_pipeline
from support.weather_records import record

from marigold_uq.field.calibrate import CalibrationOptions, calibrate_field
from marigold_uq.field.data import FieldDataError, Transitions, WeatherSequences, statistics_of
from marigold_uq.field.encoding import fit_encoder
from marigold_uq.field.forecasters import Persistence, PipelineForecaster
from marigold_uq.field.scores import score_forecasts
from marigold_uq.field.task import FieldTask
from marigold_uq.pipelines.field import FieldForecastPipeline
from marigold_uq.training.objective import ObjectiveConfig

LAND = (slice(1, 3), slice(4, 9))
VARIABLES = ("2m_temperature", "temperature_850")


def ocean_record(num_times: int = 40) -> Any:
    """A record whose first variable is missing over land."""
    states = record(num_times)
    states["2m_temperature"][(slice(None), *LAND)] = np.nan
    return states


def ocean(num_times: int = 40, **options: Any) -> WeatherSequences:
    return WeatherSequences(ocean_record(num_times), VARIABLES, masked=("2m_temperature",), **options)


def is_land() -> np.ndarray:
    land = np.zeros((5, 18), bool)
    land[LAND] = True
    return land


def test_missing_values_are_refused_unless_their_variable_is_named() -> None:
    with pytest.raises(FieldDataError, match="name it in `masked`"):
        statistics_of(WeatherSequences(ocean_record(), VARIABLES))
    with pytest.raises(FieldDataError, match="holds NaN"):
        Transitions(WeatherSequences(ocean_record(), VARIABLES))[0]
    with pytest.raises(FieldDataError, match="masked must be among"):
        WeatherSequences(ocean_record(), VARIABLES, masked=("salinity",))
    broken = ocean_record()
    broken["temperature"][3, 0, 0, 0] = np.nan
    with pytest.raises(FieldDataError, match="temperature_850 holds NaN"):
        statistics_of(WeatherSequences(broken, VARIABLES, masked=("2m_temperature",)))


def test_statistics_are_those_of_the_points_that_are_there() -> None:
    found, values = statistics_of(ocean()), record()["2m_temperature"].values.astype(np.float64)
    there = values[:, ~is_land()]
    assert found["2m_temperature"].mean == pytest.approx(there.mean())
    assert found["2m_temperature"].std == pytest.approx(there.std(ddof=1))
    assert found["2m_temperature"].increment_std == pytest.approx(np.diff(there, axis=0).std(ddof=1))


def test_the_encoder_knows_where_values_are_and_the_network_sees_it(tmp_path: Path) -> None:
    encoder = fit_encoder(ocean(), mean_field=True, seasonal=True)
    assert encoder.config.static_names[-1] == "observed_2m_temperature"
    np.testing.assert_array_equal(encoder.observed[0].numpy() == 0, is_land())
    data = ocean()
    condition = encoder.condition(data.read(0, 3, 5).unsqueeze(0), torch.tensor(data.times(0)[4:5]))
    assert bool(condition.isfinite().all())
    encoder.save_pretrained(tmp_path)
    torch.testing.assert_close(type(encoder).from_pretrained(tmp_path).observed, encoder.observed)


@pytest.mark.parametrize(("family", "score"), [("gaussian", None), ("low_rank", "kernel"), ("gaussian", "energy")])
def test_what_is_missing_does_not_count_in_the_loss(family: str, score: str | None) -> None:
    """The loss is finite, and other numbers in place of the truth over land change nothing."""
    data = ocean()
    pipeline = tiny_pipeline(family, data)
    task = FieldTask(pipeline, Transitions(data), ObjectiveConfig(score=score), validation=Transitions(data))
    batch = task.collate([task.dataset[index] for index in (3, 9)])

    def loss(future: torch.Tensor) -> torch.Tensor:
        generators = [torch.Generator().manual_seed(seed) for seed in range(2)]
        return task.losses(pipeline.unet, {**batch, "future": future}, generators)

    plain = loss(batch["future"])
    assert bool(plain.isfinite().all())
    arbitrary = torch.where(batch["future"].isnan(), 1e6, batch["future"])
    torch.testing.assert_close(loss(arbitrary), plain)  # the last state is missing there all the same
    changed = batch["future"].clone()
    changed[:, :, 0, 0, 0] += 20
    assert not torch.allclose(loss(changed), plain)
    assert np.isfinite(task.validate(pipeline.unet, 0, Path("unused"))["validation/loss"])


def test_forecasts_are_missing_where_the_last_state_is_and_nowhere_else(tmp_path: Path) -> None:
    tiny_pipeline(data=ocean()).save_pretrained(tmp_path / "model")
    pipeline = FieldForecastPipeline.from_pretrained(tmp_path / "model")
    found = pipeline(ocean_record(), 3, ensemble_size=3, generator=torch.Generator().manual_seed(0))
    for statistic in ("", "_prediction", "_uncertainty"):
        missing = np.isnan(found[f"2m_temperature{statistic}"].values)
        assert (missing == is_land()).all()
        assert np.isfinite(found[f"temperature_850{statistic}"].values).all()
    holes = ocean_record()
    holes["2m_temperature"][-1, 0, 0] = np.nan
    with pytest.raises(FieldDataError, match="2m_temperature holds NaN or infinity at 1 places"):
        pipeline(holes, 1)


def test_land_changes_no_number_at_sea() -> None:
    """Whatever the land of a chain would be, the network does not see it: forecasts at sea are those of any land."""
    data, batch = ocean(), {"time": ocean().times(0)[4:5]}
    pipeline = tiny_pipeline(data=data)
    condition = pipeline.encoder.condition(data.read(0, 3, 5).unsqueeze(0), torch.tensor(batch["time"]))
    denoise = pipeline.denoiser(condition)
    x_t = torch.randn(1, 2, 5, 18, generator=torch.Generator().manual_seed(0))
    other = x_t.clone()
    other[0, 0][torch.from_numpy(is_land())] = 99.0
    torch.testing.assert_close(denoise(other, 5), denoise(x_t, 5), rtol=0, atol=0)


def test_scores_leave_out_what_is_missing() -> None:
    windows = Transitions(ocean())
    found = score_forecasts(Persistence(), windows, range(len(windows)), min_scale=1e-3)
    errors = torch.stack([windows[i]["future"][0] - windows[i]["history"][-1] for i in range(len(windows))]).double()
    weights = torch.from_numpy(np.cos(np.deg2rad([-20.0, -10, 0, 10, 20]))).reshape(5, 1) * errors.isfinite()
    expected = (errors.abs().nan_to_num() * weights).sum((1, 2, 3)) / weights.sum((1, 2, 3))
    assert float(found["crps"].value[0]) == pytest.approx(float(expected.mean()), rel=1e-6)
    forecaster = PipelineForecaster(tiny_pipeline(data=ocean()), ensemble_size=4, num_inference_steps=1)
    scores = score_forecasts(forecaster, windows, [2, 8, 20], min_scale=1e-3)
    for name in ("crps", "rmse", "energy_score", "coverage", "spread_skill_ratio", "rank_histogram"):
        assert bool(scores[name].value.isfinite().all()), name


def test_calibration_of_an_ocean_model_is_finite_and_by_variable() -> None:
    data = ocean(480)
    pipeline = tiny_pipeline(data=data)
    options = CalibrationOptions(steps=[1], num_windows=8, num_leads=2, tau_evaluations=4, ensemble_size=6)
    found = calibrate_field(pipeline, data, options)
    assert set(found["variables"]) == set(VARIABLES)
    assert len(found["calibration"]["kappa"]) == 4
    assert all(np.isfinite(found["calibration"]["kappa"]))
    forecast = pipeline(ocean_record(), 2, ensemble_size=6)
    assert (np.isnan(forecast["2m_temperature"].values) == is_land()).all()


def test_a_seasonal_mean_refuses_points_that_come_and_go() -> None:
    states = ocean_record()
    states["2m_temperature"][5, 0, 0] = np.nan
    coming = WeatherSequences(states, VARIABLES, masked=("2m_temperature",))
    assert float(fit_encoder(coming).observed[0, 0, 0]) == pytest.approx(39 / 40)
    with pytest.raises(FieldDataError, match="missing always or never"):
        fit_encoder(coming, seasonal=True)
