"""Variables of different units: every choice is the one made for each alone, and every score is in its own unit."""

import math
import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.tiny_field import tiny_pipeline, tiny_weather
from support.weather_records import record
from torch import Tensor

from marigold_uq.calibration import Calibration, IntervalGrid, interval_grid_images
from marigold_uq.field import calibrate, settings
from marigold_uq.field.calibrate import CalibrationOptions, calibrate_field
from marigold_uq.field.config import FieldData, WeatherData
from marigold_uq.field.data import Transitions, WeatherSequences
from marigold_uq.field.evaluate import FieldEvaluation, evaluate_field, report
from marigold_uq.field.forecasters import PipelineForecaster
from marigold_uq.field.intervals import weighted_interval_grid
from marigold_uq.field.scorecard import make_scorecard, write_scorecard
from marigold_uq.field.scores import Channels, accumulate_channels
from marigold_uq.field.settings import TauSearch

UNITS = {"temperature": "K", "geopotential": "m2 s-2"}
SCALE = {"temperature": 1.0, "geopotential": 1000.0}
ERROR = 0.5
WIDTH = {"temperature": 1.5, "geopotential": 0.3}
"""Where tau is 1, of every second point; the others are as wide as the error."""


@dataclass(frozen=True)
class Walks:
    """Random walks of some of two variables, one of them a thousand times larger; a `FieldSequences`."""

    variables: tuple[str, ...]
    num_sequences: int = 200
    calendar: bool = False
    time_step: float = 1.0
    source: str = "walks"

    @property
    def coordinates(self) -> dict[str, np.ndarray]:
        return {"x": np.arange(8.0)}

    @property
    def units(self) -> dict[str, str]:
        return {name: UNITS[name] for name in self.variables}

    def times(self, sequence: int) -> np.ndarray:
        return np.arange(6.0)

    def read(self, sequence: int, start: int, stop: int) -> Tensor:
        parts = [SCALE[name] * noise((6, 8), name, sequence).cumsum(0) for name in self.variables]
        return torch.stack(parts, 1)[start:stop]

    def static_fields(self) -> dict[str, Tensor]:
        return {}


def noise(shape: tuple[int, ...], name: str, *key: int) -> Tensor:
    """Numbers that follow from a variable and a key alone, whatever else there is."""
    seed = zlib.crc32(repr((name, key)).encode())
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def known_samples(pipeline: Any, rollouts: Any, how: Any) -> Tensor:
    """Samples around the truth; two steps have the smaller error. No kappa can mend what tau can."""
    targets = list(pipeline.encoder.config.targets)
    taus = pipeline.config.target_taus or [pipeline.scheduler.config.tau] * len(targets)
    parts = []
    for number, (name, tau) in enumerate(zip(targets, taus, strict=True)):
        truth = rollouts.target[:, :, number]
        error = (2 if how.steps == 1 else 1) * ERROR * noise(tuple(truth.shape), name, how.steps, len(truth))
        width = torch.where(torch.arange(8) % 2 == 0, WIDTH[name] * math.sqrt(tau), ERROR)
        spread = width * noise((how.ensemble_size, *truth.shape), name, how.steps, 1)
        parts.append(truth + SCALE[name] * (error + spread))
    return pipeline.calibrate_samples(torch.stack(parts, 3), None)


