"""FieldForecastPipeline: members, lead times, random streams, files, xarray, calibration, bad input."""

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.tiny_field import NETWORK, SIZES, tiny_pipeline, tiny_scheduler, tiny_trajectories, tiny_weather
from support.weather_records import record
from torch import Tensor

from marigold_uq.calibration import Calibration
from marigold_uq.field.data import FieldDataError, Trajectories
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
    return pipeline(states, num_leads, generator=torch.Generator().manual_seed(3), **{"num_members": 4, **options})


@pytest.mark.parametrize("family", FAMILIES)
def test_members_do_not_depend_on_batch_size_or_company(family: str) -> None:
    pipeline = tiny_pipeline(family)
    everything = forecast(pipeline, history(), max_batch_size=100).members
    assert everything.shape == (4, 3, 3, 1, 16)
    torch.testing.assert_close(forecast(pipeline, history(), max_batch_size=5).members, everything, **ROUNDING)
    torch.testing.assert_close(forecast(pipeline, history(1), num_members=2).members, everything[:2, :1], **ROUNDING)
    torch.testing.assert_close(forecast(pipeline, history(), 1).members, everything[:, :, :1], **ROUNDING)
    assert float((everything[0] - everything[1]).abs().max()) > 0.01
    assert float((everything[:, 0] - everything[:, 1]).abs().max()) > 0.01


@pytest.mark.parametrize("family", FAMILIES)
def test_a_saved_pipeline_gives_the_same_forecast(family: str, tmp_path: Path) -> None:
    pipeline = tiny_pipeline(family)
    pipeline.set_calibration(Calibration(tau=0.5, num_steps=2), [1.0, 2.0])
    before = forecast(pipeline, history()).members
    pipeline.save_pretrained(tmp_path / "model")
    loaded = FieldForecastPipeline.from_pretrained(tmp_path / "model")
    torch.testing.assert_close(forecast(loaded, history()).members, before, **ROUNDING)
    assert loaded.kappas == [1.0, 2.0]
    assert loaded.scheduler.config.tau == 0.5


