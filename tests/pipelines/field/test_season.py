"""What is calibrated of the season: its spread, learnt from the training part, blended with that of the members."""

from pathlib import Path

import numpy as np
import pytest
import torch
from support.tiny_field import tiny_pipeline, tiny_weather
from support.weather_records import record

from marigold_uq.calibration import Calibration
from marigold_uq.field.data import WeatherSequences
from marigold_uq.field.encoding import fit_season
from marigold_uq.field.forecasters import PipelineForecaster
from marigold_uq.field.lead_factors import best_blends
from marigold_uq.pipelines.field import FieldForecastPipeline
from marigold_uq.pipelines.field.output import FieldForecast, blend


def forecast(pipeline: FieldForecastPipeline, data: WeatherSequences, date: str) -> FieldForecast:
    time = np.datetime64(date, "s").astype(np.float64)
    place = int(np.searchsorted(data.times(0), time))
    states = data.read(0, place - 1, place + 1).unsqueeze(0)
    generator = torch.Generator().manual_seed(3)
    return pipeline(states, 2, time=time, ensemble_size=20, generator=generator, output_type="pt")


def seasonal_record() -> WeatherSequences:
    """Two years of pure noise around 280 K: deviation 4 K in January, 1 K in July, twice that in the first row."""
    states = record(2 * 4 * 365)
    year = np.cos(2 * np.pi * np.arange(2 * 4 * 365) / (4 * 365.2425))[:, None, None]
    deviation = np.sqrt(8.5 + 7.5 * year) * np.array([2, 1, 1, 1, 1])[:, None]
    noise = np.random.default_rng(0).standard_normal(states["2m_temperature"].shape)
    states["2m_temperature"] = states["2m_temperature"] * 0 + 280 + deviation * noise
    return WeatherSequences(states.astype(np.float32), ("2m_temperature",))


def test_the_seasons_spread_is_learnt_and_what_a_forecast_without_skill_is_left_with(tmp_path: Path) -> None:
    data = seasonal_record()
    pipeline = tiny_pipeline("gaussian", data, seasonal=True)
    pipeline.register_modules(season=fit_season(pipeline.encoder, data))
    pipeline.calibrate(Calibration(kappa=(2.0, 0.5)), lead_dampings=[1.0, 0.0], lead_season_shares=[0.0, 1.0])
    pipeline.save_pretrained(tmp_path / "model")
    loaded = FieldForecastPipeline.from_pretrained(tmp_path / "model")
    spreads = {}
    for month in ("2014-01-01", "2014-07-01"):
        before, after = (forecast(one, data, month) for one in (tiny_pipeline("gaussian", data, seasonal=True), loaded))
        torch.testing.assert_close(after.uncertainty[:, 0], 2 * before.uncertainty[:, 0], rtol=1e-3, atol=1e-3)
        season = loaded.season_deviations(after.init_times, 2)[:, 1]
        torch.testing.assert_close(
            after.uncertainty[:, 1],
            (0.25 * before.uncertainty[:, 1].square() + season.square()).sqrt(),
            rtol=1e-3,
            atol=1e-3,
        )
        order = [output.samples[:, 0, 1].argsort(0) for output in (before, after)]
        torch.testing.assert_close(order[0], order[1])  # who is higher than who
        spreads[month] = season[0, 0].mean(-1)
    # 60 days around a date: the error of a deviation from some hundred numbers per row is a few percent
    expected = torch.tensor([2.0, 1, 1, 1, 1])
    torch.testing.assert_close(spreads["2014-01-01"], 4 * expected, rtol=0.1, atol=0)
    torch.testing.assert_close(spreads["2014-07-01"], expected, rtol=0.25, atol=0)


