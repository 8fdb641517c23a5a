"""From a config to a trained depth pipeline."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from accelerate import Accelerator
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from diffusers.models.modeling_utils import ModelMixin
from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel

from marigold_uq.commands.runner import INTERRUPTED, Invocation
from marigold_uq.component_config import store_in_config
from marigold_uq.depth.cache import check_cache
from marigold_uq.depth.conditioned_task import ConditionedObjective, ConditionedTask, Learning
from marigold_uq.depth.config import DataPart, DepthTrainConfig, StartConfig, ValidationConfig
from marigold_uq.depth.data import AugmentedDataset, LatentShards, MixtureDataset, build_dataset
from marigold_uq.depth.task import DepthTask, PictureTask, measure_residual
from marigold_uq.depth.validation import DepthValidation, picture_scores
from marigold_uq.models.depth_baseline import UNMEASURED, DepthBaseline
from marigold_uq.models.prompt_embedding import PromptEmbedding
from marigold_uq.pipelines.depth import MarigoldUQDepthPipeline
from marigold_uq.pipelines.depth.baseline import give_baseline
from marigold_uq.schedulers import FRAMEWORKS
from marigold_uq.schedulers.scheduling_distributional_ddim import DistributionalDDIMScheduler
from marigold_uq.training.family_runs import choose_family
from marigold_uq.training.loop import Trainer, TrainingResult, make_accelerator
from marigold_uq.training.order import Ordered
from marigold_uq.training.selection import AUTO, FamilyCandidate, default_candidates

SCHEDULE = {
    "num_train_timesteps": 1000,
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "prediction_type": "v_prediction",
    "clip_sample": False,
}
"""Stable Diffusion 2's schedule, for networks that start from nothing."""
DEFAULTS: dict[str, Any] = {"default_denoising_steps": 4, "default_processing_resolution": 768}


def run_training(config: DepthTrainConfig, invocation: Invocation) -> int:
    """The command `train/train_depth.py`: 0 when finished, 130 when interrupted (the same command resumes).

    With dry_run 0 if nothing would stop the run, else 1.
    """
    if config.dry_run:
        from marigold_uq.depth.dry_run import dry_run

        return dry_run(config)
    return 0 if train_depth(config, invocation.config).finished else INTERRUPTED


def train_depth(config: DepthTrainConfig, config_text: str = "") -> TrainingResult:
    """Build the pipeline and the data, train, save a pipeline folder with its card, and push it where asked for.

    With noise_family "auto" the family is chosen first; the run is then that of the chosen family, number for number.
    """
    if config.start.noise_family == AUTO:
        chosen = choose_depth_family(config)
        if chosen is None:
            return TrainingResult(0, False, config.training.output)
        config = replace(config, start=replace(config.start, **asdict(chosen)))
    accelerator = make_accelerator(config.training)
    task = make_task(config, config.start, accelerator.device, make_validation(config.validation, accelerator))
    is_main = accelerator.is_main_process
    result = Trainer(task, config.training, accelerator).run("depth", config_text)
    if is_main and result.finished:
        _publish(result.folder, config.push_to_hub)
    return result


def make_task(
    config: DepthTrainConfig,
    start: StartConfig,
    device: torch.device,
    validation: DepthValidation | None = None,
) -> PictureTask:
    """What the loop trains, from this start; without a baseline an image encoder and its decoder learn too."""
    seed = config.training.seed
    pipeline = start_pipeline(start, seed=seed, baseline=config.baseline, baseline_options=config.baseline_options)
    if pipeline.image_encoder is not None and pipeline.baseline is None:
        return _conditioned_task(config, pipeline, device, validation)
    if config.trainable == "frozen_backbone":
        raise ValueError(f"trainable='frozen_backbone' trains an image encoder beside the U-Net; {start.name} has none")
    is_large = isinstance(pipeline.vae, AutoencoderKL) and config.training.mixed_precision == "bf16"
    task = DepthTask(
        pipeline,
        training_data(config),
        config.objective,
        trainable=config.trainable,
        lora_rank=config.lora_rank,
        seed=seed,
        validation=validation,
        device=device,
        encoder_dtype=torch.bfloat16 if is_large else None,
    )
    for part in config.data:
        if part.name == "latents":
            check_cache(Path(part.root or ""), task.encoder)
    if pipeline.baseline is not None and pipeline.baseline.config.residual_scale == UNMEASURED:
        measure_residual(task)  # once: a U-Net that has learnt speaks in the units it was taught
    return task


