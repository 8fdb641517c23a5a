"""A toy that teaches: one number y given one number x, noise that changes its width and splits in two.

    python -m scripts.studies.toy.toy_regression --output docs/images/toy_regression.png

Every noise family learns the same data through the same library calls that the large models use. The figure shows the
predictive density of each family beside the truth. Below it stands the distribution of the noise eps given one noisy
value x_t, beside the exact one. The table is the CRPS on fresh data for several numbers of reverse steps. About half a
minute on two cores.
"""

import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import torch
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, PowerNorm
from matplotlib.figure import Figure
from scipy.ndimage import gaussian_filter
from torch import Tensor, nn
from tqdm import tqdm

from marigold_uq.commands.runner import Invocation, run_command
from marigold_uq.denoising import Denoiser, predict_output
from marigold_uq.distributions import MixtureDistribution, NoiseDistribution
from marigold_uq.distributions.base import MIN_SCALE
from marigold_uq.files import make_folder
from marigold_uq.metrics import crps as sample_crps
from marigold_uq.plotting import save_figure
from marigold_uq.results import markdown_table
from marigold_uq.sampling import initial_noise, reverse_diffusion
from marigold_uq.schedulers import DistributionalDDIMScheduler
from marigold_uq.scores import crps, log_score, mean_score

NUM_COMPONENTS, RANK = 3, 1
TRAIN_TIMESTEPS = 50
STEP_COUNTS = (1, 5, 50)
PROBE_X, PROBE_TIMESTEP, PROBE_X_T = 0.75, 12, -0.1
"""Where the distribution of the noise is shown: at this x, timestep and x_t both branches are still possible."""
Y_RANGE, EPS_RANGE = (-1.7, 1.7), (-1.5, 1.5)
EXACT = "exact"
CAPTIONS = {
    EXACT: "the truth",
    "point": "a mean only: ordinary diffusion",
    "gaussian": "mean and scale",
    "mixture": "three Gaussians",
    "low_rank": "joint Gaussian, diagonal + rank 1",
    "cholesky": "joint Gaussian, full covariance",
    "low_rank_mixture": "three joint Gaussians",
    "sample": "draws of a network, no formula",
}
FAMILY_NAMES = [name for name in CAPTIONS if name != EXACT]
INK, QUIET, TRUTH, LAW = "#1b2a41", "#5b677a", "#c3c9d4", "#d1495b"
DENSITY = LinearSegmentedColormap.from_list("density", ["#ffffff", "#cfe3f1", "#6aaed6", "#1f6fb2", "#0b2a55"])


def truth(x: Tensor) -> MixtureDistribution:
    """p(y | x) for x (B,): two branches that part as x grows, with noise wide on the left and narrow on the right."""
    center = 0.45 * torch.sin(4.5 * x)
    part = torch.sigmoid(14 * (x - 0.45))
    loc = torch.stack([center - 0.75 * part, center + 0.55 * part], 1)  # (B, K)
    scale = (0.07 + 0.33 * (1 - x).square()).unsqueeze(1).expand_as(loc)
    logits = torch.stack([torch.full_like(x, 0.4), torch.full_like(x, 0.6)], 1).log()
    return MixtureDistribution(loc.unsqueeze(-1), scale.unsqueeze(-1), logits.unsqueeze(-1))  # event (1,)


def make_scheduler(family: str) -> DistributionalDDIMScheduler:
    """v-prediction at zero terminal SNR: the chain may start from pure noise and take any number of steps."""
    return DistributionalDDIMScheduler(
        num_train_timesteps=TRAIN_TIMESTEPS,
        beta_start=0.001,
        beta_end=0.35,
        prediction_type="v_prediction",
        rescale_betas_zero_snr=True,
        timestep_spacing="trailing",
        clip_sample=False,
        noise_family=family,
        num_components=NUM_COMPONENTS,
        rank=RANK,
        eta=1.0,
    )


