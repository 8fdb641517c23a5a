"""FieldForecastPipeline: members, lead times, random streams, files, xarray, calibration, bad input."""

import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers.utils import logging
from support.hub_server import HubServer, run_client
from support.tiny_field import NETWORK, SIZES, tiny_pipeline, tiny_scheduler, tiny_trajectories, tiny_weather
from support.weather_records import record
from torch import Tensor

from marigold_uq.calibration import Calibration, IntervalGrid
from marigold_uq.field.data import FieldDataError, Trajectories
from marigold_uq.field.encoding import fit_encoder, require_data
from marigold_uq.models.field_encoder import FieldEncoder
from marigold_uq.models.field_head import build_network, raw_output
from marigold_uq.models.noise_color import NoiseColor
from marigold_uq.pipelines.field import FieldForecastPipeline
from marigold_uq.pipelines.field.output import FieldForecast

FAMILIES = ("point", "gaussian", "mixture", "low_rank", "cholesky", "sample")
ROUNDING = {"rtol": 1e-4, "atol": 1e-5}  # kernels of another batch size sum in another order


def history(count: int = 3) -> Tensor:
    return torch.stack([tiny_trajectories().read(i, 0, 2) for i in range(count)])


def forecast(pipeline: FieldForecastPipeline, states: Tensor, num_leads: int = 3, **options: Any) -> FieldForecast:
    return pipeline(states, num_leads, generator=torch.Generator().manual_seed(3), **{"ensemble_size": 4, **options})


@pytest.mark.parametrize("family", FAMILIES)
def test_members_do_not_depend_on_batch_size_or_company(family: str) -> None:
    pipeline = tiny_pipeline(family)
    everything = forecast(pipeline, history(), batch_size=100).samples
    assert everything.shape == (4, 3, 3, 1, 16)
    torch.testing.assert_close(forecast(pipeline, history(), batch_size=5).samples, everything, **ROUNDING)
    torch.testing.assert_close(forecast(pipeline, history(1), ensemble_size=2).samples, everything[:2, :1], **ROUNDING)
    torch.testing.assert_close(forecast(pipeline, history(), 1).samples, everything[:, :, :1], **ROUNDING)
    assert float((everything[0] - everything[1]).abs().max()) > 0.01
    assert float((everything[:, 0] - everything[:, 1]).abs().max()) > 0.01


@pytest.mark.parametrize("family", FAMILIES)
def test_a_saved_pipeline_gives_the_same_forecast(family: str, tmp_path: Path) -> None:
    pipeline = tiny_pipeline(family)
    pipeline.calibrate(Calibration(tau=0.5, num_inference_steps=2, kappa=(1.0, 2.0)))
    before = forecast(pipeline, history()).samples
    pipeline.save_pretrained(tmp_path / "model")
    loaded = FieldForecastPipeline.from_pretrained(tmp_path / "model")
    torch.testing.assert_close(forecast(loaded, history()).samples, before, **ROUNDING)
    assert loaded.calibration_for().kappa == (1.0, 2.0)
    assert loaded.scheduler.config.tau == 0.5


def test_a_saved_pipeline_keeps_its_static_fields(tmp_path: Path) -> None:
    tiny_weather().save_pretrained(tmp_path / "model")
    encoder = FieldForecastPipeline.from_pretrained(tmp_path / "model").encoder
    assert encoder.config.static_names == ["land_sea_mask", "mean_2m_temperature", "mean_temperature_850"]
    assert encoder.space == (5, 18)


def test_statistics_of_a_forecast_are_those_of_its_members() -> None:
    output = forecast(tiny_pipeline(), history(), ensemble_size=9, quantiles=(0.1, 0.5), output_epistemic=True)
    torch.testing.assert_close(output.prediction, output.samples.mean(0))
    torch.testing.assert_close(output.uncertainty, output.samples.std(0))
    torch.testing.assert_close(output.quantiles[1], output.samples.median(0).values)  # M = 9: the fifth member
    torch.testing.assert_close(output.quantiles[0], output.samples.min(0).values)  # 0.1 (9 + 1) = 1: the first
    assert output.epistemic is not None
    assert output.epistemic.shape == output.prediction.shape
    assert bool((output.epistemic > 0).all())
    np.testing.assert_allclose(output.lead_times, [0.5, 1.0, 1.5])


