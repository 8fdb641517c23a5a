"""What depth with uncertainty costs, beside diffusers' `MarigoldDepthPipeline` with the same weights.

    python scripts/benchmarks/depth.py                   # two tables, about 10 minutes on one thread
    python scripts/benchmarks/depth.py --full_size       # Stable Diffusion 2's U-Net in every family: 8 GB of memory

Weights are random: this measures time, memory and sampling error, not depth. Every method runs in a process of its own,
turn by turn, so that peak memory is its own and a busy machine disturbs all alike; seconds are processor time on one
thread, the median over turns. Prints Markdown.
"""

import json
import math
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel
from diffusers.pipelines.marigold.pipeline_marigold_depth import MarigoldDepthPipeline
from diffusers.schedulers.scheduling_ddim import DDIMScheduler
from torch import Tensor, nn

from marigold_uq import DistributionalDDIMScheduler, MarigoldUQDepthPipeline
from marigold_uq.commands.runner import Invocation, run_command
from marigold_uq.denoising import predict_output
from marigold_uq.models.prompt_embedding import PromptEmbedding
from marigold_uq.models.widen import narrow, widen
from marigold_uq.pipelines.depth.latents import recentred as recentre

FAMILY_OPTIONS: dict[str, dict[str, int]] = {
    "gaussian": {},
    "mixture": {"num_components": 3},
    "low_rank": {"rank": 3},
    "low_rank_mixture": {"num_components": 3, "rank": 3},
    "sample": {},
}
TEXT_DIM = 256
SCHEDULE: dict[str, Any] = {
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "prediction_type": "v_prediction",
    "clip_sample": False,
    "set_alpha_to_one": False,
    "steps_offset": 1,
    "timestep_spacing": "trailing",
    "rescale_betas_zero_snr": True,
}
REFERENCE_DRAWS, TRIALS, DRAWS = 256, 8, (4, 8, 16)
LATENT_STD = 0.3


# ------------------------------------------------------------------------------------------- models of random weights


def seeded(build: Callable[[], nn.Module]) -> Any:
    """The module with the same random weights in every process; the global stream is left as it was."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return build().eval()


def medium_unet() -> UNet2DConditionModel:
    """Stable Diffusion 2's layout at a fifth of its width: 35 M parameters."""
    return seeded(
        lambda: UNet2DConditionModel(
            sample_size=32,
            in_channels=8,
            out_channels=4,
            block_out_channels=(64, 128, 256, 256),
            layers_per_block=2,
            attention_head_dim=(2, 4, 8, 8),
            cross_attention_dim=TEXT_DIM,
            use_linear_projection=True,
        )
    )


def medium_vae() -> AutoencoderKL:
    """Stable Diffusion's autoencoder at a quarter of its width, 8 pixels per latent cell."""
    return seeded(
        lambda: AutoencoderKL(
            down_block_types=["DownEncoderBlock2D"] * 4,
            up_block_types=["UpDecoderBlock2D"] * 4,
            block_out_channels=[32, 64, 128, 128],
            layers_per_block=2,
            latent_channels=4,
        )
    )


def photograph(size: int) -> Tensor:
    """(3, size, size) in [0, 1]: blobs on several scales."""
    generator = torch.Generator().manual_seed(0)
    layers = [torch.rand(1, 3, n, n, generator=generator) for n in (3, 9, 27)]
    smooth = [nn.functional.interpolate(layer, (size, size), mode="bilinear") for layer in layers]
    return torch.stack(smooth).mean(0)[0]


# ------------------------------------------------------------------------------------------------ seconds and memory