class ToyNetwork(nn.Module):
    """[x_t, noise channels, features of x] -> three layers with a learned gate per timestep -> raw channels."""

    def __init__(self, inputs: int, outputs: int, generator: torch.Generator, width: int = 64) -> None:
        super().__init__()
        sizes = [inputs + 7, width, width, width]
        self.layers = nn.ModuleList(make_linear(a, b, generator) for a, b in pairwise(sizes))
        self.gates = nn.Parameter(torch.ones(len(self.layers), TRAIN_TIMESTEPS, width))
        self.head = make_linear(width, outputs, generator)

    def forward(self, x_t: Tensor, timestep: Tensor | int, x: Tensor) -> Tensor:
        waves = math.pi * x.unsqueeze(1) * x.new_tensor([1.0, 2.0, 4.0])
        hidden = torch.cat([x_t, x.unsqueeze(1), waves.sin(), waves.cos()], 1)
        for layer, gate in zip(self.layers, self.gates, strict=True):
            hidden = nn.functional.silu(gate[timestep] * layer(hidden))
        return self.head(hidden)


def make_linear(inputs: int, outputs: int, generator: torch.Generator) -> nn.Linear:
    """A linear layer whose start depends on `generator` alone."""
    layer = nn.utils.skip_init(nn.Linear, inputs, outputs)
    nn.init.normal_(layer.weight, std=inputs**-0.5, generator=generator)
    nn.init.normal_(layer.bias, std=0.5, generator=generator)
    return layer


def condition_on(network: ToyNetwork, x: Tensor) -> Denoiser:
    """Bind the condition: what predict_output and reverse_diffusion call."""
    return lambda x_t, timestep: network(x_t, timestep, x)


def exact_denoiser(scheduler: DistributionalDDIMScheduler, x: Tensor) -> Denoiser:
    """The posterior of v given x_t under the truth, as raw output of a two-component mixture head.

    Component k has V_k = abar c_k + 1 - abar, weight ~ w_k N(x_t; sqrt(abar) m_k, V_k), variance c_k / V_k and mean
    sqrt(abar (1 - abar)) (1 - c_k) (x_t - sqrt(abar) m_k) / V_k - sqrt(1 - abar) m_k.
    """
    law = truth(x)
    mean, variance, log_weight = law.loc[..., 0], law.scale[..., 0].square(), law.logits[..., 0].log_softmax(1)

    def raw(x_t: Tensor, timestep: Tensor | int) -> Tensor:
        abar = scheduler.alpha_bar(int(timestep))
        spread = abar * variance + 1 - abar
        gap = x_t - math.sqrt(abar) * mean  # (B, K)
        loc = math.sqrt(abar * (1 - abar)) * (1 - variance) * gap / spread - math.sqrt(1 - abar) * mean
        rho = torch.log(torch.expm1((variance / spread).sqrt() - MIN_SCALE))
        return torch.cat([loc, rho, log_weight - 0.5 * (gap.square() / spread + spread.log())], 1)

    return raw


@dataclass(frozen=True)
class FittedFamily:
    """A trained network, or the exact posterior in its place."""

    name: str
    scheduler: DistributionalDDIMScheduler
    network: ToyNetwork | None

    def denoiser(self, x: Tensor) -> Denoiser:
        """The denoiser for conditions x (B,)."""
        return exact_denoiser(self.scheduler, x) if self.network is None else condition_on(self.network, x)

    def sample(self, x: Tensor, num_steps: int, generator: torch.Generator) -> Tensor:
        """One draw of y for each x, (B,), in pieces that stay in the processor's cache."""
        self.scheduler.set_timesteps(num_steps)
        pieces = []
        for part in x.split(4096):
            start = initial_noise((len(part), 1), like=x, generator=generator)
            pieces.append(reverse_diffusion(self.denoiser(part), self.scheduler, start, generator=generator)[:, 0])
        return torch.cat(pieces)

    def noise_law(self, x: Tensor, x_t: Tensor, timestep: int, generator: torch.Generator) -> NoiseDistribution:
        """p(eps | x_t): the head speaks of v, and eps = sqrt(abar) v + sqrt(1 - abar) x_t."""
        with torch.no_grad():
            law = predict_output(self.denoiser(x), self.scheduler, x_t, timestep, generator=generator)
        abar = self.scheduler.alpha_bar(timestep)
        return law.affine(math.sqrt(abar), math.sqrt(1 - abar) * x_t)


