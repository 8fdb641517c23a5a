"""Evaluation of forecasts: scores by brute force, baselines, files, and a whole small study."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.tiny_field import tiny_pipeline, tiny_weather
from support.weather_records import record
from torch import Tensor
from torch.utils.data import default_collate

from marigold_uq.distributions import CholeskyDistribution, LowRankDistribution
from marigold_uq.field import figures
from marigold_uq.field.calibrate import CalibrationOptions
from marigold_uq.field.config import FieldData, PdeData, WeatherData
from marigold_uq.field.data import Trajectories, Transitions, WeatherSequences, write_trajectories
from marigold_uq.field.evaluate import FieldEvaluation, evaluate_field, report
from marigold_uq.field.forecasters import Climatology, Persistence, PipelineForecaster
from marigold_uq.field.scores import independent_groups, power_spectrum, score_forecasts, spread_windows
from scripts.studies.fields.report import (
    calibration_table,
    collect,
    correlation_figure,
    grouped_error,
    law_correlation,
    lead_time_figure,
    member_figure,
    steps_figure,
    study_table,
    summary_table,
    tau_figure,
    uncertainty_figure,
)
from scripts.studies.fields.study import ModelRun, StudyTask, score_baseline

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


class Perfect:
    """Samples with the distribution of the truth: a random walk from the last state."""

    name = "perfect"

    def forecast(self, batch: dict[str, Any], ids: Any, num_leads: int) -> Tensor:
        last, members = batch["history"][:, -1], []
        for index in ids:
            generator = torch.Generator().manual_seed(1000 + index)
            members.append(torch.randn(40, num_leads, 1, last.shape[-1], generator=generator).cumsum(1))
        return last[:, None] + torch.stack(members, 1)


def test_a_perfect_forecast_is_scored_as_one_at_every_lead_time() -> None:
    """Random walk: RMSE sqrt(lead (1 + 1/M)), spread/skill 1, coverage 0.95, CRPS sqrt(lead/pi); 4.5 errors."""
    windows = Transitions(walks(400), num_leads=3)
    indices = spread_windows(300, len(windows))
    found = score_forecasts(Perfect(), windows, indices, min_scale=1e-3)
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
    members = Climatology(data, ensemble_size=20).forecast(batch, [0], 3)
    assert members.shape == (20, 1, 3, 1, 8)
    for lead in range(3):
        states = {tuple(state.tolist()) for state in data.states[:, 2 + lead]}
        assert all(tuple(member[0].tolist()) in states for member in members[:, 0, lead])
        assert len({tuple(member[0].tolist()) for member in members[:, 0, lead]}) == 20  # each once
    year = WeatherSequences(record(4 * 365), ("2m_temperature",))
    climatology = Climatology(year, ensemble_size=5, window_days=3)
    chosen = climatology.times[
        climatology._same_time(year.times(0)[40] + 365 * 86_400)
    ]  # the same hour of the next year
    assert len(chosen) == 6  # the season has moved on by a quarter of a day: three days before, two after, and itself
    assert np.abs(chosen - year.times(0)[40]).max() <= 3.5 * 86_400


def test_mixed_precision_rounds_the_network_alone() -> None:
    data = walks()
    pipeline, windows = tiny_pipeline(data=data), Transitions(data)
    batch = default_collate([windows[index] for index in (0, 9)])
    plain, rounded = (
        PipelineForecaster(pipeline, ensemble_size=3, num_inference_steps=2, mixed_precision=how).forecast(
            batch, [0, 9], 1
        )
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
        ensemble_size=5,
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
    with pytest.raises(ValueError, match=r"other settings: .*ensemble_size was 5, now 6"):
        evaluate_field(replace(options, ensemble_size=6))
    rolled = evaluate_field(replace(options, output=tmp_path / "rolled", num_one_step=0, figures=False))
    assert rolled["rollout"]["rmse"] == metrics["rollout"]["rmse"]
    assert "one_step" not in rolled


def test_a_model_has_one_colour_in_all_panels_and_one_entry_in_the_legend() -> None:
    values = {"rmse": {"persistence": [1.0, 2.0], "point": [0.5, 1.0]}, "coverage": {"point": [0.9, 0.9]}}
    figure = figures.lead_time_curves(values, [1.0, 2.0], expected_coverage=0.95)
    colors = [{line.get_label(): line.get_color() for line in axes.get_lines()} for axes in figure.axes]
    assert colors[0]["point"] == colors[1]["point"] != colors[0]["persistence"]
    legend = figure.axes[-1].get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == ["persistence", "point"]


def test_errors_of_means_take_windows_of_one_trajectory_for_one() -> None:
    values = np.random.default_rng(0).standard_normal(50)
    alone = values.std(ddof=1) / math.sqrt(50)
    assert grouped_error(values, list(range(50))) == pytest.approx(alone)
    thrice = np.repeat(values, 3)  # the same news three times is no more than once
    assert grouped_error(thrice, [place // 3 for place in range(150)]) == pytest.approx(alone)
    assert math.isnan(grouped_error(values, [0] * 50))


def test_differences_in_percent_are_ratios_of_means_with_the_error_of_a_ratio() -> None:
    """Half of the reference in every window is -50 % for certain; with noise a bootstrap over trajectories agrees."""
    rng = np.random.default_rng(0)
    base, groups = rng.gamma(0.5, size=400), [place // 2 for place in range(400)]

    def scores(values: np.ndarray) -> dict[str, Any]:
        crps = {str(i): [float(value)] for i, value in enumerate(values)}
        return {"one_step": {"crps_of_windows": crps, "groups_of_windows": dict(zip(crps, groups, strict=True))}}

    def cell(values: np.ndarray) -> str:
        table = summary_table({}, {"base": [scores(base)], "own": [scores(values)]}, "one_step", 1, "base")
        return table.splitlines()[-1].split("|")[5].strip()

    assert cell(base / 2) == "-50.0 ± 0.0"
    own = base * rng.uniform(1.5, 4.5, 400)
    pairs = np.stack([own, base]).reshape(2, 200, 2).sum(-1)
    drawn = pairs[:, rng.integers(0, 200, (2000, 200))].sum(-1)
    assert float(cell(own).split(" ± ")[1]) == pytest.approx(100 * np.std(drawn[0] / drawn[1]), rel=0.15)


def test_windows_are_grouped_by_trajectory_and_those_of_a_record_by_ten_days() -> None:
    windows = Transitions(walks(count=3))  # 6 windows each
    assert independent_groups(windows, [0, 5, 6, 17]) == [0, 0, 1, 2]
    dated = Transitions(WeatherSequences(record(), ("2m_temperature",)))
    groups = independent_groups(dated, range(len(dated)))
    days = [float(dated[i]["time"]) / 86_400 for i in range(len(dated))]
    assert groups == [int(day // 10) for day in days]


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
    with pytest.raises(ValueError, match=r"calibration\.json was made with other settings: num_windows was 3, now 2"):
        replace(run, task=replace(run.task, calibration=options)).calibrate()
    with pytest.raises(ValueError, match=r"steps\.json was made with other settings: steps was"):
        replace(run, task=replace(run.task, curve_steps=(1,))).steps_curve()
    with pytest.raises(ValueError, match="ensemble_size was 4, now 5"):
        replace(run, task=replace(run.task, evaluation={**run.task.evaluation, "ensemble_size": 5})).run()
    path = run.folder / "calibrated" / "scheduler" / "scheduler_config.json"
    text = path.read_text()
    path.write_text(json.dumps({**json.loads(text), "tau": 0.77}))
    with pytest.raises(ValueError, match="weights or calibration of the model was"):
        run.run()
    path.write_text(text)


def test_models_of_some_variables_are_compared_on_those_alone(tmp_path: Path) -> None:
    """Baselines, and the floor of the NLL, are of the targets; a rollout is refused before anything is scored."""
    pytest.importorskip("netCDF4", reason="a netCDF file is read")
    levels = record(60)
    levels.assign(**{"2m_temperature": 100 * levels["2m_temperature"]}).to_netcdf(tmp_path / "record.nc")
    data = FieldData(
        weather=WeatherData(
            str(tmp_path / "record.nc"),
            ["2m_temperature", "temperature_850"],
            train=("2013-01-01", "2013-01-08"),
            validation=("2013-01-09", "2013-01-10"),
            test=("2013-01-11", "2013-01-15"),
        )
    )
    options = FieldEvaluation(
        data=data, model="persistence", output=tmp_path / "all", num_one_step=9, num_rollouts=0, figures=False
    )
    everything = evaluate_field(options)
    one = evaluate_field(replace(options, output=tmp_path / "one", targets=["temperature_850"]))
    assert one["num_samples"] == 9
    loud, quiet = (everything["one_step"]["variables"][name]["crps"] for name in ("2m_temperature", "temperature_850"))
    assert one["one_step"]["crps"] == quiet
    assert quiet["value"][0] < 0.05 * loud["value"][0]
    pipeline = tiny_weather(targets=("temperature_850",))
    pipeline.save_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match="cannot be rolled out: set num_rollouts to 0"):
        evaluate_field(replace(options, model=str(tmp_path / "model"), output=tmp_path / "m", num_rollouts=2))


def test_a_study_runs_all_its_stages_once_and_makes_its_tables_and_figures(data_file: Path, tmp_path: Path) -> None:
    tiny = ["--model.unet", UNET, "--model.num_train_timesteps", "8", "--model.default_denoising_steps", "4"]
    short = ["--training.batch_size", "8", "--training.max_steps", "2"]
    task = StudyTask(
        "walks",
        ["--config", str(CONFIGS / "ks_small.yaml"), "--data.pde.path", str(data_file), *tiny, *short],
        {"ensemble_size": 4, "num_one_step": 3, "num_rollouts": 2, "num_leads": 2, "figures": False},
        CalibrationOptions(steps=[1, 2], num_windows=3, ensemble_size=4, choice_size=3, tau_evaluations=4, num_leads=2),
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
    both = {"persistence": [baseline], **scores}
    summary = summary_table(collect(runs, "raw/metrics.json"), both, "rollout", 2, "persistence")
    cells = [cell.strip() for cell in summary.splitlines()[3].split("|")]
    raw = collect(runs, "raw/metrics.json")["gaussian"][0]["rollout"]["crps"]["value"][1]
    assert cells[1:3] == ["gaussian", "1"]
    assert cells[3].split(" ± ")[0] == f"{raw:.4g}"
    assert cells[5].split(" ± ")[0] == f"{scores['gaussian'][0]['rollout']['crps']['value'][1]:.4g}"
    percent = 100 * expected / np.mean([base[window][1] for window in base])
    assert cells[7].split(" ± ")[0] == f"{percent:+.1f}"
    steps = [row.split("|")[3].strip() for row in calibration_table(chosen).splitlines() if "| gaussian |" in row]
    assert steps == ["1", "1", "2", "2", "4", "4"]  # white and coloured; 4 are the model's own
    for figure in (
        lead_time_figure(scores, 1.0, 0.9),
        tau_figure(chosen),
        member_figure(scores),
        steps_figure(collect(runs, "steps.json")),
        uncertainty_figure(runs[0], 3, ensemble_size=3),
        correlation_figure(runs[1:2], [0, 7]),
    ):
        assert len(figure.axes) >= 1
