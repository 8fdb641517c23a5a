"""What CARD's published reverse mean does to the same trained models.

CARD diffuses y itself, y_t = sqrt(abar_t) y_0 + (1 - sqrt(abar_t)) f + sqrt(1 - abar_t) eps. A step back is

    right:     sqrt(abar_prev) y0_hat + (1 - sqrt(abar_prev)) f + lambda eps + sigma z
    published: sqrt(abar_prev) y0_hat + lambda (eps + (1 - sqrt(abar_t)) / sqrt(1 - abar_t) f) + sigma z

With x = y - f the right one is the ordinary step of our scheduler on the residual, and the published one adds to it
the multiple of f that `card_error` returns; f is the baseline in units of the standardised target.

    python -m scripts.studies.uci.card --data data/uci --states runs/uci/states/paper --output runs/card.json

samples the same trained models both ways. `--states` is OUTPUT/states/paper of `scripts.studies.uci.reproduce`.
With `--epochs N` models with fewer epochs are trained on to N, and saved there; the folder must exist.
"""

import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor
from tqdm.auto import tqdm

from marigold_uq.commands.runner import Invocation, run_command
from marigold_uq.pipelines.tabular.pipeline import TabularRegressionPipeline, row_generators
from marigold_uq.randomness import base_seed
from marigold_uq.results import markdown_table, write_json
from marigold_uq.sampling import initial_noise, reverse_diffusion
from marigold_uq.schedulers.scheduling_distributional_ddim import DistributionalDDIMScheduler
from marigold_uq.tabular.recipe import paper_recipe
from marigold_uq.tabular.scores import score_rows, summarize_splits
from marigold_uq.tabular.uci import UCIDataset
from scripts.studies.uci.stacked import StackedRun, StackedTask, state_path

_METRICS = ("crps", "rmse", "coverage_95", "width_95")
_STEPS = ("published", "right")


@dataclass(frozen=True)
class CardStudy:
    """Sample the same trained models with CARD's published reverse mean and with the right one.

    Args:
        data: Folder with one folder per UCI set.
        states: Folder of training states.
        output: JSON file; must not exist.
        sets: Names of sets.
        families: Noise families of the paper.
        epochs: Train on to this many epochs.
        ensemble_size: Draws per test row.
        seed: Of training and draws.
        threads: Of torch.
    """

    data: Path
    states: Path
    output: Path
    sets: list[str] = field(default_factory=lambda: ["concrete", "energy"])
    families: list[str] = field(default_factory=lambda: ["gaussian"])
    epochs: int | None = None
    ensemble_size: int = 100
    seed: int = 0
    threads: int = 1


def card_error(scheduler: DistributionalDDIMScheduler, timestep: int) -> float:
    """What the published step adds to the right one, in multiples of f.

    lambda (1 - sqrt(abar)) / sqrt(1 - abar) - (1 - sqrt(abar_prev)).

    It is 0 in the last step, where lambda = 0 and abar_prev = 1; along the way it is not, and the network sees the sum.
    """
    abar, abar_prev = scheduler.alpha_bar(timestep), scheduler.alpha_bar(scheduler.previous_timestep(timestep))
    std_dev = scheduler.step_coefficients(timestep).std_dev
    direction = math.sqrt(max(0.0, 1 - abar_prev - std_dev**2))  # lambda
    return direction * (1 - math.sqrt(abar)) / math.sqrt(1 - abar) - (1 - math.sqrt(abar_prev))


