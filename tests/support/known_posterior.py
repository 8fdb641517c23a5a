"""A depth model that has learned the exact law of depth given the image, with a decoder that is linear.

The image latent c is the image, averaged over cells of 2 x 2 pixels. Given it, the depth latent is
x_0 ~ N(m(c), diag(s^2)) with m = 0.6 c + offset and s fixed per channel, and a pixel of the decoded map is
0.5 + 0.5 sum_k w_k x_0k / SCALING over the channels of its cell. Means and standard deviations of maps are known.
"""

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from marigold_uq import DistributionalDDIMScheduler, MarigoldUQDepthPipeline
from marigold_uq.models.prompt_embedding import PromptEmbedding
from support.oracles import inverse_softplus

SCALING = 0.5
DECODER = torch.tensor([0.5, -0.3, 0.2, 0.4])  # w
OFFSET = torch.tensor([0.05, -0.1, 0.0, 0.1])
SCALE = torch.tensor([0.06, 0.03, 0.1, 0.04])  # s


def channels(values: Tensor) -> Tensor:
    """(C,) -> (C, 1, 1)."""
    return values.reshape(-1, 1, 1)


class LinearVae(nn.Module):
    """Encodes by averaging, decodes by a weighted sum of channels, both over cells of 2 x 2 pixels."""

    dtype, device = torch.float32, torch.device("cpu")
    config = SimpleNamespace(block_out_channels=(1, 1), latent_channels=4, scaling_factor=SCALING)

    def encode(self, image: Tensor) -> SimpleNamespace:
        grey = nn.functional.avg_pool2d(image.mean(1, keepdim=True), 2)
        return SimpleNamespace(latents=grey.expand(-1, 4, -1, -1) / SCALING)

    def decode(self, latent: Tensor, return_dict: bool = False) -> tuple[Tensor]:
        grey = (channels(DECODER) * latent).sum(1, keepdim=True)
        return (nn.functional.interpolate(grey, scale_factor=2).expand(-1, 3, -1, -1),)


class PerfectUnet(nn.Module):
    """The exact law of v given x_t, as raw channels [loc, rho] (Method, section 2), whatever the text."""

    dtype, device = torch.float32, torch.device("cpu")

    def __init__(self, alphas_cumprod: Tensor) -> None:
        super().__init__()
        self.alphas_cumprod = alphas_cumprod
        self.batch_sizes: list[int] = []

    def forward(self, sample: Tensor, timestep: Any, encoder_hidden_states: Tensor, return_dict: bool) -> tuple[Tensor]:
        assert encoder_hidden_states.shape[0] == sample.shape[0]
        self.batch_sizes.append(len(sample))
        condition, x_t = sample.split(4, 1)
        mean, variance = depth_mean(condition), channels(SCALE) ** 2
        abar = float(self.alphas_cumprod[int(timestep)])
        total = abar * variance + 1 - abar
        loc = (abar * (1 - abar)) ** 0.5 * (1 - variance) / total * (x_t - abar**0.5 * mean) - (1 - abar) ** 0.5 * mean
        return (torch.cat([loc, inverse_softplus((variance / total).sqrt()).expand_as(loc)], 1),)


def depth_mean(condition: Tensor) -> Tensor:
    """m(c)."""
    return 0.6 * condition + channels(OFFSET)


def known_pipeline(**config: Any) -> MarigoldUQDepthPipeline:
    """Metric unless `config` says otherwise, so that no alignment comes between the law and the maps."""
    scheduler = DistributionalDDIMScheduler(
        beta_schedule="scaled_linear",
        beta_start=0.00085,
        beta_end=0.012,
        prediction_type="v_prediction",
        timestep_spacing="trailing",
        rescale_betas_zero_snr=True,
        noise_family="gaussian",
        set_alpha_to_one=True,
    )
    pipeline = MarigoldUQDepthPipeline(
        unet=PerfectUnet(scheduler.alphas_cumprod),
        vae=LinearVae(),
        scheduler=scheduler,
        prompt_embedding=PromptEmbedding(2, 4),
        **{"scale_invariant": False, "shift_invariant": False, "default_processing_resolution": 0, **config},
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def known_image(height: int = 16, width: int = 16) -> np.ndarray:
    """A ramp within [0.3, 0.7]: no map reaches the limits of [0, 1]."""
    rows = np.linspace(0.3, 0.7, height)[:, None, None]
    columns = np.linspace(0.0, 0.1, width)[None, :, None]
    return np.broadcast_to(rows - columns + 0.05, (height, width, 3)).astype(np.float32)


def through_decoder(variance: Tensor) -> float:
    """Standard deviation of a pixel, the latent channels having these variances (C,)."""
    return float(0.5 / SCALING * (DECODER**2 * variance).sum().sqrt())


def known_law(image: np.ndarray) -> tuple[np.ndarray, float]:
    """Mean map (H, W) and the standard deviation, the same for all pixels."""
    vae = LinearVae()
    condition = vae.encode(torch.from_numpy(image).permute(2, 0, 1)[None] * 2 - 1).latents * SCALING
    decoded = vae.decode(depth_mean(condition) / SCALING)[0]
    return ((decoded.mean(1)[0] + 1) / 2).numpy(), through_decoder(SCALE**2)


def draw_truth(image: np.ndarray, generator: torch.Generator) -> np.ndarray:
    """One true map (H, W) from the law; cells of 2 x 2 pixels are independent."""
    mean, std = known_law(image)
    noise = torch.randn(mean.shape[0] // 2, mean.shape[1] // 2, generator=generator).numpy()
    return mean + std * noise.repeat(2, 0).repeat(2, 1)
