"""The record of a calibration: plain JSON, today's and that of versions before the first release."""

import json
import math

import numpy as np
import pytest
import torch

from marigold_uq.calibration import Calibration, IntervalGrid, read_calibrations, with_calibration

FULL = Calibration(
    tau=0.25,
    kappa=(0.8, 1.2),
    interval=IntervalGrid((0.5, 0.9), ((0.7, 0.8), (2.0, 1.9))),
    uncertainty="ensemble",
    num_inference_steps=10,
    ensemble_size=50,
    num_calibration=120,
    note="validation rows 2020",
)
OLD = {
    "tau": 0.25,
    "kappa": 0.8,
    "conformal_scale": [2.1, 1.9],
    "conformal_margin": None,
    "coverage": 0.95,
    "num_calibration": 120,
    "num_steps": 10,
    "num_members": 50,
    "note": "x",
}
"""As `Calibration.to_dict` wrote it before the first release."""


@pytest.mark.parametrize("calibration", [FULL, Calibration(), Calibration(kappa=2.0)])
def test_it_survives_json(calibration: Calibration) -> None:
    assert Calibration.from_dict(json.loads(json.dumps(calibration.to_dict()))) == calibration


@pytest.mark.parametrize("kappa", [[0.5, 2], (0.5, 2.0), np.array([0.5, 2.0]), torch.tensor([0.5, 2.0])])
def test_kappas_come_as_any_sequence(kappa) -> None:
    assert Calibration(kappa=kappa).kappa == (0.5, 2.0)
    assert Calibration(kappa=np.float64(3.0)).kappas == (3.0,)


@pytest.mark.parametrize("name", ["tau", "kappa"])
@pytest.mark.parametrize("value", [0.0, -1.0, math.inf, math.nan])
def test_scales_are_positive_and_finite(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{name} must be positive and finite"):
        Calibration(**{name: value})
    with pytest.raises(ValueError, match="kappa must be positive"):
        Calibration(kappa=())


def test_calls_under_other_conditions_are_named() -> None:
    assert FULL.mismatches(num_inference_steps=10, ensemble_size=50) == []
    assert FULL.mismatches(num_inference_steps=None) == []
    assert Calibration().mismatches(num_inference_steps=3, ensemble_size=4) == []
    assert FULL.mismatches(num_inference_steps=4, ensemble_size=20) == [
        "calibrated with num_inference_steps=10, called with 4",
        "calibrated with ensemble_size=50, called with 20",
    ]


def test_an_old_record_keeps_its_interval_and_its_conditions() -> None:
    found = Calibration.from_dict(OLD)
    assert (found.tau, found.kappa, found.num_calibration, found.note) == (0.25, 0.8, 120, "x")
    assert (found.num_inference_steps, found.ensemble_size) == (10, 50)
    assert found.interval == IntervalGrid((0.95,), ((2.1, 1.9),))
    assert Calibration.from_dict({**OLD, "conformal_scale": 3.0}).interval == IntervalGrid((0.95,), ((3.0,),))
    assert Calibration.from_dict({**OLD, "conformal_scale": None, "coverage": None}).interval is None


def test_an_old_margin_around_quantiles_is_dropped_with_a_warning() -> None:
    with pytest.warns(UserWarning, match="conformal_margin.*calibrate again"):
        found = Calibration.from_dict({**OLD, "conformal_scale": None, "conformal_margin": 0.3})
    assert found.interval is None


def test_an_unknown_key_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"unknown calibration keys \['temperature'\]"):
        Calibration.from_dict({"temperature": 1.0})


def test_a_config_entry_is_read_in_all_its_forms() -> None:
    """Today's list, one old record (fields, tables), an old record per way to uncertainty (depth), and nothing."""
    assert read_calibrations([FULL.to_dict()]) == (FULL,)
    assert read_calibrations(OLD) == (Calibration.from_dict(OLD),)
    by_mode = read_calibrations({"trajectory": OLD, "ensemble": {**OLD, "kappa": 2.0}})
    assert [(one.uncertainty, one.kappa) for one in by_mode] == [("trajectory", 0.8), ("ensemble", 2.0)]
    assert read_calibrations(None) == read_calibrations([]) == read_calibrations({}) == ()
    with pytest.raises(ValueError, match=r"list of records; got the keys \['kappa'\]"):
        read_calibrations({"kappa": 1.0})


def test_a_new_record_replaces_the_one_of_the_same_way_to_uncertainty() -> None:
    one, two = Calibration(uncertainty="ensemble"), Calibration(uncertainty="trajectory")
    better = Calibration(uncertainty="ensemble", kappa=2.0)
    assert with_calibration([one, two], better) == [two, better]
    assert with_calibration([one], Calibration(uncertainty="ensemble", tau=0.5))[0].tau == 0.5


def test_records_share_the_tau_of_their_scheduler() -> None:
    with pytest.raises(ValueError, match=r"one scheduler; got 0\.5 beside \[1\.0\]"):
        with_calibration([Calibration(uncertainty="ensemble")], Calibration(uncertainty="trajectory", tau=0.5))


@pytest.mark.parametrize("scale", [math.inf, [2.0, math.inf]])
def test_an_old_infinite_half_width_is_no_interval(scale) -> None:
    """Too few calibration rows gave infinity, which promises nothing that an interval could show."""
    found = Calibration.from_dict({**OLD, "conformal_scale": scale})
    assert (found.interval, found.kappa, found.num_calibration) == (None, 0.8, 120)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("num_inference_steps", 0, "num_inference_steps must be at least 1; got 0"),
        ("ensemble_size", -3, "ensemble_size must be at least 1; got -3"),
        ("num_calibration", -1, "num_calibration must be at least 0; got -1"),
    ],
)
def test_counts_have_a_least_value(name: str, value: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Calibration(**{name: value})


@pytest.mark.parametrize("name", ["num_inference_steps", "ensemble_size", "num_calibration"])
def test_counts_are_whole_numbers_also_from_numpy(name: str) -> None:
    with pytest.raises(TypeError, match=rf"{name} must be a whole number; got 2\.5"):
        Calibration(**{name: 2.5})
    stored = Calibration(**{name: np.int64(3)})
    assert json.loads(json.dumps(stored.to_dict()))[name] == 3


def test_an_interval_is_a_grid() -> None:
    with pytest.raises(TypeError, match=r"interval must be an IntervalGrid or None; got \{'a': 1\}"):
        Calibration(interval={"a": 1})  # type: ignore[arg-type]
