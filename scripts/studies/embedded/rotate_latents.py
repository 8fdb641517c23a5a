r"""Turn the latent channels so that the errors of a trained base are uncorrelated between them.

python -m scripts.studies.embedded.rotate_latents --stage basis --model runs/embedded/base_more/model \
    --latents runs/embedded/latents/train --output runs/embedded/rotated_vae
python -m scripts.studies.embedded.train_vae --config configs/depth/embedded/vae.yaml \
    --config configs/depth/embedded/decoder.yaml --config configs/depth/embedded/rotated_decoder.yaml
python -m scripts.studies.embedded.rotate_latents --stage apply --model runs/embedded/base_more/model \
    --latents runs/embedded/latents/train --basis runs/embedded/rotated_vae/basis.npy \
    --vae runs/embedded/rotated_decoder/model --output runs/embedded/rotated/model \
    --latents_output runs/embedded/rotated_latents/train

All 16 numbers of a latent cell go wrong together when a depth is wrong: the level of depth is spread over them. A
distribution with independent coordinates gives each its own error. The decoder averages these away, and the pixels'
spread comes out far too small. In the basis of the errors' principal axes they are uncorrelated. White noise is white
in any orthogonal basis, so the U-Net is turned exactly, by its first and last convolution. The encoder is turned
exactly too. The decoder clamps its input (3 tanh(z / 3)) in the old basis, so it has to be trained again. SHRINK takes
the clamp out of play.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from diffusers.models.autoencoders.autoencoder_tiny import AutoencoderTiny
from torch import Tensor, nn
from tqdm.auto import tqdm

from marigold_uq.commands.runner import Invocation, run_command
from marigold_uq.denoising import predict_output
from marigold_uq.depth.data.shards import LatentShards, write_shard
from marigold_uq.files import atomic_folder, make_folder
from marigold_uq.pipelines.depth import MarigoldUQDepthPipeline
from scripts.encode_latents import check_autoencoder

SHRINK = 4.0
"""The autoencoder's own latents become so many times smaller, and its scaling factor larger."""
BATCH = 16


@torch.inference_mode()
def error_covariance(pipeline: MarigoldUQDepthPipeline, latents: LatentShards, num_samples: int) -> Tensor:
    """Covariance (C, C) of the errors of the predicted mean at the last timestep, over cells with ground truth."""
    generator = torch.Generator().manual_seed(0)
    scheduler = pipeline.scheduler
    chosen = torch.randperm(len(latents), generator=generator)[:num_samples].tolist()
    total, count = torch.zeros(()), 0
    for first in tqdm(range(0, len(chosen), BATCH), unit="batch"):
        samples = [latents[index] for index in chosen[first : first + BATCH]]
        image, depth, valid = (
            torch.stack([sample[key] for sample in samples]).float()
            for key in ("image_latent", "depth_latent", "latent_valid")
        )
        noise = torch.randn(depth.shape, generator=generator)
        timesteps = torch.full((len(depth),), scheduler.config.num_train_timesteps - 1)
        law = predict_output(
            pipeline.denoiser(image), scheduler, scheduler.add_noise(depth, noise, timesteps), timesteps
        )
        error = valid * (scheduler.training_target(depth, noise, timesteps) - law.mean)
        total = total + torch.einsum("bchw,bdhw->cd", error, error)
        count += int(valid.sum())
    return total / count


def principal_axes(covariance: Tensor) -> Tensor:
    """Orthogonal (C, C): its columns are the axes, largest variance first."""
    return torch.linalg.eigh(covariance.double()).eigenvectors.flip(-1).float()


@torch.no_grad()
def turn_outputs(layer: nn.Module, matrix: Tensor) -> None:
    """The convolution now gives matrix @ (what it gave); its output channels are the rows."""
    assert isinstance(layer, nn.Conv2d)
    layer.weight.copy_(torch.einsum("ij,jkhw->ikhw", matrix, layer.weight))
    if layer.bias is not None:
        layer.bias.copy_(matrix @ layer.bias)


