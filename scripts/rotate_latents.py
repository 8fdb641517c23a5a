r"""Turn the latent channels so that the errors of a trained base are uncorrelated between them.

python scripts/rotate_latents.py basis --model runs/embedded/base_more/model --latents runs/embedded/latents/train \
    --output runs/embedded/rotated_vae
python scripts/train_vae.py --config configs/depth/embedded_rotated_decoder.yaml
python scripts/rotate_latents.py apply --model runs/embedded/base_more/model --latents runs/embedded/latents/train \
    --vae runs/embedded/rotated_decoder/model --basis runs/embedded/rotated_vae/basis.npy \
    --output runs/embedded/rotated/model --latents-output runs/embedded/rotated_latents/train

All 16 numbers of a latent cell go wrong together when a depth is wrong: the level of depth is spread over them. A law
with independent coordinates gives each its own error, which the decoder averages away, and the pixels' spread comes out
far too small. In the basis of the errors' principal axes they are uncorrelated. White noise is white in any orthogonal
basis, so the U-Net is turned exactly, by its first and last convolution. The encoder is turned exactly too; the decoder
clamps its input (3 tanh(z / 3)) in the old basis, so it has to be trained again. SHRINK takes the clamp out of play.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from diffusers.models.autoencoders.autoencoder_tiny import AutoencoderTiny
from encode_latents import check_autoencoder
from torch import Tensor, nn
from tqdm.auto import tqdm

from marigold_uq.data.shards import LatentShards, write_shard
from marigold_uq.denoising import predict_output
from marigold_uq.pipelines.depth import MarigoldUQDepthPipeline
from marigold_uq.training.run_folder import replacing_folder

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
        text = pipeline.prompt_embedding(len(depth)).to(depth)

        def denoiser(x: Tensor, t: Tensor | int, image: Tensor = image, text: Tensor = text) -> Tensor:
            return pipeline.unet(torch.cat([image, x], 1), t, encoder_hidden_states=text, return_dict=False)[0]

        law = predict_output(denoiser, scheduler, scheduler.add_noise(depth, noise, timesteps), timesteps)
        error = valid * (scheduler.training_target(depth, noise, timesteps) - law.mean)
        total = total + torch.einsum("bchw,bdhw->cd", error, error)
        count += int(valid.sum())
    return total / count


def principal_axes(covariance: Tensor) -> Tensor:
    """Orthogonal (C, C): its columns are the axes, largest variance first."""
    return torch.linalg.eigh(covariance.double()).eigenvectors.flip(-1).float()


@torch.no_grad()
def turn_outputs(layer: nn.Module, matrix: Tensor) -> None:
    """The convolution now says matrix @ (what it said); its output channels are the rows."""
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
        raise SystemExit(
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


def main(arguments: Sequence[str] | None = None) -> None:
    """Find the basis, or apply it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("basis", "apply"))
    parser.add_argument("--model", type=Path, required=True, help="a trained base, family point")
    parser.add_argument("--latents", type=Path, required=True, help="its training latents")
    parser.add_argument("--output", type=Path, required=True, help="folder for the autoencoder or the pipeline")
    parser.add_argument("--samples", type=int, default=512, help="basis: latents whose errors are looked at")
    parser.add_argument("--basis", type=Path, help="apply: basis.npy")
    parser.add_argument("--vae", type=Path, help="apply: the turned autoencoder with its decoder trained")
    parser.add_argument("--latents-output", type=Path, help="apply: folder for the latents in the new basis")
    args = parser.parse_args(arguments)
    if args.output.exists():
        parser.error(f"{args.output} exists; remove it to make it again")
    pipeline, latents = MarigoldUQDepthPipeline.from_pretrained(args.model), LatentShards(args.latents)
    if args.what == "basis":
        covariance = error_covariance(pipeline, latents, args.samples)
        basis = principal_axes(covariance)
        with replacing_folder(args.output) as temporary:
            turned_autoencoder(pipeline.vae, basis).save_pretrained(temporary)
            np.save(temporary / "basis.npy", basis.numpy())
        print("variances:", " ".join(f"{value:.3g}" for value in torch.linalg.eigvalsh(covariance).flip(0)))
        return
    if None in (args.basis, args.vae, args.latents_output):
        parser.error("apply needs --basis, --vae and --latents-output")
    basis = torch.from_numpy(np.load(args.basis))
    args.latents_output.mkdir(parents=True, exist_ok=True)
    check_autoencoder(args.latents_output / "autoencoder.json", args.vae)
    turn_latents(latents, basis, args.latents_output)
    with replacing_folder(args.output) as temporary:
        turned_pipeline(pipeline, basis, AutoencoderTiny.from_pretrained(args.vae)).save_pretrained(temporary)


if __name__ == "__main__":
    main()
