"""Small weather records in WeatherBench2's layout, with values that tell where they came from."""

from typing import Any

import numpy as np
import pytest

HOURS = 6


def record(num_times: int = 40, *, step: float = 10.0, start: str = "2013-01-01") -> Any:
    """2m_temperature = 280 + 5 cos(time) + latitude/10 + noise; temperature has two levels; a static mask."""
    xarray = pytest.importorskip("xarray", reason="weather records need xarray")
    generator = np.random.default_rng(0)
    time = np.datetime64(start, "ns") + np.arange(num_times) * np.timedelta64(HOURS, "h")
    latitude, longitude = np.arange(-20.0, 21.0, step), np.arange(0.0, 360.0, 2 * step)
    shape = (num_times, len(latitude), len(longitude))
    wave = 5 * np.cos(np.arange(num_times) / 3)[:, None, None]
    surface = 280 + wave + latitude[:, None] / 10 + generator.standard_normal(shape)
    upper = np.stack([surface - 20, surface - 40], 1)
    dims = ("time", "latitude", "longitude")
    return xarray.Dataset(
        {
            "2m_temperature": (dims, surface.astype(np.float32)),
            "temperature": (("time", "level", *dims[1:]), upper.astype(np.float32)),
            "land_sea_mask": (dims[1:], generator.random(shape[1:]).astype(np.float32)),
        },
        coords={"time": time, "level": [850, 500], "latitude": latitude, "longitude": longitude},
    )
