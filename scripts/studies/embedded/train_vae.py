"""Train the small autoencoder of the embedded model on rendered scenes (scripts/render_scenes.py).

python -m scripts.studies.embedded.train_vae --config configs/depth/embedded/vae.yaml
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from diffusers.models.autoencoders.autoencoder_tiny import AutoencoderTiny
from torch import Tensor, nn

from marigold_uq.commands.runner import INTERRUPTED, Invocation, run_command
from marigold_uq.depth.data import RenderedScenes
from marigold_uq.depth.data.normalization import network_pixels
from marigold_uq.pipelines.depth.latents import posterior_mode
from marigold_uq.training.config import TrainingConfig
from marigold_uq.training.loop import Trainer, make_accelerator
from marigold_uq.training.order import Ordered
from marigold_uq.training.task import TrainingTask


@dataclass(frozen=True)
class VaeLossConfig:
    """What the autoencoder is asked for.

    Args:
        depth_weight: Weight of the error of depth maps.
        picture_weight: Weight of the error of pictures; with 0 they are left out.
        edge_weight: Weight of the error of neighbouring differences, for both.
        latent_noise: Standard deviation of noise on the latents in training, so that the decoder is smooth and forgives
            the errors of a diffusion model.
        latent_weight: Weight of (mean square of the latents - 1)^2, which keeps their scale.
        crop: (height, width) of random crops to train on; None takes whole scenes.
    """

    depth_weight: float = 4.0
    picture_weight: float = 1.0
    edge_weight: float = 1.0
    latent_noise: float = 0.05
    latent_weight: float = 0.01
    crop: tuple[int, int] | None = (96, 128)


class Reconstruction(nn.Module):
    """Pixels to latents and back."""

    def __init__(self, vae: nn.Module) -> None:
        super().__init__()
        self.vae = vae

    def encode(self, pixels: Tensor) -> Tensor:
        """Unscaled latents."""
        return posterior_mode(self.vae, pixels)

    def forward(self, pixels: Tensor, noise: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Decoded pixels, with `noise` added to the latents, and the latents."""
        latents = self.encode(pixels)
        decoded = self.vae.decode(latents if noise is None else latents + noise).sample  # type: ignore[operator]
        return decoded, latents


