"""A run that was interrupted and resumed equals the uninterrupted one, bit for bit."""

import contextlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from support.toy_task import Points, ToyTask, assert_same_weights, metrics_of, toy_config, weights_of
from torch import nn

from marigold_uq.folder_lock import FolderInUseError, folder_lock
from marigold_uq.training.loop import Trainer
from marigold_uq.training.task import Stateful


class Interrupted(Exception):
    """Stands for whatever ends a process."""


def run_until(step: int, output: Path, task: ToyTask, **changes: Any) -> None:
    """Let a run die right after the task has seen optimiser step `step`."""

    def die(number: int) -> None:
        if number == step:
            raise Interrupted

    task.after_step = die  # type: ignore[method-assign]
    with pytest.raises(Interrupted):
        Trainer(task, toy_config(output, **changes)).run(config_text="x: 1\n")


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "average": {"ema_decay": 0.9},
    "accumulation": {"micro_batch_size": 2},
    "workers": {"num_workers": 2},
    "validation": {"validate_every": 4},  # right after each checkpoint
}


@pytest.mark.parametrize(
    ("name", "dies_at"), [("plain", 7), ("average", 9), ("accumulation", 7), ("workers", 7), ("validation", 9)]
)
def test_a_resumed_run_equals_the_uninterrupted_one(tmp_path: Path, name: str, dies_at: int) -> None:
    """44 samples and batches of 8: epochs of 5 steps, checkpoints at 4, 8 and 12; dropout draws from the global RNG."""

    def task() -> ToyTask:
        return ToyTask(Points(44), hidden=6, dropout=0.4)

    changes = SETTINGS[name]
    Trainer(task(), toy_config(tmp_path / "whole", **changes)).run(config_text="x: 1\n")
    run_until(dies_at, tmp_path / "parts", task(), **changes)
    resumed = task()
    assert Trainer(resumed, toy_config(tmp_path / "parts", **changes)).run(config_text="x: 1\n").finished

    assert_same_weights(weights_of(tmp_path / "whole"), weights_of(tmp_path / "parts"))
    assert metrics_of(tmp_path / "whole") == metrics_of(tmp_path / "parts")
    first_step = 4 if dies_at == 7 else 8
    assert sum(map(len, resumed.seen)) == 8 * (12 - first_step)


def test_workers_change_nothing(tmp_path: Path) -> None:
    for workers in (0, 2):
        task = ToyTask(Points(44), hidden=6, dropout=0.4)
        Trainer(task, toy_config(tmp_path / str(workers), num_workers=workers)).run()
    assert_same_weights(weights_of(tmp_path / "0"), weights_of(tmp_path / "2"))
    assert metrics_of(tmp_path / "0") == metrics_of(tmp_path / "2")


def test_a_validation_that_a_killed_run_missed_is_made_up(tmp_path: Path) -> None:
    """The checkpoint of step 4 is written before its validation, which here never comes."""

    class DiesInValidation(ToyTask):
        def validate(self, network: Any, step: int, pictures: Path) -> dict[str, float]:
            raise Interrupted

    Trainer(ToyTask(), toy_config(tmp_path / "whole", validate_every=4)).run()
    with pytest.raises(Interrupted):
        Trainer(DiesInValidation(), toy_config(tmp_path / "parts", validate_every=4)).run()
    resumed = ToyTask()
    Trainer(resumed, toy_config(tmp_path / "parts", validate_every=4)).run()
    assert resumed.validated == [4, 8, 12]
    assert metrics_of(tmp_path / "whole") == metrics_of(tmp_path / "parts")