def exact_family() -> FittedFamily:
    """The truth behind the same sampler."""
    scheduler = DistributionalDDIMScheduler.from_config(make_scheduler("mixture").config, num_components=2)
    return FittedFamily(EXACT, scheduler, None)


def fit(
    family: str, x: Tensor, y: Tensor, *, num_iterations: int, generator: torch.Generator, batch_size: int = 256
) -> FittedFamily:
    """Train one family on rows x, y (N,), with its own default score."""
    scheduler = make_scheduler(family)
    network = ToyNetwork(1 + scheduler.family.noise_channels, scheduler.num_raw_channels(1), generator)
    optimizer = torch.optim.Adam(network.parameters(), lr=4e-3)
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, num_iterations)
    for _ in range(num_iterations):
        rows = torch.randint(len(x), (batch_size,), generator=generator)
        original = y[rows].unsqueeze(1)  # (B, 1)
        noise = torch.randn(original.shape, generator=generator)
        timesteps = torch.randint(TRAIN_TIMESTEPS, (batch_size,), generator=generator)
        x_t = scheduler.add_noise(original, noise, timesteps)
        denoiser = condition_on(network, x[rows])
        law = predict_output(denoiser, scheduler, x_t, timesteps, num_draws=4, generator=generator)
        loss = mean_score(law, scheduler.training_target(original, noise, timesteps))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        decay.step()
    return FittedFamily(family, scheduler, network.eval().requires_grad_(False))


