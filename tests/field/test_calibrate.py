"""Calibration of forecasts: what is compared, what is chosen, and that it mends what is wrong."""

import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from support.linear_process import POINTS, LinearProcess, perfect_pipeline
from support.tiny_field import tiny_pipeline
from support.weather_records import record

from marigold_uq.calibration import Calibration
from marigold_uq.field import calibrate as calibration
from marigold_uq.field import settings
from marigold_uq.field.calibrate import CalibrationOptions, calibrate_field, fit_intervals
from marigold_uq.field.calibration_windows import allot_windows, open_rollouts, untouched_windows
from marigold_uq.field.data import Trajectories, Transitions, WeatherSequences
from marigold_uq.field.encoding import amplitudes
from marigold_uq.field.forecasters import PipelineForecaster
from marigold_uq.field.lead_factors import LEAST_DAMPING, Factors, best_dampings, smooth
from marigold_uq.field.scores import score_forecasts
from marigold_uq.models.noise_color import NoiseColor
from marigold_uq.pipelines.field import FieldForecastPipeline


def process_data(count: int = 40, seed: int = 0, num_states: int = 8) -> Trajectories:
    """Trajectories of the linear process."""
    process, generator = LinearProcess(), torch.Generator().manual_seed(seed)
    root = torch.linalg.cholesky(torch.diag(process.diag) + torch.outer(process.factor, process.factor))
    states = [torch.randn(count, POINTS, generator=generator, dtype=torch.float64) for _ in range(2)]
    for _ in range(num_states - 2):
        noise = torch.randn(count, POINTS, generator=generator, dtype=torch.float64) @ root.T
        states.append(process.mean_step(states[-2], states[-1]) + noise)
    return Trajectories(torch.stack(states, 1).float(), np.arange(float(POINTS)), np.arange(float(num_states)))


def perfect(steps: int) -> FieldForecastPipeline:
    """The perfect model, which samples in so many steps by default."""
    pipeline = perfect_pipeline()
    pipeline.register_to_config(default_denoising_steps=steps)
    return pipeline


def too_wide_pipeline(factor: float) -> FieldForecastPipeline:
    """The perfect model, but for a covariance of the process that is `factor` times too large."""
    pipeline = perfect(1)
    network: Any = pipeline.unet
    network.process.diag = factor * network.process.diag
    network.process.factor = math.sqrt(factor) * network.process.factor
    return pipeline


def kappas(found: dict[str, Any]) -> list[float]:
    return found["calibration"]["kappa"]


def test_calibration_leaves_a_perfect_model_alone() -> None:
    """60 windows of 5 correlated points: kappa is known to about 10 %, and 20 perfect samples want 1.1."""
    pipeline = perfect(2)
    options = CalibrationOptions(steps=[2], num_windows=60, num_leads=2, tau_evaluations=4, ensemble_size=20)
    found = calibrate_field(pipeline, process_data(), options)
    assert pipeline.calibration_for().num_inference_steps == 2
    for kappa in kappas(found):
        assert 0.8 < kappa * math.sqrt(found["best"]["tau"]) < 1.4
    pipeline.calibrate(Calibration(tau=0.3))
    assert calibrate_field(pipeline, process_data(), options) == found  # whatever was stored before


def test_calibration_finds_the_spread_that_was_lost() -> None:
    """A covariance 4 times too large wants tau kappa^2 = 1/4; spread/skill comes from 2 to 1."""
    data, pipeline = process_data(), too_wide_pipeline(4.0)
    forecaster = PipelineForecaster(pipeline, ensemble_size=40, num_inference_steps=1)
    scores = score_forecasts(forecaster, Transitions(data), range(0, 240, 2), min_scale=1e-3)
    assert float(scores["spread_skill_ratio"].value[0]) > 1.7
    found = calibrate_field(pipeline, data, CalibrationOptions(steps=[1], num_windows=60, num_leads=2))
    assert 0.18 < found["best"]["tau"] * kappas(found)[0] ** 2 < 0.34  # 10 % of kappa, twice, and 1.05^2
    scores = score_forecasts(forecaster, Transitions(data), range(0, 240, 2), min_scale=1e-3)
    assert float(scores["spread_skill_ratio"].value[0]) == pytest.approx(1.0, abs=0.12)


