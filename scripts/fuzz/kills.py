"""Kill trainings at random moments and start them again, until they finish: the models must be equal bit for bit.

    PYTHONPATH=tests python -m scripts.fuzz.kills --trainings depth field table --kills 100 --output out/kills

Each training is the real one (`train_depth`, `train_field`, `train_tabular`) on tiny data. It runs in a forked process,
which gets SIGKILL after a random time. An interrupted command continues where it was.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from marigold_uq.commands.runner import Invocation, parse_options, run_command
from marigold_uq.files import fingerprint, make_folder
from marigold_uq.results import markdown_table, write_json
from scripts.fuzz.crash_points import in_child


@dataclass
class KillCount:
    """How often a training was killed, how many runs came to their end, and which of these differ."""

    kills: int = 0
    finished: int = 0
    different: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)


def depth_training(data: Path) -> Callable[[Path], None]:
    """Six steps of a tiny depth model, a checkpoint every second one."""
    from support.tiny_training import write_everything

    from marigold_uq.depth.config import DepthTrainConfig
    from marigold_uq.depth.run import train_depth

    config = data / "config.yaml"
    if not config.exists():
        config.write_text(yaml.safe_dump(write_everything(data)))
    options, invocation = parse_options("fuzz", DepthTrainConfig, ["--config", str(config)])

    def train(output: Path) -> None:
        train_depth(replace(options, training=replace(options.training, output=output)), invocation.config)

    return train


def field_training(data: Path) -> Callable[[Path], None]:
    """Twelve steps of a tiny model of the Kuramoto-Sivashinsky equation, with an average of the weights."""
    from marigold_uq.field.config import read_config
    from marigold_uq.field.data import KuramotoSivashinsky, generate
    from marigold_uq.field.run import train_field

    path = data / "ks.h5"
    if not path.exists():
        generate(KuramotoSivashinsky(num_points=8, num_states=6, time_step=0.5), path, 60, progress=False)
    unet = '{"block_out_channels": [8, 8], "layers_per_block": 1, "embedding_channels": 8, "dropout": 0.1}'
    words = [
        "--config", "configs/field/ks_small.yaml", "--data.pde.path", str(path), "--model.unet", unet,
        "--training.max_steps", "12", "--training.optimizer.warmup_steps", "1", "--training.batch_size", "4",
        "--training.checkpoint_every", "3", "--training.validate_every", "6", "--validation_samples", "4",
        "--training.output", "x",
    ]  # fmt: skip
    options, text = read_config(words)

    def train(output: Path) -> None:
        train_field(replace(options, training=replace(options.training, output=output)), text)

    return train


def table_training(data: Path) -> Callable[[Path], None]:
    """A small regressor; its run folder appears when it is complete."""
    from support.tiny_sets import quick_model

    from marigold_uq.tabular.data import TableSource
    from marigold_uq.tabular.run import train_tabular

    path = data / "table.npz"
    rng = np.random.default_rng(0)
    features = rng.normal(size=(60, 3))
    np.savez(path, X=features, y=features.sum(1) + rng.normal(size=60))

    def train(output: Path) -> None:
        if not output.exists():
            train_tabular(TableSource(path), quick_model(num_models=1, baseline="mlp"), output)

    return train


TRAININGS: dict[str, Callable[[Path], Callable[[Path], None]]] = {
    "depth": depth_training,
    "field": field_training,
    "table": table_training,
}


def kill_training(name: str, work: Path, kills: int, until: float) -> KillCount:
    """Until so many kills were made, or the time is over."""
    state = work / f"{name}.json"
    count = KillCount(**json.loads(state.read_text())) if state.exists() else KillCount()
    data, whole, parts = (work / f"{name}-{what}" for what in ("data", "whole", "parts"))
    make_folder(data)
    train = TRAININGS[name](data)
    if not (whole / "model").exists():
        status, error = in_child(lambda: train(whole))
        if status:
            raise RuntimeError(f"{name} fails without a kill: {error}")
    started = time.monotonic()
    shutil.rmtree(work / "timed", ignore_errors=True)
    in_child(lambda: train(work / "timed"))
    seconds = time.monotonic() - started
    shutil.rmtree(work / "timed", ignore_errors=True)
    rng = np.random.default_rng([sum(name.encode()), count.kills])
    while count.kills < kills and time.monotonic() < until:
        status = killed_after(float(rng.uniform(0, 1.1 * seconds)), lambda: train(parts))
        if status == -signal.SIGKILL:
            count.kills += 1
        elif status:
            count.failed.append(in_child(lambda: train(parts))[1])
            shutil.rmtree(parts, ignore_errors=True)
        else:
            count.finished += 1
            if fingerprint(parts / "model") != fingerprint(whole / "model"):
                count.different.append(f"after {count.kills} kills")
            shutil.rmtree(parts)
        write_json(state, count, overwrite=True)
    return count


def killed_after(seconds: float, step: Callable[[], None]) -> int:
    """Run a step in a forked process that is killed after a time; its exit status."""
    child = os.fork()
    if child == 0:
        status = 0
        with open(os.devnull, "w") as nothing:
            for number in (1, 2):
                os.dup2(nothing.fileno(), number)
        try:
            step()
        except BaseException:
            status = 1
        os._exit(status)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@dataclass(frozen=True)
class Kills:
    """Kill trainings at random moments.

    Args:
        output: Folder for data, runs and state; the same one continues an interrupted command.
        trainings: depth, field, table.
        kills: Of each training.
        seconds: Stop after so many seconds, with what was done.
    """

    output: Path
    trainings: list[str] = field(default_factory=lambda: list(TRAININGS))
    kills: int = 100
    seconds: float = float("inf")


def run(options: Kills, invocation: Invocation | None = None) -> int:
    """All trainings; 1 if any model differs or any restart failed."""
    import torch

    torch.set_num_threads(1)
    make_folder(options.output)
    until, rows, bad = time.monotonic() + options.seconds, list[list[Any]](), 0
    for name in options.trainings:
        count = kill_training(name, options.output, options.kills, until)
        bad += len(count.different) + len(count.failed)
        rows.append([name, *(len(one) if isinstance(one, list) else one for one in asdict(count).values())])
        for text in count.failed:
            print(f"{name}: {text}", file=sys.stderr)
    print(markdown_table(["training", "kills", "finished", "different", "failed to restart"], rows))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(run_command("scripts.fuzz.kills", Kills, run))
