"""Weather records: what is read, in which order, from which period, and what is said about broken ones."""

import json
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from support.weather_records import record

from marigold_uq.field.config import FieldData, WeatherData
from marigold_uq.field.data import (
    FieldDataError,
    Transitions,
    WeatherSequences,
    latitude_weights,
    open_weather,
    statistics_of,
)
from marigold_uq.field.encoding import fit_encoder, fit_harmonics
from marigold_uq.field.splits import open_split
from marigold_uq.models.field_grid import NUM_WAVES, harmonic_basis, require_grid

VARIABLES = ("2m_temperature", "temperature_850")


def sequences(data: Any = None, variables: tuple[str, ...] = VARIABLES) -> WeatherSequences:
    return WeatherSequences(record() if data is None else data, variables, source="record")


@pytest.mark.parametrize("suffix", [".zarr", ".nc"])
def test_zarr_and_netcdf_hold_the_same_states_in_the_order_of_the_names(tmp_path: Path, suffix: str) -> None:
    data, path = record(), tmp_path / f"record{suffix}"
    if suffix == ".zarr":
        pytest.importorskip("zarr", reason="zarr stores need zarr")
        data.to_zarr(path)
    else:
        pytest.importorskip("netCDF4", reason="netCDF files need netCDF4")
        data.rename(latitude="lat", longitude="lon").to_netcdf(path)
    for names in (VARIABLES, VARIABLES[::-1]):
        states = open_weather(path, names).read(0, 3, 6)
        assert states.shape == (3, 2, 5, 18)
        for channel, name in enumerate(names):
            source = data["2m_temperature"] if name == "2m_temperature" else data["temperature"].sel(level=850)
            np.testing.assert_array_equal(states[:, channel].numpy(), source.values[3:6])


def test_nothing_is_read_until_it_is_asked_for(tmp_path: Path) -> None:
    pytest.importorskip("zarr", reason="zarr stores need zarr")
    record().to_zarr(tmp_path / "record.zarr")
    opened = open_weather(tmp_path / "record.zarr", VARIABLES)
    assert not opened.data["2m_temperature"]._in_memory
    opened.read(0, 0, 2)
    assert not opened.data["2m_temperature"]._in_memory
    loaded = opened.load()
    torch.testing.assert_close(loaded.read(0, 5, 9), opened.read(0, 5, 9), rtol=0, atol=0)


def test_a_region_across_greenwich_runs_from_west_to_east(tmp_path: Path) -> None:
    data = record()
    data.to_netcdf(tmp_path / "record.nc")
    region = open_weather(tmp_path / "record.nc", VARIABLES, latitude=(-10, 10), longitude=(-45, 45))
    np.testing.assert_array_equal(region.coordinates["longitude"], [-40, -20, 0, 20, 40])
    np.testing.assert_array_equal(region.coordinates["latitude"], [-10, 0, 10])
    expected = data["2m_temperature"].sel(latitude=[-10, 0, 10], longitude=[320, 340, 0, 20, 40]).values
    np.testing.assert_array_equal(region.read(0, 0, 40)[:, 0].numpy(), expected)


def test_statistics_are_by_name_and_of_the_training_period_alone() -> None:
    data = record()
    train = sequences(data).between("2013-01-01", "2013-01-05")
    before = statistics_of(train)
    reordered = statistics_of(sequences(data, VARIABLES[::-1]).between("2013-01-01", "2013-01-05"))
    assert reordered == before
    values = data["2m_temperature"].values[:20].astype(np.float64)
    assert before["2m_temperature"].mean == pytest.approx(values.mean())
    assert before["2m_temperature"].increment_std == pytest.approx(np.diff(values, axis=0).std(ddof=1))
    data["2m_temperature"][20:] *= 3
    assert statistics_of(sequences(data).between("2013-01-01", "2013-01-05")) == before


def test_periods_are_cut_at_their_dates_and_must_not_overlap(tmp_path: Path) -> None:
    record(80).to_netcdf(tmp_path / "record.nc")
    periods = {"train": ("2013-01-01", "2013-01-09"), "validation": ("2013-01-10", "2013-01-13")}
    config = WeatherData(str(tmp_path / "record.nc"), list(VARIABLES), test=("2013-01-14", "2013-01-20"), **periods)
    split = open_split(FieldData(weather=config))
    assert [len(part.times(0)) for part in split] == [36, 16, 28]
    overlap = WeatherData(str(tmp_path / "record.nc"), list(VARIABLES), test=("2013-01-13", "2013-01-20"), **periods)
    with pytest.raises(ValueError, match="overlap"):
        open_split(FieldData(weather=overlap))