def test_every_number_of_steps_and_noise_is_compared_and_tau_searched_for_the_winner() -> None:
    pipeline = tiny_pipeline(data=process_data())
    pipeline.register_to_config(default_denoising_steps=2)
    options = CalibrationOptions(steps=[1, 3], num_windows=8, num_leads=2, tau_evaluations=4)
    found = calibrate_field(pipeline, process_data(), options)
    compared = [(one["steps"], one["colored"], one["tau"]) for one in found["candidates"]]
    assert compared[:6] == [(steps, colored, 1.0) for steps in (1, 2, 3) for colored in (False, True)]
    assert len(compared) == 6 + 3
    assert {setting[:2] for setting in compared[6:]} == {(found["best"]["steps"], found["best"]["colored"])}
    assert (pipeline.noise_color is not None) == found["best"]["colored"]
    assert found["best"]["score"] == min(one["score"] for one in found["candidates"])
    assert found["candidates"][0]["score_alone"] == pytest.approx(1.0)  # the unit
    assert len(kappas(found)) == 2


def test_lead_times_count_alike_in_the_choice_whatever_their_errors() -> None:
    """A CRPS halved at the first lead time counts as much as one at the last, where errors are 100 times larger."""
    pipeline, data = tiny_pipeline(data=process_data()), process_data()
    options = CalibrationOptions(steps=[1], num_leads=2, choice_size=4)
    rollouts = open_rollouts(pipeline, Transitions(data, num_leads=2), list(range(0, 60, 3)))
    compare = settings.Comparison(pipeline, rollouts, options)
    whole = compare(1, (1.0,)).score_alone
    assert compare.unit is not None
    for lead in range(2):
        factors = torch.tensor([2.0, 1.0] if lead == 0 else [0.5, 2.0], dtype=torch.float64)
        compare.unit = compare.unit * factors.unsqueeze(1)  # (L, C)
        assert compare(1, (1.0,)).score_alone == pytest.approx(0.75 * whole)


def test_tau_is_not_searched_where_there_is_nothing_for_it_to_multiply() -> None:
    """The family `point` in one step has no spread of its own."""
    pipeline = tiny_pipeline("point", data=process_data())
    pipeline.register_to_config(default_denoising_steps=1)
    found = calibrate_field(pipeline, process_data(), CalibrationOptions(steps=[1], num_windows=8, num_leads=2))
    assert [one["tau"] for one in found["candidates"]] == [1.0]


def test_settings_whose_rollouts_leave_the_numbers_lose_and_if_all_do_it_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = CalibrationOptions(steps=[1, 2], num_windows=8, num_leads=2, tau_evaluations=0, color=False)
    draw, broken, late = calibration.draw_samples, {1}, False

    def diverge(pipeline: Any, rollouts: Any, how: Any) -> torch.Tensor:
        found = draw(pipeline, rollouts, how)
        is_last = how.ensemble_size == options.ensemble_size
        return found * 1e30 if how.steps in broken or (is_last and late) else found

    for module in (calibration, settings):
        monkeypatch.setattr(module, "draw_samples", diverge)
    pipeline = tiny_pipeline(data=process_data())
    pipeline.register_to_config(default_denoising_steps=2)
    found = calibrate_field(pipeline, process_data(), options)
    assert [one["score"] is None for one in found["candidates"]] == [True, False]
    assert found["best"]["steps"] == 2
    json.dumps(found, allow_nan=False)
    late = True
    with pytest.raises(FloatingPointError, match=r"2 steps: rollouts of \d+ windows diverge"):
        calibrate_field(pipeline, process_data(), options)
    broken.add(2)
    with pytest.raises(FloatingPointError, match="none of 2 settings"):
        calibrate_field(pipeline, process_data(), options)


@pytest.mark.parametrize("space", [(7,), (8,), (4, 6)])
def test_noise_of_a_fitted_colour_has_variance_1_and_the_correlation_of_the_residual(space: tuple[int, ...]) -> None:
    """Neighbours of the residual correlate by 2/3; 4000 draws know a correlation to .016."""
    white = torch.randn(4000, 1, *space, generator=torch.Generator().manual_seed(0))
    residual = (white + white.roll(1, -1) + white.roll(2, -1)) / math.sqrt(3)
    color = NoiseColor(2, [1, *space])
    color.amplitude[1] = amplitudes(3 * residual)  # its size does not matter
    noise = color(torch.randn(4000, 1, *space, generator=torch.Generator().manual_seed(1)), 1)
    assert float(noise.square().mean()) == pytest.approx(1, abs=0.05)
    assert float((noise * noise.roll(1, -1)).mean()) == pytest.approx(2 / 3, abs=0.05)


