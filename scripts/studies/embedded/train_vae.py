"""Train the small autoencoder of the embedded model on rendered scenes (scripts/render_scenes.py).

python -m scripts.studies.embedded.train_vae --config configs/depth/embedded_vae.yaml
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from diffusers.models.autoencoders.autoencoder_tiny import AutoencoderTiny
from jsonargparse import ActionConfigFile, ArgumentParser

from marigold_uq.depth.data.shards import SceneShards
from marigold_uq.depth.vae_task import VaeLossConfig, VaeTask
from marigold_uq.training.config import TrainingConfig
from marigold_uq.training.loop import Trainer, make_accelerator


@dataclass(frozen=True)
class VaeTrainConfig:
    """Train a small autoencoder for pictures and depth maps.

    Args:
        scenes: Folder of rendered training scenes.
        validation_scenes: Folder of rendered validation scenes.
        start: Folder of a trained autoencoder to go on with; its encoder stays, so that latents made with it keep
            their meaning, and only the decoder learns. Default: a new autoencoder.
        vae: Arguments of AutoencoderTiny, which has no normalisation layers: they would hide the level of a depth map.
        loss: What it is asked for.
        training: The loop.
    """

    scenes: Path
    validation_scenes: Path
    start: Path | None = None
    vae: dict[str, Any] = field(default_factory=dict)
    loss: VaeLossConfig = field(default_factory=VaeLossConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)


def make_vae(config: VaeTrainConfig) -> AutoencoderTiny:
    """A new autoencoder, or a trained one whose encoder is frozen."""
    if config.start is None:
        return AutoencoderTiny(**config.vae)
    if config.vae:
        raise ValueError("give either start, a trained autoencoder, or vae, the arguments of a new one; got both")
    vae = AutoencoderTiny.from_pretrained(config.start)
    vae.encoder.requires_grad_(False)
    return vae


def main(given: Sequence[str] | None = None) -> int:
    """Read the config, train, save; 0 when finished, 3 when interrupted (run again to go on)."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--config", action=ActionConfigFile)
    parser.add_class_arguments(VaeTrainConfig)
    arguments = parser.parse_args(given)
    text = parser.dump(arguments)
    values = parser.instantiate(arguments)
    values.pop("config", None)
    config = VaeTrainConfig(**values)
    accelerator = make_accelerator(config.training)
    torch.manual_seed(config.training.seed)
    task = VaeTask(
        make_vae(config).to(memory_format=torch.channels_last),
        SceneShards(config.scenes),
        SceneShards(config.validation_scenes),
        config.loss,
        accelerator.device,
    )
    return 0 if Trainer(task, config.training, accelerator).run("vae", text).finished else 3


if __name__ == "__main__":
    sys.exit(main())
