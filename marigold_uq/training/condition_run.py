"""From a config to a depth pipeline with an image encoder, trained on cached features or on pictures."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel

from marigold_uq.component_config import store_in_config
from marigold_uq.data.depth import AugmentedDataset, DepthTransform, RenderedScenes
from marigold_uq.data.shards import Shards
from marigold_uq.models.condition_encoder import ConditionEncoder
from marigold_uq.models.depth_cells import DepthCells
from marigold_uq.models.prompt_embedding import PromptEmbedding
from marigold_uq.pipelines.depth import MarigoldUQDepthPipeline
from marigold_uq.schedulers.scheduling_distributional_ddim import DistributionalDDIMScheduler
from marigold_uq.training.condition_task import ConditionObjective, ConditionTask
from marigold_uq.training.config import TrainingConfig
from marigold_uq.training.depth_config import ValidationConfig
from marigold_uq.training.depth_run import SCHEDULE, build_part, forget_calibration
from marigold_uq.training.depth_validation import DepthValidation
from marigold_uq.training.loop import Trainer, TrainingResult, make_accelerator
from marigold_uq.training.order import Ordered


@dataclass(frozen=True)
class ConditionStart:
    """Where the weights come from.

    Args:
        encoder: Folder of a condition encoder with a pretrained backbone, for a new model.
        pipeline: Folder of a trained pipeline to go on with, in place of `encoder`; a point model takes the family.
        unet: Arguments of UNet2DConditionModel; the channels at its ends follow from the rest.
        cells: Arguments of DepthCells; what the encoder decides follows from it.
        noise_family: As in `StartConfig`.
        num_components: Components of a mixture.
        rank: Rank of the low-rank families.
        initial_scale: Standard deviation the head starts with.
        default_processing_resolution: Stored with the model.
    """

    encoder: Path | None = None
    pipeline: Path | None = None
    unet: dict[str, Any] = field(default_factory=dict)
    cells: dict[str, Any] = field(default_factory=dict)
    noise_family: str = "gaussian"
    num_components: int = 1
    rank: int = 0
    initial_scale: float = 0.5
    default_processing_resolution: int = 512

    def __post_init__(self) -> None:
        if (self.encoder is None) == (self.pipeline is None):
            raise ValueError("start takes either encoder, for a new model, or pipeline, a trained one to go on with")


@dataclass(frozen=True)
class ConditionTrainConfig:
    """Train a depth model that sees its pictures through a pretrained image encoder.

    Args:
        start: Where the weights come from.
        features: Folder of cached features; the backbone then stays as it is.
        scenes: Folder of rendered scenes, in place of `features`: the backbone learns too.
        transform: Crops, flips and colour changes of the scenes.
        objective: What is minimised.
        validation: Held-out pictures.
        training: The loop.
    """

    start: ConditionStart
    features: Path | None = None
    scenes: Path | None = None
    transform: DepthTransform = field(default_factory=DepthTransform)
    objective: ConditionObjective = field(default_factory=ConditionObjective)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)

    def __post_init__(self) -> None:
        if (self.features is None) == (self.scenes is None):
            raise ValueError("training data are either features or scenes: give one of the two folders")


def train_conditioned(config: ConditionTrainConfig, config_text: str = "") -> TrainingResult:
    """Build the pipeline, train, save a pipeline folder."""
    accelerator = make_accelerator(config.training)
    held_out = config.validation.data
    task = ConditionTask(
        start_conditioned(config.start, seed=config.training.seed),
        training_samples(config),
        config.objective,
        train_backbone=config.scenes is not None,
        validation=None if held_out is None else DepthValidation(build_part(held_out), config.validation, accelerator),
        device=accelerator.device,
    )
    return Trainer(task, config.training, accelerator).run("depth", config_text)


def training_samples(config: ConditionTrainConfig) -> Ordered:
    """Cached features, or scenes with their augmentation."""
    if config.scenes is None:
        assert config.features is not None
        return Shards(config.features)
    return AugmentedDataset(RenderedScenes(config.scenes), config.transform, config.training.seed)


def start_conditioned(start: ConditionStart, *, seed: int = 0) -> MarigoldUQDepthPipeline:
    """The pipeline training starts from, with the head of its family."""
    if start.pipeline is not None:
        pipeline = MarigoldUQDepthPipeline.from_pretrained(start.pipeline)
        forget_calibration(pipeline)
    else:
        pipeline = new_conditioned(start, seed)
    family = {"num_components": start.num_components, "rank": start.rank}
    if pipeline.scheduler.config.noise_family == "point":
        pipeline.with_family(start.noise_family, **family, initial_scale=start.initial_scale, seed=seed)
    return pipeline


def new_conditioned(start: ConditionStart, seed: int) -> MarigoldUQDepthPipeline:
    """A new U-Net and decoder around a pretrained backbone; the weights follow from the seed."""
    assert start.encoder is not None
    encoder = ConditionEncoder.from_pretrained(start.encoder)
    shared = {name: encoder.config[name] for name in ("cell", "guide_channels")}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        cells = DepthCells(**{**shared, "latent_channels": encoder.config.parts**2, **start.cells})
        channels = cells.config.latent_channels
        unet = UNet2DConditionModel(
            **{"in_channels": encoder.out_channels + channels, "out_channels": channels, **start.unet}
        )
    scheduler = DistributionalDDIMScheduler(
        **SCHEDULE, rescale_betas_zero_snr=True, timestep_spacing="trailing", eta=1.0
    )
    store_in_config(scheduler, clip_sample=False)
    return MarigoldUQDepthPipeline(
        unet=unet,
        vae=cells,
        scheduler=scheduler,
        image_encoder=encoder,
        prompt_embedding=PromptEmbedding(2, unet.config.cross_attention_dim),
        default_denoising_steps=1,
        default_processing_resolution=start.default_processing_resolution,
    )
