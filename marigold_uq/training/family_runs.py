"""Choosing a family by short runs of the common loop, each in a folder of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from marigold_uq.files import discard, make_folder
from marigold_uq.training.config import TrainingConfig
from marigold_uq.training.loop import Trainer, make_accelerator
from marigold_uq.training.selection import (
    FamilyCandidate,
    Selection,
    SelectionConfig,
    default_candidates,
    read_choice,
    select_family,
    write_selection,
)
from marigold_uq.training.task import TrainingTask

__all__ = ["NewTask", "Score", "choose_family"]

NewTask = Callable[[FamilyCandidate, Path | None], TrainingTask]
"""A task with the head of this family, on the trunk of the model in a folder or, for None, on the run's own start."""
Score = Callable[[Path], Tensor]
"""Scores (U,) of the model in a folder, on the same held-out units each time."""

_WORK = "selection"


def choose_family(
    training: TrainingConfig, config: SelectionConfig, new_task: NewTask, score: Score, **settings: Any
) -> FamilyCandidate | None:
    """Choose the family of the run at `training.output`, which gets selection.json and selection.md.

    The trunk is trained once, as a point model; every candidate adds its head to it and trains with the run's own
    optimiser, data and seed. The runs lie in OUTPUT/selection, resume like any other, and are removed once the choice
    is made. A choice that is there already is returned. None if interrupted: the same call resumes.

    Args:
        training: Of the run.
        config: Candidates, score and budgets.
        new_task: Makes the task of a candidate, without validation.
        score: Scores a trained model.
        settings: What else the choice depends on; a stored choice made with others is refused.
    """
    candidates = config.candidates or default_candidates(config.score)
    trunk_steps = training.max_steps // 8 if config.trunk_steps is None else config.trunk_steps
    final_steps = max(1, training.max_steps // 4) if config.final_steps is None else config.final_steps
    settings |= {**asdict(config), "candidates": [asdict(one) for one in candidates]}
    known = read_choice(training.output, settings)
    if known is not None:
        return known
    if make_accelerator(training).num_processes > 1:
        raise ValueError(
            "a family is chosen in one process: start the command with one until selection.json is there, then with as "
            "many as you like, or name the family"
        )
    if training.resume == "never" and (training.output / _WORK).exists():
        raise FileExistsError(f"{training.output} holds an unfinished selection; choose another output, or resume it")
    selection = _select(training, candidates, trunk_steps, final_steps, new_task, score)
    if selection is None:
        return None
    print(f"{selection.markdown()}\nfamily: {selection.chosen.name}")
    write_selection(training.output, selection, settings)
    discard(training.output / _WORK)
    return selection.chosen


def _select(
    training: TrainingConfig,
    candidates: list[FamilyCandidate],
    trunk_steps: int,
    final_steps: int,
    new_task: NewTask,
    score: Score,
) -> Selection | None:
    work = training.output / _WORK
    make_folder(work)

    def train(candidate: FamilyCandidate, trunk: Path | None, name: str, steps: int) -> Path | None:
        """The model folder after `steps`, None if interrupted."""
        run = _short_run(training, work / name, steps)
        finished = Trainer(new_task(candidate, trunk), run).run(f"{name}, {steps} steps").finished
        return run.output / "model" if finished else None

    trunk = train(FamilyCandidate("point"), None, "trunk", trunk_steps) if trunk_steps else None
    if trunk_steps and trunk is None:
        return None

    def evaluate(candidate: FamilyCandidate, steps: int) -> Tensor | None:
        model = train(candidate, trunk, candidate.name, steps)
        return None if model is None else score(model)

    return select_family(candidates, evaluate, final_steps=final_steps, state=work / "trials.json")


def _short_run(training: TrainingConfig, output: Path, steps: int) -> TrainingConfig:
    """The run's own settings, without validation and trackers."""
    return replace(
        training, output=output, max_steps=steps, resume="latest", validate_every=0, checkpoint_limit=1, tracker="none"
    )