def test_families_without_a_spread_have_no_epistemic_estimate() -> None:
    with pytest.raises(ValueError, match="has no variance"):
        forecast(tiny_pipeline("point"), history(), output_epistemic=True)


def test_kappa_stretches_each_lead_time_and_is_not_fed_back() -> None:
    pipeline = tiny_pipeline()
    plain = forecast(pipeline, history())
    pipeline.calibrate(Calibration(kappa=(2.0, 0.5)))
    stretched = forecast(pipeline, history())
    torch.testing.assert_close(stretched.prediction, plain.prediction)
    factor = torch.tensor([2.0, 0.5, 0.5]).reshape(3, 1, 1)
    torch.testing.assert_close(stretched.uncertainty, factor * plain.uncertainty, rtol=1e-4, atol=1e-5)


def test_damping_moves_the_mean_towards_the_season_keeps_the_spread_and_is_not_fed_back(tmp_path: Path) -> None:
    """With half of its distance kept the mean lies half way; with none it is the season's mean, whatever the state."""
    pipeline, states = tiny_weather(), record()
    start = states.isel(time=slice(4, 6))
    plain = forecast(pipeline, start, output_type="pt")
    pipeline.calibrate(Calibration(kappa=(1.0,)), lead_dampings=[0.5, 0.0])
    pipeline.save_pretrained(tmp_path / "model")
    damped = forecast(FieldForecastPipeline.from_pretrained(tmp_path / "model"), start, output_type="pt")
    assert plain.init_times is not None
    expected = pipeline.expected_states(plain.init_times, 3)
    seconds = torch.from_numpy(plain.init_times + 2 * pipeline.encoder.config.time_step)
    torch.testing.assert_close(expected[:, 1], pipeline.encoder.seasonal_mean(seconds))
    torch.testing.assert_close(damped.prediction[:, 0], (plain.prediction[:, 0] + expected[:, 0]) / 2)
    torch.testing.assert_close(damped.prediction[:, 1:], expected[:, 1:])
    torch.testing.assert_close(damped.uncertainty, plain.uncertainty, rtol=1e-3, atol=1e-3)
    pipeline.calibrate(Calibration(kappa=(1.0,)), lead_dampings=[0.5, 1.0])
    torch.testing.assert_close(forecast(pipeline, start, output_type="pt").prediction[:, 1:], plain.prediction[:, 1:])


def test_damping_is_between_0_and_1_and_needs_a_season() -> None:
    with pytest.raises(ValueError, match="between 0 and 1"):
        tiny_weather().calibrate(Calibration(), lead_dampings=[0.5, 1.2])
    with pytest.raises(ValueError, match="between 0 and 1"):
        tiny_weather().calibrate(Calibration(), lead_dampings=[math.nan])
    with pytest.raises(ValueError, match="season's mean"):
        tiny_pipeline().calibrate(Calibration(), lead_dampings=[0.5])


GRID = IntervalGrid((0.5, 0.9, 0.95), ((1.0, 1.5, 1.6), (2.0, 3.0, 3.5), (2.5, 3.5, 4.0)))


def test_the_calibrated_interval_is_the_prediction_and_so_many_deviations() -> None:
    pipeline = tiny_pipeline()
    pipeline.calibrate(Calibration(interval=GRID, num_calibration=50, ensemble_size=4, num_inference_steps=2))
    found = forecast(pipeline, history(), coverage=0.9)
    lower, upper = found.interval
    scales = torch.tensor([2.0, 3.0, 3.5]).reshape(1, 3, 1, 1)
    torch.testing.assert_close(upper - lower, 2 * scales * found.uncertainty)
    torch.testing.assert_close((upper + lower) / 2, found.prediction)
    dataset = found.to_xarray()
    np.testing.assert_array_equal(dataset["u_upper"], upper[:, :, 0])
    assert dataset["u_lower"].dims == dataset["u_prediction"].dims
    assert len(pipeline(history(), 2).samples) == 4  # the calibrated number is the default
    assert forecast(pipeline, history()).interval is None  # nothing was asked for