def call_stock(members: int) -> tuple[nn.Module, Callable[[Tensor, int], Any]]:
    """diffusers' own ensemble with its uncertainty."""
    scheduler = DDIMScheduler(**SCHEDULE)
    pipeline = MarigoldDepthPipeline(medium_unet(), medium_vae(), scheduler, None, None, prediction_type="depth")
    pipeline.empty_text_embedding = torch.zeros(1, 2, TEXT_DIM)
    pipeline.set_progress_bar_config(disable=True)

    def call(image: Tensor, steps: int) -> Any:
        streams = [torch.Generator().manual_seed(m) for m in range(members)]
        return pipeline(image, steps, members, 0, generator=streams, output_uncertainty=True)

    return pipeline.unet, call


def call_ours(members: int, family: str, mode: str) -> tuple[nn.Module, Callable[[Tensor, int], Any]]:
    """Ours, with the same weights below its head."""
    pipeline = MarigoldUQDepthPipeline(
        unet=medium_unet(),
        vae=medium_vae(),
        scheduler=DDIMScheduler(**SCHEDULE),
        prompt_embedding=PromptEmbedding(2, TEXT_DIM),
    )
    pipeline.with_family(family, **FAMILY_OPTIONS.get(family, {})).set_progress_bar_config(disable=True)

    def call(image: Tensor, steps: int) -> Any:
        chains = members if mode == "ensemble" else min(steps, members)
        streams = [torch.Generator().manual_seed(m) for m in range(chains)]
        return pipeline(image, steps, members, 0, generator=streams, uncertainty=mode)

    return pipeline.unet, call


METHODS: dict[str, Callable[[int], tuple[nn.Module, Callable[[Tensor, int], Any]]]] = {
    "diffusers, ensemble": call_stock,
    "point, ensemble": lambda members: call_ours(members, "point", "ensemble"),
    "gaussian, ensemble": lambda members: call_ours(members, "gaussian", "ensemble"),
    "low_rank, ensemble": lambda members: call_ours(members, "low_rank", "ensemble"),
    "gaussian, trajectory": lambda members: call_ours(members, "gaussian", "trajectory"),
    "low_rank, trajectory": lambda members: call_ours(members, "low_rank", "trajectory"),
}


@dataclass(frozen=True)
class Measurement:
    """One image by one method, in a process of its own."""

    seconds: float
    peak_mb: float  # of the whole process
    above_model_mb: float  # what the call added to the loaded model
    unet_calls: int


def measure(method: str, size: int, steps: int, members: int) -> Measurement:
    """Run one call, after a small one that warms up the libraries."""
    unet, call = METHODS[method](members)
    call(photograph(64), 1)
    calls: list[int] = []
    unet.register_forward_hook(lambda *_: calls.append(1))
    before, started = peak_mb(), time.process_time()
    call(photograph(size), steps)
    seconds = time.process_time() - started
    return Measurement(seconds, peak_mb(), peak_mb() - before, len(calls))


def peak_mb() -> float:
    """Largest resident memory of this process so far; the kernel counts kilobytes, macOS bytes."""
    unit = 1e6 if sys.platform == "darwin" else 1e3
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


@dataclass(frozen=True)
class BenchmarkOptions:
    """Measure what depth with uncertainty costs, beside diffusers' pipeline with the same weights.

    Args:
        size: Edge of the image in pixels, a multiple of 16.
        steps: Denoising steps.
        ensemble_size: Members.
        turns: Measurements of each method.
        full_size: Stable Diffusion 2's U-Net instead of the tables.
        cells: Edge of the latent at full size.
        skip_costs: Only the table of draws.
        only: Measure one method in this process and print JSON.
    """

    size: int = 256
    steps: int = 4
    ensemble_size: int = 10
    turns: int = 3
    full_size: bool = False
    cells: int = 24
    skip_costs: bool = False
    only: str | None = None

    def __post_init__(self) -> None:
        if self.only is not None and self.only not in METHODS:
            raise ValueError(f"unknown method {self.only!r}; known: {', '.join(METHODS)}")


