"""What predicting a distribution costs: reverse steps, training steps, low rank in high dimension, the CRPS.

    python scripts/benchmarks/core.py --output core.json

Every number is a median of processor time, and every ratio compares two things measured in the same run, turn by turn:
on one thread, processor time is what a quiet machine would take, and other programs disturb it little. Prints Markdown;
`--output` also writes JSON. A few minutes, most of them for `compiled` and `training`; `--parts` chooses.
"""

import copy
import os
import platform
import statistics
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import scoringrules
import torch
from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel
from diffusers.schedulers.scheduling_ddim import DDIMScheduler
from diffusers.schedulers.scheduling_edm_euler import EDMEulerScheduler
from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from tqdm import tqdm

from marigold_uq.commands.runner import Invocation, run_command
from marigold_uq.denoising import predict_output
from marigold_uq.distributions import HeadOptions, LowRankDistribution, family_class
from marigold_uq.files import make_folder
from marigold_uq.metrics import crps
from marigold_uq.models.widen import widen
from marigold_uq.results import write_json
from marigold_uq.schedulers import FRAMEWORKS, DistributionalDDIMScheduler
from marigold_uq.scores import kernel_score, mean_score

LATENTS = {"4 x 24 x 32": (4, 24, 32), "4 x 96 x 96": (4, 96, 96)}
FAMILY_OPTIONS: dict[str, dict[str, int]] = {
    "point": {},
    "gaussian": {},
    "mixture": {"num_components": 3},
    "low_rank": {"rank": 3},
    "low_rank_mixture": {"num_components": 3, "rank": 3},
    "sample": {},
}
TRAINING_TARGETS = {"gaussian": 1.05, "mixture": 1.15, "low_rank": 1.15}
"""Most that a training step may cost, relative to the `point` step of the same backbone."""
TRAINING_LATENT, TRAINING_BATCH = (4, 24, 32), 4
COMPILED_FAMILIES = ("gaussian", "mixture", "low_rank")
DIMENSIONS = (1_024, 4_096, 16_384, 36_864, 147_456)  # the fourth is 4 x 96 x 96
RANK, LOW_RANK_BATCH = 3, 4
NUM_MEMBERS, NUM_POINTS = 100, 20_000


@dataclass(frozen=True)
class Row:
    """One measurement: median seconds of processor time, and the median over turns of the ratio to the reference."""

    name: str
    seconds: float
    ratio: float
    note: str = ""


def race(runners: dict[str, Callable[[], Any]], reference: str, *, turns: int, warmup: int = 2) -> list[Row]:
    """Let all run once per turn, starting with another one each turn; ratios are taken within a turn."""
    names = list(runners)
    times: dict[str, list[float]] = {name: [] for name in names}
    for turn in tqdm(range(warmup + turns), desc=reference, leave=False, disable=None):
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            start = time.process_time()
            runners[name]()
            if turn >= warmup:
                times[name].append(time.process_time() - start)
    return [
        Row(
            name,
            statistics.median(times[name]),
            statistics.median(a / b for a, b in zip(times[name], times[reference], strict=True)),
        )
        for name in names
    ]


def benchmark_step(shape: Sequence[int], turns: int) -> list[Row]:
    """One reverse step at eta = 1 (both draw noise) from raw output to x_prev, against stock DDIM."""
    sample = torch.randn(1, *shape, generator=torch.Generator().manual_seed(0))
    stock = DDIMScheduler(clip_sample=False, prediction_type="v_prediction")
    stock.set_timesteps(50)
    timestep = int(stock.timesteps[10])
    generator = torch.Generator().manual_seed(1)
    runners: dict[str, Callable[[], Any]] = {
        "stock DDIM": lambda: stock.step(sample, timestep, sample, eta=1.0, generator=generator)
    }
    for family, options in FAMILY_OPTIONS.items():
        runners[family] = step_runner(family, options, sample, timestep)
    return race(runners, "stock DDIM", turns=turns, warmup=5)


def step_runner(family: str, options: dict[str, int], sample: Tensor, timestep: int) -> Callable[[], Any]:
    """The step of one family with raw output of the right width."""
    scheduler = DistributionalDDIMScheduler(
        clip_sample=False, prediction_type="v_prediction", noise_family=family, eta=1.0, **options
    )
    scheduler.set_timesteps(50)
    generator = torch.Generator().manual_seed(2)
    channels = scheduler.num_raw_channels(sample.shape[1])
    raw = torch.randn(1, channels, *sample.shape[2:], generator=generator)
    return lambda: scheduler.step(raw, timestep, sample, generator=generator)