def calibrated(variables: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> tuple[Any, dict[str, Any]]:
    for module in (calibrate, settings):
        monkeypatch.setattr(module, "draw_samples", known_samples)
    data = Walks(variables)
    pipeline = tiny_pipeline(data=data)
    options = CalibrationOptions(steps=[1, 2], num_windows=16, num_leads=2, color=False, tau_evaluations=6)
    pipeline.register_to_config(default_denoising_steps=2)
    return pipeline, calibrate_field(pipeline, data, options)


def test_choices_for_two_variables_are_those_made_for_each_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """K and m2/s2, a thousand times larger: tau, kappas and half widths of both, from the same samples."""
    pipeline, both = calibrated(("temperature", "geopotential"), monkeypatch)
    found = both["variables"]
    for name, unit in UNITS.items():
        _, alone = calibrated((name,), monkeypatch)
        assert found[name]["unit"] == unit
        assert found[name]["tau"] == pytest.approx(alone["best"]["tau"])
        for key in ("kappas", "half_widths_95"):
            assert found[name][key] == pytest.approx(alone["variables"][name][key], rel=1e-4)
        assert both["best"]["steps"] == alone["best"]["steps"] == 2
    for name in UNITS:  # (0.5 / 1.5)^2 = 0.11 and (0.5 / 0.3)^2 = 2.8: one tau for both would serve neither
        assert abs(math.log(found[name]["tau"] * (WIDTH[name] / ERROR) ** 2)) < 0.7
    assert pipeline.config.target_taus == [found[name]["tau"] for name in UNITS]
    assert pipeline.config.calibrated_by_variable


def test_taus_of_variables_stretch_the_draws_of_each_around_the_same_means(tmp_path: Path) -> None:
    pipeline, state, taus = tiny_weather(), record(), [0.25, 4.0]
    found = []
    for several in (None, [0.0, 0.0], taus):
        pipeline.calibrate(Calibration(), target_taus=several)
        generator = torch.Generator().manual_seed(0)
        found.append(pipeline(state, 1, ensemble_size=3, num_inference_steps=1, generator=generator))
    for tau, name in zip(taus, pipeline.encoder.config.variables, strict=True):
        plain, mean, stretched = (one[name].values for one in found)
        assert np.abs(plain - mean).max() > 0.1
        np.testing.assert_allclose(stretched - mean, math.sqrt(tau) * (plain - mean), rtol=1e-3, atol=1e-3)
    pipeline.save_pretrained(tmp_path / "model")
    assert type(pipeline).from_pretrained(tmp_path / "model").config.target_taus == taus
    with pytest.raises(ValueError, match="target_taus must be one for each"):
        pipeline.calibrate(Calibration(), target_taus=[1.0])


def test_kappas_and_half_widths_of_variables_are_applied_to_their_own_channel() -> None:
    pipeline, state = tiny_weather(), record()
    plain = pipeline(state, 2, ensemble_size=6, generator=torch.Generator().manual_seed(0))
    grid = IntervalGrid((0.9,), ((1.0, 2.0, 3.0, 4.0),))
    pipeline.calibrate(Calibration(kappa=(2.0, 0.5, 1.0, 3.0), interval=grid), by_variable=True)
    found = pipeline(state, 2, ensemble_size=6, generator=torch.Generator().manual_seed(0), coverage=0.9)
    for number, name in enumerate(("2m_temperature", "temperature_850")):
        for lead in range(2):
            spread = found[f"{name}_uncertainty"].values[0, lead]
            before = plain[f"{name}_uncertainty"].values[0, lead]
            np.testing.assert_allclose(spread, (2.0, 0.5, 1.0, 3.0)[2 * number + lead] * before, rtol=1e-3)
            width = found[f"{name}_upper"].values[0, lead] - found[f"{name}_prediction"].values[0, lead]
            np.testing.assert_allclose(width, (1.0, 2.0, 3.0, 4.0)[2 * number + lead] * spread, rtol=1e-3, atol=1e-3)


def test_equal_weights_give_the_half_widths_of_images_and_whole_weights_those_of_repeated_points() -> None:
    ratios = noise((40, 12), "ratios").abs()
    groups = [index // 2 for index in range(40)]
    plain = weighted_interval_grid(ratios, torch.ones(40, 12), groups)
    assert plain == interval_grid_images(ratios, groups=groups)
    weights = torch.arange(1, 13).expand(40, 12).float()
    repeated = ratios.repeat_interleave(torch.arange(1, 13), 1)
    assert weighted_interval_grid(ratios, weights, groups) == interval_grid_images(repeated, groups=groups)
    assert weighted_interval_grid(ratios, 0 * weights, groups) is None


@pytest.mark.parametrize("best", [0.03, 0.4, 1.0, 2.5])
def test_the_search_finds_the_tau_of_a_known_curve_within_its_evaluations(best: float) -> None:
    search = TauSearch()
    tau = 1.0
    for _ in range(7):
        search.note(tau, math.log(tau / best) ** 2 + 0.1 * abs(math.log(tau / best)))
        tau = search.propose()
    assert abs(math.log(search.best / best)) < 0.35


def test_scores_of_each_variable_are_in_its_unit_and_those_together_in_increments(tmp_path: Path) -> None:
    pytest.importorskip("netCDF4", reason="a netCDF file is read")
    states = record(80)
    states["temperature"] = 100 * states["temperature"]
    states["2m_temperature"].attrs["units"], states["temperature"].attrs["units"] = "K", "cK"
    states.to_netcdf(tmp_path / "record.nc")
    periods = {"train": ("2013-01-01", "2013-01-09"), "validation": ("2013-01-10", "2013-01-12")}
    names = ["2m_temperature", "temperature_850"]
    data = WeatherData(str(tmp_path / "record.nc"), names, test=("2013-01-13", "2013-01-20"), **periods)
    options = FieldEvaluation(
        data=FieldData(weather=data), model="persistence", output=tmp_path / "both", num_one_step=9, num_rollouts=4,
        num_leads=3,
    )  # fmt: skip
    both = evaluate_field(options)
    for name, unit in zip(names, ("K", "cK"), strict=True):
        alone = evaluate_field(replace(options, targets=[name], output=tmp_path / name, figures=False))
        own = both["rollout"]["variables"][name]
        assert own["unit"] == unit
        assert own["crps"] == alone["rollout"]["crps"]  # physical, whatever else is scored
        assert alone["rollout"]["variables"][name]["rmse"] == alone["rollout"]["rmse"]
        assert f"crps, {name} ({unit})" in both["metrics"]
    small, large = (both["rollout"]["variables"][name]["crps"]["value"][0] for name in names)
    assert large == pytest.approx(100 * small, rel=1e-3)
    assert both["rollout"]["crps"]["value"][0] < 2  # in deviations of the increments
    text = report({"persistence": both})
    assert "2m_temperature (K)" in text
    assert "temperature_850 (cK)" in text
    climatology = evaluate_field(replace(options, model="climatology", output=tmp_path / "climatology"))
    card = make_scorecard(climatology, both)
    assert card.variables == ("2m_temperature (K)", "temperature_850 (cK)")
    assert card.lead_times == ("6 h", "12 h", "18 h")
    ratio = climatology["rollout"]["variables"][names[0]]["crps"]["value"][1]
    ratio /= both["rollout"]["variables"][names[0]]["crps"]["value"][1]
    assert card.changes[0][1] == pytest.approx(100 * (ratio - 1))
    table = write_scorecard(tmp_path / "climatology", climatology, tmp_path / "both")
    assert f"{100 * (ratio - 1):+.1f}" in table
    assert (tmp_path / "climatology" / "scorecard.png").exists()
    other = evaluate_field(replace(options, num_rollouts=2, output=tmp_path / "other", figures=False))
    with pytest.raises(ValueError, match="other windows"):
        make_scorecard(climatology, other)


def test_units_of_a_group_divide_its_scores() -> None:
    """The CRPS of the second variable in units of ten is a tenth of its own."""
    data = WeatherSequences(record(), ("2m_temperature", "temperature_850"))
    pipeline = tiny_pipeline(data=data)
    groups = {
        "own": Channels(slice(1, 2), None, 1e-3),
        "tens": Channels(slice(1, 2), torch.tensor([1.0, 10.0]), 1e-4),
    }
    forecaster = PipelineForecaster(pipeline, ensemble_size=4, num_inference_steps=1)
    same = {"select_targets": lambda state: state, "select_samples": lambda state: state}
    found = accumulate_channels(forecaster, Transitions(data), [3, 9], groups, **same)
    own, tens = (found[name].compute()["crps"].value for name in groups)
    torch.testing.assert_close(tens, own / 10, rtol=1e-5, atol=0)
