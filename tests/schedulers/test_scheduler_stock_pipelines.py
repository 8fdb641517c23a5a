"""Stock diffusers pipelines run, save and load with our scheduler and a widened U-Net, unmodified."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from diffusers import AutoencoderKL, DDIMScheduler, MarigoldDepthPipeline
from support.tiny_unets import EMBEDDING_DIM, run_unet, tiny_unet
from torch import Tensor
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

from marigold_uq.models.widen import widen
from marigold_uq.sampling import reverse_diffusion
from marigold_uq.schedulers import DistributionalDDIMScheduler

ROOT = Path(__file__).parents[2]
MARIGOLD = {
    "beta_schedule": "scaled_linear",
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "prediction_type": "v_prediction",
    "timestep_spacing": "trailing",
    "rescale_betas_zero_snr": True,
    "clip_sample": False,
}
HEADS = {"gaussian": {}, "mixture": {"num_components": 3}, "low_rank": {"rank": 2}}
families = pytest.mark.parametrize("family", HEADS)


def marigold(
    scheduler: DDIMScheduler, family: str = "point", sizes: dict[str, int] | None = None
) -> MarigoldDepthPipeline:
    """A stock pipeline of random components; the U-Net is widened for the family."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        vae = AutoencoderKL(
            block_out_channels=(4, 4),
            down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2,
            layers_per_block=1,
            norm_num_groups=2,
            latent_channels=4,
            sample_size=16,
        )
        text = CLIPTextConfig(
            vocab_size=4,
            hidden_size=EMBEDDING_DIM,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=2,
            max_position_embeddings=8,
            bos_token_id=0,
            eos_token_id=1,
            pad_token_id=1,
        )
        text_encoder = CLIPTextModel(text)
    vocabulary = {"<|startoftext|>": 0, "<|endoftext|>": 1, "a</w>": 2, "a": 3}
    unet = tiny_unet(8)
    widen(unet, family, **(sizes or {}))
    pipeline = MarigoldDepthPipeline(
        unet=unet,
        vae=vae,
        scheduler=scheduler,
        text_encoder=text_encoder.eval(),
        tokenizer=CLIPTokenizer(vocabulary, [], model_max_length=8),
        prediction_type="depth",
        scale_invariant=True,
        shift_invariant=True,
        default_denoising_steps=3,
        default_processing_resolution=16,
    )
    pipeline.empty_text_embedding = torch.zeros(1, 2, EMBEDDING_DIM)  # the prompt that `run_unet` uses
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def image() -> Tensor:
    return torch.rand(1, 3, 16, 24, generator=torch.Generator().manual_seed(0))


def predict(pipeline: MarigoldDepthPipeline, **options: object) -> tuple[Tensor, Tensor]:
    """Prediction (E, 16, 24, 1) and latent (E, 4, 8, 12) of a seeded call."""
    settings = {"processing_resolution": 0, "output_latent": True, "output_type": "pt", **options}
    output = pipeline(image(), generator=torch.Generator().manual_seed(1), **settings)
    return output.prediction, output.latent


@families
def test_stock_marigold_runs_with_a_widened_unet_and_our_scheduler(family: str) -> None:
    """Its latent is what our own loop gives for the same network, noise and generator."""
    scheduler = DistributionalDDIMScheduler(noise_family=family, eta=1.0, **HEADS[family], **MARIGOLD)
    pipeline = marigold(scheduler, family, HEADS[family])
    prediction, latent = predict(pipeline)
    assert prediction.shape == (1, 1, 16, 24)
    assert 0 <= prediction.min() < prediction.max() <= 1
    generator = torch.Generator().manual_seed(1)
    x_T = torch.randn(1, 4, 8, 12, generator=generator)
    condition = pipeline.vae.encode(2 * image() - 1).latent_dist.mode() * pipeline.vae.config.scaling_factor
    scheduler.set_timesteps(3)
    ours = reverse_diffusion(
        lambda x, t: run_unet(pipeline.unet, torch.cat([condition, x], 1), int(t)), scheduler, x_T, generator=generator
    )
    torch.testing.assert_close(latent, ours)


