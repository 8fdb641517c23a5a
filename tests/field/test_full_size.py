"""What weather at full size needs: copies, windows, statistics that are kept, hours, globes, and streamed forecasts."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.tiny_field import tiny_pipeline, tiny_weather
from support.weather_records import record

from marigold_uq.calibration import Calibration, IntervalGrid
from marigold_uq.commands.runner import parse_options
from marigold_uq.field import evaluate
from marigold_uq.field.config import FieldData, FieldModel, FieldTrainConfig, WeatherData, read_config
from marigold_uq.field.data import (
    FieldDataError,
    Transitions,
    WeatherSequences,
    WindowedTransitions,
    open_weather,
    preparation,
    statistics_of,
)
from marigold_uq.field.data.preparation import WeatherCopy, estimate, prepare_weather
from marigold_uq.field.encoding import fit_encoder, require_data
from marigold_uq.field.evaluate import FieldEvaluation, evaluate_field
from marigold_uq.field.run import new_pipeline, train_field
from marigold_uq.models.field_grid import periodic_axes
from marigold_uq.models.unet_1d import UNet1d
from marigold_uq.models.unet_2d import UNet2d
from marigold_uq.training.config import TrainingConfig
from scripts import prepare_weather as command

VARIABLES = ["2m_temperature", "temperature_500"]
CONFIGS = Path(__file__).parents[2] / "configs" / "field"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    pytest.importorskip("zarr", reason="weather stores are zarr")
    states = record()
    states["2m_temperature"].attrs["units"] = "K"
    states.to_zarr(tmp_path / "source.zarr", zarr_format=2)
    return tmp_path / "source.zarr"


def copy_of(source: Path, **options: Any) -> WeatherCopy:
    settings: dict[str, Any] = {
        "latitude": (-10, 10), "longitude": (-45, 45), "period": ("2013-01-02", "2013-01-08"), "chunk": 5, "threads": 2,
        "static": ["land_sea_mask"],
    }  # fmt: skip
    return WeatherCopy(str(source), source.with_name("copy.zarr"), VARIABLES, **{**settings, **options})


def test_a_copy_holds_the_states_of_its_region_and_period(source: Path) -> None:
    options = copy_of(source)
    size = estimate(options)
    assert (size.states, size.bytes_kept) == (28, 28 * 2 * 15 * 4)
    prepare_weather(options, progress=False)
    copied = open_weather(options.output, VARIABLES, static=["land_sea_mask"])
    region = open_weather(source, VARIABLES, static=["land_sea_mask"], latitude=(-10, 10), longitude=(-45, 45)).between(
        "2013-01-02", "2013-01-08"
    )
    torch.testing.assert_close(copied.read(0, 0, 28), region.read(0, 0, 28), rtol=0, atol=0)
    torch.testing.assert_close(copied.static_fields(), region.static_fields(), rtol=0, atol=0)
    assert copied.units == {"2m_temperature": "K"}
    assert copied.coordinates["longitude"].tolist() == [-40, -20, 0, 20, 40]
    with pytest.raises(FileExistsError, match="choose another output"):
        prepare_weather(options, progress=False)


def test_a_copy_that_was_cut_short_reads_only_what_is_missing(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options, read, seen = copy_of(source, threads=1), preparation._read, []

    def failing(one: Any, block: range) -> Any:
        seen.append(block.start)
        if block.start == 15 and seen.count(15) == 1:
            raise OSError("the connection is gone")
        return read(one, block)

    monkeypatch.setattr(preparation, "_read", failing)
    with pytest.raises(OSError, match="connection"):
        prepare_weather(options, progress=False)
    assert not options.output.exists()
    done = list(seen)
    with pytest.raises(ValueError, match="other settings"):
        prepare_weather(replace(options, chunk=4), progress=False)
    prepare_weather(options, progress=False)
    again = seen[len(done) :]
    assert 15 in again
    assert not set(again) & (set(done) - {15})  # nothing is read twice
    copied = open_weather(options.output, VARIABLES)
    assert bool(copied.read(0, 0, 28).isfinite().all())
    assert {path.name for path in source.parent.iterdir()} == {"source.zarr", "copy.zarr"}


def test_hours_are_kept_in_equal_steps(source: Path) -> None:
    prepare_weather(copy_of(source, hours=[0, 12]), progress=False)
    copied = open_weather(source.with_name("copy.zarr"), VARIABLES)
    assert copied.time_step == 12 * 3600
    with pytest.raises(FieldDataError, match="equal steps"):
        estimate(copy_of(source, hours=[0, 6]))


def test_the_command_estimates_and_copies(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = source.with_name("out.zarr")
    words = ["--path", str(source), "--output", str(output), "--variables", *VARIABLES]
    assert command.main([*words, "--dry_run", "true"]) == 0
    assert "40 states" in capsys.readouterr().out
    assert not output.exists()
    assert command.main(words) == 0
    assert output.exists()


def test_statistics_of_a_copy_are_measured_once_and_kept_by_name(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare_weather(copy_of(source), progress=False)
    train = open_weather(source.with_name("copy.zarr"), VARIABLES).between("2013-01-02", "2013-01-05")
    found = statistics_of(train)
    monkeypatch.setattr(WeatherSequences, "read", lambda *_: pytest.fail("the states are read again"))
    assert statistics_of(train) == found
    one = open_weather(source.with_name("copy.zarr"), VARIABLES[1:]).between("2013-01-02", "2013-01-05")
    assert statistics_of(one) == {VARIABLES[1]: found[VARIABLES[1]]}
    monkeypatch.undo()
    later = open_weather(source.with_name("copy.zarr"), VARIABLES).between("2013-01-02", "2013-01-06")
    assert statistics_of(later) != found  # another period is another training part


def test_windows_hold_every_place_once_per_epoch_and_read_each_state_about_once() -> None:
    data = WeatherSequences(record(120), ("2m_temperature",))
    plain = Transitions(data, num_leads=2)
    windowed = WindowedTransitions(data, window=16, num_open=2, num_leads=2, seed=3)
    reads: list[int] = []
    read = WeatherSequences.read

    def counting(self: Any, sequence: int, start: int, stop: int) -> torch.Tensor:
        reads.append(stop - start)
        return read(self, sequence, start, stop)

    orders = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WeatherSequences, "read", counting)
        for epoch in range(2):
            windowed.set_epoch(epoch)
            orders.append([windowed[index] for index in range(len(windowed))])
            assert len(windowed._read) <= 4
    for samples in orders:
        assert sorted(one["time"] for one in samples) == sorted(plain[i]["time"] for i in range(len(plain)))
    by_time = {plain[i]["time"]: plain[i] for i in range(len(plain))}
    for one in orders[0]:
        torch.testing.assert_close(one["history"], by_time[one["time"]]["history"], rtol=0, atol=0)
        torch.testing.assert_close(one["future"], by_time[one["time"]]["future"], rtol=0, atol=0)
    times = [[one["time"] for one in samples] for samples in orders]
    assert times[0] != times[1]
    assert sum(reads) < 2 * 120 * 1.3  # two epochs; each window also needs two states before it and one after
    again = WindowedTransitions(data, window=16, num_open=2, num_leads=2, seed=3)
    again.set_epoch(1)
    assert [again[index]["time"] for index in range(len(again))] == times[1]


def test_a_model_of_some_hours_scales_their_increments_and_refuses_other_hours(tmp_path: Path) -> None:
    states = record()
    rise = np.array([5.0, 9.0, 2.0, 0.0])[np.arange(40) % 4]  # hours 0, 6, 12, 18: it rises by 4 to hour 6
    states["2m_temperature"] += rise[:, None, None]
    data = WeatherSequences(states, ("2m_temperature",), target_hours=(6,))
    values = states["2m_temperature"].values.astype(np.float64)
    mornings = np.diff(values, axis=0)[np.arange(1, 40) % 4 == 1]
    statistics = statistics_of(data)["2m_temperature"]
    assert statistics.increment_mean == pytest.approx(mornings.mean())
    assert statistics.increment_std == pytest.approx(mornings.std(ddof=1))
    pipeline = tiny_pipeline(data=data)
    scaled = [
        pipeline.encoder.encode_target(one["history"][None, -1], one["future"][None, 0])
        for one in (Transitions(data)[i] for i in range(len(Transitions(data))))
    ]
    assert float(torch.cat(scaled).mean()) == pytest.approx(0, abs=0.15)
    pipeline.save_pretrained(tmp_path / "model")
    loaded = type(pipeline).from_pretrained(tmp_path / "model")
    history = data.read(0, 3, 5).unsqueeze(0)  # the last state is of midnight
    assert loaded(history, 1, time=data.times(0)[4], ensemble_size=2).samples.isfinite().all()
    with pytest.raises(FieldDataError, match=r"trained to predict the hours \[6\] UTC; this call asks for \[12\]"):
        loaded(history, 1, time=data.times(0)[5], ensemble_size=2)
    with pytest.raises(FieldDataError, match=r"asks for \[6, 12\]"):
        loaded(history, 2, time=data.times(0)[4], ensemble_size=2)
    with pytest.raises(ValueError, match="pass `time`"):
        loaded(history, 1, ensemble_size=2)


def test_a_globe_closes_in_longitude_and_a_region_does_not() -> None:
    globe = {"latitude": np.linspace(90, -90, 5), "longitude": np.arange(0.0, 360, 20)}
    assert periodic_axes(globe, calendar=True) == (False, True)
    assert periodic_axes({**globe, "longitude": np.arange(-180.0, 180, 1.5)}, calendar=True) == (False, True)
    assert periodic_axes({**globe, "longitude": np.arange(200.0, 331, 2.5)}, calendar=True) == (False, False)
    assert periodic_axes({"x": np.arange(8.0)}, calendar=False) == (True,)
    unet = {"block_out_channels": [8, 8], "layers_per_block": 1, "embedding_channels": 8}
    whole = WeatherSequences(record(), ("2m_temperature",))
    half = WeatherSequences(record().isel(longitude=slice(0, 9)), ("2m_temperature",))
    periodic = [new_pipeline(FieldModel(unet=unet), data).unet.config.periodic for data in (whole, half)]
    assert [tuple(one) for one in periodic] == [(False, True), (False, False)]


def test_data_in_another_unit_than_the_models_are_refused() -> None:
    states = record()
    states["2m_temperature"].attrs["units"] = "K"
    encoder = fit_encoder(WeatherSequences(states, ("2m_temperature",)))
    assert encoder.units == {"2m_temperature": "K"}
    states["2m_temperature"].attrs["units"] = "degC"
    with pytest.raises(FieldDataError, match="is in degC, the model was trained with K"):
        require_data(encoder, WeatherSequences(states, ("2m_temperature",)))


@pytest.mark.parametrize("convention", ["weatherbenchx", "weatherbench2", "earth2studio"])
def test_a_streamed_forecast_is_the_forecast(tmp_path: Path, convention: Any) -> None:
    xarray = pytest.importorskip("xarray")
    pytest.importorskip("zarr")
    pipeline, state = tiny_weather(), record()
    grid = IntervalGrid((0.9,), ((1.0, 2.0, 3.0, 4.0),))
    kept = Calibration(kappa=(2.0, 0.5, 1.0, 3.0), interval=grid, ensemble_size=5)
    pipeline.calibrate(kept, by_variable=True, lead_dampings=[1.0, 0.5, 0.8, 0.2])
    generator = torch.Generator().manual_seed(0)
    expected = pipeline(state, 2, coverage=0.9, generator=generator, output_type="pt").to_xarray(convention)
    generator = torch.Generator().manual_seed(0)
    path = pipeline.save_forecast(
        tmp_path / "f.zarr", state, 2, coverage=0.9, generator=generator, batch_size=3, convention=convention
    )
    with xarray.open_zarr(path) as found:
        assert set(found.variables) == set(expected.variables)
        for name in expected.data_vars:
            assert found[name].dims == expected[name].dims
            assert found[name].attrs == expected[name].attrs
            np.testing.assert_allclose(found[name].values, expected[name].values, rtol=1e-4, atol=1e-3)
        for name in expected.coords:
            np.testing.assert_array_equal(found[name].values, expected[name].values)
        assert found.attrs == expected.attrs
    with pytest.raises(FileExistsError):
        pipeline.save_forecast(path, state, 2)
    with pytest.raises(ValueError, match=r"as \.zarr"):
        pipeline.save_forecast(tmp_path / "f.nc", state, 2)


def test_an_output_says_what_it_holds_and_what_made_it(tmp_path: Path) -> None:
    states = record()
    states["2m_temperature"].attrs["units"], states["temperature"].attrs["units"] = "K", "K"
    data = WeatherSequences(states, ("2m_temperature", "temperature_850"))
    tiny_pipeline(data=data).save_pretrained(tmp_path / "runs" / "small")
    pipeline = tiny_weather().from_pretrained(tmp_path / "runs" / "small")
    found = pipeline(states, 2, ensemble_size=2, generator=torch.Generator().manual_seed(17), coverage=0.9)
    assert found["temperature_850_uncertainty"].attrs == {
        "long_name": "temperature 850: standard deviation of the samples",
        "cell_methods": "realization: standard_deviation",
        "standard_name": "air_temperature",
        "pressure_level_hPa": 850,
        "units": "K",
    }
    expected = found["init_time"].values[:, None] + found["lead_time"].values
    np.testing.assert_array_equal(found["valid_time"].values, expected)
    assert found["valid_time"].attrs["standard_name"] == "time"
    assert found["latitude"].attrs["units"] == "degrees_north"
    assert found.attrs["Conventions"].startswith("CF-")
    assert found.attrs["source"].startswith("marigold_uq ")
    assert (found.attrs["model"], found.attrs["seed"]) == ("runs/small", "17")


@pytest.mark.parametrize(("kind", "space"), [(UNet1d, (16,)), (UNet2d, (8, 12))])
def test_weights_may_be_stored_in_8_bits(kind: type, space: tuple[int, ...]) -> None:
    options = {"block_out_channels": (8, 8), "layers_per_block": 1, "embedding_channels": 16, "dropout": 0.0}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = kind(in_channels=3, out_channels=2, **options).eval()
    x, t = torch.randn(2, 3, *space, generator=torch.Generator().manual_seed(0)), torch.tensor([3, 9])
    with torch.no_grad():
        plain = network(x, t)
        network.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.float32)
        cast = network(x, t)
    assert network.conv_in.weight.dtype == torch.float8_e4m3fn
    assert cast.dtype == torch.float32
    assert 0 < float((cast - plain).abs().max()) < 0.1 * float(plain.abs().max())  # weights have 3 bits of mantissa


def test_the_memory_of_a_stream_of_windows_does_not_grow() -> None:
    data = WeatherSequences(record(400), ("2m_temperature",))
    windowed = WindowedTransitions(data, window=8, num_open=2)
    held = []
    for index in range(len(windowed)):
        windowed[index]
        held.append(sum(one.result().numel() for one in windowed._read.values()))
    assert max(held) <= 4 * (8 + 2) * 5 * 18


def test_the_configs_of_full_size_fit_together() -> None:
    """What is copied is what is trained with, and each evaluation reads the run of its training."""
    copied, _ = parse_options("scripts/prepare_weather.py", WeatherCopy, ["--config", str(CONFIGS / "t2m_data.yaml")])
    trained = read_config(["--config", str(CONFIGS / "t2m.yaml")])[0].data.weather
    assert trained is not None
    assert (str(copied.output), copied.variables, copied.static) == (trained.path, trained.variables, trained.static)
    assert copied.period == (trained.train[0], trained.test[1])
    for path in sorted((CONFIGS / "evaluation").glob("*.yaml")):
        options, _ = parse_options("eval/eval_field.py", FieldEvaluation, ["--config", str(path)])
        training = read_config(["--config", str(CONFIGS / path.name)])[0]
        assert options.run == training.training.output


def test_a_run_streams_a_copy_with_missing_points_from_training_to_evaluation(source: Path, tmp_path: Path) -> None:
    """`prepare`, `train` by windows, `evaluate --run`: the run's own data, the encoder's statistics, NaN over land."""
    states = record(120)
    states["2m_temperature"][:, 1:3, 4:9] = np.nan
    states.to_zarr(tmp_path / "ocean.zarr", zarr_format=2)
    copied = WeatherCopy(str(tmp_path / "ocean.zarr"), tmp_path / "copy.zarr", ["2m_temperature"], chunk=8, threads=1)
    prepare_weather(copied, progress=False)
    data = WeatherData(
        str(copied.output), ["2m_temperature"], masked=["2m_temperature"], window=8, open_windows=2,
        train=("2013-01-01", "2013-01-15"), validation=("2013-01-16", "2013-01-20"), test=("2013-01-21", "2013-01-31"),
    )  # fmt: skip
    unet = {"block_out_channels": [8, 8], "layers_per_block": 1, "embedding_channels": 8, "dropout": 0.0}
    model = FieldModel(num_train_timesteps=8, default_denoising_steps=1, unet=unet)
    training = TrainingConfig(tmp_path / "run", max_steps=3, batch_size=4, tracker="none", cpu=True, num_workers=0)
    config = FieldTrainConfig(FieldData(weather=data), model, training=training, validation_samples=4)
    words = ["--data.weather", json.dumps(asdict(data))]
    words += ["--model", json.dumps(asdict(model)), "--training.output", str(training.output)]
    assert train_field(config, read_config(words)[1]).finished
    options = FieldEvaluation(
        run=tmp_path / "run", output=tmp_path / "scores", num_one_step=4, num_rollouts=2, num_leads=2, ensemble_size=3,
        figures=False,
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluate, "statistics_of", lambda _: pytest.fail("the encoder has the statistics"))
        metrics = evaluate_field(options)
    assert all(np.isfinite(metrics["rollout"][name]["value"]).all() for name in ("crps", "rmse", "coverage"))
