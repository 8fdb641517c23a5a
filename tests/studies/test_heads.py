"""The study of what a head buys: every model is calibrated alike, and closed forms, pairs and choices are right."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import norm
from torch import Tensor

from marigold_uq.distributions import GaussianDistribution
from marigold_uq.field.config import FieldModel
from marigold_uq.field.data import Trajectories, Transitions
from marigold_uq.field.run import new_pipeline
from scripts.studies.fields import heads
from scripts.studies.fields.heads import Options, build_task, calls_table, closed_form_scores, fit_calibration, plan

POINTS = 8
UNET = {"block_out_channels": [8, 8], "layers_per_block": 1, "embedding_channels": 8, "dropout": 0.0}


def noise_walks(count: int = 40) -> Trajectories:
    """u_s = u_{s-1} + N(0, 1)."""
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(count, 6, POINTS, generator=generator).cumsum(1)
    return Trajectories(states, np.arange(float(POINTS)), np.arange(6.0))


class Walks:
    """A forecaster of walks whose steps have `spread` deviations, less where tau is small."""

    ensemble_size, num_inference_steps = 60, 1

    def __init__(self, spread: float) -> None:
        self.pipeline = new_pipeline(FieldModel(noise_family="gaussian", unet=UNET, zero_terminal_snr=True,
                                                prediction_type="v_prediction"), noise_walks())  # fmt: skip
        self.spread = spread

    def forecast(self, batch: dict[str, Any], ids: Sequence[int], num_leads: int) -> Tensor:
        last = batch["history"][:, -1]
        generator = torch.Generator().manual_seed(1)
        steps = torch.randn(self.ensemble_size, len(last), num_leads, *last.shape[1:], generator=generator)
        scale = self.spread * self.pipeline.calibration_for().tau ** 0.5
        return last[None, :, None] + scale * steps.cumsum(2)


@pytest.mark.parametrize(("spread", "expected"), [(2.0, 0.5), (0.5, 2.0)])
def test_calibration_finds_the_factor_between_a_known_spread_and_the_right_one(spread: float, expected: float) -> None:
    """Walks that spread twice too much need kappa = 1/2 at tau = 1: the mean is right, and so is its shape."""
    windows = Transitions(noise_walks(), num_leads=3)
    forecaster: Any = Walks(spread)
    chosen = fit_calibration(forecaster, windows, list(range(len(windows))))
    total = [kappa * chosen["tau"] ** 0.5 for kappa in chosen["kappas"]]
    assert total == pytest.approx([expected] * 3, rel=0.1)
    stored = forecaster.pipeline.calibration_for()
    assert (stored.tau, list(stored.kappas)) == (chosen["tau"], chosen["kappas"])


def test_the_closed_form_is_scored_in_physical_units_with_its_covariance_times_tau(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    windows = Transitions(noise_walks())
    pipeline: Any = Walks(1.0).pipeline
    law = GaussianDistribution(torch.zeros(4, 1, POINTS), 2 * torch.ones(4, 1, POINTS))
    monkeypatch.setattr(type(pipeline), "one_step_distribution", lambda *_, **__: law)
    rows = closed_form_scores(pipeline, windows, [0, 1, 2, 3], 0.25)
    truth = torch.stack([windows[i]["future"][0, 0] for i in range(4)]).double()
    expected = truth * (2 * norm.cdf(truth) - 1) + 2 * norm.pdf(truth) - 1 / np.sqrt(np.pi)  # of N(0, 1)
    torch.testing.assert_close(rows.double(), torch.as_tensor(expected).mean(1), atol=1e-5, rtol=1e-5)


def cell(values: Sequence[float], score: float, tau: float = 1.0) -> dict[str, Any]:
    """What a seed has measured, of windows in trajectories of their own."""
    windows = {str(i): [value, 2 * value] for i, value in enumerate(values)}
    mean = float(np.mean(values))
    entry = {"crps": {"value": [mean, 2 * mean]}, "crps_of_windows": windows}
    entry["groups_of_windows"] = {str(i): i for i in range(len(values))}
    return {"rollout": entry, "validation_score": score, "tau": tau, "kappas": [1.0]}


def test_tables_pair_windows_with_as_many_calls_and_closed_forms_with_one() -> None:
    cells = {
        "point_uniform": {"1": [cell([1.0, 2.0], 3.0)], "5": [cell([0.5, 1.0], 1.0)]},
        "gaussian": {"1": [cell([0.9, 1.8], 0.5)], "closed": [cell([0.8, 1.6], 0.4)]},
    }
    lines = calls_table(cells, 1).splitlines()
    assert [part.strip() for part in lines[0].strip("|").split("|")] == ["model", "seeds", "closed", "1", "5"]
    gaussian = lines[3]
    assert "-20.0 ± 0.0 %" in gaussian  # the closed form against the reference's one call
    assert "-10.0 ± 0.0 %" in gaussian
    assert heads.own_steps(cells["point_uniform"]) == "5"
    assert heads.own_steps(cells["gaussian"]) == "1"  # a closed form makes no rollout
    assert "closed" not in calls_table(cells, 2).splitlines()[0]


def test_all_models_of_a_task_share_data_size_and_training_but_for_the_head(tmp_path: Path) -> None:
    args = Options(tmp_path, seeds=1)
    configs = {run.variant: heads.read_config(run.arguments)[0] for run in plan(args) if run.task.name == "ks"}
    assert set(configs) == set(heads.SAMPLED)
    first = configs["point_uniform"]
    for one in configs.values():
        assert (one.data, one.model.unet) == (first.data, first.model.unet)
        assert one.training.optimizer == first.training.optimizer
        assert (one.training.max_steps, one.training.batch_size) == (150, 32)
    assert first.objective.uniform_timesteps
    assert configs["point_edm"].model.framework == "edm"
    assert not configs["gaussian"].objective.uniform_timesteps
    assert build_task("air", args).arguments[-1] == "[240, 300]"


def test_unknown_tasks_and_models_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="got lorenz"):
        Options(tmp_path, tasks=["lorenz"])