@pytest.mark.parametrize("calibrated", [False, True])
def test_intervals_of_rising_coverage_are_nested(calibrated: bool) -> None:
    pipeline = tiny_pipeline()
    if calibrated:
        pipeline.calibrate(Calibration(interval=GRID, ensemble_size=4, num_inference_steps=2))
    found = forecast(pipeline, history(1))
    lower, upper = torch.stack([found.interval_at(c) for c in np.linspace(0.5, 0.95, 31)]).unbind(1)
    assert bool((lower.diff(dim=0) <= 0).all())
    assert bool((upper.diff(dim=0) >= 0).all())
    with pytest.warns(UserWarning, match="extrapolated") if calibrated else nullcontext():
        widest = found.interval_at(0.99)
    assert bool((widest[0] <= lower[-1]).all())
    assert bool((widest[1] >= upper[-1]).all())
    with pytest.raises(ValueError, match="strictly between 0 and 1"):
        forecast(pipeline, history(1), coverage=95)


def test_a_call_under_other_conditions_than_the_calibration_is_warned(caplog: pytest.LogCaptureFixture) -> None:
    pipeline = tiny_pipeline()
    pipeline.calibrate(Calibration(interval=GRID, ensemble_size=4, num_inference_steps=2))
    logging.get_logger("marigold_uq").addHandler(caplog.handler)
    for other, message in (
        ({}, ""),
        ({"num_leads": 4}, "calibrated for 3 lead times, called with 4"),
        ({"ensemble_size": 3}, "calibrated with ensemble_size=4, called with 3"),
        ({"num_inference_steps": 1}, "calibrated with num_inference_steps=2, called with 1"),
    ):
        caplog.clear()
        forecast(pipeline, history(1), **other)
        assert message in caplog.text
        assert bool(caplog.text) == bool(message)


RELOAD = """
import sys
import numpy as np, torch
from marigold_uq.pipelines.field import FieldForecastPipeline
folder = sys.argv[1]
states = torch.from_numpy(np.load(folder + "/history.npy"))
for place, source in enumerate((folder + "/model", "someone/field")):
    if place:
        pipeline.push_to_hub(source)
    pipeline = FieldForecastPipeline.from_pretrained(source)
    found = pipeline(states, 3, coverage=0.92, generator=torch.Generator().manual_seed(3))
    np.save(f"{folder}/interval{place}.npy", found.interval.numpy())
"""


def test_a_calibrated_pipeline_reloads_with_its_intervals_in_a_fresh_process_and_from_the_hub(tmp_path: Path) -> None:
    pipeline = tiny_pipeline()
    pipeline.calibrate(Calibration(tau=0.5, kappa=(1.0, 2.0), interval=GRID, ensemble_size=4, num_inference_steps=2))
    pipeline.save_pretrained(tmp_path / "model")
    np.save(tmp_path / "history.npy", history(1).numpy())
    with HubServer() as hub:
        run_client(hub, RELOAD, str(tmp_path), cache=tmp_path / "cache")
        assert list(hub.repositories) == ["someone/field"]
    expected = forecast(pipeline, history(1), coverage=0.92).interval
    for place in range(2):
        np.testing.assert_allclose(np.load(tmp_path / f"interval{place}.npy"), expected, rtol=1e-4, atol=1e-5)


def test_the_calibrated_number_of_steps_is_the_default_of_a_call() -> None:
    pipeline = tiny_pipeline()
    pipeline.calibrate(Calibration(num_inference_steps=2))
    two = forecast(pipeline, history()).samples
    torch.testing.assert_close(two, forecast(pipeline, history(), num_inference_steps=2).samples, rtol=0, atol=0)
    assert float((two - forecast(pipeline, history(), num_inference_steps=3).samples).abs().max()) > 1e-3


def test_white_colour_changes_nothing_but_the_numbers_and_red_colour_smooths() -> None:
    """The same marginal spread within Monte-Carlo error, and neighbours that agree where the colour is red."""
    pipeline = tiny_pipeline()
    states, many = history(1), {"ensemble_size": 600, "num_inference_steps": 1, "batch_size": 600}
    white = forecast(pipeline, states, 1, **many)
    color = NoiseColor(10, [1, 16])
    waves = torch.minimum(torch.arange(16), 16 - torch.arange(16))
    power = 1 / (1 + waves.square())
    color.amplitude[:] = (power / power.mean()).sqrt()[:9]
    pipeline.register_modules(noise_color=color)
    red = forecast(pipeline, states, 1, **many)
    torch.testing.assert_close(
        red.uncertainty, white.uncertainty, rtol=0.2, atol=0
    )  # se 3 % each, and U_T's share is white
    correlations = [
        float(torch.corrcoef(output.samples[:, 0, 0, 0].T)[torch.arange(15), torch.arange(1, 16)].mean())
        for output in (white, red)
    ]
    assert correlations[1] > correlations[0] + 0.2