@torch.no_grad()
def sample_as_card(
    pipeline: TabularRegressionPipeline,
    features: ArrayLike,
    ensemble_size: int = 100,
    *,
    generator: torch.Generator,
    published: bool,
) -> NDArray[np.float64]:
    """Draws (ensemble_size, rows) of a pipeline of one model and one target, by the right or the published step.

    The random numbers are those of `pipeline(...)`, to which the right step is equal.
    """
    network, scheduler = pipeline.network, pipeline.scheduler
    if network.config.num_models != 1 or network.config.num_targets != 1 or pipeline.baseline is None:
        raise ValueError("expected a pipeline of one model with a baseline and one target; use `select`")
    matrix = pipeline.encode(features)
    if not isinstance(scheduler, DistributionalDDIMScheduler):
        raise ValueError(f"CARD's error is that of a DDPM step; got a {type(scheduler).__name__}")
    scheduler.set_timesteps(pipeline.config.default_denoising_steps or scheduler.config.num_train_timesteps)
    scaled = (torch.tensor(matrix) - network.feature_mean[:, None]) / network.feature_scale[:, None]
    condition = scaled.to(network.gate.dtype)  # (1, rows, F)
    baseline = pipeline.baseline(condition)  # (1, rows, 1)
    shift = baseline[0].unsqueeze(-1) / network.residual_scale[0]  # (rows, 1, 1)

    def add_error(index: int, timestep: int | float, x_prev: Tensor) -> Tensor:
        return x_prev + card_error(scheduler, int(timestep)) * shift

    generators = row_generators(matrix, pipeline.model_numbers, base_seed(generator))
    x_0 = reverse_diffusion(
        pipeline.denoiser(condition, baseline, ensemble_size),
        scheduler,
        initial_noise((len(matrix), 1, ensemble_size), like=condition, generator=generators),
        generator=generators,
        callback=add_error if published else None,
    )
    standardised = x_0[:, 0] * network.residual_scale[0] + baseline[0]  # (rows, n)
    return (standardised * network.target_scale[0] + network.target_mean[0]).T.double().numpy()


def _check_files(study: CardStudy) -> None:
    """A mistyped folder must be found out before anything is trained."""
    if study.output.exists():
        raise FileExistsError(f"{study.output} exists; choose another output, nothing is overwritten")
    if not study.states.is_dir():
        raise FileNotFoundError(f"no folder {study.states}; take OUTPUT/states/paper of scripts.studies.uci.reproduce")
    paths = [state_path(study.states, name, family) for name in study.sets for family in study.families]
    missing = [str(path) for path in paths if not path.exists()]
    if missing and study.epochs is None:
        raise FileNotFoundError(
            f"no trained models in {', '.join(missing)}; run scripts.studies.uci.reproduce, or pass --epochs"
        )


def _load_run(study: CardStudy, dataset: UCIDataset, family: str) -> StackedRun:
    """The trained models of a set."""
    recipe = replace(paper_recipe(len(dataset.indices[0][0]), dataset.name), noise_family=family)
    run = StackedRun(StackedTask(dataset, recipe, study.seed), study.states, verbose=True)
    if study.epochs is not None:
        run.advance(study.epochs)
    elif run.epoch == 0:
        raise ValueError(
            f"{run.state_path} has not finished an epoch; run scripts.studies.uci.reproduce, or pass --epochs"
        )
    return run


def _compare(study: CardStudy, name: str, family: str) -> dict[str, Any]:
    """Both steps on every split of a set, with the same random numbers."""
    dataset = UCIDataset.load(study.data, name)
    run = _load_run(study, dataset, family)
    pipeline = run.pipeline()
    scores: dict[str, list[dict[str, Any]]] = {step: [] for step in _STEPS}
    for number, split in enumerate(tqdm(dataset, f"{name} {family}", dataset.num_splits)):
        alone = pipeline.select(number)
        for step, entries in scores.items():
            generator = torch.Generator().manual_seed(study.seed)
            draws = sample_as_card(
                alone,
                split.test_features,
                study.ensemble_size,
                generator=generator,
                published=step == "published",
            )
            entries.append(score_rows(draws, split.test_targets, target_scale=float(split.train_targets.std())))
    summaries = {
        step: {metric: asdict(spread) for metric, spread in summarize_splits(entries).items()}
        for step, entries in scores.items()
    }
    return {"set": name, "family": family, "epochs": run.epoch, "num_splits": dataset.num_splits, **summaries}


def _table(results: list[dict[str, Any]]) -> str:
    """Markdown: mean and standard error over splits."""
    rows = [
        [one["set"], one["family"], one["epochs"], step, *(_entry(one[step][metric]) for metric in _METRICS)]
        for one in results
        for step in _STEPS
    ]
    return markdown_table(["set", "family", "epochs", "reverse mean", *_METRICS], rows)


def _entry(spread: dict[str, Any]) -> str:
    return f"{spread['mean']:.4g} ± {spread['standard_error'] or 0:.2g}"


def _run(study: CardStudy, invocation: Invocation) -> int:
    """Compare and write."""
    _check_files(study)
    torch.set_num_threads(study.threads)
    results = [_compare(study, name, family) for name in study.sets for family in study.families]
    print(_table(results))
    write_json(study.output, results)
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    return run_command("scripts.studies.uci.card", CardStudy, _run, arguments)


if __name__ == "__main__":
    sys.exit(main())