def test_damping_is_the_regression_of_truth_on_forecast_around_the_season() -> None:
    """Truth = season + 0.3 forecast at the first lead time, against it at the second, larger than it at the third."""
    generator = torch.Generator().manual_seed(0)
    forecast, other, expected = (torch.randn(400, 3, 1, 6, generator=generator) for _ in range(3))
    truth = torch.stack([0.3 * forecast[:, 0] + other[:, 0], -forecast[:, 1], 2 * forecast[:, 2]], 1) + expected
    members = expected + forecast + torch.tensor([-0.1, 0.1]).reshape(2, 1, 1, 1, 1)
    first, second, third = best_dampings(members, truth, expected)
    assert first == pytest.approx(0.3, abs=0.06)  # 3 standard errors of 2400 numbers
    assert second == pytest.approx(LEAST_DAMPING)
    assert third == 1.0


def test_damping_does_not_depend_on_the_units_of_a_variable() -> None:
    """One variable deserves 0.2, the other 0.8; both count, also where one is in millimetres."""
    generator = torch.Generator().manual_seed(0)
    forecast, other = (torch.randn(600, 1, 2, 6, generator=generator) for _ in range(2))
    share = torch.tensor([0.2, 0.8]).reshape(2, 1)
    truth = share * forecast + (1 - share.square()).sqrt() * other  # both of variance 1
    expected, units = torch.zeros_like(truth), torch.tensor([1.0, 1000.0]).reshape(2, 1)
    (plain,) = best_dampings(forecast[None], truth, expected)
    assert plain == pytest.approx(0.5, abs=0.05)
    assert best_dampings(units * forecast[None], units * truth, expected)[0] == pytest.approx(plain)


def test_calibration_damps_a_model_that_trusts_states_without_memory() -> None:
    """Weather redrawn every six hours: going on from the last state doubles the squared error of the season's mean."""
    states = record()
    shape = states["2m_temperature"].shape
    states["2m_temperature"] = states["2m_temperature"] * 0 + 280 + 5 * np.random.default_rng(1).standard_normal(shape)
    data = WeatherSequences(states.astype(np.float32), ("2m_temperature",))
    pipeline = tiny_pipeline("gaussian", data, seasonal=True)
    windows = Transitions(data, num_history=2, num_leads=3)
    batch = [windows[index] for index in range(1, len(windows), 2)]
    history, truth = (torch.stack([one[name] for one in batch]) for name in ("history", "future"))
    times = np.array([float(one["time"]) for one in batch])
    season = float((pipeline.expected_states(times, 3) - truth).square().mean())

    def error() -> float:
        forecast = pipeline(history, 3, time=times, ensemble_size=8, num_inference_steps=1)
        return float((forecast.prediction - truth).square().mean())

    assert error() > 1.7 * season
    options = CalibrationOptions(steps=[1], num_windows=8, num_leads=3, tau_evaluations=0, ensemble_size=8)
    found = calibrate_field(pipeline, data, options, train=data)
    assert pipeline.config.lead_dampings == found["lead_dampings"]
    assert error() < 1.1 * season
    assert pipeline.config.lead_season_shares == found["lead_season_shares"]
    calibrated = pipeline(history, 3, time=times, ensemble_size=8)
    assert float(calibrated.uncertainty.square().mean().sqrt()) == pytest.approx(math.sqrt(season), rel=0.25)


