"""How an evaluation runs: over processes, interrupted, again, with broken files and wrong options."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from support.depth_scenes import GROUPS, SIZE, random_members, write_predictions, write_scenes
from support.scripts import load_script, parse_options

from marigold_uq.depth.data import DepthSample, build_dataset
from marigold_uq.depth.evaluation import (
    AlignmentOptions,
    DataOptions,
    DepthEvaluation,
    FileOptions,
    Members,
    Predictor,
    ScoreOptions,
    evaluate,
    evaluate_depth,
)

REPOSITORY = Path(__file__).parents[3]
main = load_script("eval/eval_depth.py").main


class Counting(Predictor):
    """Members from memory; notes who was asked for, and is interrupted before image number `stop`."""

    def __init__(self, stop: int | None = None) -> None:
        self.asked: list[str] = []
        self.stop = stop

    def predict(self, sample: DepthSample) -> Members:
        if len(self.asked) == self.stop:
            raise KeyboardInterrupt
        self.asked.append(sample["name"])
        return Members.of(torch.from_numpy(random_members(sample["name"])))


@pytest.mark.slow  # tests/metrics has the quick one
def test_two_processes_give_the_numbers_of_one(options, tmp_path):
    one = evaluate_depth(options())
    arguments = [
        "--predictor=files",
        f"--files.folder={options().files.folder}",
        f"--data.root={options().data.root}",
        f"--output={tmp_path / 'two'}",
        "--figures=false",
    ]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    finished = subprocess.run(
        [*launcher, str(REPOSITORY / "eval" / "eval_depth.py"), *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert finished.returncode == 0, finished.stderr
    two = json.loads((tmp_path / "two" / "metrics.json").read_text())
    assert two["num_processes"] == 2
    assert one.metrics["num_processes"] == 1
    for part in ("metrics", "groups", "curves", "num_images", "alignment"):
        assert two[part] == one.metrics[part], part
    table = [(folder / "per_image.csv").read_text() for folder in (tmp_path / "two", options().output)]
    assert table[0] == table[1]
    assert finished.stdout.count("written to") == 1  # only one process reports


def test_an_interrupted_run_goes_on_where_it_stopped(options, tmp_path):
    whole = evaluate_depth(options(output=tmp_path / "whole"), predictor=Counting())
    with pytest.raises(KeyboardInterrupt):
        evaluate_depth(options(), predictor=Counting(stop=2))
    assert not (options().output / "metrics.json").exists()
    rest = Counting()
    resumed = evaluate_depth(options(), predictor=rest)
    assert rest.asked == list(GROUPS)[2:]
    assert resumed.metrics["metrics"] == whole.metrics["metrics"]
    assert resumed.metrics["curves"] == whole.metrics["curves"]


def test_a_prediction_that_changed_in_between_is_scored_anew(options, tmp_path):
    folder = write_predictions(tmp_path / "predictions", "samples")
    (folder / "street" / "b.npz").unlink()
    before = evaluate_depth(options(folder))
    (options().output / "metrics.json").unlink()  # as if it had been interrupted at the very end
    np.savez(folder / "desk" / "a.npz", samples=2 * random_members("desk/a") + random_members("desk/b"))
    np.savez(folder / "street" / "b.npz", samples=random_members("street/b"))
    after = evaluate_depth(options(folder))
    crps = [{r.name: r.statistics["crps"] for r in result.records} for result in (before, after)]
    assert [name for name in crps[0] if crps[0][name] != crps[1][name]] == ["desk/a"]
    assert len(after.records) == 5


def test_a_finished_evaluation_is_replaced_only_on_request(options):
    evaluate_depth(options())
    with pytest.raises(FileExistsError, match="finished evaluation"):
        evaluate_depth(options())
    (options().output / "notes.txt").write_text("mine")
    again = Counting()
    evaluate_depth(options(overwrite=True), predictor=again)
    assert len(again.asked) == 5
    assert (options().output / "notes.txt").read_text() == "mine"


def test_an_unfinished_evaluation_with_other_options_is_refused_and_the_option_named(options):
    with pytest.raises(KeyboardInterrupt):
        evaluate_depth(options(), predictor=Counting(stop=1))
    with pytest.raises(FileExistsError, match=r"score\.level"):
        evaluate_depth(options(score=ScoreOptions(level=0.9)))


def test_a_run_that_could_not_start_leaves_nothing_in_the_way(options, tmp_path):
    with pytest.raises(OSError, match="not a folder"):
        evaluate_depth(options(files=FileOptions(folder=tmp_path / "nowhere")))
    assert not options().output.exists()


def test_saved_predictions_are_not_replaced(options, tmp_path):
    saved = tmp_path / "saved"
    evaluate_depth(options(save_predictions=saved))
    with pytest.raises(FileExistsError, match="npz"):
        evaluate_depth(options(save_predictions=saved, output=tmp_path / "other"))


BROKEN = {
    "missing file": (None, "does not exist"),
    "not an npz": (b"nonsense", "no readable npz"),
    "wrong shape": ({"samples": np.zeros((3, 5, 7))}, r"5 x 7 and the image 20 x 28"),
    "no member axis": ({"samples": np.zeros(SIZE)}, r"expected \(E, H, W\)"),
    "no known key": ({"disparity": np.zeros(SIZE)}, "expected samples, or mean"),
    "negative std": ({"mean": np.zeros(SIZE), "std": np.full(SIZE, -1.0)}, "standard deviation"),
    "two sizes": ({"mean": np.zeros(SIZE), "std": np.ones((5, 7))}, "equal maps"),
    "NaN": ({"samples": np.full((3, *SIZE), np.nan)}, "NaN or infinite at"),
    "infinite std": ({"mean": random_members("desk/b")[0], "std": np.full(SIZE, np.inf)}, "NaN or infinite at"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_prediction_is_named_and_counted(case, options, tmp_path):
    content, reason = BROKEN[case]
    folder = write_predictions(tmp_path / "predictions", "samples")
    path = folder / "desk" / "b.npz"
    path.unlink()
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        np.savez(path, **content)
    result = evaluate_depth(options(folder))
    (failure,) = result.failures
    assert failure.name == "desk/b"
    assert re.search(reason, failure.reason), failure.reason
    assert result.metrics["num_failed"] == 1
    assert result.metrics["num_images"] == 4


def test_nan_where_there_is_no_truth_does_not_matter(options, tmp_path):
    folder = write_predictions(tmp_path / "predictions", "samples")
    dataset = build_dataset("folder", options().data.root)
    for index in range(len(dataset)):
        sample = dataset[index]
        members = random_members(sample["name"])
        members[:, ~sample["valid"][0].numpy()] = np.nan
        np.savez(folder / f"{sample['name']}.npz", samples=members)
    with_nan = evaluate_depth(options(folder, output=tmp_path / "nan"))
    assert with_nan.metrics["metrics"] == evaluate_depth(options()).metrics["metrics"]


def test_a_broken_sample_is_named_and_counted(options, tmp_path):
    root = write_scenes(tmp_path / "scenes")
    (root / "depth" / "desk" / "c.png").write_bytes(b"not a picture")
    (root / "rgb" / "street" / "a.png").unlink()
    result = evaluate_depth(options(data=DataOptions(root=str(root))))
    assert [failure.name for failure in result.failures] == ["desk/c", "street/a"]
    assert result.metrics["failed"][0]["name"] == "desk/c"
    assert len(result.records) == 3


def test_kinds_of_predictions_are_not_mixed(options, tmp_path):
    folder = write_predictions(tmp_path / "predictions", "samples")
    np.savez(folder / "desk" / "a.npz", mean=np.zeros(SIZE), std=np.ones(SIZE))
    with pytest.raises(ValueError, match="different kinds"):
        evaluate_depth(options(folder))


def test_mean_and_std_of_a_disparity_are_refused(options, tmp_path):
    folder = write_predictions(tmp_path / "predictions", "mean+std")
    with pytest.raises(ValueError, match="give samples"):
        evaluate_depth(options(files=FileOptions(folder=folder, space="disparity")))


def test_wrong_options_are_errors_that_say_what_is_known(options, tmp_path):
    wrong = {
        "unknown data set 'nuy'; known: diode": {"data": DataOptions(name="nuy", root=str(tmp_path))},
        "unknown metrics.*crsp.*known: depth, probabilistic": {"score": ScoreOptions(metrics=("depth", "crsp"))},
        "unknown predictor 'oracle'; known: constant, files": {"predictor": "oracle"},
        "not a folder": {"files": FileOptions(folder=tmp_path / "nowhere")},
        "data.limit must be at least 1; got 0": {"data": DataOptions(root=options().data.root, limit=0)},
        "needs a smallest depth": {"alignment": AlignmentOptions(clip="dataset")},
    }
    for number, (message, change) in enumerate(wrong.items()):
        with pytest.raises((ValueError, OSError), match=message):
            evaluate_depth(options(output=tmp_path / str(number), **change))


def test_nothing_scored_is_an_error_that_names_the_first_reason(options, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"none of 5 images.*desk/a.*does not exist"):
        evaluate_depth(options(tmp_path / "empty"))


def test_the_command_line_reads_yaml_and_flags_and_returns_what_happened(options, tmp_path, capsys):
    config = tmp_path / "config.yaml"
    config.write_text(
        yaml.safe_dump({"predictor": "ramp", "data": {"root": options().data.root}, "score": {"metrics": ["depth"]}})
    )
    chosen = parse_options(
        DepthEvaluation, *[f"--config={config}", "--data.limit=3", "--pipeline.num_inference_steps=7"]
    )
    assert (chosen.predictor, chosen.data.limit, chosen.pipeline.num_inference_steps) == ("ramp", 3, 7)
    output = f"--output={tmp_path / 'out'}"
    assert main([f"--config={config}", output]) == 0
    assert "abs_relative_difference" in capsys.readouterr().out
    assert (tmp_path / "out" / "figures" / "groups.png").stat().st_size > 1000
    assert main([f"--config={config}", output]) == 2
    assert "finished evaluation" in capsys.readouterr().err
    again = yaml.safe_load((tmp_path / "out" / "config.yaml").read_text())
    assert again["predictor"] == "ramp"
    with pytest.raises(SystemExit):
        parse_options(DepthEvaluation, "--data.nmae=nyu")
    with pytest.raises(SystemExit):
        parse_options(DepthEvaluation, "--pipeline.uncertainty=sometimes")


def test_the_published_configs_are_valid():
    for path in sorted((REPOSITORY / "configs" / "depth").glob("eval_*.yaml")):
        options = parse_options(DepthEvaluation, f"--config={path}")
        assert options.data.name in ("nyu", "kitti_eigen", "eth3d", "scannet", "diode"), path


def test_procedural_scenes_are_a_data_set_like_the_others(options, tmp_path):
    data = DataOptions("procedural", options={"length": 2, "height": 24, "width": 32, "split": "test"})
    result = evaluate_depth(options(predictor="ramp", data=data, score=ScoreOptions(metrics=("depth",))))
    assert [record.name for record in result.records] == ["test_0_0000000", "test_0_0000001"]
    for wrong, message in (
        ({"root": "somewhere"}, "rendered, not read"),
        ({"filenames": "list.txt"}, "no filename list"),
    ):
        with pytest.raises(ValueError, match=message):
            build_dataset("procedural", **wrong)


@pytest.mark.parametrize("is_first", [True, False])
def test_the_bar_of_the_first_process_can_be_turned_off(is_first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """tqdm reads TQDM_DISABLE when it is imported, and any `disable` overrules what it found."""
    seen: list[dict[str, Any]] = []

    def bar(items: Any, **options: Any) -> Any:
        seen.append(options)
        return items

    monkeypatch.setattr(evaluate, "tqdm", bar)
    state: Any = SimpleNamespace(process_index=0, num_processes=1, is_local_main_process=is_first)
    scorer: Any = lambda index: None  # noqa: E731
    evaluate._run(scorer, [0], state)
    assert [options.get("disable", "unsaid") for options in seen] == ["unsaid" if is_first else True]