def test_a_saved_pipeline_loads_in_a_fresh_process(tmp_path: Path) -> None:
    tiny_weather().save_pretrained(tmp_path / "model")
    code = (
        "from marigold_uq.pipelines.field import FieldForecastPipeline as P;"
        f"p = P.from_pretrained({str(tmp_path / 'model')!r}); print(p.encoder.config.static_names, p.encoder.space)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "['land_sea_mask', 'mean_2m_temperature', 'mean_temperature_850'] (5, 18)" in done.stdout


def test_statistics_of_a_forecast_are_those_of_its_members() -> None:
    output = forecast(tiny_pipeline(), history(), num_members=9, quantiles=(0.1, 0.5), output_epistemic=True)
    torch.testing.assert_close(output.mean, output.members.mean(0))
    torch.testing.assert_close(output.spread, output.members.std(0))
    torch.testing.assert_close(output.quantiles[1], output.members.median(0).values)  # M = 9: the fifth member
    torch.testing.assert_close(output.quantiles[0], output.members.min(0).values)  # 0.1 (9 + 1) = 1: the first
    assert output.epistemic is not None
    assert output.epistemic.shape == output.mean.shape
    assert bool((output.epistemic > 0).all())
    np.testing.assert_allclose(output.lead_times, [0.5, 1.0, 1.5])


def test_families_without_a_spread_have_no_epistemic_estimate() -> None:
    with pytest.raises(ValueError, match="has no variance"):
        forecast(tiny_pipeline("point"), history(), output_epistemic=True)


def test_kappa_stretches_each_lead_time_and_is_not_fed_back() -> None:
    pipeline = tiny_pipeline()
    plain = forecast(pipeline, history())
    pipeline.set_calibration(Calibration(), [2.0, 0.5])
    stretched = forecast(pipeline, history())
    torch.testing.assert_close(stretched.mean, plain.mean)
    factor = torch.tensor([2.0, 0.5, 0.5]).reshape(3, 1, 1)
    torch.testing.assert_close(stretched.spread, factor * plain.spread, rtol=1e-4, atol=1e-5)


def test_damping_moves_the_mean_towards_the_season_keeps_the_spread_and_is_not_fed_back(tmp_path: Path) -> None:
    """With half of its distance kept the mean lies half way; with none it is the season's mean, whatever the state."""
    pipeline, states = tiny_weather(), record()
    start = states.isel(time=slice(4, 6))
    plain = forecast(pipeline, start, output_type="pt")
    pipeline.set_calibration(Calibration(), [1.0], [0.5, 0.0])
    pipeline.save_pretrained(tmp_path / "model")
    damped = forecast(FieldForecastPipeline.from_pretrained(tmp_path / "model"), start, output_type="pt")
    assert plain.init_times is not None
    expected = pipeline.expected_states(plain.init_times, 3)
    seconds = torch.from_numpy(plain.init_times + 2 * pipeline.encoder.config.time_step)
    torch.testing.assert_close(expected[:, 1], pipeline.encoder.seasonal_mean(seconds))
    torch.testing.assert_close(damped.mean[:, 0], (plain.mean[:, 0] + expected[:, 0]) / 2)
    torch.testing.assert_close(damped.mean[:, 1:], expected[:, 1:])
    torch.testing.assert_close(damped.spread, plain.spread, rtol=1e-3, atol=1e-3)
    pipeline.set_calibration(Calibration(), [1.0], [0.5, 1.0])
    torch.testing.assert_close(forecast(pipeline, start, output_type="pt").mean[:, 1:], plain.mean[:, 1:])


def test_damping_is_between_0_and_1_and_needs_a_season() -> None:
    with pytest.raises(ValueError, match="between 0 and 1"):
        tiny_weather().set_calibration(Calibration(), None, [0.5, 1.2])
    with pytest.raises(ValueError, match="between 0 and 1"):
        tiny_weather().set_calibration(Calibration(), None, [math.nan])
    with pytest.raises(ValueError, match="season's mean"):
        tiny_pipeline().set_calibration(Calibration(), None, [0.5])


def test_the_calibrated_interval_is_the_mean_and_so_many_spreads_and_survives_saving(tmp_path: Path) -> None:
    pipeline = tiny_pipeline()
    with pytest.raises(ValueError, match="no calibrated interval"):
        _ = forecast(pipeline, history()).interval
    promised = Calibration(
        conformal_scale=(2.0, 3.0, 3.5), coverage=0.9, num_calibration=50, num_members=4, num_steps=2
    )
    pipeline.set_calibration(promised)
    pipeline.save_pretrained(tmp_path / "model")
    found = forecast(FieldForecastPipeline.from_pretrained(tmp_path / "model"), history())
    lower, upper = found.interval
    scales = torch.tensor([2.0, 3.0, 3.5]).reshape(1, 3, 1, 1)
    torch.testing.assert_close(upper - lower, 2 * scales * found.spread)
    torch.testing.assert_close((upper + lower) / 2, found.mean)
    assert found.interval_coverage == 0.9
    dataset = found.to_xarray()
    np.testing.assert_array_equal(dataset["u_upper"], upper[:, :, 0])
    assert dataset["u_lower"].dims == dataset["u_mean"].dims
    assert len(pipeline(history(), 2).members) == 4  # the calibrated number is the default
    for other in ({"num_leads": 4}, {"num_members": 3}, {"num_inference_steps": 1}):
        assert forecast(pipeline, history(), **other).interval_scales is None


def test_the_calibrated_number_of_steps_is_the_default_of_a_call() -> None:
    pipeline = tiny_pipeline()
    pipeline.set_calibration(Calibration(num_steps=2))
    two = forecast(pipeline, history()).members
    torch.testing.assert_close(two, forecast(pipeline, history(), num_inference_steps=2).members, rtol=0, atol=0)
    assert float((two - forecast(pipeline, history(), num_inference_steps=3).members).abs().max()) > 1e-3


def test_white_colour_changes_nothing_but_the_numbers_and_red_colour_smooths() -> None:
    """The same marginal spread within Monte-Carlo error, and neighbours that agree where the colour is red."""
    pipeline = tiny_pipeline()
    states, many = history(1), {"num_members": 600, "num_inference_steps": 1, "max_batch_size": 600}
    white = forecast(pipeline, states, 1, **many)
    color = NoiseColor(10, [1, 16])
    smooth = torch.randn(200, 1, 16, generator=torch.Generator().manual_seed(0))
    smooth = (smooth + smooth.roll(1, -1) + smooth.roll(-1, -1) + smooth.roll(2, -1)) / 2
    for timestep in range(10):
        color.set_power(timestep, smooth)
    pipeline.register_modules(noise_color=color)
    red = forecast(pipeline, states, 1, **many)
    torch.testing.assert_close(red.spread, white.spread, rtol=0.2, atol=0)  # se 3 % each, and U_T's share is white
    correlations = [
        float(torch.corrcoef(output.members[:, 0, 0, 0].T)[torch.arange(15), torch.arange(1, 16)].mean())
        for output in (white, red)
    ]
    assert correlations[1] > correlations[0] + 0.2


def test_white_colour_has_the_law_of_the_plain_sampler_over_several_steps() -> None:
    """With sigma > 0 and tau < 1: mean and variance at every point within 4.5 standard errors of 4000 members."""
    pipeline, count = tiny_pipeline(), 4000
    pipeline.set_calibration(Calibration(tau=0.5))
    many = {"num_members": count, "num_inference_steps": 3, "max_batch_size": count}
    plain = forecast(pipeline, history(1), 1, **many).members
    pipeline.register_modules(noise_color=NoiseColor(10, [1, 16]))
    colored = forecast(pipeline, history(1), 1, **many).members
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
    output = tiny_weather()(last_states(), 2, num_members=5, quantiles=(0.2, 0.5), output_type="pt")
    data = output.to_xarray()
    assert data["2m_temperature_quantile"].dims == ("quantile", "init_time", "lead_time", "latitude", "longitude")
    np.testing.assert_allclose(
        data["2m_temperature_quantile"].sel(quantile=0.5), output.members[:, :, :, 0].median(0).values, rtol=1e-6
    )


def test_records_with_levels_and_on_other_grids_are_read_by_the_model_s_own_points() -> None:
    """WeatherBench2's layout as it is; longitudes from -180 to 180; north first: the same forecast."""
    pipeline, data = tiny_weather(), record()
    expected = pipeline(last_states(), num_members=2, generator=torch.Generator().manual_seed(0))
    turned = data.assign_coords(longitude=(data.longitude + 180) % 360 - 180).sortby("longitude")
    for other in (data, turned, data.sortby("latitude", ascending=False)):
        found = pipeline(other, num_members=2, generator=torch.Generator().manual_seed(0))
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
    output = pipeline(last_states(), 3, num_members=2, generator=torch.Generator().manual_seed(0))
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
    np.testing.assert_allclose(output["2m_temperature_spread"], spread, rtol=1e-4, atol=1e-4)


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
    output = pipeline(np.stack(arrays, 1), 2, num_members=2, time=np.datetime64("2013-01-10T18:00"))
    path = output.save(tmp_path / f"forecast{suffix}", convention)
    opened = xarray.open_zarr(path, chunks=None) if suffix == ".zarr" else xarray.open_dataset(path)
    assert opened["2m_temperature"].dims == dims
    np.testing.assert_allclose(opened["2m_temperature"].values, output.members[:, :, :, 0].numpy())
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
    with pytest.raises(ValueError, match="give `time`"):
        forecast(tiny_weather(), torch.full((1, 2, 2, 5, 18), 270.0))
    with pytest.raises(ValueError, match="one for each of the 3 x 4 chains; got 5"):
        tiny_pipeline()(history(), num_members=4, generator=[torch.Generator()] * 5)


def test_what_is_not_predicted_cannot_be_rolled_out() -> None:
    pipeline = tiny_weather(targets=("temperature_850",))
    states = torch.stack([torch.full((2, 5, 18), 280.0), torch.full((2, 5, 18), 260.0)], 1)
    time = np.datetime64("2013-01-10")
    assert pipeline(states, num_members=2, time=time).members.shape == (2, 1, 1, 1, 5, 18)
    with pytest.raises(ValueError, match="cannot be fed back, so only num_leads=1"):
        pipeline(states, 2, num_members=2, time=time)


def test_statistics_of_other_variables_are_refused() -> None:
    good = FieldEncoder.of(tiny_trajectories())
    with pytest.raises(FieldDataError, match=r"mismatched statistics: they are of \['v'\]"):
        FieldEncoder(statistics={"v": good.statistics["u"].to_dict()}, coordinates={"x": [0.0, 1.0]})
    other = tiny_trajectories(num_points=12)
    with pytest.raises(FieldDataError, match="wrong grid: x has 12 points"):
        good.require_data(other)
    slow = Trajectories(tiny_trajectories().states, np.arange(16.0), np.arange(8.0))
    with pytest.raises(FieldDataError, match=r"states are 1 apart, the model steps by 0\.5"):
        good.require_data(slow)


def test_the_clock_is_that_of_the_predicted_time_and_place() -> None:
    """At 0 degrees, from 06 UTC, a 6-hour step predicts noon: sine 0, cosine -1; at 180 degrees midnight."""
    encoder = tiny_weather().encoder
    history_states = torch.zeros(1, 2, 2, 5, 18)
    seconds = np.datetime64("2013-01-10T06:00", "s").astype(np.float64)
    clock = encoder.condition(history_states, torch.tensor([seconds], dtype=torch.float64))[:, -6:-4]
    east = list(encoder.coordinates["longitude"]).index(180.0)
    torch.testing.assert_close(clock[0, :, 0, 0], torch.tensor([0.0, -1.0]), rtol=0, atol=1e-5)
    torch.testing.assert_close(clock[0, :, 0, east], torch.tensor([0.0, 1.0]), rtol=0, atol=1e-5)


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
