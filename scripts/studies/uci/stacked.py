"""All splits of a data set trained as one stack, in parts: what a killed process had learnt is not lost.

The baseline, which all families share, is kept when it is fitted; the state of the denoiser's training is kept every
few minutes. Training has no end of its own, so a run can be looked at after any number of epochs and then go on.
"""

import copy
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm.auto import tqdm

from marigold_uq.files import atomic_path, make_folder
from marigold_uq.models.mlp import StackedBaseline, StackedMLP
from marigold_uq.pipelines.tabular import TabularRegressionPipeline
from marigold_uq.randomness import member_seed
from marigold_uq.tabular.checkpoint import Checkpoints
from marigold_uq.tabular.fitting import Standardised, Table, build_denoiser, fit_mlp_baseline
from marigold_uq.tabular.recipe import Recipe
from marigold_uq.tabular.rows import StackedRows
from marigold_uq.tabular.scores import SplitScores, score_rows
from marigold_uq.tabular.training import StackedTrainer
from marigold_uq.tabular.uci import UCIDataset
from marigold_uq.training.interrupt import InterruptGuard
from scripts.studies.uci.cells import check_identity, dataset_digest

NO_END = 2**31
BASELINE_SETTINGS = ("dropout", "baseline_epochs", "batch_size", "learning_rate", "num_members")
"""What the baseline depends on, besides data and seed."""
NOT_IN_TRAINING = ("max_epochs", "kappa_from_validation")
"""What a saved state does not depend on."""


class Interrupted(Exception):
    """A signal asked the process to end; everything is saved."""


@dataclass(frozen=True)
class StackedTask:
    """What is trained: one model per split (times `recipe.num_members`), with the MLP baseline of the paper."""

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
        """Standardised training rows of every model, the members of a split side by side."""
        tables = [
            Table(split.train_features, split.train_targets[:, None], np.ones(len(split.train_targets)))
            for split in self.dataset
        ]
        members = range(self.recipe.num_members)
        pairs = zip(tables, self.seeds(), strict=True)
        return [Standardised.of(table, member_seed(seed, member)) for table, seed in pairs for member in members]

    def identity(self, settings: Sequence[str] | None = None) -> dict[str, Any]:
        """Data, seed and the settings that a saved state depends on (all but `NOT_IN_TRAINING` by default)."""
        recipe = asdict(self.recipe)
        names = [name for name in recipe if name not in NOT_IN_TRAINING] if settings is None else settings
        return {"data": dataset_digest(self.dataset), "seed": self.seed, **{name: recipe[name] for name in names}}


