"""From tables to a trained stack: statistics, baseline, residuals, denoiser."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from marigold_uq.models.mlp import StackedBaseline, StackedMLP
from marigold_uq.randomness import member_seed
from marigold_uq.schedulers.distributional import DistributionalScheduler
from marigold_uq.tabular.experts import ExpertBaseline
from marigold_uq.tabular.experts.fitting import ExpertOptions, fit_experts, stack_experts
from marigold_uq.tabular.objectives import BaselineObjective, DenoisingObjective
from marigold_uq.tabular.recipe import Recipe
from marigold_uq.tabular.trainer import OptimizerOptions, StackedRows, StackedTrainer

_BASELINE_PATIENCE = 50
_BASELINE_VALIDATION = 0.4
_LEAST_ROWS_TO_SPLIT = 5
_MAX_REPEATS, _VALIDATION_SCORES = 8, 4000
"""Each validation row is scored at up to 8 timesteps, as long as there are about 4000 scores in all."""

TrainStage = Callable[[StackedTrainer, str], nn.Module]
"""Trains a named stage to its end."""


@dataclass(frozen=True)
class TrainingRows:
    """Training rows of one model in original units."""

    features: NDArray[np.float64]  # (n, F)
    targets: NDArray[np.float64]  # (n, C)
    weights: NDArray[np.float64]  # (n,)


@dataclass(frozen=True)
class ValidationRows:
    """Out-of-fold predictions of the baseline for the rows on which each model stopped, in standardised units."""

    rows: list[Tensor]  # indices into the model's table, (m,) each
    predictions: list[Tensor]  # (m, C) each
    extras: list[Tensor] | None  # (m, E) each


@dataclass(frozen=True)
class FittedStack:
    """S trained models: network and baseline carry the model axis, the scheduler is common."""

    network: StackedMLP
    baseline: StackedBaseline | ExpertBaseline | None
    """With experts one model per table, which its networks share; else one per model of the network."""
    scheduler: DistributionalScheduler
    epochs: list[int]
    validation: ValidationRows | None
    """None without early stopping, and with a baseline that has seen the rows."""


@dataclass(frozen=True)
class _Statistics:
    """Mean and standard deviation of columns, (D,) each; a constant target has scale 1, a constant feature infinity.

    So a feature that was constant in training is 0, whatever it is later: no weight has learnt anything about it.
    """

    mean: NDArray[np.float64]
    scale: NDArray[np.float64]

    @classmethod
    def of(cls, columns: NDArray[np.float64], constant_scale: float = 1.0) -> "_Statistics":
        """Rounding leaves a constant column a spread of about 1e-16 of its size, which must not be divided by."""
        mean, scale = columns.mean(0), columns.std(0)
        return cls(mean, np.where((np.ptp(columns, 0) > 0) & (scale > 0), scale, constant_scale))

    def apply(self, columns: NDArray[np.float64]) -> NDArray[np.float64]:
        """(x - mean) / scale."""
        return (columns - self.mean) / self.scale


@dataclass(frozen=True)
class Standardised:
    """One model's rows in standardised units, its statistics and random streams."""

    features: Tensor  # (n, F)
    targets: Tensor  # (n, C)
    weights: Tensor  # (n,), of mean 1: their unit must not matter
    feature_statistics: _Statistics
    target_statistics: _Statistics
    seed: int

    @classmethod
    def of(cls, table: TrainingRows, seed: int) -> "Standardised":
        features, targets = _Statistics.of(table.features, math.inf), _Statistics.of(table.targets)
        tensors = (features.apply(table.features), targets.apply(table.targets), table.weights / table.weights.mean())
        x, y, w = (torch.from_numpy(np.asarray(values, dtype=np.float32)) for values in tensors)
        return cls(x, y, w, features, targets, seed)

    def generator(self, purpose: int) -> torch.Generator:
        """A stream for one purpose, the same whatever else is trained beside this model."""
        return torch.Generator().manual_seed(member_seed(self.seed, purpose))


def fit_stack(
    tables: Sequence[TrainingRows],
    recipe: Recipe,
    seeds: Sequence[int],
    *,
    verbose: bool = False,
) -> FittedStack:
    """Train `recipe.num_models` models for each table, all at once, the models of a table side by side.

    `seeds` names one seed per table. A model's result depends on its table and its seed alone.
    """
    if not tables or len(tables) != len(seeds):
        raise ValueError(f"pass at least one table and one seed per table; got {len(tables)} and {len(seeds)}")
    models = [
        Standardised.of(table, member_seed(seed, number))
        for table, seed in zip(tables, seeds, strict=True)
        for number in range(recipe.num_models)
    ]
    baseline, predictions, extras = fit_baseline(models, recipe, verbose)
    scheduler = recipe.scheduler()
    network, trainer = build_denoiser(models, predictions, recipe, scheduler, extras)
    trainer.train(verbose=verbose, description="denoiser")
    validation = _describe_validation_rows(models, recipe, predictions, extras)
    return FittedStack(network, baseline, scheduler, trainer.best_epochs, validation)


