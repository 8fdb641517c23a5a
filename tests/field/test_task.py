"""Training of field models: every family and score learns, resumes exactly, stops on a plateau, from a config."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from marigold_uq.field.config import (
    FieldData,
    FieldModel,
    FieldTrainConfig,
    PdeData,
    PlateauConfig,
    read_config,
)
from marigold_uq.field.data import Trajectories, Transitions, write_trajectories
from marigold_uq.field.run import new_pipeline, train_field
from marigold_uq.field.task import FieldTask, Plateau
from marigold_uq.pipelines.field import FieldForecastPipeline
from marigold_uq.schedulers import (
    DistributionalDDIMScheduler,
    DistributionalEDMScheduler,
    DistributionalFlowMatchScheduler,
)
from marigold_uq.training.config import OptimizerConfig, TrainingConfig
from marigold_uq.training.loop import Trainer
from marigold_uq.training.objective import ObjectiveConfig

POINTS = 8
UNET = {"block_out_channels": [8, 8], "layers_per_block": 1, "embedding_channels": 8, "dropout": 0.0}
CONFIGS = Path(__file__).parents[2] / "configs" / "field"


def decaying(count: int = 40, num_states: int = 6) -> Trajectories:
    """u_s = 0.7 u_{s-1} + 0.1 noise, from N(0, 1): an increment that follows from the state, and known noise."""
    generator = torch.Generator().manual_seed(0)
    states = [torch.randn(count, POINTS, generator=generator)]
    for _ in range(num_states - 1):
        states.append(0.7 * states[-1] + 0.1 * torch.randn(count, POINTS, generator=generator))
    return Trajectories(torch.stack(states, 1), np.arange(float(POINTS)), np.arange(float(num_states)))


@pytest.fixture(scope="module")
def data_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("h5py", reason="field files are HDF5")
    path, data = tmp_path_factory.mktemp("fields") / "decaying.h5", decaying()
    write_trajectories(path, [(0, data.states.numpy())], tuple(data.states.shape), data.x, data.t, {})
    return path


def config(data_file: Path, output: Path, **changes: Any) -> FieldTrainConfig:
    optimizer = OptimizerConfig(learning_rate=5e-3, warmup_steps=5, decay="constant")
    training = TrainingConfig(
        output=output,
        max_steps=8,
        batch_size=8,
        optimizer=optimizer,
        ema_decay=0.9,
        checkpoint_every=4,
        validate_every=4,
        log_every=1,
        tracker="none",
        cpu=True,
    )
    model = FieldModel(
        num_train_timesteps=10,
        beta_end=0.5,
        prediction_type="v_prediction",
        zero_terminal_snr=True,
        unet=UNET,
    )
    made = FieldTrainConfig(
        data=FieldData(pde=PdeData(str(data_file))), model=model, training=training, validation_samples=16
    )
    training = replace(training, **changes.pop("training", {}))
    return replace(made, model=replace(model, **changes.pop("model", {})), training=training, **changes)


def records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


FAMILIES_AND_SCORES = [
    ({"noise_family": "point"}, None),
    ({"noise_family": "gaussian"}, None),
    ({"noise_family": "mixture", "num_components": 2}, "log"),
    ({"noise_family": "low_rank_mixture", "rank": 1, "num_components": 2}, "projected"),
    ({"noise_family": "low_rank", "rank": 1}, "kernel"),
    ({"noise_family": "cholesky"}, "energy"),
    ({"noise_family": "sample"}, None),
    ({"noise_family": "sample", "num_train_timesteps": 1, "beta_start": 0.9999, "beta_end": 0.9999,
      "prediction_type": "sample", "zero_terminal_snr": False}, "crps"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("framework", "schedule", "kind"),
    [
        ("edm", {"sigma_max": 40.0}, DistributionalEDMScheduler),
        ("flow", {"shift": 2.0}, DistributionalFlowMatchScheduler),
        ("ddim", {"steps_offset": 1}, DistributionalDDIMScheduler),
    ],
)
def test_a_config_names_the_framework(
    framework: str, schedule: dict[str, Any], kind: type, data_file: Path, tmp_path: Path
) -> None:
    chosen = {"framework": framework, "schedule": schedule, "default_denoising_steps": 10}
    made = config(data_file, tmp_path / "run", model=chosen)
    assert train_field(made).finished
    pipeline = FieldForecastPipeline.from_pretrained(tmp_path / "run" / "model")
    scheduler = pipeline.scheduler
    assert type(scheduler) is kind
    assert all(scheduler.config[name] == value for name, value in schedule.items())
    forecast = pipeline(decaying().states[:2, :2, None], 2, ensemble_size=3, generator=torch.Generator().manual_seed(0))
    assert forecast.samples.isfinite().all()
    assert float(forecast.uncertainty.min()) > 0
    if framework == "edm":  # increments have deviation 1: EDM's noise for .5, twice as large
        level = scheduler.noise_level(scheduler.sample_timesteps(4000, torch.Generator().manual_seed(0)))
        assert scheduler.config.sigma_data == 1.0
        assert float(level.noise.log().mean()) == pytest.approx(-1.2 + math.log(2), abs=0.1)


def test_more_steps_than_the_table_has_are_refused_of_ddim_alone() -> None:
    with pytest.raises(ValueError, match="between 1 and num_train_timesteps=50; got 60"):
        FieldModel(default_denoising_steps=60)
    assert FieldModel(framework="flow", default_denoising_steps=60).default_denoising_steps == 60


@pytest.mark.parametrize(("model", "score"), FAMILIES_AND_SCORES, ids=lambda value: str(value)[:40])
def test_every_family_and_score_learns(
    model: dict[str, Any], score: str | None, data_file: Path, tmp_path: Path
) -> None:
    """The loss on held-out samples falls; the finished pipeline forecasts finite members that differ."""
    long = {"max_steps": 24, "validate_every": 8, "checkpoint_every": 24}
    done = train_field(
        config(data_file, tmp_path, model=model, objective=ObjectiveConfig(score=score, num_draws=2), training=long)
    )
    assert done.finished
    losses = [r["validation/loss"] for r in records(tmp_path) if "validation/loss" in r]
    assert losses[-1] < losses[0]
    pipeline = FieldForecastPipeline.from_pretrained(tmp_path / "model")
    members = pipeline(
        decaying().states[:2, :2], 2, ensemble_size=3, generator=torch.Generator().manual_seed(0)
    ).samples
    assert bool(members.isfinite().all())
    assert float(members.std(0).mean()) > 1e-3


def test_a_trained_gaussian_knows_the_mean_and_the_noise_of_a_process(data_file: Path, tmp_path: Path) -> None:
    """The rest of the increment is 0.1 noise: RMSE near 0.1 (persistence: about 0.2), spread/skill near 1."""
    long = {"max_steps": 90, "validate_every": 0, "checkpoint_every": 90, "batch_size": 16}
    train_field(config(data_file, tmp_path, training=long, validation_samples=0))
    pipeline = FieldForecastPipeline.from_pretrained(tmp_path / "model")
    states = decaying(60).states[40:]  # never seen
    output = pipeline(states[:, 2:4], ensemble_size=40, generator=torch.Generator().manual_seed(0))
    target = states[:, 4].reshape(output.prediction[:, 0].shape)
    rmse = float((output.prediction[:, 0] - target).square().mean().sqrt())
    persistence = float((states[:, 4] - states[:, 3]).square().mean().sqrt())
    spread = float(output.uncertainty.square().mean().sqrt())
    assert rmse < 0.135
    assert rmse < 0.8 * persistence
    assert 0.7 < spread / rmse < 1.35


def test_a_resumed_run_equals_an_uninterrupted_one(data_file: Path, tmp_path: Path) -> None:
    model = {"noise_family": "low_rank", "rank": 1}  # its bandwidth is part of the state
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train_field(config(data_file, whole, model=model))
    train_field(config(data_file, parts, model=model, training={"max_steps": 4}))
    train_field(config(data_file, parts, model=model))
    one, other = (FieldForecastPipeline.from_pretrained(path / "model").unet.state_dict() for path in (whole, parts))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_training_does_not_depend_on_how_a_batch_is_cut(data_file: Path, tmp_path: Path) -> None:
    for micro in (8, 2):
        train_field(config(data_file, tmp_path / str(micro), training={"micro_batch_size": micro, "ema_decay": 0.0}))
    logs = [[r["loss"] for r in records(tmp_path / str(micro)) if "loss" in r] for micro in (8, 2)]
    assert logs[0] == pytest.approx(logs[1], rel=1e-3)  # sums in another order, amplified by 8 steps


def test_the_validation_of_an_adaptive_kernel_does_not_move_with_its_bandwidth(data_file: Path, tmp_path: Path) -> None:
    """The same network has the same validation loss, whatever residuals the bandwidth has learned from."""
    settings = config(data_file, tmp_path, model={"noise_family": "low_rank", "rank": 1})
    pipeline = new_pipeline(settings.model, decaying())
    task = FieldTask(
        pipeline,
        Transitions(decaying()),
        ObjectiveConfig(score="kernel"),
        validation=Transitions(decaying()),
        validation_samples=8,
    )
    before = task.validate(pipeline.unet, 0, tmp_path)
    steps = torch.arange(10)
    task.objective.scale.update_sums(steps, 25.0 * torch.ones(10), torch.ones(10))
    assert float(task.objective.scale(steps[:1])) > 1.01
    assert task.validate(pipeline.unet, 1, tmp_path) == before


class Falling(nn.Linear):
    """A network whose weights tell its age."""


def test_a_plateau_halves_stops_and_keeps_the_best() -> None:
    plateau, network = Plateau(PlateauConfig(halve_after=2, stop_after=5)), Falling(1, 1)
    for step, loss in enumerate([1.0, 0.5, 0.6, 0.6, 0.6, 0.6]):
        nn.init.constant_(network.weight, step)
        plateau.update(loss, network)
    assert plateau.factor == 0.25  # after steps 3 and 5
    assert not plateau.stopped
    copy = Plateau(plateau.config)
    copy.load_state_dict(plateau.state_dict())
    copy.update(0.7, network)
    assert copy.stopped
    assert copy.weights is not None
    assert float(copy.weights["weight"]) == 1.0  # of step 1, the best


def worsening(data_file: Path, output: Path, max_steps: int = 30) -> Trainer:
    """A run whose validation loss never improves after the first."""

    class Worse(FieldTask):
        def validate(self, network: nn.Module, step: int, pictures: Path) -> dict[str, float]:
            return {"validation/loss": float(step)}

    made = config(data_file, output, training={"validate_every": 2, "max_steps": max_steps})
    train = decaying()
    task = Worse(
        new_pipeline(made.model, train),
        Transitions(train),
        made.objective,
        plateau=PlateauConfig(halve_after=1, stop_after=3),
    )
    return Trainer(task, made.training)


def test_training_ends_at_the_plateau_with_the_best_weights_also_when_resumed(data_file: Path, tmp_path: Path) -> None:
    result = worsening(data_file, tmp_path / "a").run()
    assert (result.step, result.finished) == (8, True)  # best at 2, then 4, 6, 8
    rates = [r["learning_rate"] for r in records(tmp_path / "a") if "learning_rate" in r]
    assert rates[4] == pytest.approx(0.5 * 5e-3)  # halved by the validation after step 4
    assert rates[6] == pytest.approx(0.25 * 5e-3)
    worsening(data_file, tmp_path / "b", max_steps=4).run()
    again = worsening(data_file, tmp_path / "b").run()
    assert (again.step, again.finished) == (8, True)
    assert worsening(data_file, tmp_path / "b").run().step == 8  # nothing more to do
    one, other = (FieldForecastPipeline.from_pretrained(tmp_path / n / "model").unet.state_dict() for n in "ab")
    assert all(torch.equal(one[name], other[name]) for name in one)


TASKS = ("burgers", "ks", "t2m")


def paper(task: str, *overlays: str) -> FieldTrainConfig:
    names = [f"{task}.yaml", *(f"{task}/{name}.yaml" for name in overlays)]
    return read_config([word for name in names for word in ("--config", str(CONFIGS / name))])[0]


def test_every_overlay_changes_the_family_and_the_output_of_its_base() -> None:
    for task in TASKS:
        base = paper(task)
        assert (base.model.noise_family, base.training.output.name) == ("gaussian", task)
        for path in sorted((CONFIGS / task).glob("*.yaml")):
            made = paper(task, path.stem)
            if path.stem == "generated":
                assert made.data != base.data
                continue
            assert made.model.noise_family == {"one_pass": "sample"}.get(path.stem, path.stem)
            assert made.training.output.name == f"{task}_{path.stem}"
            assert (made.data, made.plateau) == (base.data, base.plateau)
    for path in CONFIGS.glob("*_small.yaml"):
        if path.stem != "sweeps_small":
            assert read_config(["--config", str(path)])[0].training.output.name == path.stem


def test_paper_configs_have_the_papers_numbers() -> None:
    """Components, bandwidths and beta_T per task, as the publication's code has them."""
    for task, components, bandwidth, beta in (("burgers", 2, 5, 0.2), ("ks", 50, 10, 0.35), ("t2m", 10, 10, 0.35)):
        mixture, low_rank, point = (paper(task, family) for family in ("mixture", "low_rank", "point"))
        assert mixture.model.num_components == components
        assert mixture.model.beta_end == 0.2
        assert low_rank.objective.score_options == {"bandwidth": bandwidth, "per_dimension": False}
        assert low_rank.model.beta_end == beta
        assert point.model.beta_end == 0.35
        assert not point.model.unet  # the network's defaults are the paper's size


def test_the_documented_command_for_burgers_and_its_config_give_the_papers_grid() -> None:
    """256 points and 52 states, from PDEBench's 1024 and 201 as from the generated file, which is thinned already."""
    whole, thinned = paper("burgers").data.pde, paper("burgers", "generated").data.pde
    command = "generate_pde.py burgers --num_states 52 --save_interval 0.02 --point_stride 4"
    assert command in (CONFIGS / "burgers" / "generated.yaml").read_text()
    assert whole is not None
    assert thinned is not None
    assert len(range(201)[: whole.num_states : whole.state_stride]) == 52
    assert len(range(1024)[:: whole.point_stride]) == 256
    assert len(range(52)[: thinned.num_states : thinned.state_stride]) == 52
    assert len(range(1024 // 4)[:: thinned.point_stride]) == 256
