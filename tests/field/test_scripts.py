"""The scripts of the field study: what they plan, before anything is trained; and calibration of a trained model."""

import importlib.util
import json
from argparse import Namespace
from pathlib import Path
from types import ModuleType

import pytest
import yaml
from support.tiny_field import tiny_trajectories

from marigold_uq.field.command import read_config
from marigold_uq.field.data import write_trajectories
from marigold_uq.field.run import train_field
from marigold_uq.pipelines.field import FieldForecastPipeline
from scripts.studies.fields.study import VARIANTS, ModelRun, StudyTask

ROOT = Path(__file__).parents[2]


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_study_plans_every_family_and_first_seeds_first() -> None:
    study = script("reproduce_fields")
    tasks = study.build_tasks(Path("data"), "air.nc")
    names = list(study.PLAN)
    args = Namespace(tasks=names, variants=None, seeds=None, output=Path("out"), max_steps=None)
    runs = study.plan(args, tasks)
    seeds = [run.seed for run in runs]
    assert seeds == sorted(seeds)
    for pde in ("burgers", "ks"):
        assert {run.variant for run in runs if run.task.name == pde and run.seed == 1} >= set(study.FAMILIES)
        assert {run.variant for run in runs if run.task.name == pde and run.seed == 0} > {*study.FAMILIES, "one_pass"}
    assert {run.variant for run in runs} == set(VARIANTS)
    assert len({run.folder for run in runs}) == len(runs)
    for run in runs[::6]:
        config, _ = read_config(run.arguments)
        assert config.training.output == run.folder
        assert config.training.seed == run.seed


def test_a_model_that_is_not_planned_is_an_error() -> None:
    study = script("reproduce_fields")
    args = Namespace(tasks=["ks"], variants=["gausian"], seeds=None, output=Path("out"), max_steps=None)
    with pytest.raises(ValueError, match="no model gausian in ks; there are gaussian"):
        study.plan(args, study.build_tasks(Path("data"), "air.nc"))
    args = Namespace(tasks=["ks"], variants=["one_pass"], seeds=[1], output=Path("out"), max_steps=None)
    with pytest.raises(ValueError, match="no model of ks has these variants and seeds"):
        study.plan(args, study.build_tasks(Path("data"), "air.nc"))


def test_a_model_that_fails_does_not_stop_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    study = script("reproduce_fields")
    task = StudyTask("ks", ["--config", str(ROOT / "configs/field/ks_small.yaml"), "--data.pde.path", "x.h5"])
    runs = [ModelRun(task, variant, 0, Path("out")) for variant in ("gaussian_log", "gaussian")]
    made: list[str] = []

    def run(self: ModelRun, *, curve: bool) -> None:
        if self.variant == "gaussian_log":
            raise FloatingPointError("the loss is not finite")
        made.append(self.variant)

    monkeypatch.setattr(ModelRun, "run", run)
    assert [text.split(": ")[1] for text in study.make_models(runs)] == ["the loss is not finite"]
    assert made == ["gaussian"]


def test_the_report_is_of_everything_that_is_there_whatever_was_asked_for(tmp_path: Path) -> None:
    study = script("reproduce_fields")
    for name in ("ks/gaussian-0", "burgers/point-1", "ks/one_pass-1"):
        (tmp_path / name).mkdir(parents=True)
    assert study.main(["--output", str(tmp_path), "--tasks", "air", "--report"]) == 0
    text = (tmp_path / "results.md").read_text()
    task = study.build_tasks(tmp_path, "air.nc")["ks"]
    found = study.existing_runs(task, Namespace(output=tmp_path, max_steps=None))
    assert [(run.variant, run.seed) for run in found] == [("gaussian", 0), ("one_pass", 1)]
    assert "# ks" in text
    assert "# burgers" in text
    assert "# air" not in text


def test_a_trained_model_is_calibrated_beside_itself_and_only_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("h5py", reason="field files are HDF5")
    data = tiny_trajectories(count=60)
    write_trajectories(tmp_path / "walks.h5", [(0, data.states.numpy())], tuple(data.states.shape), data.x, data.t, {})
    run = tmp_path / "run"
    unet = '{"block_out_channels": [8, 8], "layers_per_block": 1, "embedding_channels": 8, "dropout": 0.0}'
    config, text = read_config(
        [
            "--config", str(ROOT / "configs/field/ks_small.yaml"), "--data.pde.path", str(tmp_path / "walks.h5"),
            "--model.unet", unet, "--training.max_steps", "2", "--training.optimizer.warmup_steps", "1",
            "--training.output", str(run),
        ]
    )  # fmt: skip
    calibrate = script("calibrate_field")
    assert calibrate.main(["--run", str(run)]) == 2
    assert "not a finished training" in capsys.readouterr().err
    train_field(config, text)
    small = ["--steps", "[1]", "--num_windows", "4", "--num_leads", "2", "--taus", "[]", "--ensemble_size", "4"]
    assert calibrate.main(["--run", str(run), *small]) == 0
    assert "too few" in capsys.readouterr().err  # 15 validation trajectories promise nothing
    pipeline = FieldForecastPipeline.from_pretrained(run / "calibrated")
    assert pipeline.config.lead_kappas == json.loads((run / "calibration.json").read_text())["lead_kappas"]
    assert calibrate.main(["--run", str(run), *small]) == 2
    assert "exists: remove it" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["ks_small", "burgers_small", "air_small"])
def test_models_are_evaluated_on_the_split_that_they_were_trained_with(name: str) -> None:
    train, evaluation = (
        yaml.safe_load((ROOT / "configs/field" / f"{prefix}{name}.yaml").read_text()) for prefix in ("", "eval_")
    )
    assert train["data"] == evaluation["data"]


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
    sweeps = script("sweep_fields")
    grid = yaml.safe_load((ROOT / "configs/field/sweeps_small.yaml").read_text())
    task = StudyTask("b", ["--config", str(ROOT / "configs/field/burgers_small.yaml"), "--data.pde.path", "x.h5"])
    runs = sweeps.plan(grid, task, Path("out"), list(grid["sweeps"]), 1)
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
        sweeps.plan(grid, task, Path("out"), ["depth"], 1)
