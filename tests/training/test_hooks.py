"""Tasks that steer the loop by their validations: rate, end, and an exact resume of both."""

from pathlib import Path
from typing import Any

import pytest
from support.toy_task import Points, ToyTask, assert_same_weights, metrics_of, toy_config, weights_of
from torch import nn

from marigold_uq.training.loop import Trainer
from marigold_uq.training.task import Stateful


class Patience:
    """Halves the rate at each validation and has enough after `limit` of them."""

    def __init__(self, limit: int) -> None:
        self.limit, self.seen = limit, []

    def state_dict(self) -> dict[str, Any]:
        return {"seen": list(self.seen)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.seen = list(state_dict["seen"])


class PatientTask(ToyTask):
    """Dropout draws from the global stream, which a resume restores."""

    def __init__(self, limit: int = 100) -> None:
        super().__init__(Points(44), hidden=6, dropout=0.4)
        self.patience = Patience(limit)

    def states(self) -> list[Stateful]:
        return [self.patience]

    def rate_factor(self) -> float:
        return 0.5 ** len(self.patience.seen)

    def after_validation(self, step: int, scores: dict[str, float], network: nn.Module) -> None:
        self.patience.seen.append((step, scores["validation/error"]))

    def finished(self) -> bool:
        return len(self.patience.seen) >= self.patience.limit


class Killed(Exception):
    """Stands for whatever ends a process."""


def die_at(task: PatientTask, method: str, number: int) -> PatientTask:
    """Let the `number`-th call of a method of the task end the process."""
    original, calls = getattr(task, method), [0]

    def counted(*args: Any) -> Any:
        calls[0] += 1
        if calls[0] == number:
            raise Killed
        return original(*args)

    setattr(task, method, counted)
    return task


def test_the_task_scales_the_learning_rate(tmp_path: Path) -> None:
    Trainer(PatientTask(), toy_config(tmp_path, validate_every=4)).run()
    rates = [record["learning_rate"] for record in metrics_of(tmp_path) if "loss" in record]
    assert rates == [0.05] * 4 + [0.025] * 4 + [0.0125] * 4


def test_the_task_ends_training_with_a_checkpoint_and_a_model(tmp_path: Path) -> None:
    result = Trainer(PatientTask(2), toy_config(tmp_path, validate_every=3, checkpoint_every=100)).run()
    assert (result.step, result.finished) == (6, True)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["checkpoint-6"]
    again = PatientTask(2)
    result = Trainer(again, toy_config(tmp_path, validate_every=3, checkpoint_every=100)).run()
    assert (result.step, result.finished, again.seen) == (6, True, [])


def test_more_patience_continues_a_run_that_had_ended(tmp_path: Path) -> None:
    Trainer(PatientTask(3), toy_config(tmp_path / "whole", validate_every=3)).run()
    Trainer(PatientTask(2), toy_config(tmp_path / "parts", validate_every=3)).run()
    Trainer(PatientTask(3), toy_config(tmp_path / "parts", validate_every=3)).run()
    assert_same_weights(weights_of(tmp_path / "whole"), weights_of(tmp_path / "parts"))
    assert metrics_of(tmp_path / "whole") == metrics_of(tmp_path / "parts")


@pytest.mark.parametrize(
    ("method", "number"),
    [
        ("after_step", 7),
        ("validate", 1),
        ("validate", 2),
        ("after_validation", 1),
        ("after_validation", 3),
        ("save", 1),
    ],
)
def test_a_state_takes_in_each_validation_once_wherever_the_run_dies(tmp_path: Path, method: str, number: int) -> None:
    """Checkpoints are written before the validation of their step, so that a failing one loses nothing."""
    config = {"validate_every": 4, "checkpoint_every": 4}
    whole = PatientTask()
    Trainer(whole, toy_config(tmp_path / "whole", **config)).run()
    with pytest.raises(Killed):
        Trainer(die_at(PatientTask(), method, number), toy_config(tmp_path / "parts", **config)).run()
    resumed = PatientTask()
    Trainer(resumed, toy_config(tmp_path / "parts", **config)).run()
    assert resumed.patience.seen == whole.patience.seen
    assert_same_weights(weights_of(tmp_path / "whole"), weights_of(tmp_path / "parts"))
    assert metrics_of(tmp_path / "whole") == metrics_of(tmp_path / "parts")


def test_a_finished_run_is_not_validated_again(tmp_path: Path) -> None:
    Trainer(PatientTask(), toy_config(tmp_path, validate_every=4)).run()
    again = PatientTask()
    Trainer(again, toy_config(tmp_path, validate_every=4)).run()
    assert again.validated == []
    assert len(again.patience.seen) == 3