def _conditioned_task(
    config: DepthTrainConfig,
    pipeline: MarigoldUQDepthPipeline,
    device: torch.device,
    validation: DepthValidation | None,
) -> ConditionedTask:
    if config.trainable not in ("full", "frozen_backbone"):
        raise ValueError(
            "a model that sees its pictures through an image encoder is trained with trainable 'full' or "
            f"'frozen_backbone'; got {config.trainable!r}"
        )
    objective = ConditionedObjective(score=config.objective.score, score_options=config.objective.score_options)
    learning: Learning = "all" if config.trainable == "full" else "none"
    return ConditionedTask(
        pipeline, training_data(config), objective, backbone=learning, validation=validation, device=device
    )


def choose_depth_family(config: DepthTrainConfig) -> FamilyCandidate | None:
    """The family for this run, by the scores of its held-out pictures; None if interrupted.

    Where only the head learns (trainable "head") there is no trunk to train, and a point model has nothing to learn.
    """
    start, selection, seed = config.start, config.selection, config.training.seed
    if config.baseline is None:  # around one, a head is taken off
        _require_point_start(start)
    if config.trainable == "head":
        families = selection.candidates or default_candidates(selection.score)
        learning = [one for one in families if one.num_outputs > 1]
        selection = replace(selection, candidates=learning, trunk_steps=0)
    assert config.validation.data is not None  # DepthTrainConfig checks it
    pictures = open_part(config.validation.data)
    if len(pictures) < 2:
        raise ValueError(f"noise_family 'auto' compares families on held-out pictures; got {len(pictures)} of them")
    device = make_accelerator(config.training).device

    def candidate_task(candidate: FamilyCandidate, trunk: Path | None) -> PictureTask:
        own = replace(start, **asdict(candidate))
        if trunk is not None:
            own = replace(own, name=str(trunk), kind="pipeline", variant=None, revision=None)
        return make_task(config, own, device)

    def score(model: Path) -> torch.Tensor:
        return picture_scores(MarigoldUQDepthPipeline.from_pretrained(model).to(device), pictures, selection, seed)

    names = ("start", "transform", "objective")
    facts: dict[str, Any] = {name: asdict(getattr(config, name)) for name in names}
    facts |= {
        "baseline": config.baseline,
        "baseline_options": config.baseline_options,
        "lora_rank": config.lora_rank,
        "data": [asdict(part) for part in config.data],
        "pictures": asdict(config.validation.data),
    }
    return choose_family(config.training, selection, candidate_task, score, trainable=config.trainable, **facts)


def _require_point_start(start: StartConfig) -> None:
    if start.kind != "pipeline":
        return
    source = {name: value for name in ("revision",) if (value := getattr(start, name)) is not None}
    config = DistributionalDDIMScheduler.load_config(start.name, subfolder="scheduler", **source)
    family = config.get("noise_family", "point")
    if family != "point":
        raise ValueError(
            f"{start.name} has the family {family!r} already, so there is nothing to choose: name it with "
            "start.noise_family, or start from a point model"
        )


def _publish(folder: Path, repo_id: str | None) -> None:
    """Give the finished model its card and, where asked for, upload it."""
    from marigold_uq.hub import make_card, push_to_hub

    if not (folder / "model" / "README.md").exists():
        make_card(folder, repo_id=repo_id, task="depth")
    if repo_id is not None:
        print(f"pushed to {push_to_hub(folder, repo_id)}")


def start_pipeline(
    start: StartConfig,
    *,
    seed: int = 0,
    baseline: str | None = None,
    baseline_options: Mapping[str, Any] | None = None,
) -> MarigoldUQDepthPipeline:
    """The pipeline training starts from, with the head of its family, around a baseline where one is named."""
    source: dict[str, Any] = {"variant": start.variant, "revision": start.revision}
    source = {name: value for name, value in source.items() if value is not None}
    if start.kind == "stable_diffusion":
        pipeline = MarigoldUQDepthPipeline.from_stable_diffusion(
            start.name, noise_family="point", zero_terminal_snr=start.zero_terminal_snr, **DEFAULTS, **source
        )
    elif start.kind == "pipeline":
        pipeline = MarigoldUQDepthPipeline.from_pretrained(start.name, **source)
        forget_calibration(pipeline)
    else:
        pipeline = new_pipeline(start, seed)
    wanted = {name: getattr(start, name) for name in DEFAULTS}
    pipeline.register_to_config(**{name: value for name, value in wanted.items() if value is not None})
    add_baseline(pipeline, baseline, baseline_options or {})
    give_family(pipeline, start, start.name, seed)
    if start.eta is not None:
        store_in_config(pipeline.scheduler, eta=start.eta)
    return pipeline