def test_the_seasons_mean_is_the_encoders() -> None:
    data = seasonal_record()
    pipeline = tiny_pipeline("gaussian", data, seasonal=True)
    times = torch.from_numpy(np.asarray(data.times(0))[::97])
    expected = pipeline.encoder.seasonal_mean(times)
    torch.testing.assert_close(fit_season(pipeline.encoder, data).mean(times), expected)


def test_an_ensemble_made_elsewhere_is_calibrated_afterwards() -> None:
    data = seasonal_record()
    plain = tiny_pipeline("gaussian", data, seasonal=True)
    calibrated = tiny_pipeline("gaussian", data, seasonal=True)
    calibrated.register_modules(season=fit_season(plain.encoder, data))
    calibrated.calibrate(Calibration(kappa=(2.0, 0.5)), lead_dampings=[1.0, 0.3], lead_season_shares=[0.0, 1.0])
    members = forecast(plain, data, "2014-01-01").samples
    date = np.array(["2014-01-01"], "datetime64[ns]")  # of any unit
    expected = forecast(calibrated, data, "2014-01-01").samples
    torch.testing.assert_close(calibrated.calibrate_samples(members, date), expected, rtol=1e-5, atol=1e-3)


def test_mixed_precision_does_not_round_the_season() -> None:
    """Bfloat16 has steps of 2 K at 280 K: a forecast that is all season must not know them."""
    data = seasonal_record()
    pipeline = tiny_pipeline("gaussian", data, seasonal=True)
    pipeline.register_modules(season=fit_season(pipeline.encoder, data))
    pipeline.calibrate(Calibration(kappa=(1.0,)), lead_dampings=[0.0])
    batch = {"history": data.read(0, 7, 9).unsqueeze(0), "time": data.times(0)[8:9]}
    forecaster = PipelineForecaster(pipeline, ensemble_size=3, mixed_precision="bf16")
    mean = forecaster.forecast(batch, [0], 2).mean(0)
    expected = pipeline.expected_states(np.asarray(batch["time"]), 2)
    torch.testing.assert_close(mean, expected, rtol=0, atol=1e-3)
    assert "forward" not in vars(pipeline.unet)  # left as it was


def test_shares_of_the_seasons_spread_need_it_and_are_not_negative() -> None:
    with pytest.raises(ValueError, match="module season"):
        tiny_weather().calibrate(Calibration(), lead_season_shares=[0.5])
    with pytest.raises(ValueError, match="at least 0"):
        tiny_weather().calibrate(Calibration(), lead_season_shares=[-0.5])
    with pytest.raises(ValueError, match="at least 0"):
        tiny_weather().calibrate(Calibration(), lead_season_shares=[float("nan")])
    with pytest.raises(ValueError, match="no module season"):
        tiny_weather().season_deviations(np.zeros(1), 1)


def test_members_that_agree_go_on_agreeing() -> None:
    members = torch.ones(3, 1, 1, 1, 4)
    torch.testing.assert_close(blend(members, [2.0], [1.0], torch.ones(1, 1, 1, 4)), members)
    torch.testing.assert_close(blend(members[:1], [2.0], [1.0], torch.ones(1, 1, 1, 4)), members[:1])  # one is no law


def test_the_best_blend_is_found_where_it_is_known() -> None:
    """Truth of variance k^2 s^2 + c^2 season^2 at each point, for an ensemble of spread s: (k, c) = (0.5, 0.8)."""
    generator = torch.Generator().manual_seed(0)
    spread, season = (0.5 + 3 * torch.rand(300, 1, 1, 24, generator=generator) for _ in range(2))
    members = spread * torch.randn(60, 300, 1, 1, 24, generator=generator)
    members = members - members.mean(0)
    deviation = (0.25 * spread.square() + 0.64 * season.square()).sqrt()
    target = deviation * torch.randn(300, 1, 1, 24, generator=generator)
    (kappa,), (share,) = best_blends(members, target, season)
    assert kappa == pytest.approx(0.5, abs=0.08)
    assert share == pytest.approx(0.8, abs=0.05)
