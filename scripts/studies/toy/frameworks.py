"""DDPM, EDM and flow matching on the toy: one network, one data set and one training length, the framework changes.

    python -m scripts.studies.toy.frameworks --output runs/frameworks

Every seed draws data, weights and test points once for all frameworks, so differences are paired. The network sees the
noise level as an angle, arctan(s / a), which means the same in each. Interrupt it at any time: the same command
resumes. Prints the tables of everything that is there; five seeds take a few minutes on one core.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, product
from pathlib import Path

import torch
from torch import Tensor, nn
from tqdm import tqdm

from marigold_uq.commands.runner import Invocation, run_command
from marigold_uq.component_config import store_in_config
from marigold_uq.denoising import Denoiser, predict_output
from marigold_uq.files import make_folder, require_same
from marigold_uq.metrics import crps as sample_crps
from marigold_uq.results import markdown_table, write_json
from marigold_uq.sampling import initial_noise, reverse_diffusion
from marigold_uq.schedulers import (
    DistributionalEDMScheduler,
    DistributionalFlowMatchScheduler,
    DistributionalScheduler,
)
from marigold_uq.scores import mean_score
from scripts.studies.toy.toy_regression import NUM_COMPONENTS, make_linear, make_scheduler, truth

__all__ = ["FRAMEWORKS", "Cell", "FrameworkOptions", "fit", "main", "score"]

FRAMEWORKS: dict[str, Callable[[str], DistributionalScheduler]] = {
    "DDPM": make_scheduler,
    "EDM": lambda family: DistributionalEDMScheduler(noise_family=family, num_components=NUM_COMPONENTS, eta=1.0),
    "flow": lambda family: DistributionalFlowMatchScheduler(
        noise_family=family, num_components=NUM_COMPONENTS, eta=1.0
    ),
}
"""The toy's own schedule, Karras' sigmas with sigma_data = .5 (y has a deviation of .53), and rectified flow."""
FAMILIES = ("point", "gaussian", "mixture")
STEP_COUNTS, ETAS = (1, 5, 50), (0.0, 1.0)
NUM_REPEATS = 32
"""Fresh y at each test x, and as many draws of the model."""
NUM_WAVES = 12


class FrameworkNetwork(nn.Module):
    """[x_t, features of x] -> three layers, their gates smooth in the angle of the noise level -> raw channels."""

    def __init__(self, outputs: int, generator: torch.Generator, width: int = 64) -> None:
        super().__init__()
        self.layers = nn.ModuleList(make_linear(a, b, generator) for a, b in pairwise([8, width, width, width]))
        self.gates = make_linear(NUM_WAVES, len(self.layers) * width, generator)
        self.head = make_linear(width, outputs, generator)

    def forward(self, x_t: Tensor, angle: Tensor, x: Tensor) -> Tensor:
        """x_t (B, 1), angle (B,) or (1,) within 0..pi/2, x (B,)."""
        waves = math.pi * x.unsqueeze(1) * x.new_tensor([1.0, 2.0, 4.0])
        hidden = torch.cat([x_t, x.unsqueeze(1), waves.sin(), waves.cos()], 1)
        features = torch.cos(2 * angle.unsqueeze(1) * torch.arange(NUM_WAVES))
        gates = (1 + self.gates(features)).chunk(len(self.layers), 1)
        for layer, gate in zip(self.layers, gates, strict=True):
            hidden = nn.functional.silu(gate * layer(hidden))
        return self.head(hidden)


def condition_on(network: FrameworkNetwork, scheduler: DistributionalScheduler, x: Tensor) -> Denoiser:
    """Bind the condition, and turn timesteps into angles."""

    def denoise(x_t: Tensor, timestep: Tensor | int) -> Tensor:
        level = scheduler.noise_level(timestep)
        noise, signal = (torch.as_tensor(part, dtype=x_t.dtype).reshape(-1) for part in (level.noise, level.signal))
        return network(x_t, torch.atan2(noise, signal), x)

    return denoise


@dataclass(frozen=True, order=True)
class Cell:
    """One training."""

    seed: int
    family: str
    half_at_most_noise: bool
    framework: str

    @property
    def file(self) -> str:
        """The name of its results."""
        drawn = "half" if self.half_at_most_noise else "own"
        return f"{self.framework}-{self.family}-{drawn}-{self.seed}.json"


def fit(
    cell: Cell, *, num_iterations: int, num_rows: int, batch_size: int = 256
) -> tuple[DistributionalScheduler, FrameworkNetwork]:
    """Scheduler and trained network of a cell."""
    generator = torch.Generator().manual_seed(cell.seed)
    x = torch.rand(num_rows, generator=generator)
    y = truth(x).rsample(generator=generator)  # (N, 1)
    scheduler = FRAMEWORKS[cell.framework](cell.family)
    network = FrameworkNetwork(scheduler.num_raw_channels(1), generator)
    optimizer = torch.optim.Adam(network.parameters(), lr=4e-3)
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, num_iterations)
    for _ in range(num_iterations):
        rows = torch.randint(num_rows, (batch_size,), generator=generator)
        noise = torch.randn(batch_size, 1, generator=generator)
        timesteps = scheduler.sample_timesteps(batch_size, generator)
        if cell.half_at_most_noise:
            coins = torch.rand(batch_size, generator=generator)
            timesteps = torch.where(coins < 0.5, scheduler.noisiest_timestep, timesteps)
        x_t = scheduler.add_noise(y[rows], noise, timesteps)
        law = predict_output(condition_on(network, scheduler, x[rows]), scheduler, x_t, timesteps)
        loss = mean_score(law, scheduler.training_target(y[rows], noise, timesteps))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        decay.step()
    return scheduler, network.eval().requires_grad_(False)


def score(
    scheduler: DistributionalScheduler, network: FrameworkNetwork, *, seed: int, num_conditions: int
) -> dict[str, float]:
    """Fair CRPS on fresh data for each "steps eta"; the same x, y and starting noise in every framework."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(num_conditions, generator=generator)
    y = truth(x).rsample((NUM_REPEATS,), generator=generator)[..., 0]  # (R, N)
    found = {}
    for steps, eta in product(STEP_COUNTS, ETAS):
        own = torch.Generator().manual_seed(seed + 1)
        draws = []
        scheduler.set_timesteps(steps)
        store_in_config(scheduler, eta=eta)
        for part in x.repeat(NUM_REPEATS).split(4096):  # pieces that stay in the processor's cache
            start = initial_noise((len(part), 1), like=x, generator=own)
            draws.append(reverse_diffusion(condition_on(network, scheduler, part), scheduler, start, generator=own))
        members = torch.cat(draws).reshape(NUM_REPEATS, num_conditions)
        found[f"{steps} {eta:g}"] = float(torch.stack([sample_crps(members, row) for row in y]).mean())
    return found


