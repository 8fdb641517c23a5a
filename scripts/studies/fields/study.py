"""Train, score, calibrate and score again: the stages of one model of a study, each kept on disk and never redone."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from marigold_uq.field.calibrate import CalibrationOptions, calibrate_run, calibration_settings
from marigold_uq.field.config import FieldTrainConfig, read_config
from marigold_uq.field.data import Transitions, statistics_of
from marigold_uq.field.evaluate import MIN_SCALE_SHARE, FieldEvaluation, evaluate_field
from marigold_uq.field.forecasters import PipelineForecaster, load_quietly
from marigold_uq.field.run import train_field
from marigold_uq.field.scores import score_forecasts, spread_windows
from marigold_uq.field.splits import open_split, target_hours
from marigold_uq.files import fingerprint, require_same
from marigold_uq.results import as_json, write_json

__all__ = ["VARIANTS", "ModelRun", "StudyTask", "score_baseline"]


FAMILY = "--model.noise_family"
UNIFORM = ["--objective.uniform_timesteps", "true", "--model.default_denoising_steps", "10"]
LONG = ["--training.max_steps", "3000", "--training.optimizer.decay_steps", "3000"]
FILE_UNSAFE = r"[^\w.]+"
VARIANTS: dict[str, list[str]] = {
    "point": [FAMILY, "point"],
    "gaussian": [FAMILY, "gaussian"],
    "point_uniform": [FAMILY, "point", *UNIFORM],
    "gaussian_uniform": [FAMILY, "gaussian", *UNIFORM],
    "mixture_uniform": [FAMILY, "mixture", "--model.num_components", "3", *UNIFORM],
    "point_long": [FAMILY, "point", *LONG],
    "gaussian_long": [FAMILY, "gaussian", *LONG],
    "mixture_long": [FAMILY, "mixture", "--model.num_components", "3", *LONG],
    "gaussian_log": [FAMILY, "gaussian", "--objective.score", "log"],
    "mixture": [FAMILY, "mixture", "--model.num_components", "3"],
    "low_rank_kernel": [FAMILY, "low_rank", "--model.rank", "1", "--objective.score", "kernel"],
    "low_rank_projected": [FAMILY, "low_rank", "--model.rank", "1", "--objective.score", "projected"],
    "low_rank_mixture": [
        FAMILY, "low_rank_mixture", "--model.rank", "1", "--model.num_components", "2",
        "--objective.score", "projected",
    ],
    "gaussian_rollout": [
        FAMILY, "gaussian",
        "--rollout.num_leads", "3", "--rollout.start_step", "50", "--rollout.grow_steps", "50",
    ],
    "point_edm": [FAMILY, "point", *UNIFORM, "--model.framework", "edm"],
    "cholesky_kernel": [FAMILY, "cholesky", "--objective.score", "kernel"],
    "cholesky_energy": [FAMILY, "cholesky", "--objective.score", "energy"],
    "sample": [FAMILY, "sample", "--objective.num_draws", "2"],
    "one_pass": [
        FAMILY, "sample", "--model.prediction_type", "sample",
        "--objective.score", "crps", "--objective.num_draws", "3",
        "--model.num_train_timesteps", "1", "--model.beta_start", "0.9999", "--model.beta_end", "0.9999",
        "--model.zero_terminal_snr", "false", "--model.default_denoising_steps", "1",
    ],
}  # fmt: skip
"""What a model is called in the tables -> how its config differs from the task's.