class VaeTask(TrainingTask):
    """Reconstruct pictures and depth maps with one autoencoder."""

    def __init__(self, vae: nn.Module, dataset: Ordered, held_out: Ordered, loss: VaeLossConfig, device: Any) -> None:
        self.network: nn.Module = Reconstruction(vae)
        self.dataset, self.held_out, self.loss, self.device = dataset, held_out, loss, device
        self.factor = 2 ** (len(vae.config.block_out_channels) - 1)  # type: ignore[union-attr,arg-type]
        self.latent_channels = int(vae.config.latent_channels)  # type: ignore[union-attr,arg-type]

    def losses(self, network: nn.Module, batch: dict[str, Any], generators: list[torch.Generator]) -> Tensor:
        """Absolute error of pictures and depth maps and of their edges, one number per sample."""
        weight = torch.tensor([self.loss.picture_weight, self.loss.depth_weight])
        pairs = torch.stack(_pixels_of(batch), 1)[:, weight > 0]  # (B, 2, 3, H, W), or (B, 1, ...) with one of them
        pairs = torch.stack([self._crop(pair, own) for pair, own in zip(pairs, generators, strict=True)])
        size = [edge // self.factor for edge in pairs.shape[-2:]]
        shape = (pairs.shape[1], self.latent_channels, *size)
        noise = torch.stack([torch.randn(shape, generator=own) for own in generators])
        pixels = pairs.flatten(0, 1).to(self.device)
        decoded, latents = network(pixels, self.loss.latent_noise * noise.flatten(0, 1).to(self.device))
        error = decoded - pixels
        each = error.abs().flatten(1).mean(1) + self.loss.edge_weight * _edges(error)
        each = each + self.loss.latent_weight * (latents.square().flatten(1).mean(1) - 1).square()
        return each.unflatten(0, (-1, pairs.shape[1])) @ weight[weight > 0].to(self.device)

    def _crop(self, pair: Tensor, generator: torch.Generator) -> Tensor:
        if self.loss.crop is None:
            return pair
        height, width = self.loss.crop
        free = torch.tensor([pair.shape[-2] - height + 1, pair.shape[-1] - width + 1])
        top, left = (torch.rand(2, generator=generator) * free).long().tolist()
        return pair[..., top : top + height, left : left + width]

    @torch.no_grad()
    def validate(self, network: nn.Module, step: int, pictures: Path) -> dict[str, float]:
        """Mean absolute error of whole scenes, in percent of the range."""
        network.eval()
        errors = []
        for picture, depth in self._held_out(64):
            decoded, _ = network(torch.cat([picture, depth]))
            of_depth = (decoded[1].mean(0) - depth[0, 0]).abs().mean()
            errors.append([50 * (decoded[0] - picture[0]).abs().mean(), 50 * of_depth])
        network.train()
        of_picture, of_depth = torch.tensor(errors).mean(0).tolist()
        return {"validation/picture_percent": of_picture, "validation/depth_percent": of_depth}

    def _held_out(self, number: int) -> list[tuple[Tensor, Tensor]]:
        samples = [self.held_out[index] for index in range(min(number, len(self.held_out)))]
        pairs = [_pixels_of({key: [sample[key]] for key in ("image", "depth", "valid")}) for sample in samples]
        return [(picture.to(self.device), depth.to(self.device)) for picture, depth in pairs]

    @torch.no_grad()
    def save(self, network: nn.Module, folder: Path) -> None:
        """Save; if the encoder learned, with the scale that gives depth latents the unit variance of diffusion."""
        network.eval()
        vae: Any = network.vae
        if any(parameter.requires_grad for parameter in vae.encoder.parameters()):
            latents = [network.encode(depth).flatten() for _, depth in self._held_out(200)]  # type: ignore[operator]
            vae.register_to_config(scaling_factor=float(1 / torch.cat(latents).std()))
        vae.save_pretrained(folder)


def _pixels_of(batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
    return network_pixels(batch["image"], batch["depth"], batch["valid"])


def _edges(error: Tensor) -> Tensor:
    """Mean absolute difference of horizontal and vertical neighbours, (B,)."""
    horizontal, vertical = error.diff(dim=-1), error.diff(dim=-2)
    return horizontal.abs().flatten(1).mean(1) + vertical.abs().flatten(1).mean(1)


@dataclass(frozen=True)
class VaeTrainConfig:
    """Train a small autoencoder for pictures and depth maps.

    Args:
        scenes: Folder of rendered training scenes.
        validation_scenes: Folder of rendered validation scenes.
        start: Folder of a trained autoencoder to train further; its encoder stays, so that latents made with it keep
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


def train(config: VaeTrainConfig, invocation: Invocation) -> int:
    """Train and save; 0 when finished, 130 when interrupted (the same command resumes)."""
    accelerator = make_accelerator(config.training)
    torch.manual_seed(config.training.seed)
    task = VaeTask(
        make_vae(config).to(memory_format=torch.channels_last),
        RenderedScenes(config.scenes),
        RenderedScenes(config.validation_scenes),
        config.loss,
        accelerator.device,
    )
    result = Trainer(task, config.training, accelerator).run("vae", invocation.config)
    return 0 if result.finished else INTERRUPTED


def main(arguments: Sequence[str] | None = None) -> int:
    """0 when finished, 130 when interrupted, 2 for an error that names what to mend."""
    return run_command("scripts.studies.embedded.train_vae", VaeTrainConfig, train, arguments)


if __name__ == "__main__":
    sys.exit(main())