def run_cell(cell: Cell, options: FrameworkOptions) -> dict[str, float]:
    """The scores of a cell, trained unless its file is there."""
    path = options.output / cell.file
    settings = {name: getattr(options, name) for name in ("steps", "rows", "test_points")}
    if path.exists():
        stored = json.loads(path.read_text(encoding="utf-8"))
        require_same(path, stored["settings"], settings)
        return stored["crps"]
    scheduler, network = fit(cell, num_iterations=options.steps, num_rows=options.rows)
    found = score(scheduler, network, seed=cell.seed + 1000, num_conditions=options.test_points)
    write_json(path, {"settings": settings, "crps": found})
    return found


def tables(found: dict[Cell, dict[str, float]]) -> str:
    """CRPS, and the paired differences from DDPM over seeds, as Markdown; one table per eta."""
    header = ["family", "framework", *(f"{n} step{'s' * (n > 1)}" for n in STEP_COUNTS)]
    header += [f"minus DDPM, {n}" for n in STEP_COUNTS]
    families = list(dict.fromkeys(cell.family for cell in found))
    parts = []
    for eta in ETAS:
        rows = [_row(found, family, framework, eta) for family, framework in product(families, FRAMEWORKS)]
        parts.append(f"eta = {eta:g}\n\n{markdown_table(header, rows)}")
    return "\n\n".join(parts)


def _row(found: dict[Cell, dict[str, float]], family: str, framework: str, eta: float) -> list[str]:
    """Both lists are in the order of the seeds."""
    own, base = (
        [crps for cell, crps in found.items() if (cell.family, cell.framework) == (family, name)]
        for name in (framework, "DDPM")
    )
    keys = [f"{steps} {eta:g}" for steps in STEP_COUNTS]
    scores = [with_error([one[key] for one in own]) for key in keys]
    if framework == "DDPM":
        return [family, framework, *scores, *[""] * len(keys)]
    pairs = [[one[key] - other[key] for one, other in zip(own, base, strict=True)] for key in keys]
    return [family, framework, *scores, *(with_error(differences, sign="+") for differences in pairs)]


def with_error(values: Sequence[float], sign: str = "") -> str:
    """Mean and standard error over seeds."""
    return f"{statistics.mean(values):{sign}.4f} ± {statistics.stdev(values) / math.sqrt(len(values)):.4f}"


@dataclass(frozen=True)
class FrameworkOptions:
    """Train the toy under DDPM, EDM and flow matching, and compare the CRPS at 1, 5 and 50 steps.

    Args:
        output: Folder of the results, one small file per training.
        seeds: How many seeds.
        families: Of point, gaussian and mixture.
        half_at_most_noise: Draw half of the training samples at the most noise, where sampling in one step starts.
        steps: Training steps of each network.
        rows: Training rows.
        test_points: Fresh x, with 32 y each.
    """

    output: Path = Path("runs/frameworks")
    seeds: int = 5
    families: list[str] = field(default_factory=lambda: list(FAMILIES))
    half_at_most_noise: bool = False
    steps: int = 1000
    rows: int = 20_000
    test_points: int = 300

    def __post_init__(self) -> None:
        if self.seeds < 2:
            raise ValueError(f"seeds must be at least 2, for an error; got {self.seeds}")
        unknown = [name for name in self.families if name not in FAMILIES]
        if unknown:
            raise ValueError(f"unknown families {', '.join(unknown)}; choose from {', '.join(FAMILIES)}")


def run_frameworks(options: FrameworkOptions, invocation: Invocation) -> int:
    """Train what is missing, seed by seed, and print the tables."""
    torch.set_num_threads(1)  # the tensors are tiny: more threads only wait for each other
    make_folder(options.output)
    ways = (options.half_at_most_noise,)
    cells = [Cell(*key) for key in product(range(options.seeds), options.families, ways, FRAMEWORKS)]
    found = {cell: run_cell(cell, options) for cell in tqdm(cells, desc="trainings", disable=None)}
    print(tables(found))
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    return run_command("scripts.studies.toy.frameworks", FrameworkOptions, run_frameworks, arguments)


if __name__ == "__main__":
    sys.exit(main())
