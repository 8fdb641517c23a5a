"""From a config to a trained forecast pipeline."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils.data import default_collate

from marigold_uq.calibration import unit_means
from marigold_uq.commands.runner import INTERRUPTED, Invocation
from marigold_uq.field.config import FieldModel, FieldTrainConfig
from marigold_uq.field.data import FieldSequences, Transitions
from marigold_uq.field.encoding import fit_encoder
from marigold_uq.field.forecasters import PipelineForecaster, load_quietly
from marigold_uq.field.scores import independent_groups, spread_windows
from marigold_uq.field.splits import FieldSplit, open_split, target_hours, training_samples
from marigold_uq.field.task import FieldTask
from marigold_uq.models.field_head import build_network
from marigold_uq.models.widen import widen
from marigold_uq.pipelines.field import FieldForecastPipeline
from marigold_uq.schedulers import FRAMEWORKS, UNIT_DATA, DistributionalScheduler
from marigold_uq.training.family_runs import choose_family
from marigold_uq.training.loop import Trainer, TrainingResult, make_accelerator
from marigold_uq.training.selection import AUTO, FamilyCandidate, sample_unit_scores

__all__ = ["choose_field_family", "new_pipeline", "new_scheduler", "run_training", "train_field"]


def run_training(config: FieldTrainConfig, invocation: Invocation) -> int:
    """The command `train/train_field.py`: 0 when finished, 130 when interrupted (the same command resumes)."""
    return 0 if train_field(config, invocation.config).finished else INTERRUPTED


def train_field(config: FieldTrainConfig, config_text: str = "") -> TrainingResult:
    """Build the data and the pipeline, train, save a pipeline folder, and push it where asked for.

    With noise_family "auto" the family is chosen first; the run is then that of the chosen family, number for number.
    """
    split = open_split(config.data)
    if config.model.noise_family == AUTO:
        chosen = choose_field_family(config, split)
        if chosen is None:
            return TrainingResult(0, False, config.training.output)
        config = replace(config, model=replace(config.model, **asdict(chosen)))
    accelerator = make_accelerator(config.training)
    validation = None
    if config.validation_samples:
        hours = target_hours(config.data)
        validation = Transitions(split.validation, num_history=config.model.num_history, target_hours=hours)
    task = FieldTask(
        new_pipeline(config.model, split.train, seed=config.training.seed),
        _training_windows(config, split.train),
        config.objective,
        validation=validation,
        validation_samples=config.validation_samples,
        plateau=config.plateau,
        rollout=config.rollout,
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


def _training_windows(config: FieldTrainConfig, train: FieldSequences) -> Transitions:
    """Samples one step ahead, or windows as long as the longest rollout."""
    leads = config.rollout.num_leads
    if leads == 1:
        return training_samples(config, train)
    return Transitions(
        train, num_history=config.model.num_history, num_leads=leads, target_hours=target_hours(config.data)
    )


def choose_field_family(config: FieldTrainConfig, split: FieldSplit) -> FamilyCandidate | None:
    """The family for this run, by forecasts one step ahead of validation windows; None if interrupted."""
    windows = Transitions(
        split.validation, num_history=config.model.num_history, target_hours=target_hours(config.data)
    )
    ids = spread_windows(config.selection.num_units, len(windows))
    if len(set(independent_groups(windows, ids))) < 2:
        raise ValueError(
            "noise_family 'auto' compares families on validation data: it needs at least 2 trajectories, or 20 days of "
            f"a record, there; got {len(ids)} windows of {len(set(independent_groups(windows, ids)))}"
        )
    device = make_accelerator(config.training).device

    def new_task(candidate: FamilyCandidate, trunk: Path | None) -> FieldTask:
        model = replace(config.model, **asdict(candidate))
        pipeline = new_pipeline(model, split.train, seed=config.training.seed)
        if trunk is not None:
            network = load_quietly(trunk).unet
            widen(network, **asdict(candidate), initial_scale=model.initial_scale, seed=config.training.seed)
            pipeline.register_modules(unet=network)
        samples = training_samples(config, split.train)
        return FieldTask(pipeline, samples, config.objective, seed=config.training.seed, device=device)

    def score(model: Path) -> Tensor:
        return _forecast_scores(load_quietly(model).to(device), windows, ids, config)

    facts = {name: asdict(getattr(config, name)) for name in ("data", "model", "objective")}
    return choose_family(config.training, config.selection, new_task, score, **facts)


def _forecast_scores(
    pipeline: FieldForecastPipeline, windows: Transitions, ids: list[int], config: FieldTrainConfig
) -> Tensor:
    """Scores of the scaled increments over one step, one number per trajectory (or ten days of a record)."""
    forecaster = PipelineForecaster(
        pipeline,
        ensemble_size=config.selection.ensemble_size,
        num_inference_steps=config.selection.num_inference_steps,
        seed=config.training.seed,
    )
    batch, encoder = default_collate([windows[index] for index in ids]), pipeline.encoder
    samples = forecaster.forecast(batch, ids, 1)[:, :, 0].cpu()  # (M, B, C, *space)
    target = encoder.select_targets(batch["future"][:, 0])
    scores = sample_unit_scores(encoder.scale_target(samples), encoder.scale_target(target), config.selection.score)
    return unit_means(scores, independent_groups(windows, ids))


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
    options: dict[str, Any] = {"periodic": encoder.periodic, **model.unet}
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
    options: dict[str, Any] = {name: getattr(model, name) for name in ("noise_family", "num_components", "rank", "eta")}
    if model.framework == "ddim":
        options |= {
            "num_train_timesteps": model.num_train_timesteps,
            "beta_start": model.beta_start,
            "beta_end": model.beta_end,
            "prediction_type": model.prediction_type,
            "rescale_betas_zero_snr": model.zero_terminal_snr,
            "timestep_spacing": model.timestep_spacing,
            "clip_sample": False,
        }
    return FRAMEWORKS[model.framework](**{**UNIT_DATA[model.framework], **options, **model.schedule})
