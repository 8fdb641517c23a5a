"""Studies of maps and of intervals for forecasts made again and again, on data whose answers are known."""

from pathlib import Path

import numpy as np
import pytest
import torch

from marigold_uq.field.data import PlaneTrajectories, Transitions
from marigold_uq.field.data.navier_stokes import PLANE
from marigold_uq.field.forecasters import Persistence
from scripts.studies.fields import adaptive, plane
from scripts.studies.fields.heads import Parts


def resting(side: int = 8, count: int = 6) -> PlaneTrajectories:
    """Planes that never change."""
    start = torch.randn(count, 1, side * side, generator=torch.Generator().manual_seed(0))
    metadata = {PLANE: {"start": 0.0, "length": 1.0, "side": side}}
    return PlaneTrajectories(start.expand(count, 5, -1).clone(), np.arange(64.0), np.arange(5.0), metadata)


def test_persistence_is_perfect_where_nothing_moves_and_errs_by_what_is_added() -> None:
    planes = resting()
    windows = Transitions(planes, num_leads=2)
    parts = Parts(planes, windows, windows, [0], [0, 2, 4])
    events = plane.thresholds(parts)
    assert events["90 %"] < events["99 %"]
    perfect = plane.score_forecaster(Persistence(), parts, events)
    assert all(np.abs(values).max() == 0 for values in perfect["scores"].values())
    assert perfect["spectra"]["truth"] == perfect["spectra"]["members"]

    class Offset(Persistence):
        def forecast(self, batch, ids, num_leads):  # type: ignore[no-untyped-def]
            return super().forecast(batch, ids, num_leads) + 0.5

    shifted = plane.score_forecaster(Offset(), parts, events)
    np.testing.assert_allclose(shifted["scores"]["crps"], 0.5, rtol=1e-5)
    np.testing.assert_allclose(shifted["scores"]["rmse"], 0.25, rtol=1e-5)  # a square: the root is taken of the mean
    assert "| 0.5 ± " in plane.table({"shifted": shifted}, 1)


def test_fixed_intervals_lose_their_coverage_when_errors_double_and_adaptive_ones_do_not() -> None:
    generator = torch.Generator().manual_seed(0)
    steps = torch.randn(500, 1, 3, 3, generator=generator, dtype=torch.float64)
    calm, rough = steps[:200].cumsum(0), 2 * steps[200:].cumsum(0)
    errors = torch.stack([(calm[lead : lead + 198] - calm[:198]).abs() for lead in (1, 2)], 1)
    args = adaptive.Options(Path("unused"), num_leads=2, step=0.05)
    misses = adaptive.compare(errors, rough, args)
    shares = {name: 1 - values[:, 100:].nanmean((1, 2, 3, 4)) for name, values in misses.items()}
    assert (shares["fixed"] < 0.72).all()  # P(|2 z| < 1.645) = .59
    assert ((shares["adaptive"] - 0.9).abs() < 0.04).all()
    assert misses["adaptive"][1, 0].isnan().all()  # no forecast of two steps has its truth yet
    assert "| adaptive" in adaptive.table(misses, 100)


def test_models_without_a_number_of_steps_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="got cholesky"):
        plane.Options(tmp_path, variants=["cholesky"])