def measure_apart(method: str, options: BenchmarkOptions) -> Measurement:
    """`measure` in a fresh process with one thread."""
    size, steps, members = (str(value) for value in (options.size, options.steps, options.ensemble_size))
    command = [sys.executable, __file__, "--size", size, "--steps", steps, "--ensemble_size", members, "--only", method]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    return Measurement(**json.loads(result.stdout.splitlines()[-1]))


def cost_table(options: BenchmarkOptions) -> None:
    """Seconds, memory and network calls of all methods, turn by turn."""
    turns: dict[str, list[Measurement]] = {method: [] for method in METHODS}
    for _ in range(options.turns):
        for method in METHODS:
            turns[method].append(measure_apart(method, options))
    parameters = sum(weight.numel() for weight in medium_unet().parameters()) / 1e6
    print(
        f"\n{options.size} x {options.size} pixels, {options.steps} steps, {options.ensemble_size} members, U-Net of "
        f"{parameters:.1f} M parameters, {options.turns} turns\n"
    )
    print("| method | U-Net calls | seconds | times faster | peak MB | MB above the model |")
    print("|---|---|---|---|---|---|")
    reference = turns["diffusers, ensemble"]
    for method, own in turns.items():
        faster = statistics.median(r.seconds / m.seconds for r, m in zip(reference, own, strict=True))
        seconds, peak, above = (
            statistics.median(getattr(m, name) for m in own) for name in ("seconds", "peak_mb", "above_model_mb")
        )
        print(f"| {method} | {own[0].unet_calls} | {seconds:.1f} | {faster:.1f} | {peak:.0f} | {above:.0f} |")


# ------------------------------------------------------------------------------------- cheap ways through the decoder


def plain(noise: Tensor) -> Tensor:
    return noise


