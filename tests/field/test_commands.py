"""The commands of the room: generate, train, calibrate, evaluate; and what the studies plan before they train."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from marigold_uq.field.config import read_config
from marigold_uq.pipelines.field import FieldForecastPipeline
from scripts import generate_pde
from scripts.studies.fields import reproduce, sweep
from scripts.studies.fields.study import VARIANTS, ModelRun, StudyTask

ROOT = Path(__file__).parents[2]


def script(name: str) -> ModuleType:
    """A module of train/ or eval/, which are no packages."""
    path = ROOT / ("train" if name.startswith("train") else "eval") / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def test_the_study_plans_every_family_and_first_seeds_first() -> None:
    tasks = reproduce.build_tasks(Path("data"), "air.nc")
    args = reproduce.Options(Path("out"))
    runs = reproduce.plan(args, tasks)
    seeds = [run.seed for run in runs]
    assert seeds == sorted(seeds)
    for pde in ("burgers", "ks"):
        assert {run.variant for run in runs if run.task.name == pde and run.seed == 1} >= set(reproduce.FAMILIES)
        assert {run.variant for run in runs if run.task.name == pde and run.seed == 0} > {
            *reproduce.FAMILIES,
            "one_pass",
        }
    assert {run.variant for run in runs} == set(VARIANTS) - {"low_rank_mixture", "point_edm", "gaussian_rollout"}
    assert len({run.folder for run in runs}) == len(runs)
    for run in runs[::6]:
        config, _ = read_config(run.arguments)
        assert config.training.output == run.folder
        assert config.training.seed == run.seed


def test_a_model_that_is_not_planned_is_an_error() -> None:
    args = reproduce.Options(Path("out"), tasks=["ks"], variants=["gausian"])
    with pytest.raises(ValueError, match="no model gausian in ks; there are gaussian"):
        reproduce.plan(args, reproduce.build_tasks(Path("data"), "air.nc"))
    args = reproduce.Options(Path("out"), tasks=["ks"], variants=["one_pass"], seeds=[1])
    with pytest.raises(ValueError, match="no model of ks has these variants and seeds"):
        reproduce.plan(args, reproduce.build_tasks(Path("data"), "air.nc"))


def test_a_model_that_fails_does_not_stop_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    task = StudyTask("ks", ["--config", str(ROOT / "configs/field/ks_small.yaml"), "--data.pde.path", "x.h5"])
    runs = [ModelRun(task, variant, 0, Path("out")) for variant in ("gaussian_log", "gaussian")]
    made: list[str] = []

    def run(self: ModelRun, *, curve: bool) -> None:
        if self.variant == "gaussian_log":
            raise FloatingPointError("the loss is not finite")
        made.append(self.variant)

    monkeypatch.setattr(ModelRun, "run", run)
    assert [text.split(": ")[1] for text in reproduce.make_models(runs)] == ["the loss is not finite"]
    assert made == ["gaussian"]


def test_the_report_is_of_everything_that_is_there_whatever_was_asked_for(tmp_path: Path) -> None:
    for name in ("ks/gaussian-0", "burgers/point-1", "ks/one_pass-1"):
        (tmp_path / name).mkdir(parents=True)
    assert reproduce.main(["--output", str(tmp_path), "--tasks", "air", "--report"]) == 0
    text = (tmp_path / "results.md").read_text()
    task = reproduce.build_tasks(tmp_path, "air.nc")["ks"]
    found = reproduce.existing_runs(task, reproduce.Options(tmp_path))
    assert [(run.variant, run.seed) for run in found] == [("gaussian", 0), ("one_pass", 1)]
    assert "# ks" in text
    assert "# burgers" in text
    assert "# air" not in text


def test_a_model_is_trained_calibrated_once_and_evaluated_with_the_data_of_its_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("h5py", reason="field files are HDF5")
    size = ["--num_points", "8", "--num_states", "6", "--time_step", "0.5", "--trajectories", "60"]
    assert generate_pde.main(["ks", "--output", str(tmp_path / "ks.h5"), *size]) == 0
    assert generate_pde.main(["wave", "--output", "x"]) == 2
    train, calibrate, evaluate = (script(f"{name}_field") for name in ("train", "calibrate", "eval"))
    run = tmp_path / "run"
    assert calibrate.main(["--run", str(run)]) == 2
    assert "not a finished training" in capsys.readouterr().err
    unet = '{"block_out_channels": [8, 8], "layers_per_block": 1, "embedding_channels": 8, "dropout": 0.0}'
    arguments = [
        "--config", str(ROOT / "configs/field/ks_small.yaml"), "--data.pde.path", str(tmp_path / "ks.h5"),
        "--model.unet", unet, "--training.max_steps", "2", "--training.optimizer.warmup_steps", "1",
        "--training.output", str(run), "--training.batch_size", "4", "--validation_samples", "4",
    ]  # fmt: skip
    assert train.main(arguments) == 0
    small = ["--steps", "1", "--num_windows", "4", "--num_leads", "2", "--tau_evaluations", "0"]
    small += ["--ensemble_size", "4", "--choice_size", "3"]
    assert calibrate.main(["--run", str(run), *small]) == 0
    pipeline = FieldForecastPipeline.from_pretrained(run / "calibrated")
    stored = json.loads((run / "calibration.json").read_text())["calibration"]
    assert pipeline.calibration_for().to_dict() == stored
    assert calibrate.main(["--run", str(run), *small]) == 2
    assert "exists: remove it" in capsys.readouterr().err
    scored = ["--output", str(tmp_path / "scores"), "--num_one_step", "2", "--num_rollouts", "0", "--no_figures"]
    assert evaluate.main(["--run", str(run), "--ensemble_size", "4", *scored]) == 0
    metrics = json.loads((tmp_path / "scores" / "metrics.json").read_text())
    assert metrics["predictor"]["model"] == str(run / "calibrated")
    assert metrics["config"]["data"]["pde"]["path"] == str(tmp_path / "ks.h5")
    assert evaluate.main(["--run", str(tmp_path)]) == 2
    assert "not a training run" in capsys.readouterr().err


def test_the_one_pass_baseline_has_one_step_from_pure_noise() -> None:
    task = StudyTask("ks", ["--config", str(ROOT / "configs/field/ks_small.yaml"), "--data.pde.path", "x.h5"])
    config, _ = read_config(ModelRun(task, "one_pass", 0, Path("out")).arguments)
    assert (config.model.num_train_timesteps, config.model.prediction_type) == (1, "sample")
    assert config.model.beta_start == 0.9999
    assert config.objective.score == "crps"


@pytest.mark.parametrize(("variant", "uniform", "steps"), [("gaussian", False, 1), ("gaussian_uniform", True, 10)])
def test_laptop_models_are_made_for_one_step_and_beside_them_the_papers_way(
    variant: str, uniform: bool, steps: int
) -> None:
    task = StudyTask("ks", ["--config", str(ROOT / "configs/field/ks_small.yaml"), "--data.pde.path", "x.h5"])
    config, _ = read_config(ModelRun(task, variant, 0, Path("out")).arguments)
    assert (config.objective.uniform_timesteps, config.model.default_denoising_steps) == (uniform, steps)


def test_every_setting_of_the_sweeps_is_a_valid_config_of_its_own() -> None:
    grid = yaml.safe_load((ROOT / "configs/field/sweeps_small.yaml").read_text())
    task = StudyTask("b", ["--config", str(ROOT / "configs/field/burgers_small.yaml"), "--data.pde.path", "x.h5"])
    runs = sweep.plan(grid, task, Path("out"), list(grid["sweeps"]), 1)
    assert len(runs) == 24
    assert len({run.folder.name for run in runs}) == 24
    models = [read_config(run.arguments)[0] for run in runs]
    assert {one.model.num_components for one in models if one.model.noise_family == "mixture"} == {1, 2, 3, 5, 10}
    bandwidths = {
        (one.model.rank, one.objective.score_options.get("bandwidth"))
        for one in models
        if one.model.noise_family == "low_rank" and one.objective.score == "kernel"
    }
    assert bandwidths == {(rank, width) for rank in (1, 4) for width in (None, 0.2, 0.5, 1.0)}
    with pytest.raises(ValueError, match="no sweep depth; the grid has components"):
        sweep.plan(grid, task, Path("out"), ["depth"], 1)