def fit_baseline(
    models: Sequence[Standardised], recipe: Recipe, verbose: bool
) -> tuple[StackedBaseline | ExpertBaseline | None, list[Tensor], list[Tensor] | None]:
    """The baseline, its predictions for each model's training rows, (n, C), and what it says beyond, (n, E)."""
    if recipe.baseline == "none":
        return None, [torch.zeros_like(model.targets) for model in models], None
    if recipe.baseline in ("trees", "experts"):
        return _fit_experts(models, recipe, verbose)
    network = fit_mlp_baseline(models, recipe, lambda trainer, stage: trainer.train(verbose=verbose, description=stage))
    return network, predict_rows(network, models), None


@torch.no_grad()
def predict_rows(network: StackedBaseline, models: Sequence[Standardised]) -> list[Tensor]:
    """Predictions of a stack of baselines for the training rows of each model, (n, C) each."""
    rows = StackedRows.stack([{"features": model.features} for model in models])
    fitted = network(rows.columns["features"])
    return [fitted[s, :count] for s, count in enumerate(rows.counts)]


def _fit_experts(
    models: Sequence[Standardised], recipe: Recipe, verbose: bool
) -> tuple[ExpertBaseline, list[Tensor], list[Tensor]]:
    """Models of one table share its experts: the spread between models is then that of the networks."""
    fitted = []
    for first in models[:: recipe.num_models]:
        options = ExpertOptions.for_rows(len(first.targets), recipe.baseline_epochs, recipe.baseline == "trees")
        features, targets, weights = (v.double().numpy() for v in (first.features, first.targets, first.weights))
        fitted.append(fit_experts(features, targets, weights, options, first.seed, verbose=verbose))
    predictions = [one.predictions.float() for one in fitted for _ in range(recipe.num_models)]
    extras = [one.extras.float() for one in fitted for _ in range(recipe.num_models)]
    return stack_experts(fitted), predictions, extras


def fit_mlp_baseline(models: Sequence[Standardised], recipe: Recipe, train: TrainStage) -> StackedBaseline:
    """f as published: the number of epochs from early stopping on 60/40 of the rows, then a new start on all rows."""
    epochs = [recipe.baseline_epochs] * len(models)
    large = [s for s, model in enumerate(models) if len(model.targets) >= _LEAST_ROWS_TO_SPLIT]
    if large:
        chosen = [models[s] for s in large]
        splits = [_split(model, _BASELINE_VALIDATION, model.generator(0)) for model in chosen]
        trainer = _baseline_trainer(chosen, recipe, [epochs[s] for s in large], splits)
        train(trainer, "baseline_inner_split")
        for s, epoch in zip(large, trainer.best_epochs, strict=True):
            epochs[s] = max(1, epoch)
    trainer = _baseline_trainer(models, recipe, epochs)
    train(trainer, "baseline")
    network: StackedBaseline = trainer.model  # type: ignore[assignment]
    return network


def _baseline_trainer(
    models: Sequence[Standardised],
    recipe: Recipe,
    epochs: Sequence[int],
    splits: Sequence[tuple[Tensor, Tensor]] | None = None,
) -> StackedTrainer:
    network = StackedBaseline(
        len(models), models[0].features.shape[1], models[0].targets.shape[1], dropout=recipe.dropout
    ).reset([model.generator(1) for model in models])
    tables = [{"features": model.features, "target": model.targets} for model in models]
    train, validation = _split_rows(tables, [model.weights for model in models], splits)
    options = OptimizerOptions(
        recipe.batch_size, recipe.learning_rate, amsgrad=True, patience=None if splits is None else _BASELINE_PATIENCE
    )
    generators = [model.generator(2) for model in models]
    return StackedTrainer(network, BaselineObjective(network), train, generators, options, epochs, validation)


def build_denoiser(
    models: Sequence[Standardised],
    predictions: Sequence[Tensor],
    recipe: Recipe,
    scheduler: DistributionalScheduler,
    extras: Sequence[Tensor] | None = None,
) -> tuple[StackedMLP, StackedTrainer]:
    """Network and trainer for the residuals around `predictions`; `extras` (n, E) join the features."""
    num_targets = models[0].targets.shape[1]
    network = StackedMLP(
        num_models=len(models),
        num_features=models[0].features.shape[1],
        num_targets=num_targets,
        out_channels=scheduler.num_raw_channels(num_targets),
        noise_channels=scheduler.family.noise_channels,
        num_timesteps=recipe.num_timesteps,
        num_extras=0 if extras is None else extras[0].shape[1],
    ).reset([model.generator(3) for model in models])
    tables = []
    for s, (model, fitted) in enumerate(zip(models, predictions, strict=True)):
        residual = model.targets - fitted
        if recipe.scale_residual:
            network.residual_scale[s] = _scale_of(residual)
        _store_statistics(network, s, model.feature_statistics, model.target_statistics)
        features = model.features if extras is None else torch.cat([model.features, extras[s]], 1)
        tables.append({"features": features, "baseline": fitted, "residual": residual / network.residual_scale[s]})
    objective = DenoisingObjective(scheduler, num_targets, num_draws=recipe.num_draws, one_step=recipe.one_step)
    splits = None
    if recipe.patience is not None:
        splits = _validation_splits(models, recipe)
    draws = [_fixed_draws(objective, model.generator(6)) for model in models]
    repeats = 1 if recipe.one_step else _MAX_REPEATS
    train, validation = _split_rows(tables, [model.weights for model in models], splits, draws, repeats)
    options = OptimizerOptions(
        recipe.batch_size, recipe.learning_rate, ema_decay=recipe.ema_decay, patience=recipe.patience
    )
    generators = [model.generator(5) for model in models]
    epochs = [recipe.max_epochs] * len(models)
    return network, StackedTrainer(network, objective, train, generators, options, epochs, validation)


