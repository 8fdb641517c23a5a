"""Novelty through the three pipelines: fitted on held-out inputs, kept with the model, independent of the batch."""

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.tiny_depth import picture
from support.tiny_depth import tiny_pipeline as tiny_depth
from support.tiny_field import tiny_pipeline as tiny_field
from support.tiny_field import tiny_weather
from support.tiny_sets import quick_model

from marigold_uq.calibration import Calibration, IntervalGrid
from marigold_uq.novelty import novelty_features
from marigold_uq.pipelines.base import UncertaintyPipeline
from marigold_uq.pipelines.depth.latents import ChainResult, FirstMoments, member_features, merge_chains
from marigold_uq.tabular import DiffusionRegressor

TESTS = Path(__file__).parents[1]
COUNT = 44


def states(count: int, seed: int, size: float = 1.0) -> torch.Tensor:
    walks = torch.randn(count, 2, 1, 16, generator=torch.Generator().manual_seed(seed)).cumsum(-1)
    return size * (walks - walks.mean(-1, keepdim=True))


def pictures(count: int, seed: int) -> list[Any]:
    return [picture(16, 16, seed=1000 * seed + i) for i in range(count)]


def rows(count: int, seed: int, size: float = 1.0) -> np.ndarray:
    return size * np.random.default_rng(seed).uniform(-1, 1, (count, 2))


def fitted_regressor() -> DiffusionRegressor:
    x = rows(260, 0)
    y = np.sin(2 * x[:, 0]) + 0.1 * np.random.default_rng(1).normal(size=len(x))
    return quick_model(calibration_fraction=0.2).fit(x, y)


@dataclass(frozen=True)
class Case:
    """A pipeline, inputs in distribution (count, seed), others, and the arguments of all calls."""

    pipeline: UncertaintyPipeline
    inputs: Callable[..., Any]
    novel_size: float | None  # None where a random network hardly looks at its input
    call: dict[str, Any]

    def novelty(self, inputs: Any, pipeline: Any = None, **changes: Any) -> Any:
        generator = torch.Generator().manual_seed(0)
        return (pipeline or self.pipeline)(
            inputs, generator=generator, **{**self.call, **changes}, output_novelty=True
        ).novelty


def build(name: str) -> Case:
    if name == "field":
        return Case(tiny_field(), states, 8.0, {"ensemble_size": 3})
    if name == "tabular":
        return Case(fitted_regressor().pipeline_, rows, 6.0, {"ensemble_size": 10})
    options = {"ensemble_size": 3, "uncertainty": name, "batch_size": 8}
    return Case(tiny_depth("gaussian", default_processing_resolution=16), pictures, None, options)


NAMES = ["field", "tabular", "ensemble", "trajectory"]


@pytest.fixture(scope="module", params=NAMES)
def case(request: pytest.FixtureRequest) -> Case:
    made = build(request.param)
    made.pipeline.fit_novelty(made.inputs(COUNT, 0), generator=torch.Generator().manual_seed(1), **made.call)
    return made


def test_novel_inputs_are_flagged_and_others_are_not(case: Case) -> None:
    assert case.novelty(case.inputs(20, 1)).is_novel.mean() <= 0.3
    if case.novel_size is not None:
        assert case.novelty(case.inputs(8, 1, case.novel_size)).is_novel.mean() >= 0.75


def test_an_input_alone_gets_the_p_value_it_gets_among_others(case: Case) -> None:
    """Depth and fields seed chains by their place, so there the first input is compared.

    As in diffusers, one generator draws the starts of all pictures first. What a picture's further chains draw then
    depends on how many there are, and with it the second feature, their spread.
    """
    together = case.novelty(case.inputs(5, 2), batch_size=2)
    whole = case.novelty(case.inputs(5, 2), batch_size=100)
    alone = case.novelty(case.inputs(5, 2)[:1])
    np.testing.assert_allclose(together.features, whole.features, rtol=1e-4, atol=1e-4)
    same = np.arange(whole.features.shape[1]) != 1 if "uncertainty" in case.call else slice(None)
    np.testing.assert_allclose(alone.features[0][same], whole.features[0][same], rtol=1e-4, atol=1e-4)