def antithetic(noise: Tensor) -> Tensor:
    half = noise[: len(noise) // 2]
    return torch.cat([half, -half])


def recentred(noise: Tensor) -> Tensor:
    """What the pipeline does: independent draws, moved together to the known mean."""
    return recentre(noise, torch.zeros_like(noise[0]))


def draws_table(options: BenchmarkOptions) -> None:
    """Errors of the mean and the standard deviation of decoded maps, per way of drawing latents."""
    vae = medium_vae()
    generator = torch.Generator().manual_seed(0)
    cells = options.size // 8 // 2
    loc = nn.functional.interpolate(torch.randn(1, 4, 6, 6, generator=generator), (cells, cells), mode="bicubic")

    @torch.no_grad()
    def decode(noise: Tensor) -> Tensor:
        """Grey maps before they are clipped to their range, into which random weights would run."""
        latents = (loc + LATENT_STD * noise) / vae.config.scaling_factor
        return torch.cat([vae.decode(part, return_dict=False)[0].mean(1) for part in latents.split(8)])

    reference = decode(torch.randn(REFERENCE_DRAWS, *loc.shape[1:], generator=generator))
    mean, std = reference.mean(0), reference.std(0)
    floor = 1 / math.sqrt(2 * REFERENCE_DRAWS)
    print(f"\nLatents N(m, {LATENT_STD}^2) on {cells} x {cells} cells, mean over {TRIALS} trials; errors are root mean")
    print(f"squares over pixels, against {REFERENCE_DRAWS} draws (themselves wrong by {floor:.3f} of the spread)\n")
    print("| draws | way | error of the standard deviation | ratio of variances | error of the mean, in std |")
    print("|---|---|---|---|---|")
    for count in DRAWS:
        for way in (plain, antithetic, recentred):
            maps = [
                decode(way(torch.randn(count, *loc.shape[1:], generator=torch.Generator().manual_seed(trial))))
                for trial in range(TRIALS)
            ]
            spread = rms([one.std(0) / std - 1 for one in maps])
            ratio = float(torch.stack([one.var(0) / std**2 for one in maps]).mean())
            centre = rms([(one.mean(0) - mean) / std for one in maps])
            print(f"| {count} | {way.__name__} | {spread:.3f} | {ratio:.3f} | {centre:.3f} |")


def rms(errors: list[Tensor]) -> float:
    return float(torch.stack(errors).square().mean().sqrt())


# -------------------------------------------------------------------------------------------------------- full size


def full_size_unet() -> UNet2DConditionModel:
    """Stable Diffusion 2's configuration with Marigold's 8 input channels."""
    return seeded(
        lambda: UNet2DConditionModel(
            sample_size=96,
            in_channels=8,
            out_channels=4,
            block_out_channels=(320, 640, 1280, 1280),
            layers_per_block=2,
            attention_head_dim=(5, 10, 20, 20),
            cross_attention_dim=1024,
            use_linear_projection=True,
        )
    )


def timed(action: Callable[[], Any]) -> tuple[Any, float]:
    started = time.perf_counter()
    return action(), time.perf_counter() - started


@torch.no_grad()
def full_size_table(cells: int) -> None:
    """Widen, run one step, save, load and compare, for each family on one and the same network."""
    unet, seconds = timed(full_size_unet)
    count = sum(weight.numel() for weight in unet.parameters())
    print(f"\nStable Diffusion 2's U-Net, {count:,} parameters, float32, built in {seconds:.0f} s, {peak_mb():.0f} MB;")
    print(f"one step at a latent of 4 x {cells} x {cells}; wall-clock seconds\n")
    print("| family | output channels | widen | one step | save | load | largest difference after loading | peak MB |")
    print("|---|---|---|---|---|---|---|---|")
    for family, sizes in FAMILY_OPTIONS.items():
        scheduler = DistributionalDDIMScheduler(noise_family=family, eta=1.0, **sizes, **SCHEDULE)
        scheduler.set_timesteps(1)
        _, widening = timed(partial(widen, unet, family, **sizes))
        x_prev, step = timed(partial(one_step, unet, scheduler, cells))
        with tempfile.TemporaryDirectory() as folder:
            _, saving = timed(partial(unet.save_pretrained, folder))
            loaded, loading = timed(partial(UNet2DConditionModel.from_pretrained, folder))
            difference = float((one_step(loaded, scheduler, cells) - x_prev).abs().max())
            del loaded
        channels = unet.config.out_channels
        print(
            f"| {family} | {channels} | {widening:.2f} | {step:.1f} | {saving:.0f} | {loading:.1f} | {difference:.1e} "
            f"| {peak_mb():.0f} |",
            flush=True,
        )
        narrow(unet, family, **sizes)


def one_step(unet: UNet2DConditionModel, scheduler: DistributionalDDIMScheduler, cells: int) -> Tensor:
    """x_0 of a one-step chain on a random condition."""
    generator = torch.Generator().manual_seed(1)
    condition, x_t = torch.randn(2, 1, 4, cells, cells, generator=generator)
    text, t = torch.zeros(1, 2, 1024), scheduler.timesteps[0]
    law = predict_output(
        lambda x, timestep: unet(torch.cat([condition, x], 1), timestep, text).sample,
        scheduler,
        x_t,
        t,
        generator=generator,
    )
    return scheduler.step(law, t, x_t, generator=generator, return_dict=False)[0]


def run(options: BenchmarkOptions, invocation: Invocation) -> int:
    """Print the tables; `only` measures one method in this process."""
    torch.set_num_threads(torch.get_num_threads() if options.full_size else 1)
    if options.only:
        print(json.dumps(measure(options.only, options.size, options.steps, options.ensemble_size).__dict__))
        return 0
    print(f"`{invocation.command}`, torch {torch.__version__}, {platform.machine()}")
    if options.full_size:
        full_size_table(options.cells)
        return 0
    if not options.skip_costs:
        cost_table(options)
    draws_table(options)
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """0, or 2 for an error that names what to mend."""
    return run_command("scripts/benchmarks/depth.py", BenchmarkOptions, run, arguments)


if __name__ == "__main__":
    sys.exit(main())
