"""What other tools call the axes and variables of a forecast, and the attributes of the CF conventions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

__all__ = ["CF_VERSION", "DIMENSIONS", "Convention", "coordinate_attributes", "variable_attributes"]


Convention = Literal["weatherbenchx", "weatherbench2", "earth2studio"]
CF_VERSION = "CF-1.11"
DIMENSIONS: dict[str, dict[str, str]] = {
    "weatherbenchx": {"sample": "number", "init": "init_time", "lead": "lead_time"},
    "weatherbench2": {"sample": "realization", "init": "time", "lead": "prediction_timedelta"},
    "earth2studio": {
        "sample": "ensemble",
        "init": "time",
        "lead": "lead_time",
        "latitude": "lat",
        "longitude": "lon",
    },
}
"""What each tool calls the axes. WeatherBench-X reads WeatherBench 2's names too, and renames them."""
STANDARD_NAMES = {
    "10m_u_component_of_wind": "eastward_wind",
    "10m_v_component_of_wind": "northward_wind",
    "2m_temperature": "air_temperature",
    "air": "air_temperature",
    "geopotential": "geopotential",
    "mean_sea_level_pressure": "air_pressure_at_mean_sea_level",
    "sea_surface_temperature": "sea_surface_temperature",
    "specific_humidity": "specific_humidity",
    "surface_pressure": "surface_air_pressure",
    "temperature": "air_temperature",
    "u_component_of_wind": "eastward_wind",
    "v_component_of_wind": "northward_wind",
}
COORDINATES: dict[str, dict[str, str]] = {
    "sample": {"standard_name": "realization", "long_name": "number of the sample"},
    "init": {"standard_name": "forecast_reference_time", "long_name": "time of the last known state"},
    "lead": {"standard_name": "forecast_period", "long_name": "time since the last known state"},
    "valid_time": {"standard_name": "time", "long_name": "time that is predicted"},
    "latitude": {"standard_name": "latitude", "units": "degrees_north", "axis": "Y"},
    "longitude": {"standard_name": "longitude", "units": "degrees_east", "axis": "X"},
    "quantile": {"long_name": "level of the quantile", "units": "1"},
}
STATISTICS: dict[str, dict[str, str]] = {
    "prediction": {"long_name": "mean of the samples", "cell_methods": "realization: mean"},
    "uncertainty": {
        "long_name": "standard deviation of the samples",
        "cell_methods": "realization: standard_deviation",
    },
    "epistemic": {"long_name": "the head's own estimate of its standard deviation"},
    "lower": {"long_name": "lower end of the interval"},
    "upper": {"long_name": "upper end of the interval"},
    "quantile": {"long_name": "quantiles of the samples"},
}


def coordinate_attributes(role: str) -> dict[str, str]:
    """Attributes of an axis by its role ("sample", "init", "lead") or its name; none for axes of an equation."""
    return dict(COORDINATES.get(role, {}))


def variable_attributes(variable: str, units: Mapping[str, str], statistic: str | None = None) -> dict[str, Any]:
    """Attributes of a variable, or of a statistic of it; its level is named where it is part of the name."""
    stem, _, level = variable.rpartition("_")
    on_level = level.isdecimal() and stem in STANDARD_NAMES
    name = STANDARD_NAMES.get(stem if on_level else variable)
    found: dict[str, Any] = {} if statistic is None else dict(STATISTICS[statistic])
    found["long_name"] = ": ".join([variable.replace("_", " "), *([found["long_name"]] if statistic else [])])
    if name is not None:
        found["standard_name"] = name
    if on_level:
        found["pressure_level_hPa"] = int(level)
    if units.get(variable):
        found["units"] = units[variable]
    return found