def fit_all(
    families: Sequence[str], *, num_iterations: int, num_rows: int, seed: int, progress: bool = True
) -> list[FittedFamily]:
    """The exact distribution and every family, trained on one data set; each family has its own random stream."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(num_rows, generator=generator)
    y = truth(x).rsample(generator=generator)[:, 0]
    fitted = [exact_family()]
    for index, family in enumerate(tqdm(families, desc="families", disable=not progress, leave=False)):
        own = torch.Generator().manual_seed(seed + 1 + index)
        fitted.append(fit(family, x, y, num_iterations=num_iterations, generator=own))
    return fitted


def score_table(
    fitted: Sequence[FittedFamily],
    *,
    num_conditions: int,
    num_repeats: int,
    seed: int,
    step_counts: Sequence[int] = STEP_COUNTS,
) -> dict[str, list[float]]:
    """Mean fair CRPS on fresh data, per family and number of steps; "closed form" is the truth's own.

    At each of `num_conditions` values of x there are `num_repeats` fresh y and as many draws; every draw meets every y,
    which averages the luck of both out.
    """
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(num_conditions, generator=generator)
    law = truth(x)
    y = law.rsample((num_repeats,), generator=generator)  # (R, N, 1)
    exact = torch.stack([crps(law, one) for one in y]).mean()
    table = {"closed form": [float(exact)] * len(step_counts)}
    for one in fitted:
        table[one.name] = []
        for num_steps in step_counts:
            draws = one.sample(x.repeat(num_repeats), num_steps, torch.Generator().manual_seed(seed + 1))
            members = draws.reshape(num_repeats, num_conditions)  # (M, N)
            table[one.name].append(float(torch.stack([sample_crps(members, row[:, 0]) for row in y]).mean()))
    return table


def print_table(table: dict[str, list[float]], step_counts: Sequence[int] = STEP_COUNTS) -> None:
    """Markdown, one row per family."""
    header = ["CRPS on fresh data", *(f"{n} step{'s' * (n > 1)}" for n in step_counts)]
    print(markdown_table(header, [[name, *(f"{score:.4f}" for score in row)] for name, row in table.items()]))


def predictive_density(
    one: FittedFamily, x: Tensor, y_edges: Tensor, num_draws: int, num_steps: int, seed: int
) -> Tensor:
    """Histogram of draws over y for each x, as a density (bins, len(x))."""
    generator = torch.Generator().manual_seed(seed)
    draws = one.sample(x.repeat(num_draws), num_steps, generator).reshape(num_draws, -1)  # (N, len(x))
    bins = torch.bucketize(draws, y_edges) - 1
    inside = (bins >= 0) & (bins < len(y_edges) - 1)
    columns = torch.arange(len(x)).expand_as(bins)
    counts = torch.zeros(len(y_edges) - 1, len(x))
    counts.index_put_((bins[inside], columns[inside]), torch.ones(()), accumulate=True)
    density = counts / (num_draws * (y_edges[1] - y_edges[0]))
    return torch.from_numpy(gaussian_filter(density.numpy(), (0.7, 1.2)))  # in bins: takes off the Monte-Carlo grain


def truth_density(x: Tensor, y_edges: Tensor) -> Tensor:
    """p(y | x) at the bin centres, (bins, len(x))."""
    centers = (y_edges[1:] + y_edges[:-1]) / 2
    law = truth(x)
    return torch.stack([law.log_prob(center.expand(len(x), 1))[:, 0].exp() for center in centers])


def draw_density(axes: Axes, density: Tensor, title: str, score: float) -> None:
    """Predictive density as an image, x to the right, y upwards."""
    axes.imshow(
        density.numpy(),
        origin="lower",
        extent=(0, 1, *Y_RANGE),
        aspect="auto",
        cmap=DENSITY,
        norm=PowerNorm(0.5, vmin=0, vmax=3.2),
        interpolation="bilinear",
    )
    axes.axvline(PROBE_X, color=LAW, linewidth=0.9, linestyle=(0, (4, 3)))
    axes.set_title(title, loc="left", fontsize=11.5, fontweight="bold", color=INK, pad=17)
    axes.set_title(f"CRPS {score:.3f}", loc="right", fontsize=9.5, color=INK, pad=17)
    axes.text(0, 1.03, CAPTIONS[title], transform=axes.transAxes, fontsize=8.5, color=QUIET)
    axes.set_xticks([0, 1])
    axes.set_yticks([-1, 0, 1])


def draw_noise_law(axes: Axes, one: FittedFamily, seed: int, num_draws: int) -> None:
    """p(eps | x_t) of a family as a line (a histogram where there is no density) over the exact one in grey."""
    generator = torch.Generator().manual_seed(seed)
    eps = torch.linspace(*EPS_RANGE, num_draws).unsqueeze(1)  # as many grid points as draws: one batch serves both
    x, x_t = torch.full((num_draws,), PROBE_X), torch.full((num_draws, 1), PROBE_X_T)
    exact = (-log_score(exact_family().noise_law(x, x_t, PROBE_TIMESTEP, generator), eps)).flatten().exp()
    axes.fill_between(eps[:, 0], exact, color=TRUTH, linewidth=0, label="exact")
    if one.name != EXACT:
        law = one.noise_law(x, x_t, PROBE_TIMESTEP, generator).marginal()
        if law.has_density:
            axes.plot(eps[:, 0], (-log_score(law, eps)).flatten().exp(), color=LAW, linewidth=1.6)
        else:
            draws = law.rsample(generator=generator)[:, 0].numpy()
            axes.hist(draws, bins=90, range=EPS_RANGE, density=True, histtype="stepfilled", color=LAW, alpha=0.75)
    axes.set_ylim(0, 1.3 * float(exact.max()))
    axes.set_xlim(*EPS_RANGE)
    axes.set_yticks([])
    axes.set_xticks([-1, 1])
    for side in ("top", "left", "right"):
        axes.spines[side].set_visible(False)


def headline(num_steps: int) -> str:
    """What the two rows show."""
    steps = "one reverse step" if num_steps == 1 else f"{num_steps} reverse steps"
    return (
        f"Above: predictive density p(y | x) after {steps}.\n"
        r"Below: the learned distribution of the noise, p($\epsilon$ | x$_t$), in red over the exact one in grey."
    )


def draw_figure(
    fitted: Sequence[FittedFamily], table: dict[str, list[float]], seed: int, num_draws: int, num_steps: int
) -> Figure:
    """One cell per family: predictive density above, distribution of the noise below; at most four cells to a row."""
    x, y_edges = (torch.arange(100) + 0.5) / 100, torch.linspace(*Y_RANGE, 86)
    num_columns = min(4, len(fitted))
    num_rows = math.ceil(len(fitted) / num_columns)
    height = 0.85 + 3.75 * num_rows  # inches
    figure = Figure(figsize=(2.9 * num_columns, height))
    grid = figure.add_gridspec(
        num_rows,
        num_columns,
        left=0.16 / num_columns,
        right=0.985,
        bottom=0.35 / height,
        top=1 - 1.2 / height,
        wspace=0.12,
        hspace=0.34,
    )
    figure.text(0.16 / num_columns, 1 - 0.5 / height, headline(num_steps), fontsize=10.5, linespacing=1.5, color=INK)
    for index, one in enumerate(fitted):
        cell = grid[divmod(index, num_columns)].subgridspec(2, 1, height_ratios=(2.3, 1), hspace=0.34)
        above, below = figure.add_subplot(cell[0]), figure.add_subplot(cell[1])
        known = one.name == EXACT
        density = (
            truth_density(x, y_edges) if known else predictive_density(one, x, y_edges, num_draws, num_steps, seed)
        )
        score = table["closed form"][0] if known else table[one.name][STEP_COUNTS.index(num_steps)]
        draw_density(above, density, one.name, score)
        draw_noise_law(below, one, seed, num_draws)
        label_axes(above, below, first=index % num_columns == 0)
    return figure


def label_axes(above: Axes, below: Axes, *, first: bool) -> None:
    """Axis names once per row of cells, and quiet ticks everywhere."""
    if first:
        above.set_ylabel("y", rotation=0, labelpad=6, color=INK)
    else:
        above.set_yticklabels([])
    above.set_xlabel("x", labelpad=-8, color=INK)
    below.set_xlabel(r"$\epsilon$", labelpad=-8, color=INK)
    for axes in (above, below):
        axes.tick_params(labelsize=7.5, length=2.5, color="#9aa5b5", labelcolor=QUIET)
        for spine in axes.spines.values():
            spine.set_color("#9aa5b5")


@dataclass(frozen=True)
class ToyOptions:
    """Fit every noise family to a toy with a known answer; print scores and draw the figure.

    Args:
        output: Picture to write (PNG).
        overwrite: Replace an existing picture.
        families: Which to fit; all by default.
        steps: Training steps per family.
        rows: Training rows.
        test_points: Fresh x, with 48 y each.
        draws: Draws per x in the picture.
        picture_steps: Reverse steps behind the picture, one of 1, 5 and 50.
        seed: Everything random follows from it.
    """

    output: Path = Path("toy_regression.png")
    overwrite: bool = False
    families: list[str] = field(default_factory=lambda: list(FAMILY_NAMES))
    steps: int = 1000
    rows: int = 20_000
    test_points: int = 600
    draws: int = 2000
    picture_steps: int = 5
    seed: int = 0

    def __post_init__(self) -> None:
        unknown = [name for name in self.families if name not in FAMILY_NAMES]
        if unknown:
            raise ValueError(f"unknown families {', '.join(unknown)}; choose from {', '.join(FAMILY_NAMES)}")
        if self.picture_steps not in STEP_COUNTS:
            raise ValueError(f"picture_steps must be one of {STEP_COUNTS}; got {self.picture_steps}")


def run_toy(options: ToyOptions, invocation: Invocation) -> int:
    """Fit, score, print, draw."""
    if options.output.exists() and not options.overwrite:
        raise FileExistsError(f"{options.output} exists; pass --overwrite to replace it")
    torch.set_num_threads(1)  # the tensors are tiny: more threads only wait for each other
    start = time.perf_counter()
    fitted = fit_all(options.families, num_iterations=options.steps, num_rows=options.rows, seed=options.seed)
    table = score_table(fitted, num_conditions=options.test_points, num_repeats=48, seed=options.seed + 1000)
    print_table(table)
    figure = draw_figure(
        fitted, table, seed=options.seed + 2000, num_draws=options.draws, num_steps=options.picture_steps
    )
    make_folder(options.output.parent)
    save_figure(figure, options.output, overwrite=True, dpi=110)
    print(f"\n{options.output}, {time.perf_counter() - start:.0f} s")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    return run_command("scripts.studies.toy.toy_regression", ToyOptions, run_toy, arguments)


if __name__ == "__main__":
    sys.exit(main())