@torch.no_grad()
def turn_inputs(layer: nn.Module, matrix: Tensor) -> None:
    """The convolution now expects x' and does with it what it did with x = matrix @ x', for each group of channels."""
    assert isinstance(layer, nn.Conv2d)
    groups = layer.weight.split(len(matrix), 1)
    layer.weight.copy_(torch.cat([torch.einsum("kjhw,ji->kihw", group, matrix) for group in groups], 1))


def turned_autoencoder(vae: AutoencoderTiny, basis: Tensor) -> AutoencoderTiny:
    """Its latents times the scaling factor are the old ones in the new basis; its decoder is only a beginning."""
    turn_outputs(vae.encoder.layers[-1], basis.T / SHRINK)
    turn_inputs(vae.decoder.layers[0], basis * SHRINK)
    vae.register_to_config(scaling_factor=SHRINK * vae.config.scaling_factor)
    return vae


def turned_pipeline(pipeline: MarigoldUQDepthPipeline, basis: Tensor, vae: AutoencoderTiny) -> MarigoldUQDepthPipeline:
    """The same model in the new basis."""
    if pipeline.scheduler.config.noise_family != "point":
        raise ValueError(
            f"only a mean can be turned: expected family point, got {pipeline.scheduler.config.noise_family}"
        )
    turn_inputs(pipeline.unet.conv_in, basis)
    turn_outputs(pipeline.unet.conv_out, basis.T)
    pipeline.register_modules(vae=vae)
    return pipeline


def turn_latents(latents: LatentShards, basis: Tensor, output: Path) -> None:
    """Every shard in the new basis; those that are there are kept."""
    for folder, arrays, names in tqdm(latents.shards(), total=len(latents.folders), unit="shard"):
        if (output / folder.name).exists():
            continue
        turned = dict(arrays)
        for key in ("image_latent", "depth_latent"):
            old = torch.from_numpy(np.array(arrays[key])).float()
            turned[key] = torch.einsum("ji,bjhw->bihw", basis, old).half().numpy()
        write_shard(output / folder.name, turned, names)


@dataclass(frozen=True)
class RotateOptions:
    """Turn the latent channels to the principal axes of a base's errors, in two stages.

    Args:
        stage: "basis" finds the axes and turns the autoencoder; "apply" turns the pipeline and the stored latents.
        model: The base.
        latents: Its training latents.
        output: Folder to write; it must not exist.
        samples: Latents from which the axes are found.
        basis: For apply: basis.npy of the first stage.
        vae: For apply: the turned autoencoder with its decoder trained.
        latents_output: For apply: folder for the latents in the new basis.
    """

    stage: Literal["basis", "apply"]
    model: Path
    latents: Path
    output: Path
    samples: int = 512
    basis: Path | None = None
    vae: Path | None = None
    latents_output: Path | None = None


def rotate(options: RotateOptions, invocation: Invocation) -> int:
    """Find the basis, or apply it."""
    pipeline, latents = MarigoldUQDepthPipeline.from_pretrained(options.model), LatentShards(options.latents)
    if options.stage == "basis":
        covariance = error_covariance(pipeline, latents, options.samples)
        basis = principal_axes(covariance)
        with atomic_folder(options.output) as temporary:
            turned_autoencoder(pipeline.vae, basis).save_pretrained(temporary)
            np.save(temporary / "basis.npy", basis.numpy())
        print("variances:", " ".join(f"{value:.3g}" for value in torch.linalg.eigvalsh(covariance).flip(0)))
        return 0
    if options.basis is None or options.vae is None or options.latents_output is None:
        raise ValueError("--stage apply needs --basis, --vae and --latents_output")
    basis = torch.from_numpy(np.load(options.basis))
    make_folder(options.latents_output)
    check_autoencoder(options.latents_output, options.vae)
    turn_latents(latents, basis, options.latents_output)
    make_folder(options.output.parent)
    with atomic_folder(options.output) as temporary:
        turned_pipeline(pipeline, basis, AutoencoderTiny.from_pretrained(options.vae)).save_pretrained(temporary)
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """0, or 2 for an error that names what to mend."""
    return run_command("scripts.studies.embedded.rotate_latents", RotateOptions, rotate, arguments)


if __name__ == "__main__":
    sys.exit(main())