The laptop configs train half of the samples at the last timestep, for sampling in one step; `_uniform` are closer to
the paper's way: uniform timesteps, and 10 steps of its 50. `_long` are trained three times as long.
"""


@dataclass(frozen=True)
class StudyTask:
    """A task of a study and what is spent on it.

    Args:
        name: In tables and folders.
        arguments: `train_field.py`'s, for instance --config and the path of the data.
        evaluation: How models are scored; model, data and output are filled in.
        calibration: How they are calibrated.
        raw_rollouts: Rollouts that are scored before calibration.
        curve_steps: Numbers of steps of the few-steps curve.
        curve_windows: Windows behind it.
    """

    name: str
    arguments: Sequence[str]
    evaluation: Mapping[str, Any] = field(default_factory=dict)
    calibration: CalibrationOptions = field(default_factory=CalibrationOptions)
    raw_rollouts: int = 36
    curve_steps: Sequence[int] = (1, 2, 5, 10, 50)
    curve_windows: int = 24


@dataclass(frozen=True)
class ModelRun:
    """One model: a task, a variant, a seed, and the folder of its results.

    `extra` changes its config further; such a model has a `label` of its own.
    """

    task: StudyTask
    variant: str
    seed: int
    root: Path
    extra: Sequence[str] = ()
    label: str = ""

    @property
    def name(self) -> str:
        """In tables and folders."""
        return self.label or self.variant

    @property
    def folder(self) -> Path:
        """Of everything about this model."""
        return self.root / self.task.name / f"{re.sub(FILE_UNSAFE, '_', self.name)}-{self.seed}"

    @property
    def arguments(self) -> list[str]:
        """The command line of its training."""
        own = ["--training.seed", str(self.seed), "--training.output", str(self.folder)]
        return [*self.task.arguments, *VARIANTS[self.variant], *self.extra, *own]

    def run(self, *, curve: bool = False) -> None:
        """All stages that are missing."""
        self.train()
        self.score("model", "raw", num_rollouts=self.task.raw_rollouts)
        self.calibrate()
        self.score("calibrated", "calibrated_scores")
        if curve:
            self.steps_curve()

    def train(self) -> None:
        """Resume from the newest checkpoint, to the finished model; a run with another config is refused."""
        config, text = read_config(self.arguments)
        path = self.folder / "config.yaml"
        if path.exists() and path.read_text(encoding="utf-8") != text:
            raise FileExistsError(
                f"{self.folder} holds a training of another config (compare {path}): give the same options, remove the "
                "folder, or choose another output"
            )
        if (self.folder / "model").exists():
            return
        if not train_field(config, text).finished:
            raise KeyboardInterrupt
        shutil.rmtree(self.folder / "checkpoints")

    def score(self, model: str, output: str, **changes: Any) -> dict[str, Any]:
        """One-step and rollout scores of a model folder on the test part; `changes` of the task's evaluation."""
        settings = {**self.task.evaluation, **changes}
        options = FieldEvaluation(
            data=self._config().data, model=str(self.folder / model), output=self.folder / output, **settings
        )
        return evaluate_field(options)

    def _config(self) -> FieldTrainConfig:
        return read_config(self.arguments)[0]

    def calibrate(self) -> None:
        """Choose on the validation part; the calibrated pipeline appears beside the model."""
        path = self.folder / "calibration.json"
        if path.exists():
            settings = calibration_settings(self.folder, self.task.calibration)
            require_same(path, self.read(path.name)["settings"], settings)
            return
        calibrate_run(self.folder, self.task.calibration)

    def steps_curve(self) -> dict[str, Any]:
        """One-step scores on the test part for several numbers of denoising steps, before calibration."""
        precision = self.task.calibration.mixed_precision
        options = {"steps": list(self.task.curve_steps), "windows": self.task.curve_windows}
        settings = {**options, "mixed_precision": precision, "model": fingerprint(self.folder / "model")}
        path = self.folder / "steps.json"
        if path.exists():
            stored = self.read(path.name)
            require_same(path, stored["settings"], settings)
            return stored
        config = self._config()
        split = open_split(config.data)
        pipeline = load_quietly(self.folder / "model")
        history = pipeline.encoder.config.num_history
        windows = Transitions(split.test, num_history=history, target_hours=target_hours(config.data))
        statistics = statistics_of(split.train)
        scale = max(statistics[name].increment_std for name in pipeline.encoder.config.targets)
        last = pipeline.scheduler.config.num_train_timesteps
        scores_of = {}
        for steps in sorted({min(steps, last) for steps in self.task.curve_steps}):
            forecaster = PipelineForecaster(
                pipeline, ensemble_size=20, num_inference_steps=steps, mixed_precision=precision
            )
            ids = spread_windows(self.task.curve_windows, len(windows))
            scores = score_forecasts(
                forecaster,
                windows,
                ids,
                select_targets=pipeline.encoder.select_targets,
                min_scale=MIN_SCALE_SHARE * scale,
            )
            scores_of[str(steps)] = as_json({name: scores[name] for name in ("crps", "rmse", "spread_skill_ratio")})
        found = {"scores": scores_of, "settings": settings}
        write_json(path, found)
        return found

    def read(self, name: str) -> dict[str, Any]:
        """A JSON file of this model."""
        return json.loads((self.folder / name).read_text(encoding="utf-8"))


def score_baseline(task: StudyTask, name: str, root: Path) -> dict[str, Any]:
    """Persistence or climatology with the windows of the models."""
    config, _ = read_config(list(task.arguments))
    options = FieldEvaluation(
        data=config.data,
        model=name,
        output=root / task.name / name,
        targets=config.model.targets,
        num_history=config.model.num_history,
        **task.evaluation,
    )
    return evaluate_field(replace(options, figures=False))
