"""FSDP in two processes on the CPU (gloo) against one process. DeepSpeed is refused; CUDA is not tested."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.scripts import ROOT
from support.tiny_training import train_depth_script, write_config, write_everything
from support.toy_task import assert_same_weights, metrics_of

STEPS = 4
FSDP = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
    "FSDP_AUTO_WRAP_POLICY": "NO_WRAP",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
}
"""What `accelerate launch --use_fsdp` puts into the environment, after `accelerate config`."""
WITNESS = """
import runpy, sys, torch
from marigold_uq.training.loop import Trainer
train = Trainer._train
def seen(self, start, description):
    sharded = [type(parameter).__name__ for parameter in self.network.parameters()]
    local = sum(parameter.to_local().numel() for parameter in self.network.parameters())
    whole = sum(parameter.numel() for parameter in self.network.parameters())
    print("WITNESS", self.accelerator.num_processes, torch.distributed.get_backend(), set(sharded), local < 0.7 * whole)
    return train(self, start, description)
Trainer._train = seen
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def launch_two(config: Path, **changes: str) -> list[str]:
    """Both processes as a launcher would start them; what each of them printed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    script = [sys.executable, "-c", WITNESS, str(ROOT / "train" / "train_depth.py"), "--config", str(config)]
    running = []
    for rank in range(2):
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
        environment = {**os.environ, **FSDP, **place, **address, **changes}
        running.append(
            subprocess.Popen(script, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        )
    printed = [process.communicate(timeout=900)[0] for process in running]
    assert [process.returncode for process in running] == [0, 0], "\n".join(printed)
    return printed


def weights_of(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "model" / "unet" / "diffusion_pytorch_model.safetensors")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    root = tmp_path_factory.mktemp("sharding")
    config = write_everything(root)
    config["validation"] = {"data": config["data"][1], "num_samples": 3, "num_inference_steps": 1, "num_pictures": 0}
    return root, config


def test_two_processes_that_share_the_weights_equal_one_and_resume_so(
    files: tuple[Path, dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    """Two processes to the middle and from there to the end: other weights than one process all along?"""
    root, config = files
    common = {"ema_decay": 0.0, "checkpoint_every": 2, "validate_every": 2}
    one = write_config(root / "one.yaml", config, max_steps=STEPS, output=str(root / "one"), **common)
    assert train_depth_script().main(["--config", str(one)]) == 0

    two = write_config(root / "two.yaml", config, max_steps=STEPS, output=str(root / "two"), **common)
    printed = launch_two(two)
    for text in printed:
        witnessed = [line for line in text.splitlines() if line.startswith("WITNESS")]
        assert witnessed == ["WITNESS 2 gloo {'DTensor'} True"], text
    assert json.loads((root / "two" / "versions.json").read_text())["num_processes"] == 2
    assert_same_weights(weights_of(root / "one"), weights_of(root / "two"), tolerance=1e-4)
    for mine, other in zip(metrics_of(root / "one"), metrics_of(root / "two"), strict=True):
        for name in mine:
            assert mine[name] == pytest.approx(other[name], rel=1e-3), name

    half = write_config(root / "half.yaml", config, max_steps=STEPS // 2, output=str(root / "half"), **common)
    launch_two(half)
    rest = write_config(root / "rest.yaml", config, max_steps=STEPS, output=str(root / "half"), **common)
    assert train_depth_script().main(["--config", str(rest)]) == 2
    assert "was written with FSDP: resume it in the same way" in capsys.readouterr().err
    launch_two(rest)
    assert_same_weights(weights_of(root / "one"), weights_of(root / "half"), tolerance=1e-4)


def test_what_sharding_cannot_do_is_refused(files: tuple[Path, dict[str, Any]]) -> None:
    root, config = files
    path = write_config(root / "average.yaml", config, output=str(root / "average"), ema_decay=0.9)
    with pytest.raises(AssertionError, match=r"set training\.ema_decay to 0"):
        launch_two(path)
