"""A checkpoint that was written once and must always load: it guards module path, config keys and raw layouts.

It is a stock `DDPMPipeline` with our scheduler (mixture, four components) and a tiny U-Net whose last convolution has
zero weights and the bias `RAW`, so that every raw channel is known. Expected numbers follow from the documented layout,
activations, schedule and Theorem 1, written out here with numpy.
"""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import DDPMPipeline, DiffusionPipeline, UNet2DModel

from marigold_uq.schedulers import DistributionalDDIMScheduler

CHECKPOINT = Path(__file__).parents[1] / "checkpoints" / "mixture"
CHANNELS, COMPONENTS = 4, 4
RAW = (np.arange(48) - 24) / 10  # 12 blocks of 4 channels
ETA, TAU = 0.5, 0.25


def write_checkpoint(folder: Path) -> None:
    """How `CHECKPOINT` was made. It is never written again: a new file format needs a new folder beside it."""
    if folder.exists():
        raise FileExistsError(f"{folder} exists; a frozen checkpoint is not overwritten")
    unet = UNet2DModel(
        sample_size=4,
        in_channels=CHANNELS,
        out_channels=len(RAW),
        block_out_channels=(4,),
        layers_per_block=1,
        down_block_types=("DownBlock2D",),
        up_block_types=("UpBlock2D",),
        norm_num_groups=2,
        add_attention=False,
    )
    with torch.no_grad():
        unet.conv_out.weight.zero_()
        unet.conv_out.bias.copy_(torch.from_numpy(RAW))
    scheduler = DistributionalDDIMScheduler(
        beta_schedule="scaled_linear",
        beta_start=0.00085,
        beta_end=0.012,
        prediction_type="v_prediction",
        timestep_spacing="trailing",
        rescale_betas_zero_snr=True,
        noise_family="mixture",
        num_components=COMPONENTS,
        eta=ETA,
        tau=TAU,
    )
    DDPMPipeline(unet=unet, scheduler=scheduler).save_pretrained(folder)


def positive(rho: np.ndarray) -> np.ndarray:
    return np.log1p(np.exp(rho)) + 1e-6


def alpha_bars() -> np.ndarray:
    """Stable Diffusion's schedule, its square root shifted and stretched so that it ends at 0 and begins as before."""
    betas = np.linspace(0.00085**0.5, 0.012**0.5, 1000) ** 2
    root = np.sqrt(np.cumprod(1 - betas))
    return ((root - root[-1]) * root[0] / (root[0] - root[-1])) ** 2


@pytest.fixture(scope="module")
def pipeline() -> DDPMPipeline:
    return DiffusionPipeline.from_pretrained(CHECKPOINT)


@pytest.fixture(scope="module")
def raw(pipeline: DDPMPipeline) -> torch.Tensor:
    with torch.no_grad():
        return pipeline.unet(torch.zeros(1, CHANNELS, 4, 4), 999).sample


def everywhere(channels: np.ndarray) -> torch.Tensor:
    """A number per channel, the same at all 4 x 4 positions, for a batch of one."""
    return torch.from_numpy(channels).float().reshape(1, -1, 1, 1).expand(1, -1, 4, 4)


def test_the_frozen_checkpoint_loads_and_is_small(pipeline: DDPMPipeline, raw: torch.Tensor) -> None:
    assert type(pipeline.scheduler) is DistributionalDDIMScheduler
    assert sum(file.stat().st_size for file in CHECKPOINT.rglob("*")) < 100_000
    index = json.loads((CHECKPOINT / "model_index.json").read_text())
    assert index["scheduler"] == [
        "marigold_uq.schedulers.scheduling_distributional_ddim",
        "DistributionalDDIMScheduler",
    ]
    torch.testing.assert_close(raw, everywhere(RAW))
    np.testing.assert_allclose(pipeline.scheduler.alphas_cumprod.numpy(), alpha_bars(), atol=2e-6)  # float32 cumprod


def test_its_raw_channels_are_the_documented_mixture(pipeline: DDPMPipeline, raw: torch.Tensor) -> None:
    """[loc_1..loc_4, rho_1..rho_4, logit_1..logit_4], each a block of 4 channels; rho is a standard deviation."""
    loc, rho, logits = RAW.reshape(3, COMPONENTS, CHANNELS)
    weights = np.exp(logits) / np.exp(logits).sum(0)
    mean = (weights * loc).sum(0)
    law = pipeline.scheduler.noise_distribution(raw)
    torch.testing.assert_close(law.mean, everywhere(mean))
    torch.testing.assert_close(law.variance, everywhere((weights * (positive(rho) ** 2 + (loc - mean) ** 2)).sum(0)))


