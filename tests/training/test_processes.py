"""train/train_depth.py in processes of its own: two at once, killed, terminated, interrupted."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from support.scripts import ROOT
from support.tiny_training import train_depth_script, write_config, write_everything
from support.toy_task import assert_same_weights, metrics_of
from torch import Tensor

main = train_depth_script().main
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
STEPS = 12
PATIENCE = 240.0  # seconds, on a machine that does other things as well
LAUNCH = [
    # `--cpu --num_processes 2` would run one process; with `cpu: true` in the config --multi_gpu runs two on the CPU.
    *("accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1"),
    *("--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"),
]


def trained_weights(run: Path) -> dict[str, Tensor]:
    return load_file(run / "model" / "unet" / "diffusion_pytorch_model.safetensors")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    root = tmp_path_factory.mktemp("processes")
    return root, write_everything(root)


@pytest.fixture(scope="module")
def whole(files: tuple[Path, dict[str, Any]]) -> Path:
    """An uninterrupted run of STEPS steps with an average of the weights."""
    root, config = files
    path = write_config(root / "whole.yaml", config, max_steps=STEPS, output=str(root / "whole"), ema_decay=0.9)
    assert main(["--config", str(path)]) == 0
    return root / "whole"


def wait_until(condition: Callable[[], bool], is_alive: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert is_alive(), "the process ended before it was to be stopped"
        assert time.monotonic() < end, f"nothing happened for {PATIENCE} s"
        time.sleep(0.005)


def steps_logged(run: Path) -> int:
    path = run / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


def assert_equals_whole(run: Path, whole: Path) -> None:
    assert_same_weights(trained_weights(run), trained_weights(whole))
    assert metrics_of(run) == metrics_of(whole)


def launch_two(path: Path) -> list[str]:
    return [sys.executable, "-m", *LAUNCH, str(ROOT / "train" / "train_depth.py"), "--config", str(path)]


def test_two_processes_train_like_one_with_the_same_effective_batch(files: tuple[Path, dict[str, Any]]) -> None:
    """Joint kernel score with its running bandwidth, two data sets of different sizes, 2 and 4 micro batches of 2."""
    root, config = files
    held_out = {"data": config["data"][1], "num_samples": 3, "num_inference_steps": 1, "num_pictures": 3}
    held_out["uncertainty"] = "trajectory"
    start = {**config["start"], "noise_family": "low_rank", "rank": 2}
    config = {**config, "start": start, "validation": held_out}
    one = write_config(root / "one.yaml", config, output=str(root / "one"), validate_every=6, batch_size=8)
    two = write_config(root / "two.yaml", config, output=str(root / "two"), validate_every=6, batch_size=8)
    assert main(["--config", str(one)]) == 0
    done = subprocess.run(
        launch_two(two), env=ENVIRONMENT, capture_output=True, text=True, check=False, timeout=PATIENCE
    )
    assert done.returncode == 0, done.stderr
    assert json.loads((root / "two" / "versions.json").read_text())["num_processes"] == 2
    assert json.loads((root / "one" / "versions.json").read_text())["num_processes"] == 1
    assert len(list((root / "two" / "checkpoints").glob("checkpoint-6/random_states_*.pkl"))) == 2
    (*steps_one, scores_one), (*steps_two, scores_two) = metrics_of(root / "one"), metrics_of(root / "two")
    losses = [[record["loss"] for record in steps] for steps in (steps_one, steps_two)]
    np.testing.assert_allclose(losses[0], losses[1], rtol=2e-6)  # float32, sums in another order
    assert scores_one == pytest.approx(scores_two, rel=1e-3)  # each process scores a share of the three samples
    assert len(list((root / "two" / "validation" / "step-0000006").glob("*.png"))) == 3
    # Adam turns a rounding error of a near-zero gradient into part of a step, here 6 steps of 1e-3.
    assert_same_weights(trained_weights(root / "one"), trained_weights(root / "two"), tolerance=2e-5)
    saved = [torch.load(root / name / "checkpoints" / "checkpoint-6" / "task.pt") for name in ("one", "two")]
    assert [one["validated"] for one in saved] == [6, 6]
    scales = [one["states"][0] for one in saved]
    assert (scales[0]["mean_square"] != 1).any()
    torch.testing.assert_close(scales[0]["mean_square"], scales[1]["mean_square"], rtol=1e-5, atol=0)
    assert (root / "two" / "model" / "README.md").exists()


def test_a_killed_run_resumes_to_the_weights_of_the_uninterrupted_one(
    files: tuple[Path, dict[str, Any]], whole: Path
) -> None:
    root, config = files
    path = write_config(root / "killed.yaml", config, max_steps=STEPS, output=str(root / "killed"), ema_decay=0.9)
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "train" / "train_depth.py"), "--config", str(path)],
        env=ENVIRONMENT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_until(lambda: steps_logged(root / "killed") >= 3, lambda: process.poll() is None)
    finally:
        process.kill()
    assert process.wait() == -signal.SIGKILL
    assert not (root / "killed" / "model").exists()
    assert (root / "killed" / "checkpoints" / "checkpoint-2").exists()
    assert main(["--config", str(path)]) == 0
    assert_equals_whole(root / "killed", whole)


def run_script(arguments: list[str]) -> None:
    os.setsid()  # a process group of its own, workers included
    sys.exit(main(arguments))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_terminated_or_interrupted_run_saves_says_so_and_can_be_resumed(
    files: tuple[Path, dict[str, Any]], whole: Path, number: signal.Signals
) -> None:
    root, config = files
    run = root / number.name
    settings = {"max_steps": STEPS, "output": str(run), "ema_decay": 0.9, "checkpoint_every": 100, "num_workers": 1}
    path = write_config(root / f"{number.name}.yaml", config, **settings)
    process = multiprocessing.get_context("fork").Process(target=run_script, args=(["--config", str(path)],))
    process.start()
    wait_until(lambda: steps_logged(run) >= 2, process.is_alive)
    assert process.pid is not None
    os.killpg(process.pid, number)  # terminals and job schedulers signal every process, also those that read data
    if number == signal.SIGINT:
        os.kill(process.pid, number)  # the echo that a launcher passes on
    process.join(PATIENCE)
    assert process.exitcode == 130
    [checkpoint] = (run / "checkpoints").iterdir()
    assert 2 <= int(checkpoint.name.removeprefix("checkpoint-")) < STEPS
    assert not (run / "model").exists()
    assert main(["--config", str(path)]) == 0
    assert_equals_whole(run, whole)


@pytest.mark.slow
def test_ctrl_c_on_a_launched_pair_saves_and_the_pair_resumes_exactly(files: tuple[Path, dict[str, Any]]) -> None:
    """The terminal sends SIGINT to the launcher and to both processes, and the launcher sends it on once more."""
    root, config = files
    settings = {"max_steps": STEPS, "ema_decay": 0.9, "checkpoint_every": 100}
    paths = [write_config(root / f"{n}.yaml", config, output=str(root / n), **settings) for n in ("pair", "pair_parts")]
    subprocess.run(launch_two(paths[0]), env=ENVIRONMENT, check=True, capture_output=True, timeout=PATIENCE)
    launcher = subprocess.Popen(
        launch_two(paths[1]),
        env=ENVIRONMENT,
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_until(lambda: steps_logged(root / "pair_parts") >= 2, lambda: launcher.poll() is None)
        os.killpg(launcher.pid, signal.SIGINT)
        assert launcher.wait(PATIENCE) != 0
    finally:
        if launcher.poll() is None:
            os.killpg(launcher.pid, signal.SIGKILL)
    [checkpoint] = (root / "pair_parts" / "checkpoints").iterdir()
    assert 2 <= int(checkpoint.name.removeprefix("checkpoint-")) < STEPS
    subprocess.run(launch_two(paths[1]), env=ENVIRONMENT, check=True, capture_output=True, timeout=PATIENCE)
    assert_equals_whole(root / "pair_parts", root / "pair")