def test_a_fresh_process_gives_the_same_p_values(case: Case, tmp_path: Path) -> None:
    case.pipeline.save_pretrained(tmp_path)
    torch.save((case.inputs(4, 3), case.call), tmp_path / "call.pt")
    code = (
        "import sys, torch, marigold_uq as m; kind, folder = sys.argv[1:]; "
        "inputs, call = torch.load(folder + '/call.pt', weights_only=False); "
        "pipeline = getattr(m, kind).from_pretrained(folder); "
        "found = pipeline(inputs, generator=torch.Generator().manual_seed(0), output_novelty=True, **call).novelty; "
        "print(found.p_value.tolist(), found.is_novel.tolist())"
    )
    command = [sys.executable, "-c", code, type(case.pipeline).__name__, str(tmp_path)]
    environment = {**os.environ, "TQDM_DISABLE": "1"}
    run = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    expected = case.novelty(case.inputs(4, 3))
    assert run.stdout.strip().splitlines()[-1] == f"{expected.p_value.tolist()} {expected.is_novel.tolist()}"


def test_it_changes_no_prediction_and_is_left_out_where_nobody_asks(case: Case) -> None:
    inputs = case.inputs(2, 4)
    plain = case.pipeline(inputs, generator=torch.Generator().manual_seed(0), **case.call)
    asked = case.pipeline(inputs, generator=torch.Generator().manual_seed(0), output_novelty=True, **case.call)
    assert plain.novelty is None
    np.testing.assert_array_equal(plain.prediction, asked.prediction)
    np.testing.assert_array_equal(plain.uncertainty, asked.uncertainty)


def test_other_conditions_than_those_of_the_fit_are_warned(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    warned: list[str] = []
    monkeypatch.setattr("marigold_uq.pipelines.base.logger.warning", warned.append)
    case.novelty(case.inputs(2, 5))
    assert warned == []
    case.novelty(case.inputs(2, 5), ensemble_size=case.call["ensemble_size"] + 1)
    assert any("p-values may not hold" in message for message in warned)


def test_fitting_keeps_the_calibration_and_what_belongs_to_it() -> None:
    pipeline = tiny_weather()
    grid = IntervalGrid((0.5, 0.9), ((0.7,), (2.0,)))
    pipeline.calibrate(Calibration(kappa=1.5, interval=grid), lead_dampings=[0.9])
    statistics = pipeline.encoder.statistics.values()
    noise = torch.randn(COUNT, 2, len(statistics), *pipeline.encoder.space, generator=torch.Generator().manual_seed(0))
    start = torch.stack([one.mean + one.std * noise[:, :, c] for c, one in enumerate(statistics)], 2)
    time = np.arange(COUNT) * 86_400.0
    pipeline.fit_novelty(start, ensemble_size=2, time=time)
    record = pipeline.calibration_for()
    assert (record.kappa, record.interval, pipeline.config.lead_dampings) == (1.5, grid, [0.9])
    assert record.novelty is not None
    forecast = pipeline(start[:3], 2, ensemble_size=2, time=time[:3], output_novelty=True)
    assert forecast.to_xarray()["novelty_p_value"].shape == (3,)


def test_a_model_without_a_spread_or_without_members_is_refused() -> None:
    with pytest.raises(ValueError, match="family 'point' has none"):
        tiny_depth("point")(picture(), uncertainty="ensemble", output_novelty=True)
    with pytest.raises(ValueError, match="compares members: choose uncertainty, one of"):
        tiny_depth("gaussian")(picture(), output_novelty=True)
    with pytest.raises(ValueError, match="at least 2 members; got ensemble_size=1"):
        tiny_field()(states(1, 0), ensemble_size=1, output_novelty=True)
    with pytest.raises(ValueError, match="has no variance"):
        tiny_field("point")(states(1, 0), ensemble_size=2, output_novelty=True)


def test_features_of_a_picture_are_those_of_its_latents_averaged_over_chains() -> None:
    g = torch.Generator().manual_seed(0)
    latents, means, variances = torch.rand(3, 3, 1, 4, 4, 5, generator=g)
    chains = [
        ChainResult(one[0], first=FirstMoments(mean[0], variance[0]))
        for one, mean, variance in zip(latents, means, variances, strict=True)
    ]
    found = member_features(merge_chains(chains))
    expected = novelty_features(means.mean(0), variances.mean(0).sqrt(), latents.std(0))
    torch.testing.assert_close(found, expected)


def test_the_estimator_learns_it_from_the_rows_it_set_aside() -> None:
    model = fitted_regressor()
    assert model.predict_novelty(rows(30, 1)).is_novel.mean() <= 0.3
    assert model.predict_novelty(rows(30, 1, 6.0)).is_novel.mean() >= 0.7
    without = quick_model().fit(rows(60, 0), rows(60, 0)[:, 0])
    with pytest.raises(ValueError, match="set calibration_fraction so that 40 rows"):
        without.predict_novelty(rows(2, 1))