def test_white_colour_has_the_law_of_the_plain_sampler_over_several_steps() -> None:
    """With sigma > 0 and tau < 1: mean and variance at every point within 4.5 standard errors of 4000 members."""
    pipeline, count = tiny_pipeline(), 4000
    pipeline.calibrate(Calibration(tau=0.5))
    many = {"ensemble_size": count, "num_inference_steps": 3, "batch_size": count}
    plain = forecast(pipeline, history(1), 1, **many).samples
    pipeline.register_modules(noise_color=NoiseColor(10, [1, 16]))
    colored = forecast(pipeline, history(1), 1, **many).samples
    assert float((plain - colored).abs().max()) > 0.1  # other random numbers
    variances = [members.var(0) for members in (plain, colored)]
    error = (sum(variances) / count).sqrt()
    assert float(((plain.mean(0) - colored.mean(0)) / error).abs().max()) < 4.5
    error = math.sqrt(2 * 2 / (count - 1)) * (variances[0] + variances[1]) / 2
    assert float(((variances[0] - variances[1]) / error).abs().max()) < 4.5


def test_half_precision_is_of_the_network_alone(tmp_path: Path) -> None:
    tiny_weather().save_pretrained(tmp_path / "model")
    for name in ("dtype", "torch_dtype"):
        loaded = FieldForecastPipeline.from_pretrained(tmp_path / "model", **{name: torch.bfloat16})
        assert loaded.unet.dtype == torch.bfloat16
        assert loaded.encoder.harmonics.dtype == torch.float32
    loaded.register_modules(noise_color=NoiseColor(10, [2, 5, 18]))
    loaded.to(torch.float16)
    assert loaded.unet.dtype == torch.float16
    assert loaded.encoder.harmonics.dtype == loaded.noise_color.amplitude.dtype == torch.float32


def test_quantiles_of_the_call_are_in_the_dataset() -> None:
    output = tiny_weather()(last_states(), 2, ensemble_size=5, quantiles=(0.2, 0.5), output_type="pt")
    data = output.to_xarray()
    assert data["2m_temperature_quantile"].dims == ("quantile", "init_time", "lead_time", "latitude", "longitude")
    np.testing.assert_allclose(
        data["2m_temperature_quantile"].sel(quantile=0.5), output.samples[:, :, :, 0].median(0).values, rtol=1e-6
    )


def test_records_with_levels_and_on_other_grids_are_read_by_the_model_s_own_points() -> None:
    """WeatherBench2's layout as it is; longitudes from -180 to 180; north first: the same forecast."""
    pipeline, data = tiny_weather(), record()
    expected = pipeline(last_states(), ensemble_size=2, generator=torch.Generator().manual_seed(0))
    turned = data.assign_coords(longitude=(data.longitude + 180) % 360 - 180).sortby("longitude")
    for other in (data, turned, data.sortby("latitude", ascending=False)):
        found = pipeline(other, ensemble_size=2, generator=torch.Generator().manual_seed(0))
        np.testing.assert_allclose(found["2m_temperature"], expected["2m_temperature"])


def test_coloured_noise_is_refused_for_other_families() -> None:
    pipeline = tiny_pipeline("mixture")
    pipeline.register_modules(noise_color=NoiseColor(10, [1, 16]))
    with pytest.raises(TypeError, match="coloured noise is for family 'gaussian'"):
        forecast(pipeline, history())


def last_states(data: Any = None) -> Any:
    data = record() if data is None else data
    return data.assign(temperature_850=data["temperature"].sel(level=850)).drop_vars(["temperature", "level"])


