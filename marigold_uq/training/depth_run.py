"""From a config to a trained depth pipeline."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import torch
from accelerate import Accelerator
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from diffusers.models.modeling_utils import ModelMixin
from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel

from marigold_uq.component_config import store_in_config
from marigold_uq.data.depth import AugmentedDataset, MixtureDataset, build_dataset
from marigold_uq.models.prompt_embedding import PromptEmbedding
from marigold_uq.pipelines.depth import MarigoldUQDepthPipeline
from marigold_uq.schedulers.scheduling_distributional_ddim import DistributionalDDIMScheduler
from marigold_uq.training.depth_config import DataPart, DepthTrainConfig, StartConfig
from marigold_uq.training.depth_task import DepthTask
from marigold_uq.training.depth_validation import DepthValidation
from marigold_uq.training.loop import Trainer, TrainingResult, make_accelerator
from marigold_uq.training.order import Ordered

SCHEDULE = {
    "num_train_timesteps": 1000,
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "prediction_type": "v_prediction",
    "clip_sample": False,
}
"""Stable Diffusion 2's schedule, for networks that start from nothing."""


def train_depth(config: DepthTrainConfig, config_text: str = "") -> TrainingResult:
    """Build the pipeline and the data, train, and save a pipeline folder."""
    accelerator = make_accelerator(config.training)
    pipeline = start_pipeline(config.start, seed=config.training.seed)
    task = DepthTask(
        pipeline,
        training_data(config),
        config.objective,
        trainable=config.trainable,
        lora_rank=config.lora_rank,
        validation=make_validation(config, accelerator),
        device=accelerator.device,
    )
    return Trainer(task, config.training, accelerator).run("depth", config_text)


def start_pipeline(start: StartConfig, *, seed: int = 0) -> MarigoldUQDepthPipeline:
    """The pipeline training starts from, with the head of its family."""
    defaults = {
        "default_denoising_steps": start.default_denoising_steps,
        "default_processing_resolution": start.default_processing_resolution,
    }
    extra = {} if start.variant is None else {"variant": start.variant}
    if start.kind == "stable_diffusion":
        snr = start.zero_terminal_snr
        pipeline = MarigoldUQDepthPipeline.from_stable_diffusion(
            start.name, noise_family="point", zero_terminal_snr=snr, **defaults, **extra
        )
    elif start.kind == "pipeline":
        pipeline = MarigoldUQDepthPipeline.from_pretrained(start.name, **extra)
    else:
        pipeline = new_pipeline(start, seed)
        pipeline.register_to_config(**defaults)
    if pipeline.scheduler.config.noise_family == "point":
        pipeline.with_family(
            start.noise_family,
            num_components=start.num_components,
            rank=start.rank,
            initial_scale=start.initial_scale,
            seed=seed,
        )
    store_in_config(pipeline.scheduler, eta=start.eta)
    return pipeline


def new_pipeline(start: StartConfig, seed: int) -> MarigoldUQDepthPipeline:
    """A fresh U-Net beside a trained VAE; the weights follow from the seed, whatever was drawn before."""
    vae = load_vae(Path(start.name))
    channels = vae.config.latent_channels
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        unet = UNet2DConditionModel(**{"in_channels": 2 * channels, "out_channels": channels, **start.unet})
    snr = {"rescale_betas_zero_snr": True, "timestep_spacing": "trailing"} if start.zero_terminal_snr else {}
    return MarigoldUQDepthPipeline(
        unet=unet,
        vae=cast(AutoencoderKL, vae),
        scheduler=DistributionalDDIMScheduler(**SCHEDULE, **snr),
        prompt_embedding=PromptEmbedding(2, unet.config.cross_attention_dim),
    )


def load_vae(path: Path) -> ModelMixin:
    """The VAE of a pipeline folder or a VAE folder, of whichever class its config names."""
    import diffusers

    folder = path / "vae" if (path / "vae").is_dir() else path
    config = AutoencoderKL.load_config(str(folder))
    return getattr(diffusers, config["_class_name"]).from_pretrained(str(folder))


def training_data(config: DepthTrainConfig) -> Ordered:
    """The mixture of all parts with its augmentation, read in order; ready-made latents come as they are."""
    if not config.data:
        raise ValueError("no training data: give at least one entry under `data`, for instance {name: hypersim, ...}")
    parts = [build_part(part) for part in config.data]
    training = config.training
    mixture = MixtureDataset(
        parts,
        [part.probability for part in config.data],
        config.epoch_length or sum(len(part) for part in parts),
        training.seed,
        block_size=training.micro_batch_size or 1,
    )
    if any(part.name == "latents" for part in config.data):
        return mixture
    return AugmentedDataset(mixture, config.transform, training.seed)


def build_part(part: DataPart) -> Any:
    """A data set by name; our scenes and ready-made latents beside the published ones."""
    if part.name == "procedural":
        from marigold_uq.data.synthetic import ProceduralScenes

        return ProceduralScenes(**part.options)
    if part.name == "latents":
        from marigold_uq.data.shards import LatentShards

        return LatentShards(Path(str(part.root)), **part.options)
    return build_dataset(part.name, part.root, part.filenames, **part.options)


def make_validation(config: DepthTrainConfig, accelerator: Accelerator) -> DepthValidation | None:
    """Scores and sheets of held-out pictures, made by the main process."""
    if config.validation.data is None:
        return None
    return DepthValidation(build_part(config.validation.data), config.validation, accelerator)