@families
def test_stock_marigold_with_an_ensemble_and_its_own_uncertainty_runs(family: str) -> None:
    scheduler = DistributionalDDIMScheduler(noise_family=family, **HEADS[family], **MARIGOLD)
    pipeline = marigold(scheduler, family, HEADS[family])
    output = pipeline(
        image(), processing_resolution=0, ensemble_size=3, output_uncertainty=True, output_type="pt", batch_size=3
    )
    assert output.prediction.shape == output.uncertainty.shape == (1, 1, 16, 24)
    assert torch.isfinite(output.prediction).all()
    assert output.uncertainty.max() > 0


@pytest.mark.parametrize("family", ["point", *HEADS])
def test_where_the_spread_is_shrunk_away_stock_marigold_predicts_what_it_did_before_widening(family: str) -> None:
    """tau = 1e-12 leaves each component's mean, and a small initial scale puts the components on the prediction.

    Four trailing steps, where stock's previous timestep is the used one. 1e-3: three components at distance 1e-5 and
    standard deviations of 1e-6 x 0.5, carried through four evaluations of a random network.
    """
    sizes = HEADS.get(family, {})
    before = predict(marigold(DDIMScheduler(**MARIGOLD)), num_inference_steps=4)[1]
    scheduler = DistributionalDDIMScheduler(noise_family=family, tau=1e-12, **sizes, **MARIGOLD)
    pipeline = marigold(scheduler)
    widen(pipeline.unet, family, **sizes, initial_scale=1e-5 if family == "mixture" else 0.5)
    after = predict(pipeline, num_inference_steps=4)[1]
    if family == "point":
        assert torch.equal(after, before)
    torch.testing.assert_close(after, before, rtol=0, atol=1e-3)


LOAD_AND_STEP = """
import sys
import marigold_uq
import torch
from diffusers import DiffusionPipeline

pipeline = DiffusionPipeline.from_pretrained(sys.argv[1])
assert type(pipeline.scheduler) is marigold_uq.DistributionalDDIMScheduler, type(pipeline.scheduler)
given = torch.load(sys.argv[2])
pipeline.scheduler.set_timesteps(3)
with torch.no_grad():
    raw = pipeline.unet(given["x"], 999, given["prompt"], return_dict=False)[0]
generator = torch.Generator().manual_seed(4)
step = pipeline.scheduler.step(given["raw"], 999, given["x"][:, 4:], generator=generator).prev_sample
torch.save({"raw": raw, "step": step}, sys.argv[3])
"""


def test_a_saved_pipeline_loads_in_a_fresh_process_and_steps_alike(tmp_path: Path) -> None:
    scheduler = DistributionalDDIMScheduler(noise_family="low_rank", rank=2, eta=1.0, **MARIGOLD)
    scheduler.calibrate(tau=0.3)
    pipeline = marigold(scheduler, "low_rank", {"rank": 2})
    pipeline.save_pretrained(tmp_path / "saved")
    index = json.loads((tmp_path / "saved" / "model_index.json").read_text())
    assert index["scheduler"] == [
        "marigold_uq.schedulers.scheduling_distributional_ddim",
        "DistributionalDDIMScheduler",
    ]

    x, prompt = torch.randn(2, 8, 8, 8, generator=torch.Generator().manual_seed(0)), torch.zeros(2, 2, EMBEDDING_DIM)
    raw = run_unet(pipeline.unet, x, 999)
    torch.save({"x": x, "prompt": prompt, "raw": raw}, tmp_path / "given.pt")
    files = [str(tmp_path / name) for name in ("saved", "given.pt", "result.pt")]
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-c", LOAD_AND_STEP, *files],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": paths, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    result = torch.load(tmp_path / "result.pt")
    scheduler.set_timesteps(3)
    step = scheduler.step(raw, 999, x[:, 4:], generator=torch.Generator().manual_seed(4)).prev_sample
    assert torch.equal(result["step"], step)
    torch.testing.assert_close(result["raw"], raw)
