"""train_tabular.py and eval_tabular.py, as they are called."""

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest
import yaml
from support.scripts import ROOT, load_script
from support.tiny_sets import write_set

from marigold_uq.commands.runner import make_parser
from marigold_uq.pipelines.tabular import TabularRegressionPipeline
from marigold_uq.tabular import DiffusionRegressor, TrainingOptions
from marigold_uq.tabular.data import TableError, TableSource, read_table
from marigold_uq.tabular.evaluate import EvaluateTabular
from marigold_uq.tabular.run import ModelOptions, TrainTabular, train_tabular

MODEL = {"max_epochs": "3", "num_models": "2", "baseline": "none", "num_inference_steps": "3"}
FLAGS = [part for name, value in MODEL.items() for part in (f"--model.{name}", value)] + ["--ensemble_size", "20"]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same rows as CSV (with a text column), npz and a UCI folder."""
    root = tmp_path_factory.mktemp("tables")
    write_set(root, "toy")
    rng = np.random.default_rng(0)
    x = rng.normal(size=(250, 2))
    y = x[:, 0] + 0.1 * rng.normal(size=250)
    np.savez(root / "rows.npz", X=x, y=y, w=np.ones(250))
    lines = ["size,colour,weight,price"]
    lines += [f"{a},{'red' if b > 0 else 'blue'},1,{c}" for (a, b), c in zip(x, y, strict=True)]
    (root / "rows.csv").write_text("\n".join(lines) + "\n")
    return root


def test_tables_are_read_from_csv_npz_and_uci_folders(files: Path) -> None:
    pytest.importorskip("pandas")
    table = read_table(TableSource(files / "rows.csv", ["price"], weight="weight"))
    assert table.feature_names == ["size", "colour"]
    assert table.targets.shape == (250,)
    assert table.weights is not None
    both = read_table(TableSource(files / "rows.csv", ["price", "size"], features=["colour"]))
    assert both.targets.shape == (250, 2)
    assert read_table(TableSource(files / "rows.npz", weight="w")).features.shape == (250, 2)
    assert len(read_table(TableSource(files / "toy", part="test")).targets) == 6
    assert len(read_table(TableSource(files / "toy", split=1)).targets) == 54


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (TableSource(Path("rows.txt")), "neither a .csv"),
        (TableSource(Path("none.csv"), ["price"]), "no file"),
        (TableSource(Path("rows.csv")), "name the target column"),
        (TableSource(Path("rows.csv"), ["cost"]), "no column cost; it has size, colour, weight, price"),
        (TableSource(Path("rows.csv"), ["price"], features=["price"]), "price is both"),
        (TableSource(Path("rows.npz"), weight="v"), "no array v; it has X, y, w"),
    ],
)
def test_wrong_sources_are_explained(files: Path, source: TableSource, message: str) -> None:
    pytest.importorskip("pandas")
    with pytest.raises(TableError, match=message):
        read_table(replace(source, path=files / source.path))


def test_a_trained_table_is_saved_scored_and_never_overwritten(
    files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("pandas")
    train, evaluate = load_script("train/train_tabular.py"), load_script("eval/eval_tabular.py")
    rows = ["--data.path", str(files / "rows.csv"), "--data.target", "[price]", "--data.weight", "weight"]
    run = tmp_path / "run"
    assert train.main([*rows, *FLAGS, "--model.calibration_fraction", "0.2", "--output", str(run)]) == 0
    assert yaml.safe_load((run / "config.yaml").read_text())["model"]["max_epochs"] == 3
    described = json.loads((run / "run.json").read_text())
    assert described["feature_names"] == ["size", "colour"]
    assert described["recipe"]["num_models"] == 2
    pipeline = TabularRegressionPipeline.from_pretrained(run / "model")
    assert pipeline.calibration_for().num_calibration == 50
    assert train.main([*rows, *FLAGS, "--output", str(run)]) == 2
    assert "nothing is overwritten" in capsys.readouterr().err

    scores = ["--run", str(run), *rows, "--ensemble_size", "30", "--output", str(tmp_path / "scores")]
    assert evaluate.main(scores) == 0
    metrics = json.loads((tmp_path / "scores" / "metrics.json").read_text())["metrics"]
    assert metrics["interval_coverage_95"]["value"] > 0.8  # of the training rows: sd of 250 rows .014
    assert metrics["rmse"]["value"] < 2
    assert (tmp_path / "scores" / "calibration.png").stat().st_size > 0
    assert "| crps |" in (tmp_path / "scores" / "metrics.md").read_text()
    assert evaluate.main(scores) == 2
    assert "already holds an evaluation" in capsys.readouterr().err


def test_several_targets_are_scored_one_by_one_and_must_be_those_of_the_training(
    files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("pandas")
    train, evaluate = load_script("train/train_tabular.py"), load_script("eval/eval_tabular.py")
    rows, run = ["--data.path", str(files / "rows.csv"), "--data.target"], tmp_path / "run"
    assert train.main([*rows, "[price,size]", *FLAGS, "--output", str(run)]) == 0
    assert evaluate.main(["--run", str(run), *rows, "[price,size]", "--output", str(tmp_path / "scores")]) == 0
    result = json.loads((tmp_path / "scores" / "metrics.json").read_text())
    assert result["num_splits"] == 1
    for target, scores in zip(("price", "size"), result["splits"], strict=True):
        assert result["metrics"][f"{target}/crps"]["value"] == scores["crps"]
        assert result["metrics"][f"{target}/crps"]["std"] is None
        assert f"## {target}" in (tmp_path / "scores" / "metrics.md").read_text()
    assert "crps" not in result["metrics"]
    for wrong in ("[size,price]", "[price,weight]", "[price]"):
        assert evaluate.main(["--run", str(run), *rows, wrong, "--output", str(tmp_path / "wrong")]) == 2
        assert "predicts price, size; the target of" in capsys.readouterr().err


def test_a_folder_that_appears_during_training_is_not_replaced(files: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"

    class Slow(DiffusionRegressor):
        def fit(self, *arguments: Any, **options: Any) -> Self:
            """Meanwhile another process finishes."""
            run.mkdir()
            (run / "theirs").write_text("result")
            return super().fit(*arguments, **options)

    model = Slow(max_epochs=1, num_models=1, baseline="none", random_state=0)
    with pytest.raises(FileExistsError, match="made by another process meanwhile; this result is kept in"):
        train_tabular(TableSource(files / "rows.npz"), model, run)
    assert [path.name for path in run.iterdir()] == ["theirs"]
    (kept,) = [path for path in tmp_path.iterdir() if path != run]
    assert isinstance(TabularRegressionPipeline.from_pretrained(kept / "model"), TabularRegressionPipeline)


def test_all_splits_of_a_set_are_fitted_and_scored(
    files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    evaluate = load_script("eval/eval_tabular.py")
    arguments = ["--uci", str(files / "toy"), *FLAGS]
    config = str(ROOT / "configs" / "tabular" / "paper.yaml")
    assert evaluate.main(["--config", config, *arguments, "--output", str(tmp_path / "out")]) == 0
    result = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert result["num_splits"] == 2
    assert result["metrics"]["crps"]["standard_error"] > 0
    assert result["predictor"]["model"]["noise_family"] == "gaussian"
    assert result["command"].startswith("python eval/eval_tabular.py --config")
    assert evaluate.main(["--output", str(tmp_path / "nothing")]) == 2
    assert "give --run and --data.path" in capsys.readouterr().err


@pytest.mark.parametrize("path", sorted((ROOT / "configs" / "tabular").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_config_is_read_by_both_commands(path: Path) -> None:
    given = yaml.safe_load(path.read_text())["model"]
    details = given.pop("training_options", {})
    for options, data in ((TrainTabular, ["--data.path", "a.csv"]), (EvaluateTabular, [])):
        parser = make_parser("program", options)
        values = parser.instantiate(parser.parse_args(["--config", str(path), "--output", "out", *data]))
        assert values.model.changes().items() >= {**given, **details}.items()


def test_the_options_of_a_config_are_the_arguments_of_the_estimator() -> None:
    others = {"ensemble_size", "random_state", "verbose"}
    assert {field.name for field in fields(ModelOptions)} == set(DiffusionRegressor().get_params()) - others
    model = ModelOptions(training_options=TrainingOptions(patience=3)).estimator(seed=5)
    assert model.get_params()["training_options"].patience == 3
    assert model.random_state == 5