def test_a_half_written_line_and_a_half_written_checkpoint_do_not_stop_a_resume(tmp_path: Path) -> None:
    Trainer(ToyTask(), toy_config(tmp_path / "whole")).run()
    run_until(7, tmp_path / "parts", ToyTask())
    with (tmp_path / "parts" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "lo')
    (tmp_path / "parts" / "checkpoints" / ".checkpoint-8").mkdir()
    Trainer(ToyTask(), toy_config(tmp_path / "parts")).run()
    assert metrics_of(tmp_path / "whole") == metrics_of(tmp_path / "parts")
    assert not list((tmp_path / "parts" / "checkpoints").glob(".*"))


def test_a_run_that_died_before_its_first_checkpoint_starts_anew_without_old_metrics(tmp_path: Path) -> None:
    run_until(3, tmp_path, ToyTask())
    assert len(metrics_of(tmp_path)) == 2
    Trainer(ToyTask(), toy_config(tmp_path)).run()
    assert [record["step"] for record in metrics_of(tmp_path)] == list(range(1, 13))


def test_a_run_that_died_while_saving_its_model_saves_it_when_started_again(tmp_path: Path) -> None:
    class DiesWhileSaving(ToyTask):
        def save(self, network: Any, folder: Path) -> None:
            super().save(network, folder)
            raise Interrupted

    with pytest.raises(Interrupted):
        Trainer(DiesWhileSaving(), toy_config(tmp_path)).run()
    assert not (tmp_path / "model").exists()
    task = ToyTask()
    assert Trainer(task, toy_config(tmp_path)).run().finished
    assert not task.seen
    assert weights_of(tmp_path)["weight"].isfinite().all()


def test_a_finished_run_started_again_leaves_its_model_and_card_alone(tmp_path: Path) -> None:
    Trainer(ToyTask(), toy_config(tmp_path)).run()
    (tmp_path / "model" / "README.md").write_text("evaluated")
    Trainer(ToyTask(), toy_config(tmp_path)).run()
    assert (tmp_path / "model" / "README.md").read_text() == "evaluated"
    Trainer(ToyTask(), toy_config(tmp_path, max_steps=14)).run()  # a longer run is a new model
    assert not (tmp_path / "model" / "README.md").exists()


def test_an_extension_killed_while_it_saves_its_model_saves_it_when_started_again(tmp_path: Path) -> None:
    """The model of the shorter run is complete, but it is not the one that was asked for."""

    class DiesBeforeSaving(ToyTask):
        def save(self, network: Any, folder: Path) -> None:
            raise Interrupted

    Trainer(ToyTask(), toy_config(tmp_path / "whole")).run()
    Trainer(ToyTask(), toy_config(tmp_path / "parts", max_steps=6)).run()
    short = weights_of(tmp_path / "parts")
    with pytest.raises(Interrupted):
        Trainer(DiesBeforeSaving(), toy_config(tmp_path / "parts")).run()
    assert_same_weights(weights_of(tmp_path / "parts"), short)
    assert Trainer(ToyTask(), toy_config(tmp_path / "parts")).run().finished
    assert_same_weights(weights_of(tmp_path / "parts"), weights_of(tmp_path / "whole"))


class Harmful:
    """Unpickling it makes a file."""

    def __init__(self, witness: Path) -> None:
        self.witness = witness

    def __reduce__(self) -> Any:
        return Path.touch, (self.witness,)


@pytest.mark.parametrize(
    "name",
    ["task.pt", "average.pt", "optimizer.bin", "random_states_0.pkl", "pytorch_model.bin", "custom_checkpoint_0.pkl"],
)
def test_resuming_runs_no_code_from_a_checkpoint(tmp_path: Path, name: str) -> None:
    """Whatever file of it was replaced by a pickle that calls a function."""
    run_until(7, tmp_path, ToyTask(), ema_decay=0.9)
    checkpoint = tmp_path / "checkpoints" / "checkpoint-4"
    if name.startswith("custom"):  # as versions before the first release wrote them
        (checkpoint / "task.pt").unlink()
        (checkpoint / "average.pt").unlink()
    if name.startswith("pytorch"):
        (checkpoint / "model.safetensors").unlink()
    torch.save(Harmful(tmp_path / "witness"), checkpoint / name)
    with contextlib.suppress(Exception):  # most are refused; random states are left out by accelerate
        Trainer(ToyTask(), toy_config(tmp_path, ema_decay=0.9)).run()
    assert not (tmp_path / "witness").exists()


def test_a_task_state_that_could_run_code_is_refused_by_name(tmp_path: Path) -> None:
    run_until(7, tmp_path, ToyTask())
    path = tmp_path / "checkpoints" / "checkpoint-4" / "task.pt"
    torch.save(Harmful(tmp_path / "witness"), path)
    with pytest.raises(ValueError, match=r"task\.pt is damaged, or holds more than tensors"):
        Trainer(ToyTask(), toy_config(tmp_path)).run()


class Counter:
    """A state that counts the steps."""

    def __init__(self) -> None:
        self.count = torch.zeros(())

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.count = state_dict["count"]


class Counting(ToyTask):
    """Its loss depends on its state."""

    def __init__(self) -> None:
        super().__init__()
        self.counter = Counter()

    def states(self) -> list[Stateful]:
        return [self.counter]

    def losses(self, network: nn.Module, batch: dict[str, Any], generators: list[torch.Generator]) -> torch.Tensor:
        self.counter.count = self.counter.count + 1
        return super().losses(network, batch, generators) * self.counter.count


@pytest.mark.parametrize("ema_decay", [0.0, 0.9])
def test_a_checkpoint_of_accelerates_pickles_still_resumes(tmp_path: Path, ema_decay: float) -> None:
    """What versions before the first release wrote: average, then task states, as custom_checkpoint_*.pkl."""
    Trainer(Counting(), toy_config(tmp_path / "whole", ema_decay=ema_decay)).run()
    run_until(7, tmp_path / "parts", Counting(), ema_decay=ema_decay)
    checkpoint = tmp_path / "parts" / "checkpoints" / "checkpoint-4"
    (state,) = torch.load(checkpoint / "task.pt")["states"]
    old = [state]
    if ema_decay:
        old.insert(0, torch.load(checkpoint / "average.pt"))
        (checkpoint / "average.pt").unlink()
    (checkpoint / "task.pt").unlink()
    for number, values in enumerate(old):
        torch.save(values, checkpoint / f"custom_checkpoint_{number}.pkl")
    Trainer(Counting(), toy_config(tmp_path / "parts", ema_decay=ema_decay)).run()
    assert_same_weights(weights_of(tmp_path / "whole"), weights_of(tmp_path / "parts"))
    assert metrics_of(tmp_path / "whole") == metrics_of(tmp_path / "parts")


@pytest.mark.parametrize(("before", "after"), [(0.9, 0.0), (0.0, 0.9)])
def test_a_resume_with_or_without_an_average_as_before(tmp_path: Path, before: float, after: float) -> None:
    run_until(7, tmp_path, ToyTask(), ema_decay=before)
    with pytest.raises(ValueError, match="resume with the same ema_decay"):
        Trainer(ToyTask(), toy_config(tmp_path, ema_decay=after)).run()


def test_a_checkpoint_of_another_task_is_refused(tmp_path: Path) -> None:
    run_until(7, tmp_path, ToyTask())
    with pytest.raises(ValueError, match="holds 0 states of a task; this one has 1"):
        Trainer(Counting(), toy_config(tmp_path)).run()


def test_a_second_training_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    with folder_lock(tmp_path), pytest.raises(FolderInUseError, match="is in use by another run of this process"):
        Trainer(ToyTask(), toy_config(tmp_path)).run()
    assert Trainer(ToyTask(), toy_config(tmp_path)).run().finished


def test_metrics_that_a_power_cut_damaged_are_made_again(tmp_path: Path) -> None:
    Trainer(ToyTask(), toy_config(tmp_path / "whole")).run()
    run_until(7, tmp_path / "parts", ToyTask())
    metrics = tmp_path / "parts" / "metrics.jsonl"
    whole = metrics.read_bytes().splitlines(keepends=True)
    metrics.write_bytes(b"".join(whole[:5]) + b"\0" * 30 + b"\xff\n" + whole[5])
    Trainer(ToyTask(), toy_config(tmp_path / "parts")).run()
    assert metrics_of(tmp_path / "whole") == metrics_of(tmp_path / "parts")


def test_checkpoints_beyond_the_limit_that_a_killed_run_left_are_removed(tmp_path: Path) -> None:
    Trainer(ToyTask(), toy_config(tmp_path, checkpoint_limit=3)).run()
    Trainer(ToyTask(), toy_config(tmp_path, checkpoint_limit=1)).run()
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["checkpoint-12"]


@pytest.mark.parametrize("content", [b"", b"not a pickle", "harmful", {}, {"torch_manual_seed": 3}, [1]])
def test_damaged_random_states_are_an_error_not_another_run(tmp_path: Path, content: Any) -> None:
    """accelerate alone would go on with other random numbers, and say so in its log."""
    run_until(7, tmp_path, ToyTask())
    path = tmp_path / "checkpoints" / "checkpoint-4" / "random_states_0.pkl"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        torch.save(Harmful(tmp_path / "witness") if content == "harmful" else content, path)
    with pytest.raises(ValueError, match=r"random_states_0\.pkl is damaged.* Without this file training goes on"):
        Trainer(ToyTask(), toy_config(tmp_path)).run()
    assert not (tmp_path / "witness").exists()


def test_never_refuses_a_folder_with_a_run(tmp_path: Path) -> None:
    run_until(3, tmp_path, ToyTask(), resume="never")
    with pytest.raises(FileExistsError, match="already holds a run"):
        Trainer(ToyTask(), toy_config(tmp_path, resume="never")).run()


def test_a_checkpoint_can_be_named_and_goes_on_in_another_folder(tmp_path: Path) -> None:
    Trainer(ToyTask(), toy_config(tmp_path / "whole")).run()
    checkpoint = tmp_path / "whole" / "checkpoints" / "checkpoint-8"
    Trainer(ToyTask(), toy_config(tmp_path / "other", resume=str(checkpoint))).run()
    assert_same_weights(weights_of(tmp_path / "whole"), weights_of(tmp_path / "other"))
    assert [record["step"] for record in metrics_of(tmp_path / "other")] == [9, 10, 11, 12]


def test_a_named_checkpoint_older_than_the_folders_newest_is_refused(tmp_path: Path) -> None:
    """Otherwise the later ones, of another branch, would be taken for this run's at the next resume."""
    Trainer(ToyTask(), toy_config(tmp_path)).run()
    old = tmp_path / "checkpoints" / "checkpoint-8"
    with pytest.raises(FileExistsError, match=r"later than .*checkpoint-8: checkpoint-12"):
        Trainer(ToyTask(), toy_config(tmp_path, resume=str(old))).run()


@pytest.mark.parametrize("name", ["checkpoint-9", "model"])
def test_a_path_that_is_no_checkpoint_is_refused(tmp_path: Path, name: str) -> None:
    Trainer(ToyTask(), toy_config(tmp_path / "run")).run()
    with pytest.raises((FileNotFoundError, ValueError), match="checkpoint"):
        Trainer(ToyTask(), toy_config(tmp_path / "new", resume=str(tmp_path / "run" / name))).run()


def test_a_resume_with_another_config_keeps_the_old_one(tmp_path: Path) -> None:
    run_until(7, tmp_path, ToyTask())
    Trainer(ToyTask(), toy_config(tmp_path)).run(config_text="x: 2\n")
    assert (tmp_path / "config.yaml").read_text() == "x: 2\n"
    assert (tmp_path / "config-until-step-4.yaml").read_text() == "x: 1\n"


def test_a_checkpoint_of_fewer_processes_warns_that_dropout_is_not_restored(tmp_path: Path) -> None:
    run_until(7, tmp_path, ToyTask())
    for path in (tmp_path / "checkpoints").glob("*/random_states_0.pkl"):
        path.unlink()
    with pytest.warns(UserWarning, match="random state of dropout is not restored"):
        Trainer(ToyTask(), toy_config(tmp_path)).run()


def test_tensorboard_hides_what_the_killed_run_wrote_after_its_checkpoint(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run_until(7, tmp_path, ToyTask(), tracker="tensorboard")
    Trainer(ToyTask(), toy_config(tmp_path, tracker="tensorboard")).run()
    events = accumulator.EventAccumulator(str(tmp_path / "marigold_uq"))
    events.Reload()
    assert [event.step for event in events.Scalars("loss")] == list(range(1, 13))


def test_versions_and_config_are_plain_files_that_need_no_library(tmp_path: Path) -> None:
    Trainer(ToyTask(), toy_config(tmp_path)).run(config_text="x: 1\n")
    assert "accelerate" in json.loads((tmp_path / "versions.json").read_text())
    shutil.rmtree(tmp_path / "checkpoints")
    assert torch.load(tmp_path / "model" / "weights.pt", weights_only=True)
