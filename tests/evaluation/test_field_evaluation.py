"""Evaluation of forecasts: scores by brute force, baselines, calibration, files, and a whole small study."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from linear_process import POINTS, LinearProcess, perfect_pipeline
from tiny_field import tiny_pipeline, tiny_weather
from torch import Tensor
from torch.utils.data import default_collate
from weather_records import record

from marigold_uq.calibration import Calibration
from marigold_uq.data.fields import Trajectories, Transitions, WeatherSequences, write_trajectories
from marigold_uq.distributions import CholeskyDistribution, LowRankDistribution
from marigold_uq.evaluation.fields import calibration
from marigold_uq.evaluation.fields.calibration import (
    LEAST_DAMPING,
    CalibrationOptions,
    alternate_windows,
    best_dampings,
    calibrate_field,
    smooth,
)
from marigold_uq.evaluation.fields.evaluation import FieldEvaluation, evaluate_field, report
from marigold_uq.evaluation.fields.forecasters import Climatology, Persistence, PipelineForecaster
from marigold_uq.evaluation.fields.report import (
    calibration_table,
    collect,
    correlation_figure,
    law_correlation,
    lead_time_figure,
    member_figure,
    steps_figure,
    study_table,
    summary_table,
    tau_figure,
    uncertainty_figure,
)
from marigold_uq.evaluation.fields.scores import power_spectrum, score_forecasts, spread_windows
from marigold_uq.evaluation.fields.study import ModelRun, StudyTask, score_baseline
from marigold_uq.pipelines.field import FieldForecastPipeline
from marigold_uq.training.field_config import FieldData, PdeData, WeatherData

CONFIGS = Path(__file__).parents[2] / "configs" / "field"
UNET = '{"block_out_channels": [8, 8], "layers_per_block": 1, "embedding_channels": 8, "dropout": 0.0}'


def walks(count: int = 40, num_states: int = 8, num_points: int = 8) -> Trajectories:
    steps = torch.randn(count, num_states, num_points, generator=torch.Generator().manual_seed(0))
    return Trajectories(steps.cumsum(1), np.arange(float(num_points)), np.arange(float(num_states)))


@pytest.fixture(scope="module")
def data_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("h5py", reason="field files are HDF5")
    path, data = tmp_path_factory.mktemp("fields") / "walks.h5", walks()
    write_trajectories(path, [(0, data.states.numpy())], tuple(data.states.shape), data.x, data.t, {})
    return path


class Honest:
    """Members with the law of the truth: a random walk from the last state."""

    name = "honest"

    def forecast(self, batch: dict[str, Any], ids: Any, num_leads: int) -> Tensor:
        last, members = batch["history"][:, -1], []
        for index in ids:
            generator = torch.Generator().manual_seed(1000 + index)
            members.append(torch.randn(40, num_leads, 1, last.shape[-1], generator=generator).cumsum(1))
        return last[:, None] + torch.stack(members, 1)


def test_an_honest_forecast_is_scored_as_one_at_every_lead_time() -> None:
    """Random walk: RMSE sqrt(lead (1 + 1/M)), spread/skill 1, coverage 0.95, CRPS sqrt(lead/pi); 4.5 errors."""
    windows = Transitions(walks(400), num_leads=3)
    indices = spread_windows(300, len(windows))
    found = score_forecasts(Honest(), windows, indices, min_scale=1e-3)
    for lead in range(3):
        variance = lead + 1
        expected = {
            "rmse": math.sqrt(variance * (1 + 1 / 40)),
            "crps": math.sqrt(variance / math.pi),
            "spread_skill_ratio": 1.0,
            "coverage": 0.95,
            "gaussian_nll": 0.5 * math.log(2 * math.pi * variance) + 0.5 * 1.06,
        }
        for name, value in expected.items():
            slack = 4.5 * float(found[name].standard_error[lead]) + (0.01 if name == "gaussian_nll" else 0)
            assert float(found[name].value[lead]) == pytest.approx(value, abs=slack), name
    assert found["rank_histogram"].value.shape == (3, 41)
    torch.testing.assert_close(found["rank_histogram"].value.sum(1), torch.ones(3, dtype=torch.float64))
    ratio = found["spectrum_members"].value / found["spectrum_target"].value
    assert bool(((ratio[:, 1:] > 0.7) & (ratio[:, 1:] < 1.4)).all())  # 300 windows: some percent


def test_persistence_is_the_last_state_and_its_crps_the_absolute_error() -> None:
    data = walks(20)
    windows = Transitions(data, num_leads=2)
    found = score_forecasts(Persistence(), windows, range(len(windows)), min_scale=1e-3)
    errors = torch.stack([windows[i]["future"] - windows[i]["history"][-1] for i in range(len(windows))])
    torch.testing.assert_close(found["rmse"].value.float(), errors.square().mean((0, 2, 3)).sqrt())
    torch.testing.assert_close(found["crps"].value.float(), errors.abs().mean((0, 2, 3)))
    assert "coverage" not in found


def test_maps_are_weighted_by_the_cosine_of_latitude() -> None:
    windows = Transitions(WeatherSequences(record(), ("2m_temperature",)))
    found = score_forecasts(Persistence(), windows, range(len(windows)), min_scale=1e-3)
    errors = torch.stack([windows[i]["future"][0] - windows[i]["history"][-1] for i in range(len(windows))])
    weights = torch.from_numpy(np.cos(np.deg2rad([-20.0, -10, 0, 10, 20]))).reshape(5, 1)
    weights = weights.expand(5, 18)
    expected = ((errors.double().square() * weights).sum() / (weights.sum() * len(errors))).sqrt()
    assert float(found["rmse"].value[0]) == pytest.approx(float(expected), rel=1e-6)


def test_climatology_takes_training_states_of_the_same_time_and_season() -> None:
    data = walks(30)
    batch = {"history": data.states[:1, :2].unsqueeze(2), "time": [1.0]}
    members = Climatology(data, num_members=20).forecast(batch, [0], 3)
    assert members.shape == (20, 1, 3, 1, 8)
    for lead in range(3):
        states = {tuple(state.tolist()) for state in data.states[:, 2 + lead]}
        assert all(tuple(member[0].tolist()) in states for member in members[:, 0, lead])
        assert len({tuple(member[0].tolist()) for member in members[:, 0, lead]}) == 20  # each once
    year = WeatherSequences(record(4 * 365), ("2m_temperature",))
    climatology = Climatology(year, num_members=5, window_days=3)
    chosen = climatology.times[
        climatology._same_time(year.times(0)[40] + 365 * 86_400)
    ]  # the same hour of the next year
    assert len(chosen) == 6  # the season has moved on by a quarter of a day: three days before, two after, and itself
    assert np.abs(chosen - year.times(0)[40]).max() <= 3.5 * 86_400


def test_mixed_precision_rounds_the_network_alone() -> None:
    data = process_data()
    pipeline, windows = tiny_pipeline(data=data), Transitions(data)
    batch = default_collate([windows[index] for index in (0, 9)])
    plain, rounded = (
        PipelineForecaster(pipeline, num_members=3, num_steps=2, mixed_precision=how).forecast(batch, [0, 9], 1)
        for how in ("no", "bf16")
    )
    assert rounded.dtype == pipeline.unet.dtype == torch.float32
    assert 0 < float((rounded - plain).abs().max()) < 0.02 * float(plain.std())  # bfloat16: 8 bits


def test_windows_are_spread_over_all_places_and_never_repeat() -> None:
    chosen = spread_windows(16, 656)
    assert len(set(chosen)) == 16
    assert [index * 16 // 656 for index in chosen] == list(range(16))
    assert len({index % 41 for index in chosen}) > 5  # 41 places per trajectory: not always the same one
    assert spread_windows(9, 4) == [0, 1, 2, 3]
    assert len(set(spread_windows(144, 733))) == 144  # stretches of 5.09 windows share none


def test_the_power_spectrum_finds_a_wave() -> None:
    x = torch.arange(32) / 32
    wave = 3 * torch.sin(2 * torch.pi * 4 * x) + 7
    power = power_spectrum(wave.reshape(1, 1, 1, 32), 1)[0, 0]
    assert float(power[4]) == pytest.approx((3 / 2) ** 2, rel=1e-5)
    assert float(power.sum() - power[4]) == pytest.approx(0, abs=1e-6)


def test_results_are_written_once_and_read_again(data_file: Path, tmp_path: Path) -> None:
    options = FieldEvaluation(
        data=FieldData(pde=PdeData(str(data_file))),
        model="climatology",
        output=tmp_path / "out",
        members=5,
        num_one_step=4,
        num_rollouts=2,
        num_leads=3,
    )
    metrics = evaluate_field(options, command="test")
    written = {path.name for path in (tmp_path / "out").iterdir()}
    assert written == {"metrics.json", "report.md", "lead_times.png", "spectra.png", "ranks.png"}
    stored = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert stored["metrics"]["crps"]["value"] == metrics["one_step"]["crps"]["value"][0]
    assert evaluate_field(options) == stored
    assert "| climatology |" in report({"climatology": stored})
    with pytest.raises(FileExistsError, match="other options"):
        evaluate_field(FieldEvaluation(data=options.data, output=tmp_path / "out", members=6))
    rolled = evaluate_field(replace(options, output=tmp_path / "rolled", num_one_step=0, figures=False))
    assert rolled["rollout"]["rmse"] == metrics["rollout"]["rmse"]
    assert "one_step" not in rolled


def process_data(count: int = 40) -> Trajectories:
    """Trajectories of the linear process."""
    process, generator = LinearProcess(), torch.Generator().manual_seed(0)
    root = torch.linalg.cholesky(torch.diag(process.diag) + torch.outer(process.factor, process.factor))
    states = [torch.randn(count, POINTS, generator=generator, dtype=torch.float64) for _ in range(2)]
    for _ in range(6):
        noise = torch.randn(count, POINTS, generator=generator, dtype=torch.float64) @ root.T
        states.append(process.mean_step(states[-2], states[-1]) + noise)
    return Trajectories(torch.stack(states, 1).float(), np.arange(float(POINTS)), np.arange(8.0))


def too_wide_pipeline(factor: float) -> FieldForecastPipeline:
    """The perfect model, but for a covariance of the process that is `factor` times too large."""
    pipeline = perfect_pipeline()
    network: Any = pipeline.unet
    network.process.diag = factor * network.process.diag
    network.process.factor = math.sqrt(factor) * network.process.factor
    return pipeline


def test_calibration_leaves_a_perfect_model_alone() -> None:
    """60 windows of 5 correlated points: kappa is known to about 10 %, and 40 perfect members want 1.05."""
    pipeline = perfect_pipeline()
    options = CalibrationOptions(steps=[2], num_windows=60, num_leads=3, taus=[0.3, 2.0])
    found = calibrate_field(pipeline, process_data(), options)
    assert pipeline.config.calibration["num_steps"] == 2
    for kappa in found["lead_kappas"]:
        assert 0.8 < kappa * math.sqrt(found["best"]["tau"]) < 1.35
    pipeline.set_calibration(Calibration(tau=0.3))
    assert calibrate_field(pipeline, process_data(), options) == found  # whatever was stored before


def test_calibration_finds_the_spread_that_was_lost() -> None:
    """A law whose covariance is 4 times too large wants tau kappa^2 = 1/4; spread/skill comes from 2 to 1."""
    data, pipeline = process_data(), too_wide_pipeline(4.0)
    forecaster = PipelineForecaster(pipeline, num_members=40, num_steps=1)
    scores = score_forecasts(forecaster, Transitions(data), range(0, 240, 2), min_scale=1e-3)
    assert float(scores["spread_skill_ratio"].value[0]) > 1.7
    found = calibrate_field(pipeline, data, CalibrationOptions(steps=[1], num_windows=60, num_leads=3))
    assert 0.18 < found["best"]["tau"] * found["lead_kappas"][0] ** 2 < 0.34  # 10 % of kappa, twice, and 1.05^2
    scores = score_forecasts(forecaster, Transitions(data), range(0, 240, 2), min_scale=1e-3)
    ratio = scores["spread_skill_ratio"]
    assert float(ratio.value[0]) == pytest.approx(1.0, abs=0.12)


def test_every_number_of_steps_and_colour_is_compared_and_tau_tried_for_the_winner() -> None:
    """White and coloured noise for each number of steps, then tau for the winner alone."""
    pipeline = tiny_pipeline(data=process_data())
    pipeline.register_to_config(default_num_inference_steps=2)
    options = CalibrationOptions(steps=[1, 3], num_windows=8, num_leads=2, taus=[0.1, 2.0])
    found = calibrate_field(pipeline, process_data(), options)
    names = [(one["name"], one["steps"], one["tau"]) for one in found["candidates"]]
    expected = [(f"{color}, {how}", steps, 1.0) for steps in (1, 2, 3) for color in ("white", "coloured")
                for how in ("as it is", "kappa")]  # fmt: skip
    assert names[:-4] == expected
    assert [(name.split(", ")[1], tau) for name, _, tau in names[-4:]] == [
        (how, tau) for tau in (0.1, 2.0) for how in ("tau", "tau and kappa")
    ]
    assert found["best"]["score"] == min(one["score"] for one in found["candidates"] if one["name"].endswith("kappa"))
    assert len(found["lead_kappas"]) == 2


def test_lead_times_count_alike_in_the_choice_whatever_their_errors() -> None:
    """The first candidate is the unit; a CRPS halved at the first lead time counts as much as one at the second."""
    options = CalibrationOptions(steps=[1], num_windows=8, num_leads=2)
    pipeline = tiny_pipeline(data=process_data())
    comparison = calibration._Comparison(pipeline, calibration.Rollouts({}, [], torch.zeros(0), None), options, None)
    comparison._unit = (0.01, 1.0)
    assert comparison._score((0.005, 1.0)) == comparison._score((0.01, 0.5)) == pytest.approx(0.75)
    found = calibrate_field(pipeline, process_data(), options)
    assert found["candidates"][0]["score"] == pytest.approx(1.0)


def test_tau_is_tried_once_where_there_is_nothing_for_it_to_multiply() -> None:
    """The family `point` in one step has no spread of its own."""
    pipeline = tiny_pipeline("point", data=process_data())
    pipeline.register_to_config(default_num_inference_steps=1)
    found = calibrate_field(pipeline, process_data(), CalibrationOptions(steps=[1], num_windows=8, num_leads=2))
    assert [one["tau"] for one in found["candidates"]] == [1.0, 1.0, 0.03, 0.03]


def test_settings_whose_rollouts_leave_the_numbers_lose_and_if_all_do_it_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = CalibrationOptions(steps=[1, 2], num_windows=8, num_leads=2, taus=[], color=False)
    members, broken, late = calibration._members, {1}, False

    def diverge(*arguments: Any) -> torch.Tensor:
        found = members(*arguments)
        is_last = arguments[4] == options.num_members
        return found * 1e30 if arguments[3] in broken or (is_last and late) else found

    monkeypatch.setattr(calibration, "_members", diverge)
    pipeline = tiny_pipeline(data=process_data())
    pipeline.register_to_config(default_num_inference_steps=2)
    found = calibrate_field(pipeline, process_data(), options)
    assert [one["score"] is None for one in found["candidates"]] == [True, True, False, False]
    assert found["best"]["steps"] == 2
    json.dumps(found, allow_nan=False)
    late = True
    with pytest.raises(FloatingPointError, match=r"2 steps: rollouts of \d+ windows diverge"):
        calibrate_field(pipeline, process_data(), options)
    broken.add(2)
    with pytest.raises(FloatingPointError, match="none of 4 settings"):
        calibrate_field(pipeline, process_data(), options)


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
        forecast = pipeline(history, 3, time=times, num_members=8, num_inference_steps=1)
        return float((forecast.mean - truth).square().mean())

    assert error() > 1.7 * season
    options = CalibrationOptions(steps=[1], num_windows=8, num_leads=3, taus=[], num_members=8)
    found = calibrate_field(pipeline, data, options, train=data)
    assert pipeline.config.lead_dampings == found["lead_dampings"]
    assert error() < 1.1 * season
    assert pipeline.config.lead_season_shares == found["lead_season_shares"]
    calibrated = pipeline(history, 3, time=times, num_members=8)
    assert float(calibrated.spread.square().mean().sqrt()) == pytest.approx(math.sqrt(season), rel=0.25)


def test_the_colour_is_fitted_to_other_windows_than_score_it() -> None:
    for count, available in ((16, 345), (3, 16), (60, 160)):
        scored, fitted, others = alternate_windows(count, 64, available)
        assert len(scored) == min(count, available // 2)
        assert len(others) > len(scored) / 2
        assert not {*scored, *fitted} & set(others)
        assert len(fitted) == pytest.approx(min(64, available // 2), rel=0.2)


def test_kappas_are_smoothed_over_lead_times_but_the_first_and_the_last() -> None:
    assert smooth([2.0]) == pytest.approx([2.0])
    assert smooth([1.0, 2.0, 4.0, 8.0]) == pytest.approx([1.0, 2.0, 4.0, 8.0])  # geometric growth stays
    assert smooth([1.0, 4.0, 1.0, 1.0]) == pytest.approx([1.0, 4 ** (1 / 3), 4 ** (1 / 3), 1.0])


def test_correlations_are_those_of_the_covariance() -> None:
    factor = torch.tensor([[[1.0, 2.0, 0.0]]])
    law = LowRankDistribution(torch.zeros(1, 3), torch.ones(1, 3), factor)
    expected = torch.tensor([[1, 2 / math.sqrt(10), 0], [2 / math.sqrt(10), 1, 0], [0, 0, 1]])
    torch.testing.assert_close(law_correlation(law)[0], expected)
    tril = torch.linalg.cholesky(torch.eye(3) + factor[0].T @ factor[0]).unsqueeze(0)
    torch.testing.assert_close(law_correlation(CholeskyDistribution(torch.zeros(1, 3), tril))[0], expected)


def _check_that_changes_are_noticed(run: ModelRun) -> None:
    """Other options, or another model in its place, are refused and not answered with what is there."""
    with pytest.raises(FileExistsError, match="a training of another config"):
        replace(run, extra=["--training.max_steps", "3"]).train()
    options = replace(run.task.calibration, num_windows=2)
    with pytest.raises(FileExistsError, match=r"made with another num_windows: remove calibration\.json, calibrated"):
        replace(run, task=replace(run.task, calibration=options)).calibrate()
    with pytest.raises(FileExistsError, match="made with another steps"):
        replace(run, task=replace(run.task, curve_steps=(1,))).steps_curve()
    with pytest.raises(FileExistsError, match="other options"):
        replace(run, task=replace(run.task, evaluation={**run.task.evaluation, "members": 5})).run()
    path = run.folder / "calibrated" / "scheduler" / "scheduler_config.json"
    text = path.read_text()
    path.write_text(json.dumps({**json.loads(text), "tau": 0.77}))
    with pytest.raises(FileExistsError, match="other weights or another calibration"):
        run.run()
    path.write_text(text)


def test_models_of_some_variables_are_compared_on_those_alone(tmp_path: Path) -> None:
    """Baselines, and the floor of the NLL, are of the targets; a rollout is refused before anything is scored."""
    pytest.importorskip("netCDF4", reason="a netCDF file is read")
    levels = record(60)
    loud = levels.assign(**{"2m_temperature": 100 * levels["2m_temperature"]})
    loud.to_netcdf(tmp_path / "record.nc")
    data = FieldData(
        weather=WeatherData(
            str(tmp_path / "record.nc"),
            ["2m_temperature", "temperature_850"],
            train=("2013-01-01", "2013-01-08"),
            validation=("2013-01-09", "2013-01-10"),
            test=("2013-01-11", "2013-01-15"),
        )
    )
    options = FieldEvaluation(data=data, output=tmp_path / "all", num_one_step=9, num_rollouts=0, figures=False)
    everything = evaluate_field(options)
    one = evaluate_field(replace(options, output=tmp_path / "one", targets=["temperature_850"]))
    assert one["num_samples"] == 9
    assert one["one_step"]["crps"]["value"][0] < 0.05 * everything["one_step"]["crps"]["value"][0]
    pipeline = tiny_weather(targets=("temperature_850",))
    pipeline.save_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match="cannot be rolled out: set num_rollouts to 0"):
        evaluate_field(replace(options, model=str(tmp_path / "model"), output=tmp_path / "m", num_rollouts=2))


def test_a_study_runs_all_its_stages_once_and_makes_its_tables_and_figures(data_file: Path, tmp_path: Path) -> None:
    tiny = ["--model.unet", UNET, "--model.num_train_timesteps", "8", "--model.default_num_inference_steps", "4"]
    short = ["--training.batch_size", "8", "--training.max_steps", "2"]
    task = StudyTask(
        "walks",
        ["--config", str(CONFIGS / "ks_small.yaml"), "--data.pde.path", str(data_file), *tiny, *short],
        {"members": 4, "num_one_step": 3, "num_rollouts": 2, "num_leads": 2, "figures": False},
        CalibrationOptions(steps=[1, 2], num_windows=3, num_members=4, choice_members=3, taus=[0.3, 2.0], num_leads=2),
        curve_steps=(1, 2),
        curve_windows=2,
    )
    runs = [ModelRun(task, variant, 0, tmp_path) for variant in ("gaussian", "low_rank_projected", "one_pass")]
    for run in runs[:2]:
        run.run(curve=True)
    runs[2].train()  # its schedule has one step, whatever the config says
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.json")}
    for run in runs[:2]:
        run.run(curve=True)
    assert before == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.json")}
    baseline = score_baseline(task, "persistence", tmp_path)
    _check_that_changes_are_noticed(runs[0])
    scores, chosen = collect(runs, "calibrated_scores/metrics.json"), collect(runs, "calibration.json")
    rows = study_table({"persistence": [baseline], **scores}, "rollout", 2).splitlines()
    assert [row.split("|")[1].strip() for row in rows[2:]] == ["persistence", "gaussian", "low_rank_projected"]
    assert rows[3].count("±") == 6  # one seed: standard errors over windows
    paired = study_table({"persistence": [baseline], **scores}, "rollout", 2, ("crps",), ["persistence"])
    own, base = (one["rollout"]["crps_of_windows"] for one in (scores["gaussian"][0], baseline))
    expected = np.mean([own[window][1] - base[window][1] for window in base])
    assert f"| {expected:.3g} ± " in paired
    ratio = math.exp(np.mean([math.log(own[window][1] / base[window][1]) for window in base]))
    assert f"| {ratio:.3g} ± " in paired
    summary = summary_table(collect(runs, "raw/metrics.json"), {"persistence": [baseline], **scores}, (1, 2))
    cells = [cell.strip() for cell in summary.splitlines()[3].split("|")]
    raw = collect(runs, "raw/metrics.json")["gaussian"][0]["one_step"]["crps"]["value"][0]
    assert cells[1:3] == ["gaussian", "1"]
    assert cells[3].split(" ± ")[0] == f"{raw:.4g}"
    assert cells[8].split(" ± ")[0] == f"{scores['gaussian'][0]['rollout']['crps']['value'][1]:.4g}"
    steps = [row.split("|")[3].strip() for row in calibration_table(chosen).splitlines() if "| gaussian |" in row]
    assert steps == ["1", "2", "4"]  # 4 are the model's own
    for figure in (
        lead_time_figure(scores, 1.0, 0.9),
        tau_figure(chosen),
        member_figure(scores),
        steps_figure(collect(runs, "steps.json")),
        uncertainty_figure(runs[0], 3, num_members=3),
        correlation_figure(runs[1:2], [0, 7]),
    ):
        assert len(figure.axes) >= 1