def test_xarray_in_gives_xarray_out_with_the_dates_of_the_forecast() -> None:
    pipeline = tiny_weather()
    output = pipeline(last_states(), 3, ensemble_size=2, generator=torch.Generator().manual_seed(0))
    assert dict(output["2m_temperature"].sizes) == {
        "number": 2,
        "init_time": 1,
        "lead_time": 3,
        "latitude": 5,
        "longitude": 18,
    }
    assert output["init_time"].values[0] == record()["time"].values[-1]
    assert output["lead_time"].values.tolist() == (np.arange(1, 4) * np.timedelta64(6, "h").astype("m8[ns]")).tolist()
    spread = output["2m_temperature"].std("number", ddof=1)
    np.testing.assert_allclose(output["2m_temperature_uncertainty"], spread, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("suffix", [".zarr", ".nc"])
@pytest.mark.parametrize(
    ("convention", "dims"),
    [
        ("weatherbenchx", ("number", "init_time", "lead_time", "latitude", "longitude")),
        ("weatherbench2", ("realization", "time", "prediction_timedelta", "latitude", "longitude")),
        ("earth2studio", ("ensemble", "time", "lead_time", "lat", "lon")),
    ],
)
def test_files_have_the_dimensions_other_tools_expect(tmp_path: Path, suffix: str, convention: Any, dims: Any) -> None:
    xarray = pytest.importorskip("xarray", reason="forecast files need xarray")
    pytest.importorskip("zarr" if suffix == ".zarr" else "netCDF4", reason="the file format's package")
    pipeline = tiny_weather()
    arrays = [last_states()[name].values[-2:] for name in pipeline.encoder.config.variables]
    output = pipeline(np.stack(arrays, 1), 2, ensemble_size=2, time=np.datetime64("2013-01-10T18:00"))
    path = output.save(tmp_path / f"forecast{suffix}", convention)
    opened = xarray.open_zarr(path, chunks=None) if suffix == ".zarr" else xarray.open_dataset(path)
    assert opened["2m_temperature"].dims == dims
    np.testing.assert_allclose(opened["2m_temperature"].values, output.samples[:, :, :, 0].numpy())
    assert opened[dims[1]].values[0] == np.datetime64("2013-01-10T18:00", "ns")
    with pytest.raises(FileExistsError, match="exists"):
        output.save(path)
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


def _broken(change: Any) -> Any:
    return last_states(change(record()))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data.isel(latitude=slice(0, 4)), "wrong grid: latitude has 4 points"),
        (lambda data: data.drop_vars("2m_temperature"), "missing variable '2m_temperature'"),
        (lambda data: data.isel(time=[0, 1, 3]), "time gap: the last 2 states are"),
        (lambda data: data.isel(time=[3, 2]), "unsorted in time"),
        (lambda data: data.isel(time=[0]), "needs 2 states"),
        (lambda data: data.where(data.latitude > -20), "2m_temperature holds NaN or infinity at 36 places"),
        (lambda data: data - 273.15, "mismatched statistics: a state of 2m_temperature has a mean .* other units"),
    ],
)
def test_bad_initial_states_are_named(change: Any, message: str) -> None:
    with pytest.raises(FieldDataError, match=message):
        tiny_weather()(_broken(change))


def test_tensors_of_another_shape_or_without_a_needed_date_are_refused() -> None:
    with pytest.raises(FieldDataError, match=r"= \(B, 2, 1, 16\); got \(3, 2, 1, 15\)"):
        forecast(tiny_pipeline(), history()[..., :15])
    with pytest.raises(ValueError, match="pass `time`"):
        forecast(tiny_weather(), torch.full((1, 2, 2, 5, 18), 270.0))
    with pytest.raises(ValueError, match="one for each of the 3 x 4 chains; got 5"):
        tiny_pipeline()(history(), ensemble_size=4, generator=[torch.Generator()] * 5)


def test_what_is_not_predicted_cannot_be_rolled_out() -> None:
    pipeline = tiny_weather(targets=("temperature_850",))
    states = torch.stack([torch.full((2, 5, 18), 280.0), torch.full((2, 5, 18), 260.0)], 1)
    time = np.datetime64("2013-01-10")
    assert pipeline(states, ensemble_size=2, time=time).samples.shape == (2, 1, 1, 1, 5, 18)
    with pytest.raises(ValueError, match="cannot be fed back, so only num_leads=1"):
        pipeline(states, 2, ensemble_size=2, time=time)