def test_its_first_step_is_the_documented_one(pipeline: DDPMPipeline, raw: torch.Tensor) -> None:
    """From zero SNR to t = 749: A = lambda, B = -sqrt(abar_p), variance tau (B^2 s_k^2 + sigma^2) of each component."""
    pipeline.scheduler.set_timesteps(4)
    assert pipeline.scheduler.timesteps.tolist() == [999, 749, 499, 249]
    abar_prev = alpha_bars()[749]
    sigma2 = ETA**2 * (1 - abar_prev)
    loc, rho, logits = RAW.reshape(3, COMPONENTS, CHANNELS)
    weights = np.exp(logits) / np.exp(logits).sum(0)
    means = math.sqrt(1 - abar_prev - sigma2) * 2.0 - math.sqrt(abar_prev) * loc  # x_t = 2
    mean = (weights * means).sum(0)
    variances = TAU * (abar_prev * positive(rho) ** 2 + sigma2)
    law = pipeline.scheduler.reverse_distribution(raw, 999, torch.full((1, CHANNELS, 4, 4), 2.0))
    torch.testing.assert_close(law.mean, everywhere(mean), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        law.variance, everywhere((weights * (variances + (means - mean) ** 2)).sum(0)), rtol=1e-5, atol=1e-5
    )


def load_as(family: str, **sizes: int) -> DistributionalDDIMScheduler:
    return DistributionalDDIMScheduler.from_pretrained(CHECKPOINT / "scheduler", noise_family=family, **sizes)


def test_the_same_channels_read_by_the_other_families(raw: torch.Tensor) -> None:
    """gaussian [loc, rho]; low_rank [loc, rho, factor_1..factor_r]; rho of low_rank is a variance."""
    blocks = RAW.reshape(12, CHANNELS)
    gaussian = load_as("gaussian").noise_distribution(raw)  # 24 target channels
    torch.testing.assert_close(gaussian.mean, everywhere(RAW[:24]))
    torch.testing.assert_close(gaussian.stddev, everywhere(positive(RAW[24:])))
    low_rank = load_as("low_rank", rank=10).noise_distribution(raw)
    torch.testing.assert_close(low_rank.mean, everywhere(blocks[0]))
    torch.testing.assert_close(low_rank.variance, everywhere(positive(blocks[1]) + (blocks[2:] ** 2).sum(0)))


def test_the_same_channels_read_as_a_low_rank_mixture(raw: torch.Tensor) -> None:
    """[loc_1.., rho_1.., logit_1.., factor_11, .., factor_1r, .., factor_Kr], logits averaged over all coordinates."""
    blocks = RAW.reshape(12, CHANNELS)
    loc, variance, logits = blocks[:2], positive(blocks[2:4]), blocks[4:6].mean(1)
    factors = blocks[6:].reshape(2, 3, CHANNELS)
    weights = (np.exp(logits) / np.exp(logits).sum()).reshape(2, 1)
    mean = (weights * loc).sum(0)
    spread = variance + (factors**2).sum(1) + (loc - mean) ** 2
    law = load_as("low_rank_mixture", num_components=2, rank=3).noise_distribution(raw)
    torch.testing.assert_close(law.mean, everywhere(mean))
    torch.testing.assert_close(law.variance, everywhere((weights * spread).sum(0)))


def test_the_same_numbers_read_as_a_cholesky_factor() -> None:
    """[loc, lower triangle by rows], 9 numbers for three coordinates; Sigma_ii = s_i^2, row i of L along [raw, 1]."""
    raw = np.array([0.1, 0.2, 0.3, -0.4, 0.5, 0.6, -0.7, 0.8, 0.9])
    scale = positive(raw[[3, 5, 8]])
    rows = np.array([[1, 0, 0], [raw[4], 1, 0], [raw[6], raw[7], 1]])
    root = scale[:, None] * rows / np.linalg.norm(rows, axis=1, keepdims=True)
    law = load_as("cholesky").noise_distribution(torch.from_numpy(raw).unsqueeze(0))
    np.testing.assert_allclose(law.mean[0].numpy(), raw[:3])
    np.testing.assert_allclose((law.scale_tril @ law.scale_tril.mT)[0].numpy(), root @ root.T)


def test_the_stock_pipeline_samples_from_it(pipeline: DDPMPipeline) -> None:
    pipeline.set_progress_bar_config(disable=True)
    images = pipeline(2, num_inference_steps=3, output_type="np", generator=torch.Generator().manual_seed(0)).images
    assert images.shape == (2, 4, 4, CHANNELS)
    assert np.isfinite(images).all()


def test_writing_again_gives_the_same_entries_but_never_over_the_old_files(tmp_path: Path) -> None:
    """The code still writes all that was frozen; only the library version may differ, and new entries may appear."""
    write_checkpoint(tmp_path / "new")
    for name in ("model_index.json", "scheduler/scheduler_config.json"):
        new, old = (json.loads((folder / name).read_text()) for folder in (tmp_path / "new", CHECKPOINT))
        old["_diffusers_version"] = new["_diffusers_version"]
        assert {key: new[key] for key in old} == old
    with pytest.raises(FileExistsError, match="not overwritten"):
        write_checkpoint(CHECKPOINT)