def test_only_the_target_hours_are_forecast() -> None:
    windows = Transitions(sequences(), target_hours=[6])
    assert len(windows) == 9  # ten days have a morning; the first has no two states before it
    assert {windows[i]["time"] % 86_400 for i in range(len(windows))} == {0.0}  # from midnight


def test_weights_are_those_of_the_sphere() -> None:
    weights = latitude_weights(sequences().coordinates)
    assert weights is not None
    expected = np.cos(np.deg2rad([-20, -10, 0, 10, 20]))
    np.testing.assert_allclose(weights[:, 0].numpy(), expected / expected.mean())
    assert latitude_weights({"x": np.arange(3.0)}) is None


def _unsorted(data: Any) -> Any:
    return data.isel(time=[0, 1, 3, 2, *range(4, 40)])


def _gap(data: Any) -> Any:
    return data.isel(time=[*range(10), *range(12, 40)])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data.drop_vars("2m_temperature"), "missing variable '2m_temperature'; it holds .*land_sea_mask"),
        (lambda data: data.isel(level=[1]), r"temperature has the levels \[500\], not 850"),
        (_unsorted, "time is unsorted: 2013-01-01T12:00 follows 2013-01-01T18:00"),
        (_gap, "time gap: 2013-01-03T06:00 is followed by 2013-01-04T00:00, the usual step is 6 h"),
        (lambda data: data.isel(longitude=[0, 2, 1]), "longitude is not sorted"),
        (lambda data: data.isel(time=[0]), "at least 2 dates"),
    ],
)
def test_broken_records_are_named(change: Any, message: str) -> None:
    with pytest.raises(FieldDataError, match=message):
        sequences(change(record()))


def test_an_ocean_mask_of_nan_is_named() -> None:
    data = record()
    data["2m_temperature"][:, 1, 2] = np.nan
    with pytest.raises(FieldDataError, match=r"2m_temperature holds NaN .* 1 of 90 points at all times, like the land"):
        statistics_of(sequences(data))
    with pytest.raises(FieldDataError, match="2m_temperature holds NaN or infinity at 3 places around state 4"):
        Transitions(sequences(data))[2]


def test_another_grid_is_named() -> None:
    coarse, fine = sequences(), sequences(record(step=5.0))
    with pytest.raises(FieldDataError, match="wrong grid: latitude has 9 points from -20 to 20, but the grid asked"):
        require_grid("record", fine.coordinates, coarse.coordinates)
    with pytest.raises(FieldDataError, match="no grid point in latitude"):
        open_weather_region((50, 60))


def open_weather_region(latitude: tuple[float, float]) -> None:
    from marigold_uq.field.data.weather import _region

    _region(record(), "record", latitude, None)