def test_statistics_of_other_variables_are_refused() -> None:
    good = fit_encoder(tiny_trajectories())
    with pytest.raises(FieldDataError, match=r"mismatched statistics: they are of \['v'\]"):
        FieldEncoder(statistics={"v": good.statistics["u"].to_dict()}, coordinates={"x": [0.0, 1.0]})
    other = tiny_trajectories(num_points=12)
    with pytest.raises(FieldDataError, match="wrong grid: x has 12 points"):
        require_data(good, other)
    slow = Trajectories(tiny_trajectories().states, np.arange(16.0), np.arange(8.0))
    with pytest.raises(FieldDataError, match=r"states are 1 apart, the model steps by 0\.5"):
        require_data(good, slow)


def test_the_clock_is_that_of_the_predicted_time_and_place() -> None:
    """At 0 degrees, from 06 UTC, a 6-hour step predicts noon: sine 0, cosine -1; at 180 degrees midnight.

    At 60 degrees east it is 16 o'clock: the sun is ahead there, and not behind.
    """
    encoder = tiny_weather().encoder
    history_states = torch.zeros(1, 2, 2, 5, 18)
    seconds = np.datetime64("2013-01-10T06:00", "s").astype(np.float64)
    clock = encoder.condition(history_states, torch.tensor([seconds], dtype=torch.float64))[:, -6:-4]
    east = list(encoder.coordinates["longitude"]).index(180.0)
    torch.testing.assert_close(clock[0, :, 0, 0], torch.tensor([0.0, -1.0]), rtol=0, atol=1e-5)
    torch.testing.assert_close(clock[0, :, 0, east], torch.tensor([0.0, 1.0]), rtol=0, atol=1e-5)
    ahead = list(encoder.coordinates["longitude"]).index(60.0)
    angle = torch.tensor(2 * torch.pi * 16 / 24)
    torch.testing.assert_close(clock[0, :, 0, ahead], torch.stack([angle.sin(), angle.cos()]), rtol=0, atol=1e-5)


def test_the_cholesky_head_puts_distances_where_the_family_reads_them() -> None:
    scheduler, shape = tiny_scheduler("cholesky"), (1, 4)
    output = torch.arange(5)[:, None] * 10.0 + torch.arange(4)  # block b at coordinate i holds 10 b + i
    flat = raw_output(scheduler, output.unsqueeze(0), shape)[0].tolist()
    assert flat[:4] == [0, 1, 2, 3]  # the mean
    # row i: L[i, j] comes from the block of distance i - j, that is 1 + i - j
    assert flat[4:] == [10, 21, 11, 32, 22, 12, 43, 33, 23, 13]


@pytest.mark.parametrize("family", FAMILIES)
def test_networks_follow_from_their_seed(family: str) -> None:
    scheduler = tiny_scheduler(family)
    first, again, other = (build_network(scheduler, (1, 16), 2, seed=seed, **NETWORK) for seed in (0, 0, 1))
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))
    assert not torch.equal(first.conv_last.weight, other.conv_last.weight)
    assert set(SIZES) <= set(FAMILIES)


@pytest.mark.parametrize("family", ["gaussian", "mixture", "low_rank", "sample"])
def test_forecasts_in_one_step_come_from_the_distribution_of_one_step(family: str) -> None:
    """Each member has a start of its own, so the distribution is averaged over 60 starts; five standard errors."""
    pipeline, state = tiny_pipeline(family), history(1)
    members = forecast(pipeline, state, 1, ensemble_size=1500, num_inference_steps=1, batch_size=500).samples[:, 0, 0]
    laws = [
        pipeline.one_step_distribution(state, generator=torch.Generator().manual_seed(i), num_draws=20)
        for i in range(60)
    ]
    assert laws[0].shape == (1, 1, 16)
    mean = torch.cat([law.mean for law in laws])
    variance = torch.cat([law.variance for law in laws]).mean(0) + mean.var(0)
    error = 5 * (members.var(0) / 1500 + mean.var(0) / 60).sqrt()
    assert bool(((mean.mean(0) - members.mean(0)).abs() < error).all())
    # of 60 starts a variance between them is known to 1 / sqrt(30): 18 %, so 9 % of a deviation, at 16 points
    torch.testing.assert_close(variance.sqrt(), members.std(0), rtol=0.35, atol=0)
    torch.testing.assert_close(variance.mean().sqrt(), members.var(0).mean().sqrt(), rtol=0.15, atol=0)
    if family != "sample":
        quantiles = laws[0].quantile([0.05, 0.95])
        assert bool((quantiles[0] < quantiles[1]).all())