def _scale_of(residual: Tensor) -> Tensor:
    """Root mean square of each column; 1 where a residual is always 0."""
    scale = residual.square().mean(0).sqrt()
    return torch.where(scale > 1e-6, scale, 1.0)


def _store_statistics(network: StackedMLP, s: int, features: _Statistics, targets: _Statistics) -> None:
    """Write the statistics of model s into its buffers."""
    network.feature_mean[s], network.feature_scale[s] = map(torch.from_numpy, (features.mean, features.scale))
    network.target_mean[s], network.target_scale[s] = map(torch.from_numpy, (targets.mean, targets.scale))


def _validation_splits(models: Sequence[Standardised], recipe: Recipe) -> list[tuple[Tensor, Tensor]]:
    """For model m of M the m-th of M folds of its table; random shares of the rows if these are fewer than M."""
    splits = []
    for number, model in enumerate(models):
        if not recipe.validation_folds or not 1 < recipe.num_models <= len(model.targets):
            splits.append(_split(model, recipe.validation_fraction, model.generator(4)))
            continue
        place = number % recipe.num_models
        order = torch.randperm(len(model.targets), generator=models[number - place].generator(4))
        held_out = torch.arange(len(order)) % recipe.num_models == place
        splits.append((order[~held_out], order[held_out]))
    return splits


def _describe_validation_rows(
    models: Sequence[Standardised], recipe: Recipe, predictions: Sequence[Tensor], extras: Sequence[Tensor] | None
) -> ValidationRows | None:
    if recipe.patience is None or recipe.baseline == "mlp":
        return None
    rows = [held_out for _, held_out in _validation_splits(models, recipe)]

    def chosen(tables: Sequence[Tensor]) -> list[Tensor]:
        return [values[index] for values, index in zip(tables, rows, strict=True)]

    return ValidationRows(rows, chosen(predictions), None if extras is None else chosen(extras))


def _split(model: Standardised, fraction: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Indices of training and validation rows, at least one of each."""
    count = len(model.targets)
    order = torch.randperm(count, generator=generator)
    held_out = min(count - 1, max(1, round(fraction * count)))
    return order[held_out:], order[:held_out]


def _split_rows(
    tables: Sequence[dict[str, Tensor]],
    weights: Sequence[Tensor],
    splits: Sequence[tuple[Tensor, Tensor]] | None,
    validation_draws: Sequence[Callable[[dict[str, Tensor]], dict[str, Tensor]]] | None = None,
    max_repeats: int = _MAX_REPEATS,
) -> tuple[StackedRows, StackedRows | None]:
    """Training and validation rows; with `validation_draws` validation rows come repeated, with fixed draws."""
    if splits is None:
        return StackedRows.stack(tables, weights), None
    stacks = []
    for part in (0, 1):
        rows = [split[part] for split in splits]
        if part == 1 and validation_draws is not None:
            rows = [index.repeat(min(max_repeats, max(1, _VALIDATION_SCORES // len(index)))) for index in rows]
        chosen = [{name: c[index] for name, c in table.items()} for table, index in zip(tables, rows, strict=True)]
        if part == 1 and validation_draws is not None:
            chosen = [draw(table) for table, draw in zip(chosen, validation_draws, strict=True)]
        stacks.append(StackedRows.stack(chosen, [w[index] for w, index in zip(weights, rows, strict=True)]))
    return stacks[0], stacks[1]


def _fixed_draws(
    objective: DenoisingObjective, generator: torch.Generator
) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    """Draws of validation rows, made once; their timesteps rise evenly through those of training, if it has several."""

    def draw(rows: dict[str, Tensor]) -> dict[str, Tensor]:
        num_rows = len(rows["residual"])
        drawn = objective.draw(num_rows, generator)
        if objective.only_timestep is not None:
            return objective.examples({**rows, **drawn})
        part = torch.arange(num_rows) * _MAX_REPEATS // num_rows
        where = (part + torch.rand(num_rows, generator=generator)) / _MAX_REPEATS
        return objective.examples({**rows, **drawn, "timestep": objective.scheduler.timesteps_at(where)})

    return draw