class Bomb:
    """Unpickling it makes a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize(
    "encoding",
    [
        {"dtype": "|O", "filters": [{"id": "pickle", "protocol": 4}], "compressor": None},
        {"dtype": "<f8", "filters": None, "compressor": {"id": "pickle", "protocol": 4}},
        {"dtype": "|O", "filters": [{"id": "vlen-utf8"}], "compressor": {"id": "pickle", "protocol": 4}},
    ],
)
def test_a_pickle_in_a_zarr_record_is_not_run(tmp_path: Path, encoding: dict[str, Any]) -> None:
    store = tmp_path / "stranger.zarr"
    (store / "time").mkdir(parents=True)
    (store / ".zgroup").write_text('{"zarr_format": 2}')
    array = {"zarr_format": 2, "shape": [2], "chunks": [2], "fill_value": 0, "order": "C", **encoding}
    (store / "time" / ".zarray").write_text(json.dumps(array))
    (store / "time" / ".zattrs").write_text('{"_ARRAY_DIMENSIONS": ["time"]}')
    (store / "time" / "0").write_bytes(pickle.dumps(Bomb(tmp_path / "was_here")))
    with pytest.raises(FieldDataError, match=r"stranger\.zarr"):
        open_weather(store, VARIABLES)
    assert not (tmp_path / "was_here").exists()


def test_a_netcdf_record_never_leads_to_another_file(tmp_path: Path) -> None:
    record().to_netcdf(tmp_path / "secret.nc")
    record().drop_vars("2m_temperature").to_netcdf(tmp_path / "a.nc")
    with h5py.File(tmp_path / "a.nc", "a") as file:
        file["2m_temperature"] = h5py.ExternalLink(str(tmp_path / "secret.nc"), "2m_temperature")
    with pytest.raises(FieldDataError, match=r"'2m_temperature' is a link, perhaps to another file"):
        open_weather(tmp_path / "a.nc", VARIABLES)


@pytest.mark.parametrize("suffix", ["nc", "zarr"])
def test_damaged_records_are_errors_of_ours(tmp_path: Path, suffix: str) -> None:
    whole = tmp_path / f"whole.{suffix}"
    record().to_netcdf(whole) if suffix == "nc" else record().to_zarr(whole)
    rng, refused = np.random.default_rng(1), 0
    for number in range(25):
        path = tmp_path / f"damaged{number}.{suffix}"
        shutil.copyfile(whole, path) if suffix == "nc" else shutil.copytree(whole, path)
        files = [path] if suffix == "nc" else sorted(one for one in path.rglob("*") if one.is_file())
        file = files[rng.integers(len(files))]
        content = bytearray(file.read_bytes())
        for place in rng.integers(0, len(content), 1 + len(content) // 200):
            content[place] = rng.integers(0, 256)
        file.write_bytes(content[: rng.integers(len(content))] if number % 4 == 0 else content)
        try:
            open_weather(path, VARIABLES).read(0, 0, 3)
        except FieldDataError:
            refused += 1
    assert refused > 2


def test_a_missing_file_is_named() -> None:
    with pytest.raises(FileNotFoundError, match=r"no weather record /nowhere\.zarr"):
        open_weather("/nowhere.zarr", VARIABLES)


def test_persistence_of_the_real_record_is_what_others_measured(data_root: Path) -> None:
    """RMSE of persistence from July to December 2014, 6 h 2.317 K and 24 h 3.015 K; weighted 2.266 and 2.726."""
    path = data_root / "weather" / "air_temperature.nc"
    if not path.exists():
        pytest.skip(f"no {path}")
    test = open_weather(path, ["air"]).between("2014-07-01", "2014-12-31").load()
    states, weights = test.read(0, 0, len(test.times(0))).double(), latitude_weights(test.coordinates)
    assert weights is not None
    for lead, plain, weighted in ((1, 2.317, 2.266), (4, 3.015, 2.726)):
        error = (states[lead:] - states[:-lead]).square()
        assert float(error.mean().sqrt()) == pytest.approx(plain, abs=5e-4)
        assert float((error * weights).mean().sqrt()) == pytest.approx(weighted, abs=5e-4)


def test_harmonics_find_the_mean_of_the_hour_and_season() -> None:
    """A field made of the waves themselves is found again, and white noise around it only by its error."""
    data = record(4 * 500)
    weather = WeatherSequences(data, ("2m_temperature",))
    waves = harmonic_basis(weather.times(0))
    truth = torch.randn(NUM_WAVES, 5, 18, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    noise = torch.randn(2000, 5, 18, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    values = torch.einsum("tw,w...->t...", waves, truth) + 0.1 * noise
    data["2m_temperature"][:] = values.numpy()
    found = fit_harmonics(weather)
    assert found.shape == (1, NUM_WAVES, 5, 18)
    # errors: 0.1 / sqrt(2000/4) for products of two waves, and a year and a half does not separate them perfectly
    torch.testing.assert_close(found[0], truth, rtol=0, atol=5 * 0.1 / 500**0.5)


def test_a_short_record_says_nothing_of_other_seasons() -> None:
    """40 days of winter: the fitted mean of July is a mean of what was seen, not a wave that left the record."""
    weather = WeatherSequences(record(160), ("2m_temperature",))
    found, july = fit_harmonics(weather), np.datetime64("2013-07-01T00", "s").astype(np.float64) + 21_600 * np.arange(4)
    means = torch.einsum("tw,cw...->tc...", harmonic_basis(july), found)
    states = weather.read(0, 0, 160).double()
    assert bool((means > states.amin(0)).all())
    assert bool((means < states.amax(0)).all())
    torch.testing.assert_close(means.mean(0), states.mean(0), rtol=0, atol=1e-6)  # four times a day: waves average out


def test_the_seasonal_channel_is_the_fitted_mean_of_the_predicted_time() -> None:
    weather = sequences(record(4 * 400))
    encoder = fit_encoder(weather, seasonal=True)
    times = weather.times(0)
    condition = encoder.condition(weather.read(0, 6, 8).unsqueeze(0), torch.tensor(times[7:8]))
    mean = torch.einsum("w,cw...->c...", harmonic_basis(times[8:9])[0], fit_harmonics(weather))
    statistics = encoder.statistics["temperature_850"]
    torch.testing.assert_close(condition[0, -1], statistics.normalize_state(mean[1]).float(), rtol=1e-4, atol=1e-4)
    assert condition.shape[1] == encoder.condition_channels == 6
