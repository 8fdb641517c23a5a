"""All splits of a data set trained as one stack, in parts: a killed process loses minutes of work.

States of training are saved every few minutes; families share one baseline. The denoiser's training has no end of its
own, so a run can be evaluated after any number of epochs and then resumed.
"""

import copy
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from tqdm.auto import tqdm

from marigold_uq.files import atomic_path, make_folder, require_same
from marigold_uq.models.mlp import StackedMLP
from marigold_uq.pipelines.tabular import TabularRegressionPipeline
from marigold_uq.randomness import member_seed
from marigold_uq.tabular.recipe import Recipe
from marigold_uq.tabular.scores import SplitScores, score_rows
from marigold_uq.tabular.stack import Standardised, TrainingRows, build_denoiser, fit_mlp_baseline, predict_rows
from marigold_uq.tabular.trainer import StackedTrainer
from marigold_uq.tabular.uci import UCIDataset
from marigold_uq.training.interrupt import InterruptGuard
from scripts.studies.uci.cells import dataset_digest

NO_END = 2**31
_BASELINE_SETTINGS = ("dropout", "baseline_epochs", "batch_size", "learning_rate", "num_models")
"""What the baseline depends on, besides data and seed."""
_NOT_IN_TRAINING = ("max_epochs", "kappa_from_validation")
"""What a saved state does not depend on."""


class Interrupted(KeyboardInterrupt):
    """A signal asked the process to end; everything is saved."""


@dataclass(frozen=True)
class StackedTask:
    """What is trained: one model per split (times `recipe.num_models`), with the MLP baseline of the paper."""

    dataset: UCIDataset
    recipe: Recipe
    seed: int = 0

    def __post_init__(self) -> None:
        if self.recipe.baseline != "mlp" or self.recipe.calibration_fraction:
            raise ValueError(
                "stacked reproduction trains recipes with the MLP baseline and no calibration rows; got baseline "
                f"{self.recipe.baseline!r} and calibration_fraction {self.recipe.calibration_fraction}"
            )

    def seeds(self) -> list[int]:
        """One seed per split."""
        return [member_seed(self.seed, split) for split in range(self.dataset.num_splits)]

    def models(self) -> list[Standardised]:
        """Standardised training rows of every model, the models of a split side by side."""
        tables = [
            TrainingRows(split.train_features, split.train_targets[:, None], np.ones(len(split.train_targets)))
            for split in self.dataset
        ]
        numbers = range(self.recipe.num_models)
        pairs = zip(tables, self.seeds(), strict=True)
        return [Standardised.of(table, member_seed(seed, number)) for table, seed in pairs for number in numbers]

    def identity(self, settings: Sequence[str] | None = None) -> dict[str, Any]:
        """Data, seed and the settings that a saved state depends on (all but `_NOT_IN_TRAINING` by default)."""
        recipe = asdict(self.recipe)
        names = [name for name in recipe if name not in _NOT_IN_TRAINING] if settings is None else settings
        return {"data": dataset_digest(self.dataset), "seed": self.seed, **{name: recipe[name] for name in names}}


@dataclass
class _Stage:
    """A trainer whose state is kept in a file.

    Args:
        trainer: Built with the same arguments every time.
        path: The file; a state of other data or settings is refused.
        identity: What the state depends on.
        title: Of the progress bar.
        seconds_between: Time between saved states.
    """

    trainer: StackedTrainer
    path: Path
    identity: dict[str, Any]
    title: str
    seconds_between: float
    seconds: float = 0.0  # of processor time, over all processes

    def resume(self) -> None:
        """Take the saved state, if there is one."""
        if not self.path.exists():
            return
        state = torch.load(self.path, weights_only=True)
        require_same(self.path, state["identity"], self.identity)
        self.trainer.load_state_dict(state["trainer"])
        self.seconds = state["seconds"]

    @property
    def epoch(self) -> int:
        """Epochs that every model has behind it; one that stopped early counts as having arrived."""
        progress = self.trainer.progress
        epochs = [epoch for epoch, active in zip(progress.epoch, progress.active, strict=True) if active]
        return min(epochs, default=NO_END)

    def run(self, epochs: int, *, verbose: bool) -> None:
        """Train until every model has `epochs` epochs behind it; a signal to end saves and raises `Interrupted`."""
        saved, started = time.monotonic(), time.process_time()
        options = {"total": epochs, "initial": min(self.epoch, epochs), "unit": "epoch", "disable": not verbose}

        def save() -> None:
            nonlocal saved, started
            self.seconds, started = self.seconds + time.process_time() - started, time.process_time()
            state = {"identity": self.identity, "seconds": self.seconds, "trainer": self.trainer.state_dict()}
            with atomic_path(self.path, overwrite=True) as temporary:
                torch.save(state, temporary)
            saved = time.monotonic()

        with InterruptGuard() as guard, tqdm(desc=self.title, **options) as bar:
            while self.epoch < epochs:
                self.trainer.step()
                bar.update(min(self.epoch, epochs) - bar.n)
                if guard.requested or time.monotonic() - saved > self.seconds_between:
                    save()
                if guard.requested:
                    raise Interrupted(f"{self.title} is saved at epoch {self.epoch} of {epochs}")
        save()