class StackedRun:
    """Training of a `StackedTask` that goes on where a former process stopped.

    Args:
        task: What is trained.
        folder: Where states are kept; tasks of other families of the same set share its baseline.
        checkpoint_seconds: Time between saved states.
        verbose: Show progress bars.
    """

    def __init__(
        self,
        task: StackedTask,
        folder: Path,
        *,
        checkpoint_seconds: float = 120.0,
        verbose: bool = False,
    ) -> None:
        self.task, self.folder, self.verbose = task, Path(folder), verbose
        self.seconds_between = checkpoint_seconds
        self.state_path = state_path(self.folder, task.dataset.name, task.recipe.noise_family)
        make_folder(self.folder)
        models = task.models()
        self.seconds = 0.0  # of processor time in training the denoiser, over all processes
        self.baseline = self._fitted_baseline(models)
        self.scheduler = task.recipe.scheduler()
        recipe = replace(task.recipe, max_epochs=NO_END)
        self.network, self.trainer = build_denoiser(models, self._fitted(models), recipe, self.scheduler)
        if self.state_path.exists():
            self._resume()

    @property
    def epoch(self) -> int:
        """Epochs that every model has behind it (one that stopped early counts as having arrived)."""
        progress = self.trainer.progress
        return min(
            (epoch for epoch, active in zip(progress.epoch, progress.active, strict=True) if active), default=NO_END
        )

    def advance(self, epochs: int) -> None:
        """Train until every model has `epochs` epochs behind it; a signal to end saves and raises `Interrupted`."""
        title = f"{self.task.dataset.name} {self.task.recipe.noise_family}"
        options = {"total": epochs, "initial": min(self.epoch, epochs), "unit": "epoch"}
        saved = time.monotonic()
        self._started = time.process_time()
        with InterruptGuard() as guard, tqdm(desc=title, disable=not self.verbose, **options) as bar:
            while self.epoch < epochs:
                self.trainer.step()
                bar.update(min(self.epoch, epochs) - bar.n)
                if guard.requested or time.monotonic() - saved > self.seconds_between:
                    self.save()
                    saved = time.monotonic()
                if guard.requested:
                    raise Interrupted(f"{title} is saved at epoch {self.epoch} of {epochs}")
        self.save()

    def pipeline(self) -> TabularRegressionPipeline:
        """The models as they stand: averaged (or best) weights, float32; training goes on untouched."""
        network: StackedMLP = copy.deepcopy(self.network)
        with torch.no_grad():
            for weight, result in zip(network.parameters(), self.trainer.results(), strict=True):
                weight.copy_(result)
        steps = self.task.recipe.num_inference_steps
        models = TabularRegressionPipeline(network, self.scheduler, self.baseline, default_num_inference_steps=steps)
        models.set_progress_bar_config(disable=True)  # `score_splits` has a bar of its own
        return models

    def save(self) -> None:
        """Keep the state; an interrupted write leaves the former one."""
        now = time.process_time()
        self.seconds, self._started = self.seconds + now - self._started, now
        state = {"identity": self.task.identity(), "seconds": self.seconds, "trainer": self.trainer.state_dict()}
        with atomic_path(self.state_path, overwrite=True) as temporary:
            torch.save(state, temporary)

    def _resume(self) -> None:
        state = torch.load(self.state_path, weights_only=True)
        check_identity(self.state_path, state["identity"], self.task.identity())
        self.trainer.load_state_dict(state["trainer"])
        self.seconds = state["seconds"]

    def _fitted_baseline(self, models: Sequence[Standardised]) -> StackedBaseline:
        """Fitted once for all families of a set; a second call loads what the first one saved."""
        fingerprint = json.dumps(self.task.identity(BASELINE_SETTINGS))
        checkpoints = Checkpoints(self.folder / f"{self.task.dataset.name}-baseline", fingerprint, self.seconds_between)
        return fit_mlp_baseline(models, self.task.recipe, self.verbose, checkpoints)

    @torch.no_grad()
    def _fitted(self, models: Sequence[Standardised]) -> list[torch.Tensor]:
        """What the baseline says about each model's training rows, (n, 1) each."""
        rows = StackedRows.stack([{"features": model.features} for model in models])
        values = self.baseline(rows.columns["features"])
        return [values[s, :count] for s, count in enumerate(rows.counts)]


def state_path(folder: Path, dataset: str, family: str) -> Path:
    """The file of a training."""
    return Path(folder) / f"{dataset}-{family}.pt"


def build_trainers(task: StackedTask, *, together: bool) -> list[StackedTrainer]:
    """Trainers of a task's denoisers around a baseline of 0: one for all models, or one each. For timing them."""
    models = task.models()
    groups = [models] if together else [[model] for model in models]
    scheduler = task.recipe.scheduler()
    recipe = replace(task.recipe, max_epochs=NO_END)
    zeros = [[torch.zeros_like(model.targets) for model in group] for group in groups]
    return [build_denoiser(g, z, recipe, scheduler)[1] for g, z in zip(groups, zeros, strict=True)]


def score_splits(
    pipeline: TabularRegressionPipeline,
    dataset: UCIDataset,
    *,
    num_samples: int = 100,
    seed: int = 0,
    verbose: bool = False,
) -> list[SplitScores]:
    """Scores of every split's test rows under its own models of the stack."""
    members = pipeline.network.config.num_models // dataset.num_splits
    scores = []
    for number, split in enumerate(tqdm(dataset, "sampling", dataset.num_splits, disable=not verbose)):
        chosen = pipeline.select(range(number * members, (number + 1) * members))
        samples = chosen(split.test_features, num_samples, seed=seed).samples[..., 0]
        scale = float(split.train_targets.std())
        scores.append(score_rows(samples, split.test_targets, target_scale=scale, seed=seed))
    return scores
