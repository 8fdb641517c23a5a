"""From a config to a depth pipeline with an image encoder, trained on cached features or on pictures."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel

from marigold_uq.commands.runner import Invocation
from marigold_uq.depth.conditioned_task import ConditionedObjective, ConditionedTask, Learning
from marigold_uq.depth.config import ValidationConfig
from marigold_uq.depth.data import AugmentedDataset, DepthTransform, RenderedScenes
from marigold_uq.depth.data.shards import Shards
from marigold_uq.depth.run import SCHEDULE, forget_calibration, give_family, make_validation
from marigold_uq.models.condition_encoder import ConditionEncoder
from marigold_uq.models.depth_cells import DepthCells
from marigold_uq.models.prompt_embedding import PromptEmbedding
from marigold_uq.pipelines.depth import MarigoldUQDepthPipeline
from marigold_uq.schedulers.scheduling_distributional_ddim import DistributionalDDIMScheduler
from marigold_uq.training.config import TrainingConfig
from marigold_uq.training.loop import Trainer, TrainingResult, make_accelerator
from marigold_uq.training.order import Ordered


@dataclass(frozen=True)
class ConditionedStart:
    """Where the weights come from.

    Args:
        encoder: Folder of a condition encoder with a pretrained backbone, for a new model.
        pipeline: Folder of a trained pipeline to train further, in place of `encoder`. A point model takes the
            family; any other must have it already.
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
            raise ValueError("start takes either encoder, for a new model, or pipeline, a trained one to train further")


@dataclass(frozen=True)
class ConditionedTrainConfig:
    """Train a depth model that sees its pictures through a pretrained image encoder.

    Args:
        start: Where the weights come from.
        features: Folder of cached features; the backbone then stays as it is.
        scenes: Folder of rendered scenes, in place of `features`: the backbone learns too.
        later_stages: With `features`: the backbone's stages after the first level that is kept learn too.
        transform: Crops, flips and colour changes of the scenes.
        objective: What is minimised.
        validation: Held-out pictures.
        training: The loop.
    """

    start: ConditionedStart
    features: Path | None = None
    scenes: Path | None = None
    later_stages: bool = False
    transform: DepthTransform = field(default_factory=DepthTransform)
    objective: ConditionedObjective = field(default_factory=ConditionedObjective)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)

    def __post_init__(self) -> None:
        if (self.features is None) == (self.scenes is None):
            raise ValueError("training data are either features or scenes: give one of the two folders")
        if self.later_stages and self.features is None:
            raise ValueError("later_stages learn from kept features; on scenes all stages learn: drop one of the two")

    @property
    def backbone(self) -> Learning:
        """Which part of it learns."""
        if self.scenes is not None:
            return "all"
        return "later" if self.later_stages else "none"


def run_conditioned_training(config: ConditionedTrainConfig, invocation: Invocation) -> int:
    """The command `scripts.studies.embedded.train`: 0 when finished, 3 when interrupted (the same command resumes)."""
    return 0 if train_conditioned(config, invocation.config).finished else 3


def train_conditioned(config: ConditionedTrainConfig, config_text: str = "") -> TrainingResult:
    """Build the pipeline, train, save a pipeline folder."""
    accelerator = make_accelerator(config.training)
    task = ConditionedTask(
        start_conditioned(config.start, seed=config.training.seed),
        training_samples(config),
        config.objective,
        backbone=config.backbone,
        validation=make_validation(config.validation, accelerator),
        device=accelerator.device,
    )
    return Trainer(task, config.training, accelerator).run("depth", config_text)


def training_samples(config: ConditionedTrainConfig) -> Ordered:
    """Cached features, or scenes with their augmentation."""
    if config.scenes is None:
        assert config.features is not None
        return Shards(config.features)
    return AugmentedDataset(RenderedScenes(config.scenes), config.transform, config.training.seed)


def start_conditioned(start: ConditionedStart, *, seed: int = 0) -> MarigoldUQDepthPipeline:
    """The pipeline training starts from, with the head of its family."""
    if start.pipeline is not None:
        pipeline = MarigoldUQDepthPipeline.from_pretrained(start.pipeline)
        forget_calibration(pipeline)
    else:
        pipeline = new_conditioned(start, seed)
    give_family(pipeline, start, start.pipeline or start.encoder, seed)
    return pipeline


def new_conditioned(start: ConditionedStart, seed: int) -> MarigoldUQDepthPipeline:
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
    return MarigoldUQDepthPipeline(
        unet=unet,
        vae=cells,
        scheduler=scheduler,
        image_encoder=encoder,
        prompt_embedding=PromptEmbedding(2, unet.config.cross_attention_dim),
        default_denoising_steps=1,
        default_processing_resolution=start.default_processing_resolution,
    )