class StackedRun:
    """Training of a `StackedTask` that resumes where a former process stopped.

    Args:
        task: What is trained.
        folder: Where states are kept; tasks of other families of the same set share its baseline.
        checkpoint_seconds: Time between saved states.
        verbose: Show progress bars.
    """

    def __init__(
        self, task: StackedTask, folder: Path, *, checkpoint_seconds: float = 120.0, verbose: bool = False
    ) -> None:
        self.task, self.folder, self.verbose = task, Path(folder), verbose
        self.seconds_between = checkpoint_seconds
        self.state_path = state_path(self.folder, task.dataset.name, task.recipe.noise_family)
        make_folder(self.folder)
        models = task.models()
        self.baseline = fit_mlp_baseline(models, task.recipe, self._train_baseline)
        self.scheduler = task.recipe.scheduler()
        recipe = replace(task.recipe, max_epochs=NO_END)
        self.network, trainer = build_denoiser(models, predict_rows(self.baseline, models), recipe, self.scheduler)
        title = f"{task.dataset.name} {task.recipe.noise_family}"
        self._stage = _Stage(trainer, self.state_path, task.identity(), title, checkpoint_seconds)
        self._stage.resume()

    @property
    def epoch(self) -> int:
        """Epochs that every model has behind it."""
        return self._stage.epoch

    @property
    def seconds(self) -> float:
        """Processor time of training the denoiser, over all processes."""
        return self._stage.seconds

    def advance(self, epochs: int) -> None:
        """Train until every model has `epochs` epochs behind it; a signal to end saves and raises `Interrupted`."""
        self._stage.run(epochs, verbose=self.verbose)

    def pipeline(self) -> TabularRegressionPipeline:
        """The models as they stand: averaged (or best) weights, float32; training may continue."""
        network: StackedMLP = copy.deepcopy(self.network)
        with torch.no_grad():
            for weight, result in zip(network.parameters(), self._stage.trainer.results(), strict=True):
                weight.copy_(result)
        steps = self.task.recipe.num_inference_steps
        models = TabularRegressionPipeline(network, self.scheduler, self.baseline, default_denoising_steps=steps)
        models.set_progress_bar_config(disable=True)  # `score_splits` has a bar of its own
        return models

    def _train_baseline(self, trainer: StackedTrainer, name: str) -> nn.Module:
        """Trained once for all families of a set; later calls load the result."""
        path = self.folder / f"{self.task.dataset.name}-{name}.pt"
        title = f"{self.task.dataset.name} {name}"
        stage = _Stage(trainer, path, self.task.identity(_BASELINE_SETTINGS), title, self.seconds_between)
        stage.resume()
        if not trainer.has_ended:
            stage.run(max(trainer.max_epochs), verbose=self.verbose)
        return trainer.finish()


def state_path(folder: Path, dataset: str, family: str) -> Path:
    """The file of a training."""
    return Path(folder) / f"{dataset}-{family}.pt"


def score_splits(
    pipeline: TabularRegressionPipeline,
    dataset: UCIDataset,
    *,
    ensemble_size: int = 100,
    seed: int = 0,
    verbose: bool = False,
) -> list[SplitScores]:
    """Scores of every split's test rows under its own models of the stack."""
    count = pipeline.network.config.num_models // dataset.num_splits
    scores = []
    for number, split in enumerate(tqdm(dataset, "sampling", dataset.num_splits, disable=not verbose)):
        chosen = pipeline.select(range(number * count, (number + 1) * count))
        generator = torch.Generator().manual_seed(seed)
        samples = chosen(split.test_features, ensemble_size, generator=generator).samples[..., 0]
        scale = float(split.train_targets.std())
        scores.append(score_rows(samples, split.test_targets, target_scale=scale, seed=seed))
    return scores