def add_baseline(pipeline: MarigoldUQDepthPipeline, name: str | None, options: Mapping[str, Any]) -> None:
    """Turn the pipeline into one of residuals around the baseline; one that is of this baseline already stays."""
    if name is None:
        return
    if pipeline.baseline is None:
        give_baseline(pipeline, DepthBaseline.open(name, **options))
    elif pipeline.baseline.config.name != name:
        raise ValueError(f"the start has the baseline {pipeline.baseline.config.name!r} already; got baseline={name!r}")


class Head(Protocol):
    """The fields of a start that say which distribution is learnt."""

    @property
    def noise_family(self) -> str: ...
    @property
    def num_components(self) -> int: ...
    @property
    def rank(self) -> int: ...
    @property
    def initial_scale(self) -> float: ...


def give_family(pipeline: MarigoldUQDepthPipeline, start: Head, source: object, seed: int) -> None:
    """Add a head to a point pipeline; a pipeline that has one already must have the one asked for."""
    asked = {name: getattr(start, name) for name in ("noise_family", "num_components", "rank")}
    has = {name: pipeline.scheduler.config[name] for name in asked}
    if has["noise_family"] == "point":
        pipeline.with_family(**asked, initial_scale=start.initial_scale, seed=seed)
    elif has != asked:
        raise ValueError(
            f"{source} has the head {has} already, but start asks for {asked}: give its own noise_family, "
            "num_components and rank, or start from a point model"
        )


def forget_calibration(pipeline: MarigoldUQDepthPipeline) -> None:
    """Tau, kappa and intervals belong to weights that are about to change."""
    pipeline.register_to_config(calibration=None)
    store_in_config(pipeline.scheduler, tau=1.0)


def new_pipeline(start: StartConfig, seed: int) -> MarigoldUQDepthPipeline:
    """A fresh U-Net beside a trained VAE; the weights follow from the seed, whatever was drawn before."""
    vae = load_vae(Path(start.name))
    channels = vae.config.latent_channels
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        unet = UNet2DConditionModel(**{"in_channels": 2 * channels, "out_channels": channels, **start.unet})
    snr = {"rescale_betas_zero_snr": True, "timestep_spacing": "trailing"} if start.zero_terminal_snr else {}
    own: dict[str, Any] = {**SCHEDULE, **snr} if start.framework == "ddim" else {}
    return MarigoldUQDepthPipeline(
        unet=unet,
        vae=cast(AutoencoderKL, vae),
        scheduler=FRAMEWORKS[start.framework](**{**own, **start.schedule}),
        prompt_embedding=PromptEmbedding(2, unet.config.cross_attention_dim),
        **DEFAULTS,
    )


def load_vae(path: Path) -> ModelMixin:
    """The VAE of a pipeline folder or a VAE folder, of whichever class its config names."""
    import diffusers

    folder = path / "vae" if (path / "vae").is_dir() else path
    config = AutoencoderKL.load_config(str(folder))
    kind: Any = getattr(diffusers, str(config.get("_class_name")), None)
    if not (isinstance(kind, type) and issubclass(kind, ModelMixin)):
        raise ValueError(f"{folder} is of the class {config.get('_class_name')!r}; expected a VAE of diffusers")
    loader: Any = kind
    vae: ModelMixin = loader.from_pretrained(str(folder), use_safetensors=True)
    return vae


def training_data(config: DepthTrainConfig) -> Ordered:
    """The mixture of all parts with its augmentation, read in order; ready-made latents come as they are."""
    if not config.data:
        raise ValueError("no training data: give at least one entry under `data`, for instance {name: hypersim, ...}")
    parts = [open_part(part) for part in config.data]
    seed = config.training.seed
    length = config.epoch_length or max(config.training.batch_size, sum(len(part) for part in parts))
    # Neighbours of one size make whole micro batches, and one network call each.
    block = config.training.micro_batch_size or 1
    mixture = MixtureDataset(parts, [part.probability for part in config.data], length, seed, block_size=block)
    if any(isinstance(part, LatentShards) for part in parts):
        return mixture
    return AugmentedDataset(mixture, config.transform, seed)


def open_part(part: DataPart) -> Any:
    """The data set that a config entry names."""
    return build_dataset(part.name, part.root, part.filenames, **part.options)


def make_validation(config: ValidationConfig, accelerator: Accelerator) -> DepthValidation | None:
    """Scores and sheets of held-out pictures, shared out over the processes."""
    return None if config.data is None else DepthValidation(open_part(config.data), config, accelerator)