STOCK: dict[str, Any] = {
    "ddim": lambda: DDIMScheduler(clip_sample=False, prediction_type="v_prediction"),
    "edm": EDMEulerScheduler,
    "flow": FlowMatchEulerDiscreteScheduler,
}
"""diffusers' scheduler of each framework."""


def benchmark_schedulers(framework: str, shape: Sequence[int], turns: int) -> list[Row]:
    """One step at eta = 0, where stock draws no noise, of families `point` and `gaussian` against stock's."""
    sample = torch.randn(1, *shape, generator=torch.Generator().manual_seed(0))
    stock = STOCK[framework]()
    stock.set_timesteps(50)
    timestep = stock.timesteps[10]
    if framework == "edm":
        stock.scale_model_input(sample, timestep)  # without it stock warns at every step

    def stock_step() -> None:
        stock._step_index = 10  # Euler schedulers count their steps
        stock.step(sample, timestep, sample)

    runners: dict[str, Callable[[], Any]] = {"stock": stock_step}
    for family in ("point", "gaussian"):
        scheduler = FRAMEWORKS[framework].from_config(stock.config, noise_family=family)
        scheduler.set_timesteps(50)
        raw = torch.randn(1, scheduler.num_raw_channels(shape[0]), *shape[1:])
        generator = torch.Generator().manual_seed(2)
        runners[family] = partial(scheduler.step, raw, timestep, sample, generator=generator)
    return race(runners, "stock", turns=turns, warmup=5)


def benchmark_compiled(family: str, turns: int) -> list[Row]:
    """Head, score and gradient of raw output, eager and compiled into one graph: what follows the network."""
    sizes: dict[str, Any] = dict(FAMILY_OPTIONS[family])
    head, shape = HeadOptions(**sizes), TRAINING_LATENT
    kind, generator = family_class(family), torch.Generator().manual_seed(0)
    channels = kind.num_raw_channels(shape[0], head)
    raw = torch.randn(TRAINING_BATCH, channels, *shape[1:], generator=generator, requires_grad=True)
    target = torch.randn(TRAINING_BATCH, *shape, generator=generator)

    def loss(raw: Tensor) -> Tensor:
        return mean_score(kind.from_raw(raw, head, event_shape=shape), target)

    compiled = torch.compile(loss, fullgraph=True)
    runners: dict[str, Callable[[], Any]] = {
        "eager": lambda: torch.autograd.grad(loss(raw), raw),
        "compiled": lambda: torch.autograd.grad(compiled(raw), raw),
    }
    return race(runners, "eager", turns=turns, warmup=3)


def small_unet() -> UNet2DConditionModel:
    """A conditional U-Net of about 4 M parameters: 8 -> 4 channels, as Marigold's."""
    return UNet2DConditionModel(
        sample_size=32,
        in_channels=8,
        out_channels=4,
        block_out_channels=(64, 96, 128),
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=64,
        attention_head_dim=4,
    )