def test_choice_colour_and_intervals_have_windows_of_their_own() -> None:
    for count, available in ((16, 345), (3, 16), (60, 160), (16, 20_000)):
        windows = allot_windows(count, 64, 128, available)
        assert len(windows.scored) == min(count, available // 2)
        assert len(windows.fitted) == pytest.approx(min(64, available // 2), rel=0.2)
        assert windows.color
        assert not {*windows.scored, *windows.fitted} & {*windows.color, *windows.intervals}
        assert not {*windows.color} & {*windows.intervals}
    assert len(windows.intervals) == pytest.approx(128, rel=0.1)


def test_intervals_are_calibrated_on_trajectories_that_no_choice_has_seen() -> None:
    windows = Transitions(process_data(400), num_leads=3)
    allotted = allot_windows(16, 64, 128, len(windows))
    touched = {windows.sequence_of(i) for i in (*allotted.scored, *allotted.fitted, *allotted.color)}
    intervals = untouched_windows(windows, allotted)
    assert len(intervals) > 90
    assert not touched & {windows.sequence_of(i) for i in intervals}


def test_intervals_cover_what_they_promise_at_every_lead_time_where_the_spread_is_far_too_wide(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without kappas twice the spread wants q about 1; fresh trajectories know the coverage to .01."""
    monkeypatch.setattr(calibration, "fit_factors", lambda pipeline, rollouts, chosen, options: Factors(chosen))
    pipeline = too_wide_pipeline(4.0)
    options = CalibrationOptions(steps=[1], num_windows=16, num_leads=3, tau_evaluations=0, ensemble_size=20)
    found = calibrate_field(pipeline, process_data(800), options)
    stored = pipeline.calibration_for()
    assert stored.interval is not None
    assert stored.num_calibration == found["num_interval_units"] > 90
    assert all(0.8 < scale < 1.4 for scale in stored.interval.scale(0.95))
    windows = Transitions(process_data(400, seed=1), num_leads=3)
    forecaster = PipelineForecaster(pipeline, ensemble_size=20, num_inference_steps=1)
    scores = score_forecasts(forecaster, windows, range(0, 1600, 4), min_scale=1e-3)
    for lead in range(3):
        assert 0.93 < float(scores["conformal_coverage"].value[lead]) < 0.98
        assert float(scores["conformal_width"].value[lead]) > 0
    assert PipelineForecaster(pipeline, ensemble_size=1).interval_scales(0.95) is None  # it holds for 20 samples
    assert forecaster.interval_scales(0.9999) is None  # nothing was promised so far out


def test_windows_of_one_trajectory_are_one_unit_and_one_trajectory_promises_nothing() -> None:
    pipeline, long = perfect(1), process_data(1, num_states=400)
    windows = Transitions(long, num_leads=2)
    assert untouched_windows(windows, allot_windows(16, 64, 128, len(windows))) == []
    options = CalibrationOptions(steps=[1], num_windows=4, num_leads=2, ensemble_size=8)
    chosen = Factors(Calibration(num_inference_steps=1, ensemble_size=8))
    grid, units = fit_intervals(pipeline, windows, list(range(0, 300, 3)), chosen, options)
    assert units == 1
    assert grid is None or grid.coverages[-1] <= 0.5  # one unit can promise a half at most
    several = Transitions(process_data(30), num_leads=2)
    grid, units = fit_intervals(pipeline, several, list(range(len(several))), chosen, options)
    assert units == 30
    assert grid is not None
    assert grid.num_outputs == 2
    assert grid.coverages[-1] == 0.96  # 1 - 1/31


def test_intervals_can_be_left_out_and_nonsense_is_refused_before_anything_is_rolled_out() -> None:
    pipeline = perfect(1)
    options = CalibrationOptions(steps=[1], num_windows=8, num_leads=2, tau_evaluations=0, interval_windows=0)
    assert calibrate_field(pipeline, process_data(), options)["calibration"]["interval"] is None
    assert pipeline.calibration_for().interval is None
    with pytest.raises(ValueError, match=r"ensemble_size at least 3; got \{'ensemble_size': 1\}"):
        CalibrationOptions(ensemble_size=1)
    with pytest.raises(ValueError, match="must be 0 or at least 4"):
        CalibrationOptions(tau_evaluations=2)


def test_kappas_are_smoothed_over_lead_times_but_the_first_and_the_last() -> None:
    assert smooth([2.0]) == pytest.approx([2.0])
    assert smooth([1.0, 2.0, 4.0, 8.0]) == pytest.approx([1.0, 2.0, 4.0, 8.0])  # geometric growth stays
    assert smooth([1.0, 4.0, 1.0, 1.0]) == pytest.approx([1.0, 4 ** (1 / 3), 4 ** (1 / 3), 1.0])
