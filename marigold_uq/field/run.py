"""From a config to a trained forecast pipeline."""

from __future__ import annotations

import math
from typing import Any

from marigold_uq.field.config import FieldModel, FieldTrainConfig
from marigold_uq.field.data import FieldSequences, Transitions
from marigold_uq.field.encoding import fit_encoder
from marigold_uq.field.splits import open_split, target_hours, training_samples
from marigold_uq.field.task import FieldTask
from marigold_uq.models.field_head import build_network
from marigold_uq.pipelines.field import FieldForecastPipeline
from marigold_uq.schedulers import FRAMEWORKS, DistributionalScheduler
from marigold_uq.training.loop import Trainer, TrainingResult, make_accelerator

__all__ = ["new_pipeline", "new_scheduler", "train_field"]


def train_field(config: FieldTrainConfig, config_text: str = "") -> TrainingResult:
    """Build the data and the pipeline, train, save a pipeline folder, and push it where asked for."""
    accelerator = make_accelerator(config.training)
    split = open_split(config.data)
    validation = None
    if config.validation_samples:
        hours = target_hours(config.data)
        validation = Transitions(split.validation, num_history=config.model.num_history, target_hours=hours)
    task = FieldTask(
        new_pipeline(config.model, split.train, seed=config.training.seed),
        training_samples(config, split.train),
        config.objective,
        validation=validation,
        validation_samples=config.validation_samples,
        plateau=config.plateau,
        seed=config.training.seed,
        device=accelerator.device,
    )
    is_main = accelerator.is_main_process
    result = Trainer(task, config.training, accelerator).run("field", config_text)
    if is_main and result.finished and config.push_to_hub is not None:
        from marigold_uq.hub import make_card, push_to_hub

        make_card(result.folder, repo_id=config.push_to_hub, task="field", overwrite=True)
        print(f"pushed to {push_to_hub(result.folder, config.push_to_hub)}")
    return result


def new_pipeline(model: FieldModel, train: FieldSequences, *, seed: int = 0) -> FieldForecastPipeline:
    """An untrained pipeline; statistics come from the training part, weights follow from the seed."""
    encoder = fit_encoder(
        train,
        targets=model.targets,
        num_history=model.num_history,
        grid_channels=model.grid_channels,
        time_features=model.time_features,
        mean_field=model.mean_field,
        seasonal=model.seasonal,
    )
    scheduler = new_scheduler(model)
    options: dict[str, Any] = {"periodic": tuple(not train.calendar for _ in encoder.space), **model.unet}
    network = build_network(
        scheduler,
        encoder.event_shape,
        encoder.condition_channels,
        initial_scale=model.initial_scale,
        seed=seed,
        **{name: tuple(value) if isinstance(value, list) else value for name, value in options.items()},
    )
    return FieldForecastPipeline(network, scheduler, encoder, default_denoising_steps=model.default_denoising_steps)


def new_scheduler(model: FieldModel) -> DistributionalScheduler:
    """That of the framework; increments have deviation 1 and no bounds, so nothing is clipped."""
    own: dict[str, dict[str, Any]] = {
        "ddim": {
            "num_train_timesteps": model.num_train_timesteps,
            "beta_start": model.beta_start,
            "beta_end": model.beta_end,
            "prediction_type": model.prediction_type,
            "rescale_betas_zero_snr": model.zero_terminal_snr,
            "timestep_spacing": model.timestep_spacing,
            "clip_sample": False,
        },
        "edm": {"sigma_data": 1.0, "training_log_mean": -1.2 + math.log(2)},  # EDM's own are for a deviation of .5
        "flow": {},
    }
    head = {name: getattr(model, name) for name in ("noise_family", "num_components", "rank", "eta")}
    return FRAMEWORKS[model.framework](**{**own[model.framework], **head, **model.schedule})