def training_runner(base: UNet2DConditionModel, family: str) -> Callable[[], None]:
    """Forward, score, backward and Adam step of a widened copy of `base`, through the library's own calls."""
    options = FAMILY_OPTIONS[family]
    unet = copy.deepcopy(base)
    widen(unet, family, **options)
    scheduler = DistributionalDDIMScheduler(
        prediction_type="v_prediction", clip_sample=False, noise_family=family, **options
    )
    optimizer = torch.optim.Adam(unet.parameters(), lr=3e-5)
    generator = torch.Generator().manual_seed(0)
    condition, original, noise = torch.randn(3, TRAINING_BATCH, *TRAINING_LATENT, generator=generator)
    timesteps = torch.randint(1000, (TRAINING_BATCH,), generator=generator)
    text = torch.zeros(TRAINING_BATCH, 2, 64)

    def denoise(x_t: Tensor, timestep: Tensor | int) -> Tensor:
        return unet(torch.cat([condition, x_t], 1), timestep, text).sample

    def train() -> None:
        x_t = scheduler.add_noise(original, noise, timesteps)
        law = predict_output(denoise, scheduler, x_t, timesteps)
        mean_score(law, scheduler.training_target(original, noise, timesteps)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return train


def benchmark_training(turns: int) -> tuple[list[Row], int]:
    """Training steps of the families with a target, against `point`; also the number of parameters."""
    with torch.random.fork_rng(devices=[]):  # diffusers initialises from the global stream: put it back afterwards
        torch.manual_seed(0)
        base = small_unet()
    runners = {family: training_runner(base, family) for family in ("point", *TRAINING_TARGETS, "low_rank_mixture")}
    rows = race(runners, "point", turns=turns, warmup=3)
    return [mark_target(row) for row in rows], sum(p.numel() for p in base.parameters())


def mark_target(row: Row) -> Row:
    """Say whether a row meets its target."""
    limit = TRAINING_TARGETS.get(row.name)
    if limit is None:
        return row
    verdict = "met" if row.ratio <= limit else "MISSED"
    return Row(row.name, row.seconds, row.ratio, f"at most {limit}: {verdict}")


@dataclass(frozen=True)
class ScalingRow:
    """Low-rank work at one dimension: median seconds and peak bytes of all tensors made on the way."""

    dim: int
    seconds: float
    peak_bytes: int

    @property
    def bytes_per_coordinate(self) -> float:
        """Peak bytes per sample and coordinate."""
        return self.peak_bytes / (LOW_RANK_BATCH * self.dim)

    @property
    def nanoseconds_per_coordinate(self) -> float:
        """Time per sample and coordinate."""
        return 1e9 * self.seconds / (LOW_RANK_BATCH * self.dim)


def low_rank_runner(dim: int) -> Callable[[], None]:
    """Draw from a low-rank distribution, score a target with the kernel score, and differentiate."""
    generator = torch.Generator().manual_seed(0)
    raw = torch.randn(LOW_RANK_BATCH, 2 + RANK, dim, generator=generator, requires_grad=True)
    target = torch.randn(LOW_RANK_BATCH, 1, dim, generator=generator)

    def run() -> None:
        law = LowRankDistribution.from_raw(raw, HeadOptions(rank=RANK))
        draw = law.rsample(generator=generator)
        score = kernel_score(law, target).mean() + draw.mean()
        torch.autograd.grad(score, raw)

    return run


def benchmark_scaling(turns: int) -> list[ScalingRow]:
    """Time and memory against D, dimensions taking turns."""
    runners = {str(dim): low_rank_runner(dim) for dim in DIMENSIONS}
    rows = race(runners, str(DIMENSIONS[0]), turns=turns)
    return [
        ScalingRow(dim, row.seconds, peak_memory(runners[str(dim)])) for dim, row in zip(DIMENSIONS, rows, strict=True)
    ]


class PeakMemory(TorchDispatchMode):
    """Counts the bytes of all tensors that operators make while it is active, and the most alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._counted: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._count(leaf.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        if storage in self._counted:  # a view, or a result written into its input
            return
        self._counted.add(storage)
        self.live += storage.nbytes()
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._release, storage.nbytes())

    def _release(self, num_bytes: int) -> None:
        self.live -= num_bytes


def peak_memory(run: Callable[[], Any]) -> int:
    """Most bytes of tensors alive at once while `run` runs, beyond what existed before."""
    with PeakMemory() as memory:
        run()
    return memory.peak


def benchmark_crps(turns: int) -> tuple[list[Row], float]:
    """Fair CRPS of 100 members, ours against scoringrules' estimators; also the largest difference in value."""
    generator = torch.Generator().manual_seed(0)
    samples = torch.randn(NUM_MEMBERS, NUM_POINTS, generator=generator)
    target = torch.randn(NUM_POINTS, generator=generator)
    rows, observed = np.ascontiguousarray(samples.numpy().T), target.numpy()  # their own layout: members last

    def theirs(estimator: str) -> Callable[[], Any]:
        return lambda: scoringrules.crps_ensemble(observed, rows, estimator=estimator)

    runners: dict[str, Callable[[], Any]] = {
        "scoringrules pwm": theirs("pwm"),
        "scoringrules fair": theirs("fair"),
        "marigold_uq.metrics.crps": lambda: crps(samples, target),
    }
    difference = float(np.abs(crps(samples, target).numpy() - runners["scoringrules fair"]()).max())
    return race(runners, "scoringrules pwm", turns=turns, warmup=1), difference


def print_rows(title: str, rows: Sequence[Row], reference: str) -> None:
    """A Markdown table of times and ratios."""
    print(f"\n### {title}\n\n| | CPU ms | times {reference} | |\n|---|---|---|---|")
    for row in rows:
        print(f"| {row.name} | {1e3 * row.seconds:.3f} | {row.ratio:.3f} | {row.note} |")


def print_scaling(rows: Sequence[ScalingRow]) -> None:
    """A Markdown table of cost against dimension."""
    print(f"\n### low_rank (rank {RANK}): draw + kernel score + gradient, batch {LOW_RANK_BATCH}\n")
    print("| D | CPU ms | ns per coordinate | peak MB | bytes per coordinate | one D x D matrix, MB |")
    print("|---|---|---|---|---|---|")
    for row in rows:
        print(
            f"| {row.dim} | {1e3 * row.seconds:.2f} | {row.nanoseconds_per_coordinate:.1f} | "
            f"{row.peak_bytes / 1e6:.2f} | {row.bytes_per_coordinate:.1f} | {4 * row.dim**2 / 1e6:.0f} |"
        )


def environment() -> dict[str, Any]:
    """What the numbers depend on."""
    return {
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "scoringrules": scoringrules.__version__,
        "load_before": os.getloadavg()[0],
    }


def report_steps(turns: int) -> dict[str, Any]:
    """Reverse steps of all families beside stock DDIM."""
    results = {}
    for name, shape in LATENTS.items():
        rows = benchmark_step(shape, turns=5 * turns)
        print_rows(f"Reverse step, latent {name}", rows, "stock DDIM")
        results[f"step {name}"] = [asdict(row) for row in rows]
    return results


def report_schedulers(turns: int) -> dict[str, Any]:
    """Reverse steps of all frameworks beside stock's."""
    results = {}
    for framework in FRAMEWORKS:
        rows = benchmark_schedulers(framework, LATENTS["4 x 24 x 32"], turns=5 * turns)
        print_rows(f"Reverse step of {framework}, latent 4 x 24 x 32, eta = 0", rows, "stock")
        results[f"scheduler {framework}"] = [asdict(row) for row in rows]
    return results


def report_compiled(turns: int) -> dict[str, Any]:
    """Head, score and gradient, compiled and eager."""
    results = {}
    for family in COMPILED_FAMILIES:
        rows = benchmark_compiled(family, turns)
        print_rows(f"Head, score and gradient of {family}, batch {TRAINING_BATCH}", rows, "eager")
        results[f"compiled {family}"] = [asdict(row) for row in rows]
    return results


def report_training(turns: int) -> dict[str, Any]:
    """Training steps."""
    rows, parameters = benchmark_training(turns)
    print_rows(f"Training step, U-Net of {parameters / 1e6:.1f} M parameters, batch {TRAINING_BATCH}", rows, "point")
    return {"training": {"parameters": parameters, "rows": [asdict(row) for row in rows]}}


def report_scaling(turns: int) -> dict[str, Any]:
    """Low rank in high dimension."""
    rows = benchmark_scaling(turns)
    print_scaling(rows)
    return {"low_rank": [asdict(row) for row in rows]}


def report_crps(turns: int) -> dict[str, Any]:
    """The CRPS of an ensemble."""
    rows, difference = benchmark_crps(turns)
    print_rows(f"CRPS, {NUM_MEMBERS} members x {NUM_POINTS} points (values agree to {difference:.0e})", rows, "pwm")
    return {"crps": {"largest_difference": difference, "rows": [asdict(row) for row in rows]}}


PARTS: dict[str, Callable[[int], dict[str, Any]]] = {
    "steps": report_steps,
    "schedulers": report_schedulers,
    "compiled": report_compiled,
    "training": report_training,
    "low_rank": report_scaling,
    "crps": report_crps,
}


@dataclass(frozen=True)
class CoreBenchmark:
    """Measure what predicting a distribution costs.

    Args:
        output: Also write the results here, as JSON.
        overwrite: Replace an existing output.
        threads: torch threads; with more, processor time adds them up.
        turns: Turns of each race.
        parts: Of steps, schedulers, compiled (which needs a C++ compiler), training, low_rank, crps.
    """

    output: Path | None = None
    overwrite: bool = False
    threads: int = 1
    turns: int = 25
    parts: list[str] = field(default_factory=lambda: list(PARTS))

    def __post_init__(self) -> None:
        unknown = [name for name in self.parts if name not in PARTS]
        if unknown:
            raise ValueError(f"unknown parts {', '.join(unknown)}; choose from {', '.join(PARTS)}")


def run_benchmark(options: CoreBenchmark, invocation: Invocation) -> int:
    """Measure, print, write."""
    if options.output and options.output.exists() and not options.overwrite:
        raise FileExistsError(f"{options.output} exists; pass --overwrite to replace it")
    torch.set_num_threads(options.threads)
    results: dict[str, Any] = {"environment": environment()}
    print(", ".join(f"{key} {value}" for key, value in results["environment"].items()))
    for name in options.parts:
        results.update(PARTS[name](options.turns))
    if options.output:
        make_folder(options.output.parent)
        write_json(options.output, results, overwrite=True)
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    return run_command("scripts/benchmarks/core.py", CoreBenchmark, run_benchmark, arguments)


if __name__ == "__main__":
    sys.exit(main())
