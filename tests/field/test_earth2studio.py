"""The adapter to earth2studio's prognostic-model protocol."""

from collections import OrderedDict
from itertools import islice

import numpy as np
import pytest
import torch
from support.tiny_field import tiny_pipeline, tiny_weather
from torch import Tensor

from marigold_uq.calibration import Calibration
from marigold_uq.field.data import FieldDataError
from marigold_uq.field.earth2studio import Earth2StudioPrognostic

ENSEMBLE, DATES = 3, np.array(["2013-01-05T00:00", "2013-01-07T12:00"], dtype="datetime64[ns]")


def model() -> Earth2StudioPrognostic:
    return Earth2StudioPrognostic(tiny_weather(), variable_names={"2m_temperature": "t2m", "temperature_850": "t850"})


def start(prognostic: Earth2StudioPrognostic) -> tuple[Tensor, OrderedDict[str, np.ndarray]]:
    """(ensemble, time, lead_time, variable, lat, lon), as `earth2studio.run.ensemble` makes it."""
    coords = prognostic.input_coords()
    coords.pop("batch")
    full = OrderedDict({"ensemble": np.arange(ENSEMBLE), "time": DATES, **coords})
    one = torch.tensor([280.0, 260.0]).reshape(2, 1, 1).expand(2, 5, 18)
    return one.expand(ENSEMBLE, 2, 2, 2, 5, 18).clone(), full


def test_input_coordinates_are_those_of_the_model() -> None:
    coords = model().input_coords()
    assert list(coords) == ["batch", "lead_time", "variable", "lat", "lon"]
    assert coords["lead_time"].tolist() == (np.array([-6, 0]) * np.timedelta64(1, "h").astype("m8[ns]")).tolist()
    assert coords["variable"].tolist() == ["t2m", "t850"]
    assert len(coords["batch"]) == 0


def test_the_iterator_yields_the_start_and_then_steps_as_the_pipeline_makes_them() -> None:
    prognostic = model()
    x, coords = start(prognostic)
    states = list(islice(prognostic.create_iterator(x, coords), 3))
    torch.testing.assert_close(states[0][0], x[:, :, -1:])
    hours = [int(c["lead_time"][0] / np.timedelta64(1, "h")) for _, c in states]
    assert hours == [0, 6, 12]
    assert states[2][0].shape == (ENSEMBLE, 2, 1, 2, 5, 18)
    history = x.flatten(0, 1)
    for lead in range(2):
        time = np.tile(DATES, ENSEMBLE) + lead * np.timedelta64(6, "h")
        streams = prognostic._streams(x, OrderedDict({**coords, "lead_time": states[lead][1]["lead_time"]}))
        new = prognostic.pipeline(history, ensemble_size=1, time=time, generator=streams).samples[0]
        torch.testing.assert_close(states[1 + lead][0].flatten(0, 2), new[:, 0], rtol=1e-5, atol=1e-3)
        history = torch.cat([history[:, 1:], new], 1)
    assert float(states[2][0].std(0).mean()) > 0.01  # members differ though they start alike


def test_a_call_is_one_step() -> None:
    prognostic = model()
    x, coords = start(prognostic)
    output, after = prognostic(x, coords)
    assert output.shape == (ENSEMBLE, 2, 1, 2, 5, 18)
    assert after["lead_time"].tolist() == [np.timedelta64(6, "h").astype("m8[ns]").astype(int)]
    assert list(after) == list(coords)


def test_inputs_that_do_not_fit_are_refused() -> None:
    prognostic = model()
    _, coords = start(prognostic)
    with pytest.raises(ValueError, match="variables are"):
        prognostic.output_coords(OrderedDict({**coords, "variable": np.array(["t850", "t2m"])}))
    with pytest.raises(ValueError, match="lead_time holds 2 times"):
        prognostic.output_coords(OrderedDict({**coords, "lead_time": coords["lead_time"][-1:]}))
    with pytest.raises(FieldDataError, match="wrong grid: lat"):
        prognostic.output_coords(OrderedDict({**coords, "lat": coords["lat"][:-1]}))
    with pytest.raises(ValueError, match="live on latitude, longitude and dates"):
        Earth2StudioPrognostic(tiny_pipeline())


def test_mini_batches_of_an_ensemble_are_its_parts() -> None:
    """earth2studio.run.ensemble cuts members into batches; a batch must not repeat another's members."""
    prognostic = model()
    x, coords = start(prognostic)
    whole = list(islice(prognostic.create_iterator(x, coords), 3))
    for member in range(ENSEMBLE):
        one = OrderedDict({**coords, "ensemble": np.array([member])})
        part = list(islice(prognostic.create_iterator(x[member : member + 1], one), 3))
        for lead in (1, 2):
            torch.testing.assert_close(part[lead][0][0], whole[lead][0][member], rtol=1e-5, atol=1e-3)
    late = OrderedDict({**coords, "time": coords["time"][1:]})
    torch.testing.assert_close(prognostic(x[:, 1:], late)[0], whole[1][0][:, 1:], rtol=1e-5, atol=1e-3)


def test_kappa_cannot_be_applied_to_single_members_and_this_is_said() -> None:
    pipeline = tiny_weather()
    pipeline.calibrate(Calibration(kappa=(1.0, 1.5)))
    with pytest.warns(UserWarning, match=r"not applied \(kappas .1.0, 1.5., dampings ..,"):
        Earth2StudioPrognostic(pipeline)
    pipeline.calibrate(Calibration(kappa=(1.0,)), lead_dampings=[0.5])
    with pytest.warns(UserWarning, match=r"not applied .*dampings .0.5."):
        Earth2StudioPrognostic(pipeline)
